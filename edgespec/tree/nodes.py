"""Nodes of a draft tree: which there are, what hangs from what, and which are the best.

A draft source names ten guesses for one that is sent, so no object is made of any: they are columns
by id, and what an expansion brought stays one run of ids, the best first.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import chain

import numpy as np

from edgespec.tree.ledger import NO_PARENT, Rows
from edgespec.tree.node import TreeNode

Key = tuple[float, int]
"""What the best comes first by: the negative score, counted from the root, and the id, as ties go
to the older."""

MOST_DEAD = 4096
"""Ids that columns may begin with which are no nodes any more."""


class Nodes:
    """The live nodes of a tree: the root, and all that hangs from it.

    Ids only grow, and a node's is greater than its parent's.
    """

    def __init__(self, first_id: int, parent: int, token: int, position: int) -> None:
        """A tree of the root alone: `token` at `position`, its row hanging from row `parent`."""
        self.newest = first_id
        self.root = first_id
        # By id, from `_first` on. `_drafted`, `_ranks`, `_sources`: see TreeNode.
        self._first = first_id
        self._parents, self._tokens, self._positions = [parent], [token], [position]
        self._scores = [0.0]
        self._drafted: list[float | None] = [None]
        self._ranks, self._sources = [0], [0]
        self._sent: set[int] = set()
        self._expanded: set[int] = set()
        self._targets: dict[int, int] = {}
        # Of nodes that have children, above before below: ids among which all of them are.
        self._below: dict[int, Sequence[int]] = {}
        # All nodes but the root, each run in order of their keys.
        self._runs: list[Sequence[int]] = []
        # Some scores are newer than others, so that a child may score better than its parent.
        self._refreshed = False

    def __len__(self) -> int:
        return 1 + sum(map(len, self._runs))

    def __contains__(self, node_id: int) -> bool:
        if node_id == self.root:
            return True
        at = node_id - self._first
        return 0 <= at < len(self._parents) and node_id in self._below.get(self._parents[at], ())

    def __getitem__(self, node_id: int) -> TreeNode:
        if node_id not in self:
            raise KeyError(node_id)
        at = node_id - self._first
        return TreeNode(
            node_id,
            self._parents[at],
            self._tokens[at],
            self._positions[at],
            self._scores[at],
            self._drafted[at],
            self._ranks[at],
            self._sources[at],
            node_id in self._sent,
            node_id in self._expanded,
            {self._tokens[child - self._first]: child for child in self.children(node_id)},
        )

    @property
    def ids(self) -> tuple[int, ...]:
        """All nodes, the root first."""
        return (self.root, *chain.from_iterable(self._runs))

    def children(self, node_id: int) -> list[int]:
        """The nodes right below one."""
        parents, first = self._parents, self._first
        return [i for i in self._below.get(node_id, ()) if parents[i - first] == node_id]

    def score(self, node_id: int) -> float:
        """Cumulative natural-log score of a node, counted from the present root."""
        return self._scores[node_id - self._first] - self._scores[self.root - self._first]

    def position(self, node_id: int) -> int:
        """Its absolute position."""
        return self._positions[node_id - self._first]

    def parent(self, node_id: int) -> int:
        """The node above it; the root's is no node any more."""
        return self._parents[node_id - self._first]

    def is_sent(self, node_id: int) -> bool:
        """Whether it travels, or has."""
        return node_id in self._sent

    def is_expanded(self, node_id: int) -> bool:
        """Whether its children were asked of the draft source."""
        return node_id in self._expanded

    def path(self, node_id: int) -> tuple[int, ...]:
        """Tokens from below the root down to a node; empty for the root."""
        return self.paths((node_id,))[0]

    def paths(self, ids: Iterable[int]) -> tuple[tuple[int, ...], ...]:
        """The same for several nodes."""
        known: dict[int, tuple[int, ...]] = {self.root: ()}
        parents, tokens, first = self._parents, self._tokens, self._first
        found = []
        for one in ids:
            above: list[int] = []
            while one not in known:
                above.append(one)
                one = parents[one - first]
            path = known[one]
            for node_id in reversed(above):
                path = known[node_id] = (*path, tokens[node_id - first])
            found.append(path)
        return tuple(found)

    @property
    def lowest(self) -> int:
        """The position of the deepest level."""
        return max(map(self.position, self.ids))

    @property
    def lowest_sent(self) -> int:
        """That of the deepest one of which something was sent; the root's is above none."""
        return max(self.position(one) for one in self.ids if one in self._sent)

    def level(self, position: int) -> tuple[int, ...]:
        """The nodes at that position, in descending score; ties go to the older node."""
        level = (one for one in self.ids if self.position(one) == position)
        return tuple(sorted(level, key=self._key))

    def frontier(self, depth: int) -> Iterator[int]:
        """The nodes that were not expanded yet, in descending score.

        Only nodes less than `depth` levels below the root; ties go to the older node.
        """
        return (one for _, one in self.frontier_keys(depth))

    def frontier_keys(self, depth: int) -> Iterator[Key]:
        """The same with their keys."""
        return self._best_first(self._expanded, self.position(self.root) + depth)

    def unsent(self) -> Iterator[int]:
        """The unsent nodes in descending score, never a child before its parent.

        FlowSpec §3.2, score-based segmentation; ties go to the older node. Scores that were
        refreshed at different times may leave a child above its parent: it then follows it.
        """
        return (one for _, one in self.unsent_keys())

    def unsent_keys(self) -> Iterator[Key]:
        """The same with their keys."""
        return self._parents_first() if self._refreshed else self._best_first(self._sent)

    def _best_first(self, but: Set[int], before: float = math.inf) -> Iterator[Key]:
        """All nodes but these, and but those from that position on."""
        positions, scores, first = self._positions, self._scores, self._first
        own = self._score(self.root)

        def keys(run: Sequence[int]) -> Iterator[Key]:
            for one in run:
                if one not in but and positions[one - first] < before:
                    yield own - scores[one - first], one

        return heapq.merge(*map(keys, ((self.root,), *self._runs)))

    def _parents_first(self) -> Iterator[Key]:
        heap: list[Key] = []
        below: dict[int, list[Key]] = {}
        for one in self.ids:
            if one not in self._sent:
                parent = self.parent(one)
                ready = one == self.root or parent in self._sent
                (heap if ready else below.setdefault(parent, [])).append(self._key(one))
        heapq.heapify(heap)
        while heap:
            best = heapq.heappop(heap)
            for key in below.get(best[1], ()):
                heapq.heappush(heap, key)
            yield best

    def _add(self, parent: int, token: int, score: float) -> int:
        """A node more below one, which no expansion brought; returns its id."""
        position = self.position(parent) + 1
        run = self._give_ids([parent], [token], [position], [score], [None], [0], [0])
        self._below[parent] = [*self.children(parent), run.start]
        self._runs.append(run)
        return run.start

    def take_ids(self, count: int) -> tuple[int, ...]:
        """Ids for rows that travel with the tree's and are no nodes of it."""
        none = [0] * count
        orphans = [NO_PARENT] * count
        return tuple(self._give_ids(orphans, none, none, [0.0] * count, [None] * count, none, none))

    def _give_ids(
        self,
        parents: Sequence[int],
        tokens: Sequence[int],
        positions: Sequence[int],
        scores: Sequence[float],
        drafted: Sequence[float | None],
        ranks: Sequence[int],
        sources: Sequence[int],
    ) -> range:
        self._parents += parents
        self._tokens += tokens
        self._positions += positions
        self._scores += scores
        self._drafted += drafted
        self._ranks += ranks
        self._sources += sources
        run = range(self.newest + 1, self.newest + 1 + len(parents))
        self.newest += len(parents)
        return run

    def _forget_dead(self) -> None:
        """Leave out of the columns what was long ago."""
        dead = self.root - self._first
        if dead > MOST_DEAD:
            self._first = self.root
            for column in (self._parents, self._tokens, self._positions, self._ranks):
                del column[:dead]
            del self._scores[:dead], self._drafted[:dead], self._sources[:dead]
            self._sent = {one for one in self._sent if one >= self.root}
            self._expanded = {one for one in self._expanded if one >= self.root}
            self._targets = {one: t for one, t in self._targets.items() if one >= self.root}

    def _score(self, node_id: int) -> float:
        return self._scores[node_id - self._first]

    def _key(self, node_id: int) -> Key:
        return self._score(self.root) - self._score(node_id), node_id

    def _sort(self) -> None:
        """Scores have changed."""
        self._refreshed = True
        self._runs = [sorted(chain.from_iterable(self._runs), key=self._key)]

    def _child(self, node_id: int, token: int) -> int | None:
        return next(
            (i for i in self.children(node_id) if self._tokens[i - self._first] == token), None
        )

    def _keep_below(self, root: int) -> None:
        parents, first = self._parents, self._first
        below: dict[int, Sequence[int]] = {}
        for one, family in self._below.items():
            if one == root or parents[one - first] in below:
                below[one] = family
        runs = ([one for one in run if parents[one - first] in below] for run in self._runs)
        self.root, self._below, self._runs = root, below, [run for run in runs if run]

    def _rows(self, ids: Sequence[int]) -> Rows:
        """The rows that nodes travel as."""
        at = [one - self._first for one in ids]
        told = [
            [column[n] for n in at] for column in (self._parents, self._tokens, self._positions)
        ]
        return Rows(*np.array([ids, *told], np.int64))
