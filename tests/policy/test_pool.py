"""The pool: rows and nodes of several requests compete by what they bring for what they cost."""

from __future__ import annotations

import pytest
from support.rounds import grown, learnt, view

from edgespec.policy.pool import Chosen, nodes_that_pay, rows_that_pay
from edgespec.policy.row_times import RowTimes
from edgespec.tree.draft_tree import DraftTree

MOST = 64
CHAIN = (0.8, 0.8, 0.8, 0.8, 0.8, 0.8)


def chain(shares: tuple[float, ...] = CHAIN, *, root_sent: bool = True) -> DraftTree:
    """A root with one guess below the other, each that likely if the one before it is right."""
    tree = DraftTree(0, -1, 1000, 0)
    if root_sent:
        tree.send((0,))
    last = 0
    for share in shares:
        (last,) = grown(tree, [last], [[share]])
    return tree


def rows(trees: list[DraftTree], price: float, share: int = MOST, ahead: int = MOST) -> list[int]:
    """How many rows each request sends, where a row more takes `price` of a step of one."""
    estimates = learnt({1: 1.0, 101: 1.0 + 100 * price}, spread=4.0)
    views = [view(tree, estimates=estimates) for tree in trees]
    return [len(ids) for ids in rows_that_pay(views, ahead, MOST, share)]


def test_the_best_rows_of_all_leave_first_and_none_before_its_parent() -> None:
    one, other = chain((0.9, 0.9, 0.9)), chain((0.5, 0.5, 0.5))
    # 0.9; 0.81 * 1.3 >= 0.3 * 1.71, 0.729 * 1.6 >= 0.3 * 2.44, 0.5 * 1.9 >= 0.3 * 2.94,
    # 0.25 * 2.2 < 0.3 * 3.19.
    assert rows([one, other], 0.3) == [3, 1]
    estimates = learnt({1: 1.0, 64: 1.0})
    found: Chosen = rows_that_pay([view(t, estimates=estimates) for t in (one, other)], 0, 9, 9)
    assert found == [(1, 2, 3), (1, 2, 3)]


def test_roots_always_go_the_longest_waiting_ones_first() -> None:
    trees = [chain(root_sent=False) for _ in range(5)]
    assert [number > 0 for number in rows(trees, 0.01, share=2)] == [True, True] + [False] * 3
    assert rows(trees, 100.0) == [1] * 5, "however dear a row is"


def test_beside_a_prompt_few_guesses_go_and_all_roots() -> None:
    estimates = learnt({1: 1.0, 101: 5.0}, spread=4.0)
    views = [view(chain(root_sent=False), estimates=estimates) for _ in range(2)]
    sent = [len(sum(rows_that_pay(views, MOST, MOST, MOST, n), ())) for n in (0, 8, 40, 1000)]
    # Beside 40 rows 0.8 * 2.72 >= 0.04 * 43.6, but 0.64 * 2.76 < 0.04 * 44.24.
    assert sent == [14, 10, 4, 2]


def test_no_row_of_a_tree_goes_before_its_root_does() -> None:
    trees = [chain((), root_sent=False), chain(root_sent=False), chain()]
    one, none, many = rows(trees, 0.01, share=1)
    assert (one, none) == (1, 0)
    assert many > 0


@pytest.mark.parametrize("price", [0.0, 0.03, 0.08, 0.24])
def test_the_more_requests_there_are_the_fewer_rows_each_has(price: float) -> None:
    each = []
    for requests in (1, 2, 4, 8, 16, 32, 64):
        sent = rows([chain(root_sent=False) for _ in range(requests)], price)
        assert min(sent) >= 1
        each.append(sum(sent) / requests)
    assert each == sorted(each, reverse=True)
    assert each[-1] == 1.0, "plain decoding: the roots alone fill a segment"


@pytest.mark.parametrize("price", [0.03, 0.08, 0.24])
def test_a_segment_is_no_slower_a_token_than_plain_decoding_or_any_fixed_depth(
    price: float,
) -> None:
    for requests in (2, 4, 8, 16):
        trees = [chain(root_sent=False) for _ in range(requests)]

        def speed(depths: list[int]) -> float:
            tokens = sum(sum(0.8**level for level in range(depth)) for depth in depths)
            return tokens / (1.0 + price * (sum(depths) - 1))

        best = max(speed([depth] * requests) for depth in range(1, 8))
        assert speed(rows(trees, price)) >= 0.98 * best


def test_one_request_alone_pays_for_itself_only() -> None:
    """As the adaptive policy has it, whatever its rows bring together."""
    assert rows([chain()], 0.24) == [6], "0.8 ** 6 * 2.2 >= 0.24"
    assert rows([chain(), chain((0.01,))], 0.24) == [4, 0], "0.8 ** 5 * 1.96 < 0.24 * 2.69"


def test_nodes_of_all_are_expanded_in_one_pass_as_far_as_they_pay() -> None:
    trees = [chain((0.9,)), chain((0.5,)), chain((0.1,))]
    for tree in trees:
        tree.expand([0])

    def nodes(price: float) -> list[int]:
        estimates = learnt({1: 1.0, 64: 1.0}, {1: 1.0, 101: 1.0 + 100 * price})
        views = [view(tree, estimates=estimates) for tree in trees]
        return [len(ids) for ids in nodes_that_pay(views, MOST)]

    assert nodes(0.01) == [1, 1, 1]
    assert nodes(0.2) == [1, 1, 0], "0.5 s gained, 0.2 s spent; not 0.1 s gained"
    assert nodes(0.9) == [1, 0, 0]


def test_before_it_is_known_what_a_draft_takes_one_node_finds_out() -> None:
    estimates = learnt()
    estimates.draft = RowTimes()
    trees = [chain((0.9,)), chain((0.5,))]
    chosen = nodes_that_pay([view(tree, estimates=estimates) for tree in trees], MOST)
    assert [len(ids) for ids in chosen] == [1, 0]
