"""DraftTree grown by expansions: attach, frontier, levels, paths; what a walk tells of guesses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.tree.draft_tree import DraftTree
from edgespec.tree.drafted import Children

Path = tuple[int, ...]

FAR = 10**6


def children(*triples: tuple[int, int, float]) -> Children:
    """Guesses from (index of the path, token, own score)."""
    parents, tokens, scores = zip(*triples, strict=True) if triples else ((), (), ())
    return Children(
        np.array(parents, np.int64), np.array(tokens, np.int64), np.array(scores, np.float64)
    )


@dataclass
class Guess:
    """A node of the model: its cumulative score, own score, rank among its expansion."""

    score: float
    drafted: float | None = None
    rank: int = 0
    expanded: bool = False


@dataclass
class Model:
    """The same tree as a dict of paths, with everything done by brute force."""

    nodes: dict[Path, Guess] = field(default_factory=lambda: {(): Guess(0.0)})

    def attach(
        self, paths: Sequence[Path], found: Children, keep: int, levels: int, own: Sequence[float]
    ) -> int:
        ranked = sorted(
            (-(self.nodes[paths[at]].score + score), index, (*paths[at], token), drafted)
            for index, (at, token, drafted, score) in enumerate(
                zip(
                    found.parents.tolist(),
                    found.tokens.tolist(),
                    found.scores.tolist(),
                    own,
                    strict=True,
                )
            )
            if paths[at] in self.nodes and len(paths[at]) < levels
        )
        before = len(self.nodes)
        for rank, (score, _, path, drafted) in enumerate(ranked[:keep]):
            self.nodes.setdefault(path, Guess(-score, drafted, rank))
        return len(self.nodes) - before

    def pass_to(self, token: int) -> None:
        """The root's target token is that token."""
        kept = {path[1:]: node for path, node in self.nodes.items() if path[:1] == (token,)}
        self.nodes = kept or {(): Guess(self.nodes[()].score)}


SHARES = st.sampled_from((-0.0, -0.5, -1.0, -1.5))


@st.composite
def guesses(draw: st.DrawFn, paths: int) -> Children:
    """Some guesses for each of so many paths, the best first."""
    triples = []
    for at in range(paths):
        tokens = draw(st.lists(st.integers(0, 4), unique=True, max_size=4))
        scores = sorted((draw(SHARES) for _ in tokens), reverse=True)
        triples += [(at, token, score) for token, score in zip(tokens, scores, strict=True)]
    return children(*triples)


def agrees(tree: DraftTree, model: Model) -> None:
    """Both trees are the same in everything that is kept."""
    by_path = {tree.path(i): tree[i] for i in tree.ids}
    assert by_path.keys() == model.nodes.keys()
    root = tree[tree.root]
    for path, guess in model.nodes.items():
        node = by_path[path]
        assert math.isclose(node.score, guess.score, abs_tol=1e-12)
        assert (node.drafted, node.rank) == (guess.drafted, guess.rank)
        assert node.expanded == guess.expanded
        assert node.position == root.position + len(path)


@given(st.data())
def test_growing_and_walking_against_brute_force(data: st.DataObject) -> None:
    tree, model = DraftTree(3, 2, 9, 100), Model()
    for _ in range(data.draw(st.integers(1, 5))):
        limit, depth = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 5))
        ids = tuple(islice(tree.frontier(depth), limit))
        by_path = {tree.path(i): i for i in tree.ids}
        open_ones = [p for p, g in model.nodes.items() if not g.expanded and len(p) < depth]
        open_ones.sort(key=lambda p: (-tree[by_path[p]].score, by_path[p]))
        assert [tree.path(i) for i in ids] == open_ones[:limit]
        paths = [tree.path(i) for i in ids]
        tree.expand(ids)
        for path in paths:
            model.nodes[path].expanded = True
        walks = data.draw(st.booleans())
        if walks:  # while the draft is at work, the root moves on
            token = data.draw(st.integers(0, 4))
            tree.record([tree.root], [token])
            tree.advance()
            model.pass_to(token)
            paths = [path[1:] if path[:1] == (token,) else (-1,) for path in paths]
        found = data.draw(guesses(len(ids)))
        own = [score + data.draw(SHARES) for score in found.scores.tolist()]
        keep, levels = data.draw(st.integers(0, 10)), data.draw(st.integers(0, 5))
        added = tree.attach(ids, found, keep, tree[tree.root].position + levels, np.array(own))
        assert added == model.attach(paths, found, keep, levels, own)
        agrees(tree, model)
        assert tree.lowest == tree[tree.root].position + max(map(len, model.nodes))


@given(st.data())
def test_a_level_is_all_of_it_in_score_order(data: st.DataObject) -> None:
    tree = DraftTree(0, -1, 9, 10)
    for _ in range(3):
        ids = tuple(islice(tree.frontier(FAR), 4))
        tree.expand(ids)
        found = data.draw(guesses(len(ids)))
        tree.attach(ids, found, 99, FAR, found.scores)
    seen: list[int] = []
    for position in range(10, tree.lowest + 1):
        level = tree.level(position)
        assert level
        assert all(tree[i].position == position for i in level)
        assert list(level) == sorted(level, key=lambda i: (-tree[i].score, i))
        seen += level
    assert sorted(seen) == sorted(tree.ids)
    assert tree.level(9) == tree.level(tree.lowest + 1) == ()


def test_the_best_children_of_all_are_kept() -> None:
    """PipeDec §3.3: of a layer's candidates those of highest cumulative probability."""
    tree = DraftTree(0, -1, 9, 0)
    tree.attach((0,), children((0, 1, -0.5), (0, 2, -1.0)), 9, FAR, np.array((-0.5, -1.0)))
    below = children((0, 3, -0.1), (0, 4, -2.0), (1, 5, -0.2), (1, 6, -0.9))
    assert tree.attach((1, 2), below, 3, FAR, below.scores) == 3
    assert {tree.path(i) for i in tree.level(2)} == {(1, 3), (2, 5), (2, 6)}
    assert [tree[i].rank for i in tree.level(2)] == [0, 1, 2]


def test_guesses_below_guesses_come_with_them() -> None:
    tree = DraftTree(0, -1, 9, 0)
    # 1 and 2 below the root; 3 below 1, 4 below 3; 5 below 2.
    tree.expand((0,))
    deep = children((0, 1, -0.5), (0, 2, -1.0), (1, 3, -0.2), (3, 4, -0.1), (2, 5, -0.3))
    assert deep.further(1) == 3
    assert tree.attach((0,), deep, 9, FAR, deep.scores) == 5
    paths = {tree.path(i): tree[i] for i in tree.ids}
    assert set(paths) == {(), (1,), (2,), (1, 3), (1, 3, 4), (2, 5)}
    assert [tree.score(paths[p].id) for p in ((1, 3, 4), (2, 5))] == pytest.approx([-0.8, -1.3])
    assert [path for path, node in paths.items() if node.expanded] == [(), (1,), (1, 3), (2,)]
    assert [paths[p].rank for p in ((1,), (1, 3), (1, 3, 4), (2,), (2, 5))] == [0, 1, 2, 3, 4]
    assert set(tree.frontier(9)) == {paths[p].id for p in ((1, 3, 4), (2, 5))}


@pytest.mark.parametrize(
    ("keep", "last", "left"),
    [
        (3, FAR, {(1,), (1, 3), (1, 3, 4)}),
        (2, FAR, {(1,), (1, 3)}),
        (9, 2, {(1,), (2,), (1, 3), (2, 5)}),
    ],
)
def test_the_best_of_all_levels_are_kept(keep: int, last: int, left: set[Path]) -> None:
    tree = DraftTree(0, -1, 9, 0)
    deep = children((0, 1, -0.5), (0, 2, -1.0), (1, 3, -0.2), (3, 4, -0.1), (2, 5, -0.3))
    assert tree.attach((0,), deep, keep, last, deep.scores) == len(left)
    assert {tree.path(i) for i in tree.ids} == left | {()}
    gone = DraftTree(0, -1, 9, 0)
    assert gone.attach((7,), deep, keep, last, deep.scores) == 0


def test_what_lies_below_a_guess_that_is_here_counts_from_what_is_said_now() -> None:
    tree = DraftTree(0, -1, 9, 0)
    tree.attach((0,), children((0, 1, -0.5)), 9, FAR, np.array((-0.5,)))
    tree.send((0, 1))
    deep = children((0, 1, -0.1), (1, 3, -0.2))
    assert tree.attach((0,), deep, 9, FAR, deep.scores) == 1
    assert (tree.score(1), tree.score(2)) == pytest.approx((-0.5, -0.3))


def test_a_guess_that_is_here_keeps_its_place_and_counts_among_the_kept() -> None:
    tree = DraftTree(0, -1, 9, 0)
    tree.attach((0,), children((0, 1, -0.5)), 9, FAR, np.array((-0.5,)))
    tree.send((0, 1))
    again = children((0, 1, -0.1), (0, 2, -0.2), (0, 3, -0.3))
    assert tree.attach((0,), again, 2, FAR, again.scores) == 1
    assert (tree.score(1), tree[1].drafted, tree[1].rank) == (-0.5, -0.5, 0)
    assert (tree[2].token, tree[2].rank) == (2, 1)


def test_what_was_not_used_below_a_node_that_is_asked_about_again_goes() -> None:
    tree = DraftTree(0, -1, 9, 0)
    deep = children((0, 1, -0.5), (0, 2, -1.0), (1, 3, -0.2), (3, 4, -0.1))
    tree.attach((0,), deep, 9, FAR, deep.scores)
    tree.send((0, 1, 2))
    again = children((0, 1, -0.1), (0, 2, -0.2), (0, 5, -0.4))
    assert tree.attach((0,), again, 9, FAR, again.scores) == 2
    scores = {tree.path(node): tree.score(node) for node in tree.ids}
    assert scores == {
        (): 0.0,
        (1,): -0.5,
        (1, 3): -0.7,
        (1, 3, 4): pytest.approx(-0.8),
        (2,): -0.2,
        (5,): -0.4,
    }


def test_the_paths_of_a_root_and_below_it() -> None:
    tree = DraftTree(0, -1, 9, 0)
    tree.attach((0,), children((0, 1, -0.5)), 9, FAR, np.array((-0.5,)))
    tree.attach((1,), children((0, 2, -0.5)), 9, FAR, np.array((-0.5,)))
    assert [tree.path(i) for i in (0, 1, 2)] == [(), (1,), (1, 2)]
    tree.record([0], [1])
    tree.advance()
    assert [tree.path(i) for i in (1, 2)] == [(), (2,)]


# --- what a walk tells of guesses -----------------------------------------------------------------


@pytest.mark.parametrize(("token", "rank"), [(1, 0), (2, 1), (3, 2), (4, None)])
def test_every_guess_below_a_passed_node_was_right_or_wrong(token: int, rank: int | None) -> None:
    tree = DraftTree(0, -1, 9, 0)
    tree.expand((0,))
    tree.attach(
        (0,),
        children((0, 1, -0.5), (0, 2, -1.0), (0, 3, -2.0)),
        9,
        FAR,
        np.array((-0.1, -0.2, -0.3)),
    )
    tree.record([0], [token])
    step = tree.advance()
    assert step.outcomes == tuple(
        zip((-0.5, -1.0, -2.0), (t == token for t in (1, 2, 3)), strict=True)
    )
    assert step.ranks == (rank,)


def test_a_node_that_was_not_expanded_tells_no_rank() -> None:
    tree = DraftTree(0, -1, 9, 0)
    tree.record([0], [1])
    step = tree.advance()
    assert (step.outcomes, step.ranks, step.missed) == ((), (), True)


def test_a_walk_of_several_nodes_tells_of_each_of_them() -> None:
    tree = DraftTree(0, -1, 9, 0)
    tree.expand((0,))
    tree.attach((0,), children((0, 1, -0.5)), 9, FAR, np.array((-0.5,)))
    tree.expand((1,))
    tree.attach((1,), children((0, 2, -0.7), (0, 3, -0.9)), 9, FAR, np.array((-0.7, -0.9)))
    tree.record([0, 1], [1, 3])
    step = tree.advance()
    assert step.outcomes == ((-0.5, True), (-0.7, False), (-0.9, True))
    assert step.ranks == (0, 1)
    assert tree[tree.root].token == 3
