"""The coordinator's draft tree of one request: guesses below the newest committed token.

Nodes get ids that only grow. The tree holds only live nodes: the root (newest committed token) and
its descendants. A node is unsent, then sent round the ring, then verified: its target token is the
base model's next token after it. Guesses of an expansion wait as columns until something is done
with them (tree.waiting): they have ids, and nodes are made of them on the way.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from edgespec.errors import LocalProtocolError
from edgespec.tree.drafted import FROM_ROOT, Children, DraftedTree, Floats
from edgespec.tree.ledger import Rows
from edgespec.tree.node import Advance, TreeNode, rows_of
from edgespec.tree.waiting import Guesses, Key, Ranked


class DraftTree:
    """A tree of guesses rooted at the newest committed token."""

    def __init__(self, first_id: int, parent: int, token: int, position: int) -> None:
        """A tree of the root alone: `token` at `position`, its row hanging from row `parent`."""
        self.newest = first_id
        self.root = first_id
        self._nodes = {first_id: TreeNode(first_id, parent, token, position, 0.0)}
        self._waiting = Guesses()
        # Kept in order: what is unsent below what is sent, and what is not expanded.
        self._sendable: list[Key] = [(0.0, first_id)]
        self._open = list(self._sendable)

    def __len__(self) -> int:
        return len(self._nodes) + len(self._waiting)

    def __contains__(self, node_id: int) -> bool:
        return node_id in self._nodes or node_id in self._waiting

    def __getitem__(self, node_id: int) -> TreeNode:
        node = self._nodes.get(node_id)
        return self._made(node_id) if node is None else node

    def get(self, node_id: int) -> TreeNode | None:
        """The node, or None if it is not live."""
        node = self._nodes.get(node_id)
        return self._made(node_id) if node is None and node_id in self._waiting else node

    @property
    def ids(self) -> tuple[int, ...]:
        return (*self._nodes, *self._waiting)

    def score(self, node_id: int) -> float:
        """Cumulative natural-log score of a node, counted from the present root."""
        node = self._nodes.get(node_id)
        score = self._waiting.of(node_id).score(node_id) if node is None else node.score
        return score - self._nodes[self.root].score

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
        root_score = self._nodes[self.root].score
        added = seen = 0
        order = np.lexsort((np.arange(len(drafted)), -drafted.scores))
        parents, tokens = drafted.parents.tolist(), drafted.tokens.tolist()
        scores, sources = drafted.scores.tolist(), drafted.made_by.tolist()
        for index in order.tolist():
            if (added if only_new else seen) >= keep:
                break
            parent_id = node_of.get(parents[index])
            if parent_id is None or index in node_of:
                continue
            parent = self._nodes[parent_id]
            if parent.position >= last_position:
                continue
            seen += 1
            score = root_score + scores[index] - base
            child = parent.children.get(tokens[index])
            if child is None:
                child = self._add(parent, tokens[index], score).id
                added += 1
            else:
                self._nodes[child].score = score
            self._nodes[child].sources |= sources[index]
            node_of[index] = child
        self._sort()
        return added

    def _add(self, parent: TreeNode, token: int, score: float) -> TreeNode:
        self.newest += 1
        node = TreeNode(self.newest, parent.id, token, parent.position + 1, score)
        return self._put(node, parent)

    def _put(self, node: TreeNode, parent: TreeNode) -> TreeNode:
        self._nodes[node.id] = node
        parent.children[node.token] = node.id
        key = -node.score, node.id
        if parent.sent:
            insort(self._sendable, key)
        if not node.expanded:
            insort(self._open, key)
        return node

    def _made(self, node_id: int) -> TreeNode:
        """The node of a guess that waits. Raises KeyError for one that does not."""
        run = self._waiting.take(node_id)
        parent = self[run.parents[node_id - run.first]]
        token, own, rank, sources = run.told(node_id)
        score, position = run.score(node_id), parent.position + 1
        node = TreeNode(node_id, parent.id, token, position, score, sources=sources)
        if sources:
            node.drafted, node.rank = own, rank
        node.expanded = node_id in run.expanded
        node.waiting = run if node_id in run.above else None
        return self._put(node, parent)

    def _child(self, node: TreeNode, token: int) -> TreeNode | None:
        """That child of a node, be it that it waits."""
        child = node.children.get(token)
        if child is None and node.waiting is not None:
            child = node.waiting.find(node.id, token)
        return self[child] if child is not None and child in self else None

    def _sort(self) -> None:
        """Scores have changed."""
        for keys in (self._sendable, self._open):
            keys[:] = sorted((-self._nodes[node_id].score, node_id) for _, node_id in keys)

    def take_ids(self, count: int) -> tuple[int, ...]:
        """Ids for rows that travel with the tree's and are no nodes of it."""
        first = self.newest + 1
        self.newest += count
        return tuple(range(first, first + count))

    def reopen(self, last_position: int) -> None:
        """More can be said about the children of nodes up to that position than when they were
        asked about: let them be asked about again."""
        self._waiting.reopen(last_position)
        for node in self._nodes.values():
            node.expanded &= node.position > last_position
        open_ones = (node for node in self._nodes.values() if not node.expanded)
        self._open = sorted((-node.score, node.id) for node in open_ones)

    def path(self, node_id: int) -> tuple[int, ...]:
        """Tokens from below the root down to a node; empty for the root."""
        tokens: list[int] = []
        while node_id != self.root:
            node = self[node_id]
            tokens.append(node.token)
            node_id = node.parent
        return tuple(reversed(tokens))

    def frontier(self, depth: int) -> Iterator[int]:
        """The nodes that were not expanded yet, in descending score.

        Only nodes less than `depth` levels below the root; ties go to the older node.
        """
        last = self._nodes[self.root].position + depth
        for node_id in self._waiting.in_order(self._open, lambda _: ()):
            node = self._nodes.get(node_id)
            waits = node is None and self._waiting.of(node_id).is_open(node_id, last)
            if waits or (node is not None and not node.expanded and node.position < last):
                yield node_id

    @property
    def lowest(self) -> int:
        """The position of the deepest level."""
        return max(position for position, _, _ in self._places())

    @property
    def lowest_sent(self) -> int:
        """That of the deepest one of which something was sent; the root's is above none."""
        return max(node.position for node in self._nodes.values() if node.sent)

    def level(self, position: int) -> tuple[int, ...]:
        """The nodes at that position, in descending score; ties go to the older node."""
        level = sorted(key for at, *key in self._places() if at == position)
        return tuple(int(node_id) for _, node_id in level)

    def _places(self) -> Iterator[tuple[int, float, int]]:
        """The position of every node, and what it comes first by."""
        for node in self._nodes.values():
            yield node.position, -node.score, node.id
        for node_id in self._waiting:
            run = self._waiting.of(node_id)
            yield run.positions[node_id - run.first], *run.key(node_id - run.first)

    def expand(self, ids: Iterable[int]) -> None:
        """Note that the children of these nodes are asked of the draft source."""
        for node_id in ids:
            self[node_id].expanded = True
        self._open = [key for key in self._open if not self._nodes[key[1]].expanded]

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
        Parents that are no longer here, and guesses behind `last_position`, are left out. A node
        that is already here keeps its place and its score; what waited below a node that was asked
        about once more goes. Guesses that have guesses below them count as expanded.
        """
        nodes, before = [self.get(node_id) for node_id in ids], self.newest
        places = [None if node is None else (node.score, node.position) for node in nodes]
        ranked = Ranked(places, children, calibrated, keep, last_position)
        run = ranked.waiting(before + 1, ids, ranked.known(nodes, children, self._nodes), children)
        self.newest += len(run)
        self._waiting.add(run)
        asked, asked_again = set(ids), False
        for node in (self._nodes[one] for one in run.above if one in self._nodes):
            asked_again |= node.waiting is not None
            node.waiting, node.expanded = run, node.expanded or node.id not in asked
        if asked_again:
            self._waiting.clear(self._nodes)
        for at, certain in children.chains:  # nobody need be asked in between
            end = nodes[at]
            for token in certain:
                if end is not None and end.position < last_position:
                    end.expanded = True
                    end = self._child(end, token) or self._add(end, token, end.score)
        return self.newest - before

    def rescore(self, node_id: int, own: Mapping[int, float], add_from: float) -> None:
        """Children of a node get these own natural-log scores, by token; what hangs below them
        moves along. Tokens that are no children yet become some if they score `add_from` at least.
        """
        self.make_all()
        node = self._nodes[node_id]
        for token, score in own.items():
            child = node.children.get(token)
            if child is not None:
                self._move(child, node.score + score - self._nodes[child].score)
            elif score >= add_from:
                self._add(node, token, node.score + score)
        self._sort()

    def make_all(self) -> None:
        """Make nodes of all guesses that wait."""
        for node_id in tuple(self._waiting):
            self[node_id]

    def _move(self, node_id: int, change: float) -> None:
        """A node and all below it score so much more."""
        stack = [node_id] if change else []
        while stack:
            node = self._nodes[stack.pop()]
            node.score += change
            stack.extend(node.children.values())

    # --- sending ------------------------------------------------------------------------------

    def unsent(self) -> Iterator[int]:
        """The unsent nodes in descending score, never a child before its parent.

        FlowSpec §3.2, score-based segmentation; ties go to the older node. Scores that were
        refreshed at different times may leave a child above its parent: it then follows it.
        """

        def below(node_id: int) -> Iterator[Key]:
            for child in self._nodes[node_id].children.values():
                yield -self._nodes[child].score, child

        return self._waiting.in_order(self._sendable, below)

    def send(self, ids: Sequence[int]) -> Rows:
        """Mark nodes as sent and return their rows, in that order.

        Raises LocalProtocolError, changing nothing, if one is not live, was sent before, or
        travels before its parent.
        """
        ahead: set[int] = set()
        for node_id in ids:
            node = self.get(node_id)
            if node is None or node.sent or node_id in ahead:
                raise LocalProtocolError(f"node {node_id} cannot be sent")
            if node_id != self.root and not (self._nodes[node.parent].sent or node.parent in ahead):
                raise LocalProtocolError(f"node {node_id} would travel before its parent")
            ahead.add(node_id)
        nodes = [self._nodes[i] for i in ids]
        for node in nodes:
            node.sent = True
        below = [self._nodes[child] for node in nodes for child in node.children.values()]
        ready = {*self._sendable, *((-node.score, node.id) for node in below)}
        self._sendable = sorted(key for key in ready if not self._nodes[key[1]].sent)
        return rows_of(nodes)

    # --- verifying ----------------------------------------------------------------------------

    def record(self, ids: Iterable[int], target_tokens: Iterable[int]) -> None:
        """Note the base model's next token after each node; nodes no longer here are ignored."""
        for node_id, target_token in zip(ids, target_tokens, strict=True):
            node = self.get(node_id)
            if node is not None:
                node.target_token = target_token

    def unverified(self, ids: Iterable[int]) -> Rows:
        """The rows of some nodes, parents first: of the one that the walk along known target tokens
        ends at, and of those below it. No other's target token can matter any more, or yet; nodes
        no longer here are ignored."""
        node = self._nodes[self.root]
        while node.target_token is not None:
            child = node.children.get(node.target_token)
            if child is None:
                return Rows.none()
            node = self._nodes[child]
        found: dict[int, TreeNode] = {}
        for node_id in ids:
            one = self._nodes.get(node_id)
            if one is not None and (one is node or one.parent in found):
                found[node_id] = one
        return rows_of(list(found.values()))

    def advance(self) -> Advance:
        """Walk from the root along target tokens as far as they are known, and prune what is left
        out.

        While the target token is a child, that child becomes the root (FlowSpec Eq. 2, continuous
        condition). If it is not, the walk misses: the token becomes a new, unsent root whose
        parent is the last node passed, and nothing else remains.
        """
        before = self._nodes
        tokens: list[int] = []
        passed: list[int] = []
        outcomes: list[tuple[float, bool]] = []
        ranks: list[int | None] = []
        sources: list[int] = []
        node = self._nodes[self.root]
        missed = False
        while node.target_token is not None:
            token = node.target_token
            tokens.append(token)
            passed.append(node.id)
            outcomes += self._outcomes(node, token)
            child = self._child(node, token)
            if node.expanded and (child is None or child.drafted is not None):
                ranks.append(None if child is None else child.rank)
            sources.append(0 if child is None else child.sources)
            if child is None:
                missed = True
                node = self._add(node, token, node.score)
                break
            node = child
        if passed:
            self.root = node.id
            self._keep_below(node)
            if missed:
                self._sendable = [(-node.score, node.id)]
        outcome = tuple(outcomes), tuple(ranks), tuple(sources)
        return Advance(tuple(tokens), tuple(passed), missed, *outcome, before)

    def _outcomes(self, node: TreeNode, token: int) -> list[tuple[float, bool]]:
        run, children = node.waiting, map(self._nodes.__getitem__, node.children.values())
        older = [one for one in children if run is None or one.id not in run.ids]
        told = [(one.drafted, one.token == token) for one in older if one.drafted is not None]
        return told + run.outcomes(node.id, token) if run else told

    def _keep_below(self, root: TreeNode) -> None:
        kept: dict[int, TreeNode] = {}
        stack = [root]
        while stack:
            node = stack.pop()
            kept[node.id] = node
            stack.extend(self._nodes[c] for c in node.children.values())
        self._nodes = kept
        self._waiting.clear(kept)
        self._sendable = [key for key in self._sendable if key[1] in kept]
        self._open = [key for key in self._open if key[1] in kept]
