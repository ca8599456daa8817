"""Waiting guesses: what one expansion brought and no node was made of yet, the best first.

A draft source names ten guesses for one that is sent or expanded. They have ids, scores and places
in the tree as its nodes have, but stay columns until the tree needs a node of one.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from edgespec.tree.drafted import Children, Floats
from edgespec.tree.ledger import IntArray

if TYPE_CHECKING:
    from edgespec.tree.node import TreeNode

Key = tuple[float, int]
"""What the best comes first by: the negative score, and the id, as ties go to the older."""


class Waiting:
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

    def told(self, node_id: int) -> tuple[int, float, int, int]:
        """Of one of these: token, own score, rank among all that the expansion brought, sources."""
        at = node_id - self.first
        columns = self._tokens, self._drafted, self._ranks, self._sources
        token, drafted, rank, sources = (column[at].item() for column in columns)
        return token, drafted, rank, sources

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
        self._of: dict[int, Waiting] = {}
        self._runs: list[Waiting] = []

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, node_id: int) -> bool:
        return node_id in self._of

    def __iter__(self) -> Iterator[int]:
        return iter(self._of)

    def of(self, node_id: int) -> Waiting:
        """The expansion that brought it. Raises KeyError for what does not wait."""
        return self._of[node_id]

    def is_expanded(self, node_id: int) -> bool:
        """Whether it has guesses below it."""
        return node_id in self._of[node_id].expanded

    def add(self, run: Waiting) -> None:
        """All of an expansion wait."""
        self._of.update(dict.fromkeys(run.ids, run))
        self._runs.append(run)

    def take(self, node_id: int) -> Waiting:
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
        kept: dict[int, Waiting] = {}
        for node_id, run in self._of.items() if nodes else ():
            above = run.parents[node_id - run.first]
            if above in kept or (above in nodes and nodes[above].waiting is run):
                kept[node_id] = run
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

    def _next(self, run: Waiting, at: int) -> int:
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
        parents, count = children.parents, len(places)
        known = np.array([place or (-np.inf, 0) for place in places], np.float64).reshape(-1, 2)
        above = np.zeros((len(parents), 2))
        direct = parents < count
        above[direct] = known[parents[direct]]
        totals, left = above[:, 0] + own, np.flatnonzero(~direct)
        done = direct.copy()
        while len(left):  # level by level: what is above stands before
            ready = done[parents[left] - count]
            now, left = left[ready], left[~ready]
            up = parents[now] - count
            above[now, 0], above[now, 1] = totals[up], above[up, 1] + 1
            totals[now] = totals[up] + own[now]
            done[now] = True
        able = np.flatnonzero(np.isfinite(totals) & (above[:, 1] < last_position))
        best = np.argsort(-totals[able], kind="stable")[:keep]
        self.order: IntArray = able[best]
        self.scores: Floats = totals[self.order]
        self.positions: IntArray = above[self.order, 1].astype(np.int64) + 1
        self._parents, self._paths = parents, count

    def parents(self, paths: Sequence[int], ids: IntArray) -> IntArray:
        """The ids of what is above each, if those are the paths' and theirs."""
        at = np.zeros(len(self._parents), np.int64)
        at[self.order] = ids
        every: IntArray = np.concatenate([np.array(paths, np.int64), at])
        return every[self._parents[self.order]]

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
