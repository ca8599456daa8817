"""Waiting guesses: what one expansion brought and no node was made of yet, the best first.

A draft source names ten guesses for one that is sent or expanded. They have ids, scores and places
in the tree as its nodes have, but stay columns until the tree needs a node of one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from edgespec.tree.drafted import Children, Floats
from edgespec.tree.ledger import IntArray

if TYPE_CHECKING:
    from edgespec.tree.node import TreeNode

Key = tuple[float, int]
"""What the best comes first by: the negative score, and the id, as ties go to the older."""


class Expansion:
    """The guesses of one expansion that are new to the tree, in descending cumulative score; ties
    go to the one that was named first. The n-th has the id `first` + n.

    `scores`, `positions`, and `parents` (ids) as nodes have them. `above`: ids of nodes and guesses
    that have some of these below them. `expanded`: those of these that count as expanded. `at`: how
    many of the first wait no longer.
    """

    def __init__(
        self, first: int, parents: IntArray, ranked: Ranked, children: Children, new: IntArray
    ) -> None:
        """`new`: places of the new ones among the ranked; `parents` are theirs."""
        self.first = first
        self.at = 0
        self.parents: list[int] = parents.tolist()
        self.scores: list[float] = ranked.scores[new].tolist()
        self.positions: list[int] = ranked.positions[new].tolist()
        self.above = frozenset(self.parents)
        self.expanded = {one for one in self.above if one >= first}
        self._above, self._ranks = parents, new
        index = ranked.order[new]
        self._tokens, self._drafted = children.tokens[index], children.scores[index]
        self._sources = children.made_by[index]

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def ids(self) -> range:
        return range(self.first, self.first + len(self))

    def key(self, at: int) -> Key:
        """What that one comes first by."""
        return -self.scores[at], self.first + at

    def score(self, node_id: int) -> float:
        """The cumulative score of one of these."""
        return self.scores[node_id - self.first]

    def is_open(self, node_id: int, last_position: int) -> bool:
        """Whether it is not expanded, and lies before that position."""
        return node_id not in self.expanded and self.positions[node_id - self.first] < last_position

    def told(self, node_id: int) -> tuple[int, float, int, int]:
        """Of one of these: token, own score, rank among all that the expansion brought, sources."""
        at = node_id - self.first
        token, rank = self._tokens.item(at), self._ranks.item(at)
        return token, self._drafted.item(at), rank, self._sources.item(at)

    def outcomes(self, parent: int, token: int) -> list[tuple[float, bool]]:
        """For every guess below that one which a source made: its own score, and whether it is
        that token."""
        at = np.flatnonzero((self._above == parent) & (self._sources != 0))
        right = self._tokens[at] == token
        return list(zip(self._drafted[at].tolist(), right.tolist(), strict=True))

    def find(self, parent: int, token: int) -> int | None:
        """The id of that guess."""
        at = np.flatnonzero((self._above == parent) & (self._tokens == token))
        return self.first + int(at[0]) if len(at) else None


class Guesses:
    """All guesses of one tree that wait, in order of their age."""

    def __init__(self) -> None:
        self._of: dict[int, Expansion] = {}
        self._runs: list[Expansion] = []

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, node_id: int) -> bool:
        return node_id in self._of

    def __iter__(self) -> Iterator[int]:
        return iter(self._of)

    def of(self, node_id: int) -> Expansion:
        """The expansion that brought it. Raises KeyError for what does not wait."""
        return self._of[node_id]

    def add(self, run: Expansion) -> None:
        """All of an expansion wait."""
        self._of.update(dict.fromkeys(run.ids, run))
        self._runs.append(run)

    def take(self, node_id: int) -> Expansion:
        """A guess becomes a node. Raises KeyError for one that does not wait."""
        return self._of.pop(node_id)

    def reopen(self, last_position: int) -> None:
        """Let those up to there be expanded though they have guesses below them."""
        for run in self._runs:
            run.expanded = {
                one for one in run.expanded if run.positions[one - run.first] > last_position
            }

    def clear(self, nodes: Mapping[int, TreeNode]) -> None:
        """These nodes are left: forget what hangs from none of them, or is not of the newest
        expansion of one."""
        kept: dict[int, Expansion] = {}
        for run in self._runs:
            alive = {one for one in run.above if one in nodes and nodes[one].waiting is run}
            if alive:
                for one in sorted(run.above.intersection(run.ids)):  # those above come first
                    if run.parents[one - run.first] in alive and one in self._of:
                        alive.add(one)
                below = [
                    one for one, above in zip(run.ids, run.parents, strict=True) if above in alive
                ]
                kept.update((one, run) for one in below if one in self._of)
        self._of = kept
        known = set(map(id, kept.values()))
        self._runs = [run for run in self._runs if id(run) in known]

    def in_order(self, keys: Iterable[Key], below: Callable[[int], Iterable[Key]]) -> Iterator[int]:
        """The nodes with these keys and all guesses that wait, the best first; after each node
        those with the keys `below` it compete too."""
        heap = list(keys)
        for run in self._runs:
            run.at = self._next(run, run.at)
            if run.at < len(run):
                heap.append(run.key(run.at))
        heapq.heapify(heap)
        while heap:
            node_id = heap[0][1]
            waits = self._of.get(node_id)
            if waits and (at := self._next(waits, node_id - waits.first + 1)) < len(waits):
                heapq.heapreplace(heap, waits.key(at))
            else:
                heapq.heappop(heap)
            if waits is None:
                for key in below(node_id):
                    heapq.heappush(heap, key)
            yield node_id

    def _next(self, run: Expansion, at: int) -> int:
        """The place of the first one from `at` on that waits, or how many there are."""
        count, first, waiting = len(run.scores), run.first, self._of
        while at < count and first + at not in waiting:
            at += 1
        return at


class Ranked:
    """The `keep` best of guesses, the best first; ties go to the smaller index.

    `order`: their indices; `scores`: cumulative. What lies behind `last_position` does not count,
    nor what is below a path that has no place.
    """

    def __init__(
        self,
        places: Sequence[tuple[float, int] | None],
        children: Children,
        own: Floats,
        keep: int,
        last_position: int,
    ) -> None:
        """`places`: cumulative score and position of the end of each path. `own`: the guesses' own
        scores."""
        # Of the paths, then of the guesses.
        totals = [-math.inf if place is None else place[0] for place in places]
        positions = [0 if place is None else place[1] for place in places]
        above = children.parents.tolist()
        for at, score in zip(above, own.tolist(), strict=True):
            totals.append(totals[at] + score)
        for at in above:
            positions.append(positions[at] + 1)
        every = np.array(totals[len(places) :])
        able = np.isfinite(every)
        if max(positions, default=0) > last_position:
            able &= np.array(positions[len(places) :]) <= last_position
        left = np.flatnonzero(able)
        best = np.argsort(-every[left], kind="stable")[:keep]
        self.order: IntArray = left[best]
        self.scores: Floats = every[self.order]
        self.positions: IntArray = np.array(positions, np.int64)[self.order + len(places)]
        self._parents = children.parents

    def waiting(
        self, first: int, paths: Sequence[int], known: Mapping[int, int], children: Children
    ) -> Expansion:
        """Those that are not `known`, with ids from `first` on, below paths with these ids."""
        new = np.arange(len(self.order))
        ids = first + new
        if known:
            new = np.delete(new, [*known])
            ids[new] = np.arange(first, first + len(new))
            ids[[*known]] = [*known.values()]
        at = np.zeros(len(self._parents), np.int64)
        at[self.order] = ids
        every = np.concatenate([np.array(paths, np.int64), at])
        return Expansion(first, every[self._parents[self.order[new]]], self, children, new)

    def known(
        self,
        asked: Sequence[TreeNode | None],
        children: Children,
        nodes: Mapping[int, TreeNode],
    ) -> dict[int, int]:
        """Which of them are nodes already, below those that were asked about: ids by rank."""
        if not any(node is not None and node.children for node in asked):
            return {}
        known: dict[int, int] = {}
        found: dict[int, TreeNode] = {}  # by the guesses' indices
        for rank, index in enumerate(self.order.tolist()):
            at = int(children.parents[index])
            above = asked[at] if at < len(asked) else found.get(at - len(asked))
            node_id = None if above is None else above.children.get(int(children.tokens[index]))
            if node_id is not None:
                known[rank], found[index] = node_id, nodes[node_id]
                found[index].sources |= int(children.made_by[index])
        return known
