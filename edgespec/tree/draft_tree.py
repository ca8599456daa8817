"""The coordinator's draft tree of one request: guesses below the newest committed token.

Nodes get ids that only grow. The tree holds only live nodes: the root (newest committed token) and
its descendants. A node is unsent, then sent round the ring, then verified: its target token is the
base model's next token after it. A draft source names ten guesses for one that is sent: no object
is made of any. They are columns by id, and what an expansion brought stays one run of ids.
"""

from __future__ import annotations

import copy
import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain

import numpy as np

from edgespec.errors import LocalProtocolError
from edgespec.tree.drafted import FROM_ROOT, Children, DraftedTree, Floats
from edgespec.tree.ledger import NO_PARENT, IntArray, Rows
from edgespec.tree.node import Advance, TreeNode

Key = tuple[float, int]
"""What the best comes first by: the negative score, counted from the root, and the id, as ties go
to the older."""

MOST_DEAD = 4096
"""Ids that columns may begin with which are no nodes any more."""


class DraftTree:
    """A tree of guesses rooted at the newest committed token."""

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
        self._refreshed = (
            False  # some scores are newer than others: a child may be above its parent
        )

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
            self._targets.get(node_id),
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

    # --- growing ------------------------------------------------------------------------------

    def merge(
        self,
        drafted: DraftedTree,
        since: Sequence[int],
        keep: int,
        last_position: int,
        only_new: bool = False,
    ) -> int:
        """Add guesses whose token path is not in the tree yet; return how many were added.

        `since` are the tokens that became committed after the root below which `drafted` grew (none
        if that is still the root): guesses off that path are stale and are left out (FlowSpec
        §3.4, context-aware merge: a guess is new if its path is). The `keep` best-scored guesses
        are taken; with `only_new` those already here do not count among them (§3.4, score-aware).
        Guesses behind `last_position` could never be used and are left out. Guesses already here
        take the fresher score.
        """
        at = drafted.find(since)
        if at is None:
            return 0
        self._forget_dead()
        node_of, base = {at: self.root}, 0.0 if at == FROM_ROOT else float(drafted.scores[at])
        known = {(self.parent(i), self._tokens[i - self._first]): i for i in self.ids}
        root_score = self._score(self.root)
        added = seen = 0
        order = np.lexsort((np.arange(len(drafted)), -drafted.scores))
        parents, tokens = drafted.parents.tolist(), drafted.tokens.tolist()
        scores, sources = drafted.scores.tolist(), drafted.made_by.tolist()
        for index in order.tolist():
            if (added if only_new else seen) >= keep:
                break
            parent = node_of.get(parents[index])
            if parent is None or index in node_of or self.position(parent) >= last_position:
                continue
            seen += 1
            score = root_score + scores[index] - base
            path = parent, tokens[index]
            if path not in known:
                known[path] = self._add(*path, score)
                added += 1
            child = node_of[index] = known[path]
            self._scores[child - self._first] = score
            self._sources[child - self._first] |= sources[index]
        self._sort()
        return added

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
        """Before the tree grows: leave out of the columns what was long ago."""
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

    def reopen(self, last_position: int) -> None:
        """More can be said about the children of nodes up to that position than when they were
        asked about: let them be asked about again."""
        self._expanded = {
            one for one in self.ids if one in self._expanded and self.position(one) > last_position
        }

    def path(self, node_id: int) -> tuple[int, ...]:
        """Tokens from below the root down to a node; empty for the root."""
        tokens: list[int] = []
        while node_id != self.root:
            tokens.append(self._tokens[node_id - self._first])
            node_id = self._parents[node_id - self._first]
        return tuple(reversed(tokens))

    def frontier(self, depth: int) -> Iterator[int]:
        """The nodes that were not expanded yet, in descending score.

        Only nodes less than `depth` levels below the root; ties go to the older node.
        """
        return (one for _, one in self.frontier_keys(depth))

    def frontier_keys(self, depth: int) -> Iterator[Key]:
        """The same with their keys."""
        return self._best_first(self._expanded, self.position(self.root) + depth)

    def _best_first(self, but: Set[int], before: float = math.inf) -> Iterator[Key]:
        """All nodes but these, and but those from that position on."""
        positions, scores, first = self._positions, self._scores, self._first
        own = self._score(self.root)

        def keys(run: Sequence[int]) -> Iterator[Key]:
            for one in run:
                if one not in but and positions[one - first] < before:
                    yield own - scores[one - first], one

        return heapq.merge(*map(keys, ((self.root,), *self._runs)))

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

    def expand(self, ids: Iterable[int]) -> None:
        """Note that the children of these nodes are asked of the draft source."""
        self._expanded.update(ids)

    def attach(
        self,
        ids: Sequence[int],
        children: Children,
        keep: int,
        last_position: int,
        calibrated: Floats,
    ) -> int:
        """Add the `keep` best of `children`, guessed below nodes `ids`; return how many are new.

        `calibrated` are the children's own scores as they count here (see policy.estimates).
        Parents that are no longer here, and guesses behind `last_position`, are left out. Guesses
        that have guesses below them count as expanded. A node that is asked about once more keeps
        those children that something was done with, and their scores; others go.
        """
        self._forget_dead()
        before = self.newest
        order, scores, positions = self._ranked(ids, children, keep, last_position, calibrated)
        paths, ranks = len(ids), np.arange(len(order))
        above = np.full(paths + len(children), NO_PARENT)  # ids of the paths' ends, then of guesses
        above[:paths] = ids
        if any(one in self._below for one in ids):
            ranks = np.delete(ranks, self._here(above, paths, children, order))
        index = order[ranks]
        above[paths + index] = np.arange(before + 1, before + 1 + len(index))
        parents = above[children.parents[index]].tolist()
        own: list[float | None] = children.scores[index].tolist()
        sources = [1] * len(own)
        if children.sources is not None:
            sources = children.sources[index].tolist()
            own = [one if made else None for one, made in zip(own, sources, strict=True)]
        run = self._give_ids(
            parents,
            children.tokens[index].tolist(),
            positions[index].tolist(),
            scores[index].tolist(),
            own,
            ranks.tolist(),
            sources,
        )
        distinct = dict.fromkeys(parents)
        self._hang(run, distinct)
        self._expanded |= distinct.keys() - ids
        for at, certain in children.chains:  # nobody need be asked in between
            end = ids[at]
            for token in certain:
                if end in self and self.position(end) < last_position:
                    self._expanded.add(end)
                    end = self._child(end, token) or self._add(end, token, self._score(end))
        return self.newest - before

    def _ranked(
        self,
        ids: Sequence[int],
        children: Children,
        keep: int,
        last_position: int,
        calibrated: Floats,
    ) -> tuple[IntArray, Floats, IntArray]:
        """The places of the `keep` best of `children`, the best first; ties go to the smaller one.
        And the cumulative scores and the positions of all of them."""
        places = [one - self._first if one in self else None for one in ids]
        scores = np.array([-math.inf if at is None else self._scores[at] for at in places])
        positions = np.array([0 if at is None else self._positions[at] for at in places])
        above, paths = children.parents, len(ids)
        deep = len(above) and above[-1] >= paths
        flat = np.minimum(above, paths - 1) if deep else above
        scores, positions = scores[flat] + calibrated, positions[flat] + 1
        for at in np.flatnonzero(above >= paths).tolist() if deep else ():  # below guesses
            scores[at] = scores[above[at] - paths] + calibrated[at]
            positions[at] = positions[above[at] - paths] + 1
        scores[positions > last_position] = -math.inf
        able = np.count_nonzero(scores > -math.inf)
        order = (-scores).argsort(kind="stable")[: min(keep, able)]
        return order, scores, positions

    def _here(self, above: IntArray, paths: int, children: Children, order: IntArray) -> list[int]:
        """Which of the ranked guesses are nodes that stay, below those that were asked about."""
        self._refreshed = True  # what is guessed below them counts from what is said now
        ranks = []
        for rank, index in enumerate(order.tolist()):
            parent, token = above.item(children.parents.item(index)), children.tokens.item(index)
            child = self._child(parent, token)
            if child is not None and self._is_used(child):
                above[paths + index] = child
                self._sources[child - self._first] |= children.made_by.item(index)
                ranks.append(rank)
        return ranks

    def _hang(self, run: range, parents: Iterable[int]) -> None:
        """These new nodes hang from those."""
        asked_again = [one for one in parents if one in self._below]
        stay = {one: list(filter(self._is_used, self.children(one))) for one in asked_again}
        self._below.update(dict.fromkeys(parents, run))
        for one, children in stay.items():
            self._below[one] = [*children, *self.children(one)]
        if stay:
            self._runs = [list(filter(self.__contains__, one)) for one in self._runs]
        self._runs.append(run)

    def _is_used(self, node_id: int) -> bool:
        """Whether something was done with it, or it came of no expansion."""
        used = node_id in self._sent or node_id in self._expanded or node_id in self._below
        return used or self._drafted[node_id - self._first] is None

    def _child(self, node_id: int, token: int) -> int | None:
        return next(
            (i for i in self.children(node_id) if self._tokens[i - self._first] == token), None
        )

    def rescore(self, node_id: int, own: Mapping[int, float], add_from: float) -> None:
        """Children of a node get these own natural-log scores, by token; what hangs below them
        moves along. Tokens that are no children yet become some if they score `add_from` at least.
        """
        for token, score in own.items():
            child, scored = self._child(node_id, token), self._score(node_id) + score
            if child is not None:
                self._move(child, scored - self._score(child))
            elif score >= add_from:
                self._add(node_id, token, scored)
        self._sort()

    def _move(self, node_id: int, change: float) -> None:
        """A node and all below it score so much more."""
        stack = [node_id] if change else []
        while stack:
            one = stack.pop()
            self._scores[one - self._first] += change
            stack += self.children(one)

    # --- sending ------------------------------------------------------------------------------

    def unsent(self) -> Iterator[int]:
        """The unsent nodes in descending score, never a child before its parent.

        FlowSpec §3.2, score-based segmentation; ties go to the older node. Scores that were
        refreshed at different times may leave a child above its parent: it then follows it.
        """
        return (one for _, one in self.unsent_keys())

    def unsent_keys(self) -> Iterator[Key]:
        """The same with their keys."""
        return self._parents_first() if self._refreshed else self._best_first(self._sent)

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

    def send(self, ids: Sequence[int]) -> Rows:
        """Mark nodes as sent and return their rows, in that order.

        Raises LocalProtocolError, changing nothing, if one is not live, was sent before, or
        travels before its parent.
        """
        ahead: set[int] = set()
        for one in ids:
            if one not in self or one in self._sent or one in ahead:
                raise LocalProtocolError(f"node {one} cannot be sent")
            parent = self.parent(one)
            if one != self.root and parent not in self._sent and parent not in ahead:
                raise LocalProtocolError(f"node {one} would travel before its parent")
            ahead.add(one)
        self._sent |= ahead
        return self._rows(ids)

    def _rows(self, ids: Sequence[int]) -> Rows:
        """The rows that nodes travel as."""
        at = [one - self._first for one in ids]
        columns = self._parents, self._tokens, self._positions
        told = (np.array([column[n] for n in at], np.int64) for column in columns)
        return Rows(np.array(ids, np.int64), *told)

    # --- verifying ----------------------------------------------------------------------------

    def record(self, ids: Iterable[int], target_tokens: Iterable[int]) -> None:
        """Note the base model's next token after each node; nodes no longer here are ignored."""
        told = zip(ids, target_tokens, strict=True)
        self._targets.update((one, token) for one, token in told if one in self)

    def unverified(self, ids: Iterable[int]) -> Rows:
        """The rows of some nodes, parents first: of the one that the walk along known target tokens
        ends at, and of those below it. No other's target token can matter any more, or yet; nodes
        no longer here are ignored."""
        end: int | None = self.root
        while end in self._targets:
            end = self._child(end, self._targets[end])
        found: dict[int, None] = {}
        for one in ids:
            if one in self and (one == end or self.parent(one) in found):
                found[one] = None
        return self._rows(list(found))

    def advance(self) -> Advance:
        """Walk from the root along target tokens as far as they are known, and prune what is left
        out.

        While the target token is a child, that child becomes the root (FlowSpec Eq. 2, continuous
        condition). If it is not, the walk misses: the token becomes a new, unsent root whose
        parent is the last node passed, and nothing else remains.
        """
        tokens: list[int] = []
        passed: list[int] = []
        outcomes: list[tuple[float, bool]] = []
        ranks: list[int | None] = []
        sources: list[int] = []
        first, end = self._first, self.root
        right: int | None = end
        while right is not None and right in self._targets:
            end, token = right, self._targets[right]
            tokens.append(token)
            passed.append(end)
            right = None
            for child in self.children(end):
                own, is_right = self._drafted[child - first], self._tokens[child - first] == token
                if own is not None:
                    outcomes.append((own, is_right))
                if is_right:
                    right = child
            at = right - first if right is not None else None
            if end in self._expanded and (at is None or self._drafted[at] is not None):
                ranks.append(None if at is None else self._ranks[at])
            sources.append(0 if at is None else self._sources[at])
        if not passed:
            return Advance((), (), False)
        before = copy.copy(self)
        if right is None:
            self.root = self._add(end, tokens[-1], self._score(end))
            self._below, self._runs, self._refreshed = {}, [], False
        else:
            self._keep_below(right)
        outcome = tuple(outcomes), tuple(ranks), tuple(sources)
        return Advance(tuple(tokens), tuple(passed), right is None, *outcome, before)

    def _keep_below(self, root: int) -> None:
        parents, first = self._parents, self._first
        below: dict[int, Sequence[int]] = {}
        for one, family in self._below.items():
            if one == root or parents[one - first] in below:
                below[one] = family
        runs = ([one for one in run if parents[one - first] in below] for run in self._runs)
        self.root, self._below, self._runs = root, below, [run for run in runs if run]
