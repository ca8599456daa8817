"""DraftTree against a naive model that is a set of token paths; sending order; verification."""

from __future__ import annotations

import math
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.errors import LocalProtocolError
from edgespec.tree.draft_tree import DraftTree
from edgespec.tree.drafted import FROM_ROOT, DraftedTree
from edgespec.tree.node import Advance
from edgespec.tree.segments import near_equal

FAR = 10**6
Path = tuple[int, ...]


def drafted(*guesses: tuple[int, int, float]) -> DraftedTree:
    """A drafted tree from (parent, token, score)."""
    return DraftedTree(
        np.array([g[0] for g in guesses], np.int64),
        np.array([g[1] for g in guesses], np.int64),
        np.array([g[2] for g in guesses], np.float64),
    )


@st.composite
def drafted_trees(draw: st.DrawFn, most: int = 25) -> DraftedTree:
    """Random trees with few tokens and few scores: shared paths and ties are common."""
    guesses: list[tuple[int, int, float]] = []
    taken: set[tuple[int, int]] = set()
    for index in range(draw(st.integers(0, most))):
        parent = draw(st.integers(FROM_ROOT, index - 1)) if index else FROM_ROOT
        parent = min(parent, len(guesses) - 1)
        token = draw(st.integers(0, 3))
        if (parent, token) in taken:
            continue
        taken.add((parent, token))
        above = 0.0 if parent == FROM_ROOT else guesses[parent][2]
        guesses.append((parent, token, above - draw(st.sampled_from((0.0, 0.5, 1.0)))))
    return drafted(*guesses)


def paths_of(tree: DraftedTree) -> list[Path]:
    """Every guess's tokens from the root."""
    paths: list[Path] = []
    for parent, token in zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True):
        paths.append((*(() if parent == FROM_ROOT else paths[parent]), token))
    return paths


def live_paths(tree: DraftTree) -> dict[Path, int]:
    """{tokens below the root: node id} of all live nodes."""
    found: dict[Path, int] = {}
    for node_id in tree.ids:
        path: list[int] = []
        at = node_id
        while at != tree.root:
            path.append(tree[at].token)
            at = tree[at].parent
        found[tuple(reversed(path))] = node_id
    return found


def naive_merge(
    live: dict[Path, float],
    tree: DraftedTree,
    since: Path,
    keep: int,
    levels: int,
    only_new: bool,
) -> dict[Path, float]:
    """The same as DraftTree.merge, on a set of paths with scores."""
    paths = paths_of(tree)
    scores = dict(zip(paths, tree.scores.tolist(), strict=True))
    if since and since not in scores:
        return live
    base = scores[since] if since else 0.0
    merged = dict(live)
    order = sorted(range(len(paths)), key=lambda i: (-scores[paths[i]], i))
    taken = 0
    for path in (paths[i] for i in order):
        below = path[len(since) :]
        if path[: len(since)] != since or not below or len(below) > levels:
            continue
        if taken == keep:
            break
        taken += not only_new or below not in live
        merged[below] = scores[path] - base
    return merged


@given(st.data())
def test_merging_is_by_path(data: st.DataObject) -> None:
    tree = DraftTree(7, 6, 9, 100)
    model: dict[Path, float] = {}
    for _ in range(data.draw(st.integers(1, 4))):
        fresh = data.draw(drafted_trees())
        since = tuple(data.draw(st.lists(st.integers(0, 3), max_size=2)))
        keep = data.draw(st.integers(0, 12))
        levels = data.draw(st.integers(0, 6))
        only_new = data.draw(st.booleans())
        before = dict(live_paths(tree))
        added = tree.merge(fresh, since, keep, 100 + levels, only_new)
        model = naive_merge(model, fresh, since, keep, levels, only_new)
        after = live_paths(tree)
        assert set(after) - {()} == set(model)
        assert added == len(after) - len(before)
        for path, node_id in before.items():
            assert after[path] == node_id, "a guess that was here lost its id"
        for path, score in model.items():
            assert math.isclose(tree.score(after[path]), score)
            assert tree[after[path]].position == 100 + len(path)
        assert sorted(set(after.values()) - set(before.values())) == list(
            range(tree.newest - added + 1, tree.newest + 1)
        )


@given(drafted_trees(), drafted_trees(), st.lists(st.integers(0, 9), max_size=6))
def test_unsent_is_in_score_order_and_never_a_child_first(
    one: DraftedTree, two: DraftedTree, limits: list[int]
) -> None:
    tree = DraftTree(0, -1, 0, 0)
    tree.merge(one, (), 99, FAR)
    for limit in limits:
        chosen = tuple(islice(tree.unsent(), limit))
        assert len(chosen) == min(limit, sum(not tree[i].sent for i in tree.ids))
        for at, node_id in enumerate(chosen):
            assert not tree[node_id].sent
            if node_id != tree.root:
                assert tree[tree[node_id].parent].sent or tree[node_id].parent in chosen[:at]
            # The best of all that could have been taken here.
            ready = [
                i
                for i in tree.ids
                if not tree[i].sent
                and i not in chosen[:at]
                and (i == tree.root or tree[tree[i].parent].sent or tree[i].parent in chosen[:at])
            ]
            assert node_id == min(ready, key=lambda i: (-tree[i].score, i))
        sent = tree.send(chosen[: len(chosen) // 2 + 1])
        assert sent.parents.tolist() == [tree[i].parent for i in sent.ids.tolist()]
        tree.merge(two, (), 99, FAR)  # refreshes scores of what is not sent yet


def test_ties_go_to_the_older_node() -> None:
    tree = DraftTree(0, -1, 0, 0)
    tree.merge(drafted((-1, 5, -1.0), (-1, 4, -1.0), (0, 3, -1.0)), (), 9, FAR)
    assert tuple(tree.unsent()) == (0, 1, 2, 3)
    assert [tree[i].token for i in (1, 2, 3)] == [5, 4, 3]


def test_a_refreshed_score_changes_the_order() -> None:
    tree = DraftTree(0, -1, 0, 0)
    tree.merge(drafted((-1, 5, -1.0), (-1, 4, -2.0)), (), 9, FAR)
    tree.merge(drafted((-1, 4, -0.5), (-1, 5, -3.0)), (), 9, FAR)
    assert [tree[i].token for i in tree.unsent()] == [0, 4, 5]
    assert len(tree) == 3


def test_scores_count_from_the_present_root() -> None:
    tree = DraftTree(0, -1, 0, 0)
    tree.merge(drafted((-1, 5, -1.0), (0, 6, -3.0)), (), 9, FAR)
    tree.record([0], [5])
    tree.advance()
    assert tree.score(tree.root) == 0.0
    assert [tree.score(i) for i in tree.ids if i != tree.root] == [-2.0]
    # A draft below the same old root: its scores are moved to the new one.
    tree.merge(drafted((-1, 5, -1.0), (0, 7, -1.5)), (5,), 9, FAR)
    assert sorted(tree.score(i) for i in tree.ids) == [-2.0, -0.5, 0.0]


def test_a_stale_draft_off_the_path_gives_nothing() -> None:
    tree = DraftTree(0, -1, 0, 0)
    guesses = drafted((-1, 5, -1.0), (0, 6, -2.0), (1, 7, -3.0))
    assert tree.merge(guesses, (4,), 9, FAR) == 0
    assert tree.merge(guesses, (5, 7), 9, FAR) == 0
    assert tree.merge(guesses, (5, 6), 9, FAR) == 1
    assert tree.merge(DraftedTree.empty(), (), 9, FAR) == 0


def test_guesses_behind_the_last_position_are_left_out() -> None:
    tree = DraftTree(0, -1, 0, 10)
    guesses = drafted((-1, 5, -1.0), (0, 6, -2.0), (1, 7, -3.0))
    assert tree.merge(guesses, (), 9, last_position=10) == 0
    assert tree.merge(guesses, (), 9, last_position=12) == 2


def test_only_new_does_not_count_what_is_here() -> None:
    guesses = drafted(*((-1, token, -float(token)) for token in range(6)))
    tree = DraftTree(0, -1, 0, 0)
    assert tree.merge(guesses, (), 2, FAR) == 2
    assert tree.merge(guesses, (), 2, FAR) == 0
    assert tree.merge(guesses, (), 2, FAR, only_new=True) == 2
    assert set(live_paths(tree)) == {(), (0,), (1,), (2,), (3,)}


# --- sending and verifying ------------------------------------------------------------------------


def grown() -> DraftTree:
    """Root 0 (token 9); 1 (a=1) and 2 (b=2) below it; 3 (c=3) below 1; 4 (d=4) below 3."""
    tree = DraftTree(0, -1, 9, 10)
    tree.merge(drafted((-1, 1, -1.0), (-1, 2, -2.0), (0, 3, -3.0), (2, 4, -4.0)), (), 9, FAR)
    return tree


@pytest.mark.parametrize("ids", [(1,), (0, 0), (0, 3), (0, 99), (0, 1, 4), (3, 0)])
def test_what_may_not_be_sent_changes_nothing(ids: tuple[int, ...]) -> None:
    tree = grown()
    with pytest.raises(LocalProtocolError):
        tree.send(ids)
    assert not any(tree[i].sent for i in tree.ids)


def test_a_node_is_sent_once() -> None:
    tree = grown()
    rows = tree.send((0, 1))
    assert rows.ids.tolist() == [0, 1]
    assert rows.parents.tolist() == [-1, 0]
    assert rows.tokens.tolist() == [9, 1]
    assert rows.positions.tolist() == [10, 11]
    with pytest.raises(LocalProtocolError):
        tree.send((1,))
    assert tuple(tree.unsent()) == (2, 3, 4)


def test_nothing_is_known_nothing_moves() -> None:
    tree = grown()
    tree.record([1, 3], [3, 4])  # target tokens ahead of the root's
    assert tree.advance() == Advance((), (), False)
    assert len(tree) == 5


def test_the_walk_goes_as_far_as_verdicts_are_known() -> None:
    tree = grown()
    tree.record([1], [3])
    tree.record([0], [1])
    assert tree.advance() == Advance((1, 3), (0, 1), False, sources=(1, 1))
    assert tree.root == 3
    assert tree.ids == (3, 4)


def test_a_miss_leaves_a_new_unsent_root_behind_the_last_node_passed() -> None:
    tree = grown()
    tree.send((0, 1))
    tree.record([0, 1], [1, 7])
    assert tree.advance() == Advance((1, 7), (0, 1), True, sources=(1, 0))
    assert tree.ids == (5,)
    root = tree[5]
    assert (root.parent, root.token, root.position, root.sent) == (1, 7, 12, False)
    assert tuple(tree.unsent()) == (5,)
    assert tree.newest == 5


def test_verdicts_of_pruned_nodes_are_ignored() -> None:
    tree = grown()
    tree.record([0], [2])
    tree.advance()
    tree.record([1, 3, 99], [3, 4, 5])
    assert tree.ids == (2,)
    assert tree.advance().tokens == ()


@given(drafted_trees(), st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_advance_keeps_exactly_what_hangs_from_the_new_root(
    guesses: DraftedTree, answer: list[int]
) -> None:
    tree = DraftTree(0, -1, 0, 0)
    tree.merge(guesses, (), 99, FAR)
    before = live_paths(tree)
    known = [node for path, node in before.items() if path == tuple(answer[: len(path)])]
    depth = {node: len(path) for path, node in before.items()}
    known = [node for node in known if depth[node] < len(answer)]
    tree.record(known, [answer[depth[node]] for node in known])
    step = tree.advance()
    assert list(step.tokens) == answer[: len(step.tokens)]
    assert len(step.passed) == len(step.tokens)
    gone = tuple(step.tokens)
    expected = {p[len(gone) :]: i for p, i in before.items() if p[: len(gone)] == gone}
    assert live_paths(tree) == (expected or {(): tree.newest})
    assert step.missed == (not expected)


# --- drafted trees and segments -------------------------------------------------------------------


@given(drafted_trees(), st.integers(0, 30))
def test_the_best_guesses_are_a_connected_tree(guesses: DraftedTree, limit: int) -> None:
    best = guesses.best(limit)
    assert len(best) == min(limit, len(guesses))
    assert all(p < i for i, p in enumerate(best.parents.tolist()))
    whole = dict(zip(paths_of(guesses), guesses.scores.tolist(), strict=True))
    kept = dict(zip(paths_of(best), best.scores.tolist(), strict=True))
    assert kept.items() <= whole.items()
    left = [whole[p] for p in whole.keys() - kept.keys()]
    assert not kept or not left or min(kept.values()) >= max(left)


@given(st.integers(0, 200), st.integers(1, 12), st.integers(1, 20))
def test_segments_are_near_equal_and_in_order(count: int, parts: int, longest: int) -> None:
    ids = tuple(range(count))
    segments = near_equal(ids, parts, longest)
    assert tuple(i for s in segments for i in s) == ids[: parts * longest]
    assert len(segments) == min(parts, count)
    lengths = [len(s) for s in segments]
    assert not lengths or (max(lengths) - min(lengths) <= 1 and max(lengths) <= longest)
    assert lengths == sorted(lengths, reverse=True)
