"""The coordinator's draft tree of one request: guesses below the newest committed token.

Nodes get ids that only grow. The tree holds only live nodes: the root (newest committed token) and
its descendants. A node is unsent, then sent round the ring, then verified: its target token is the
base model's next token after it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from edgespec.errors import LocalProtocolError
from edgespec.tree.drafted import FROM_ROOT, Children, DraftedTree, Floats
from edgespec.tree.ledger import NO_PARENT, IntArray, Rows
from edgespec.tree.node import Advance
from edgespec.tree.nodes import Nodes


class DraftTree(Nodes):
    """A tree of guesses rooted at the newest committed token."""

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

    def reopen(self, last_position: int) -> None:
        """More can be said about the children of nodes up to that position than when they were
        asked about: let them be asked about again."""
        self._expanded = {
            one for one in self.ids if one in self._expanded and self.position(one) > last_position
        }

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
        before = self.newest
        index, scores, positions = self._ranked(ids, children, keep, last_position, calibrated)
        paths, ranks = len(ids), [*range(len(index))]
        above = np.full(paths + len(children), NO_PARENT)  # ids of the paths' ends, then of guesses
        above[:paths] = ids
        if not self._below.keys().isdisjoint(ids):
            here = self._here(above, paths, children, index)
            ranks, index = [n for n in ranks if n not in here], np.delete(index, here)
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
            ranks,
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
        first, above, paths = self._first, children.parents, len(ids)
        at_end = [one - first if one in self else -1 for one in ids]
        ends = [self._scores[at] if at >= 0 else -math.inf for at in at_end]
        places = [self._positions[at] if at >= 0 else 0 for at in at_end]
        deep = len(above) and above[-1] >= paths
        flat = np.minimum(above, paths - 1) if deep else above
        scores, positions = np.array(ends)[flat] + calibrated, np.array(places)[flat] + 1
        for at in np.flatnonzero(above >= paths).tolist() if deep else ():  # below guesses
            scores[at] = scores[above[at] - paths] + calibrated[at]
            positions[at] = positions[above[at] - paths] + 1
        able = len(scores)
        if deep or -math.inf in ends or max(places, default=0) >= last_position:
            scores[positions > last_position] = -math.inf
            able = int(np.count_nonzero(scores > -math.inf))
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

    # --- sending ------------------------------------------------------------------------------

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
        self._forget_dead()
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
        before = DraftTree.__new__(DraftTree)  # it has the columns with this one in common
        vars(before).update(vars(self))
        if right is None:
            self.root = self._add(end, tokens[-1], self._score(end))
            self._below, self._runs, self._refreshed = {}, [], False
        else:
            self._keep_below(right)
        outcome = tuple(outcomes), tuple(ranks), tuple(sources)
        return Advance(tuple(tokens), tuple(passed), right is None, *outcome, before)
