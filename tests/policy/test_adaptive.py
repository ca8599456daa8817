"""The adaptive policy: what is sent and expanded, from planted costs and from learnt ones."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from support.growers import SoloOracle
from support.rounds import NOBODYS_TOKEN, Round, grown, learnt, sent, view

from edgespec.policy.adaptive import Adaptive
from edgespec.policy.base import Expand, RequestView, Send
from edgespec.policy.estimates import RingEstimates
from edgespec.policy.pool import LEAST_SHARE
from edgespec.tree.draft_tree import DraftTree
from edgespec.tree.drafted import Children

SHARES = (0.5, 0.3, 0.2, 0.12, 0.06)


def fan(shares: tuple[float, ...] = SHARES) -> DraftTree:
    """A sent root with children of these shares."""
    tree = DraftTree(0, -1, 1000, 0)
    tree.send((0,))
    grown(tree, [0], [shares])
    return tree


def test_a_root_leaves_at_once_after_a_miss() -> None:
    tree = fan()
    tree.record([0], [77_777])
    assert tree.advance().missed
    full = Adaptive().window(4)
    for busy in ({}, {"queued": 3, "in_flight": full - 1}, {"verifying": 1}, {"drafting": True}):
        assert sent(Adaptive().decide(view(tree, **busy))) == [(tree.root,)]


def test_nothing_else_leaves_while_the_first_stage_is_busy_or_the_window_is_full() -> None:
    for busy in ({"queued": 1}, {"in_flight": Adaptive().window(4)}):
        assert sent(Adaptive().decide(view(fan(), **busy))) == []
    known = learnt({1: 1.0, 101: 11.0}, spread=4.0)
    assert sent(Adaptive().decide(view(fan(), in_flight=4, estimates=known))) != []


@pytest.mark.parametrize(
    ("spread", "room"), [(1.0, 1), (1.3, 2), (1.8, 3), (3.7, 5), (4.0, 5), (9.0, 9)]
)
def test_no_more_is_in_flight_than_keeps_the_slowest_stage_busy(spread: float, room: int) -> None:
    """The first stage is free: it is a later one that they would pile up before."""
    known = learnt({1: 1.0, 101: 11.0}, spread=spread)
    assert sent(Adaptive().decide(view(fan(), in_flight=room - 1, estimates=known))) != []
    assert sent(Adaptive().decide(view(fan(), in_flight=room, estimates=known))) == []


def test_a_new_root_leaves_at_once_whatever_is_in_flight() -> None:
    known = learnt({1: 1.0, 101: 11.0}, spread=2.0)
    assert sent(Adaptive().decide(view(DraftTree(0, -1, 7, 3), in_flight=9, estimates=known)))


@pytest.mark.parametrize(
    ("draft", "right", "waits"), [(0.59, 6, True), (0.61, 6, False), (0.59, 5, False)]
)
def test_a_new_root_waits_for_a_pass_that_is_shorter_than_its_guesses_gain(
    draft: float, right: int, waits: bool
) -> None:
    """They come home a step earlier, of 1 s, in 6 of 10 cases."""
    known = learnt({1: 1.0, 101: 11.0}, {1: draft, 2: draft}, spread=4.0)
    known.ranks.update({0: right - 1, 9: 1, 10: 1, None: 9 - right})
    tree = DraftTree(0, -1, 7, 3)
    decided = Adaptive().decide(view(tree, estimates=known))
    assert [one.ids for one in decided if isinstance(one, Expand)] == [(0,)]
    assert sent(decided) == ([] if waits else [(0,)])
    if waits:
        tree.expand([0])
        assert Adaptive().decide(view(tree, estimates=known, drafting=True)) == []
        nothing_came = Adaptive().decide(view(tree, estimates=known))
        assert sent(nothing_came) == [(0,)]
        below = grown(tree, [0], [[0.9]])
        assert sent(Adaptive().decide(view(tree, estimates=known))) == [(0, *below)]


def test_a_new_root_waits_for_no_pass_that_guesses_for_others() -> None:
    """Or for none, at the end of an answer."""
    known = learnt({1: 1.0, 101: 11.0}, {1: 0.01, 2: 0.01}, spread=4.0)
    known.ranks.update({0: 9, None: 1})
    for busy in ({"drafting": True}, {"depth_left": 0}):
        tree = DraftTree(0, -1, 7, 3)
        assert sent(Adaptive().decide(view(tree, estimates=known, **busy))) == [(0,)]


@pytest.mark.parametrize(
    ("ahead", "spread", "rows"),
    [
        # A row more costs 0.1 s, a segment of k rows takes 1 + 0.1 (k - 1) s.
        (10, 4.0, 4),  # 0.5; .3 * 1.1, .2 * 1.2, .12 * 1.3 >= .1; .06 * 1.4 is less
        (0, 4.0, 1),  # the segment's own way: .3 * 1.1 < .1 * 4
        (2, 4.0, 2),  # as long as the one ahead for one price, beyond for four times that
        (0, 1.0, 4),
        (0, 3.0, 2),  # .3 * 1.1 >= .1 * 3 > .2 * 1.2
    ],
)
def test_rows_leave_as_long_as_their_gain_covers_their_cost(
    ahead: int, spread: float, rows: int
) -> None:
    tree = fan()
    estimates = learnt({1: 1.0, 101: 11.0}, spread=spread)
    decided = sent(Adaptive().decide(view(tree, ahead=ahead, estimates=estimates)))
    assert decided == [tuple(islice(tree.unsent(), rows))]


@pytest.mark.parametrize(("draft", "head", "rows"), [(0.5, 0.5, 1), (0.5, 1.0, 2), (2.0, 0.4, 4)])
def test_where_d0_is_slower_than_a_step_rows_leave_rather_than_wait_for_its_next_segment(
    draft: float, head: float, rows: int
) -> None:
    """A draft pass and a head of 1.5, 2.4 s: .3 * 1.5 >= .1 * 4 > .2 * 1.5, .2 * 2.4 >= .1 * 4."""
    tree = fan((0.5, 0.3, 0.2, 0.17, 0.06))
    estimates = learnt({1: 1.0, 101: 11.0}, {1: draft, 2: draft}, spread=4.0, head=head)
    decided = sent(Adaptive().decide(view(tree, estimates=estimates)))
    assert decided == [tuple(islice(tree.unsent(), rows))]


def test_rows_leave_in_descending_share() -> None:
    tree = fan((0.4, 0.6))
    below = grown(tree, [1, 2], [[0.9], [0.5]])
    free = learnt({1: 1.0, 64: 1.0})
    (rows,) = sent(Adaptive().decide(view(tree, estimates=free)))
    assert list(rows) == sorted(rows, key=lambda i: (-tree.score(i), i))
    assert set(rows) == {1, 2, *below}


def test_where_a_row_costs_next_to_nothing_all_leave_and_where_time_stands_still() -> None:
    tree = fan((0.01,) * 50)
    for cost in ({1: 1.0, 64: 1.0 + 1e-6}, {1: 0.0}, {1: 0.0, 64: 0.0}):
        estimates = learnt(cost, cost)
        (rows,) = sent(Adaptive().decide(view(tree, estimates=estimates)))
        assert len(rows) == 50


def test_a_segment_is_not_worth_sending_for_what_will_not_be() -> None:
    """All its rows together count."""
    cheap = learnt({1: 1.0, 64: 1.0})
    hopeless, many = fan((LEAST_SHARE / 4,) * 3), fan((LEAST_SHARE / 4,) * 5)
    assert sent(Adaptive().decide(view(hopeless, estimates=cheap))) == []
    assert len(sent(Adaptive().decide(view(many, estimates=cheap)))[0]) == 5


def test_expansions_take_the_best_nodes_as_long_as_they_pay() -> None:
    tree = fan()
    dear = learnt({1: 1.0, 64: 1.0}, {1: 0.5, 101: 19.5})  # a row more: 0.19 s of the draft
    asked = [d for d in Adaptive().decide(view(tree, estimates=dear)) if isinstance(d, Expand)]
    (one,) = asked
    assert (one.ids, one.width) == ((1, 2, 3), 10), "0.5, 0.3, 0.2 s gained, 0.19 s spent"
    assert (one.most, one.keep) == (64, 640), "of a source to which further levels cost no pass"
    assert math.exp(one.least) == pytest.approx(0.19), "what a row more takes, of a step of 1 s"
    none = fan((LEAST_SHARE / 2,))
    assert Adaptive().decide(view(none, estimates=dear)) == []


@pytest.mark.parametrize(("row", "nodes"), [(0.0, 3), (0.1, 2), (0.4, 1)])
def test_a_node_whose_guesses_would_hardly_ever_leave_is_not_expanded(
    row: float, nodes: int
) -> None:
    """However little that takes the draft; a row more takes 0, 0.1 or 0.4 s of a step of 1 s: a
    quarter of that must be covered, and 1 in 144 at least."""
    estimates = learnt({1: 1.0, 101: 1.0 + 100 * row}, {1: 0.1, 64: 0.1})
    decided = Adaptive().decide(view(fan((0.5, 0.03, 0.01, 0.006)), estimates=estimates))
    (asked,) = (d for d in decided if isinstance(d, Expand))
    assert len(asked.ids) == nodes


@pytest.mark.parametrize(("head", "nodes"), [(0.0, 3), (0.4, 3), (1.1, 4), (3.0, 5)])
def test_expansions_take_more_nodes_where_the_next_pass_comes_late(head: float, nodes: int) -> None:
    """A row more takes the draft 0.19 s; a pass and a head take 0.5 s + `head`, a step 1 s."""
    estimates = learnt({1: 1.0, 64: 1.0}, {1: 0.5, 101: 19.5}, head=head)
    decided = Adaptive().decide(view(fan(), estimates=estimates))
    (asked,) = (d for d in decided if isinstance(d, Expand))
    assert len(asked.ids) == nodes


def test_expansions_end_with_the_answer() -> None:
    tree = fan()
    assert [type(d) for d in Adaptive().decide(view(tree, depth_left=1))] == [Send]
    below = [d for d in Adaptive().decide(view(tree, depth_left=2)) if isinstance(d, Expand)]
    assert len(below) == 1


class Wrong(SoloOracle):
    """A draft that is never right, and sure of itself."""

    def expand(self, request: int, context: object, paths: object, width: int) -> Children:
        """Three guesses of which the first is all but committed."""
        count = len(paths)  # type: ignore[arg-type]
        parents = np.repeat(np.arange(count), 3)
        tokens = np.tile(np.array([50, 51, 52]), count)
        scores = np.tile(np.log([0.9, 0.06, 0.03]), count)
        return Children(parents, tokens, scores)


def linear(rows: int) -> float:
    """A device with some cost a row."""
    return 1.0 + 0.05 * rows


def play(oracle: SoloOracle, tokens: int, estimates: RingEstimates | None = None) -> Round:
    """An answer of that many tokens."""
    known = estimates or learnt({16: linear(16)}, {16: linear(16) / 2}, spread=3.0)
    rng = random.Random(1)
    game = Round(Adaptive(), rng, 3, tokens, oracle, known, linear)
    game.play(most=100_000)
    return game


def test_nothing_but_the_root_leaves_for_a_draft_that_is_never_right() -> None:
    """It is learnt, whatever the draft says of itself."""
    game = play(Wrong(random.Random(0), 0.0), 600)
    assert sum(rows for _, rows in game.guessed) > 20, "it was not tried"
    assert not any(rows for tokens, rows in game.guessed if tokens > 300)


def test_a_draft_that_is_always_right_is_used_to_the_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing but right guesses hardly any row is sent in vain, and segments overlap."""

    draft = SoloOracle(random.Random(0), 1.0)

    def right(path: tuple[int, ...], width: int) -> list[tuple[int, float]]:
        (answer,) = draft.guesser.answers
        size = len(path)
        token = answer[size] if answer[:size] == path and size < len(answer) else NOBODYS_TOKEN
        return [(token, math.log(0.9))]

    monkeypatch.setattr(draft.guesser, "children", right)
    game = play(draft, 200)
    rows = sum(map(len, game.sends))
    assert 201 <= rows <= 230


@pytest.mark.thorough
def test_drafting_delays_no_send_but_of_a_new_root_alone() -> None:
    """Asynchronous: what else leaves does not depend on whether the draft source is at work."""
    compared = 0
    for seed in range(15):
        rng = random.Random(seed)
        known = learnt({16: linear(16)}, {16: linear(16)}, spread=2.0)
        game = Round(
            Adaptive(), rng, rng.choice((1, 2, 4)), 20, SoloOracle(rng, 0.8), known, linear
        )
        while not game.over:
            seen = game.view()
            if seen.tree[seen.tree.root].sent or len(seen.tree) > 1:
                compared += _sends(seen, drafting=True) != []
                assert _sends(seen, drafting=True) == _sends(seen, drafting=False)
            game.decide()
            game.happen()
    assert compared > 50


def _sends(seen: RequestView, *, drafting: bool) -> list[tuple[int, ...]]:
    return sent(Adaptive().decide(replace(seen, drafting=drafting)))
