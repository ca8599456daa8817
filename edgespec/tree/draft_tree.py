"""The coordinator's draft tree of one request: guesses below the newest committed token.

Nodes get ids that only grow. The tree holds only live nodes: the root (newest committed token) and
its descendants. A node is unsent, then sent round the ring, then verified: its target token is the
base model's next token after it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from edgespec.errors import LocalProtocolError
from edgespec.tree.drafted import FROM_ROOT, Children, DraftedTree, best_below
from edgespec.tree.ledger import Rows


@dataclass(slots=True)
class TreeNode:
    """One guessed (or, at the root, committed) token at an absolute position.

    `drafted`: its own natural-log score as the draft source gave it, if it came of an expansion.
    `rank`: how many guesses of that expansion were better, 0 for the best. `expanded`: its children
    have been, or are being, asked of the draft source. `sources`: which of the draft source's
    members guessed it, as bits (see tree.drafted); none for a token that no source guessed.
    """

    id: int
    parent: int
    token: int
    position: int
    score: float
    drafted: float | None = None
    rank: int = 0
    expanded: bool = False
    sources: int = 0
    sent: bool = False
    target_token: int | None = None
    children: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Advance:
    """What verification committed: new tokens, the nodes passed on the way, hit or miss.

    `passed` are the ids whose target tokens were used, in order; the i-th gave `tokens[i]`.
    `missed`: the last token was not in the tree, so that nothing else of it is left. `outcomes`:
    for every guess (of an expansion) below the nodes passed, its own score and whether it was
    right: what scores can be calibrated by. `ranks`: for every node passed that had been expanded,
    the rank of the guess that was right, None if none was. `sources`: for every token, who had
    guessed it (see TreeNode). `before`: the tree's nodes by id before it was pruned, for watchers.
    """

    tokens: tuple[int, ...]
    passed: tuple[int, ...]
    missed: bool
    outcomes: tuple[tuple[float, bool], ...] = ()
    ranks: tuple[int | None, ...] = ()
    sources: tuple[int, ...] = ()
    before: Mapping[int, TreeNode] = field(default_factory=dict, repr=False, compare=False)


class DraftTree:
    """A tree of guesses rooted at the newest committed token."""

    def __init__(self, first_id: int, parent: int, token: int, position: int) -> None:
        """A tree of the root alone: `token` at `position`, its row hanging from row `parent`."""
        self.newest = first_id
        self.root = first_id
        self._nodes = {first_id: TreeNode(first_id, parent, token, position, 0.0)}

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node_id: int) -> bool:
        return node_id in self._nodes

    def __getitem__(self, node_id: int) -> TreeNode:
        return self._nodes[node_id]

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(self._nodes)

    def score(self, node_id: int) -> float:
        """Cumulative natural-log score of a node, counted from the present root."""
        return self._nodes[node_id].score - self._nodes[self.root].score

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
        node_of, base = self._graft(drafted, since)
        if node_of is None:
            return 0
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
                child = self._add(parent, tokens[index], score)
                added += 1
            else:
                self._nodes[child].score = score
            self._nodes[child].sources |= sources[index]
            node_of[index] = child
        return added

    def _graft(
        self, drafted: DraftedTree, since: Sequence[int]
    ) -> tuple[dict[int, int] | None, float]:
        """Where the drafted tree meets our root: {drafted index: node id} and its score there."""
        at = FROM_ROOT
        for token in since:
            match = np.flatnonzero((drafted.parents == at) & (drafted.tokens == token))
            if not len(match):
                return None, 0.0
            at = int(match[0])
        return {at: self.root}, 0.0 if at == FROM_ROOT else float(drafted.scores[at])

    def _add(self, parent: TreeNode, token: int, score: float) -> int:
        self.newest += 1
        node = TreeNode(self.newest, parent.id, token, parent.position + 1, score)
        self._nodes[node.id] = node
        parent.children[token] = node.id
        return node.id

    def take_ids(self, count: int) -> tuple[int, ...]:
        """Ids for rows that travel with the tree's and are no nodes of it."""
        first = self.newest + 1
        self.newest += count
        return tuple(range(first, first + count))

    def reopen(self, last_position: int) -> None:
        """More can be said about the children of nodes up to that position than when they were
        asked about: let them be asked about again."""
        for node in self._nodes.values():
            if node.position <= last_position:
                node.expanded = False

    def path(self, node_id: int) -> tuple[int, ...]:
        """Tokens from below the root down to a node; empty for the root."""
        tokens: list[int] = []
        while node_id != self.root:
            node = self._nodes[node_id]
            tokens.append(node.token)
            node_id = node.parent
        return tuple(reversed(tokens))

    def frontier(self, limit: int, depth: int) -> tuple[int, ...]:
        """Up to `limit` nodes that were not expanded yet, in descending score.

        Only nodes less than `depth` levels below the root; ties go to the older node.
        """
        last = self._nodes[self.root].position + depth
        heap = [(-self._nodes[self.root].score, self.root)]
        chosen: list[int] = []
        while heap and len(chosen) < limit:
            _, node_id = heapq.heappop(heap)
            node = self._nodes[node_id]
            if node.position >= last:
                continue
            if not node.expanded:
                chosen.append(node_id)
            for child in node.children.values():
                heapq.heappush(heap, (-self._nodes[child].score, child))
        return tuple(chosen)

    @property
    def lowest(self) -> int:
        """The position of the deepest level."""
        return max(node.position for node in self._nodes.values())

    def level(self, position: int) -> tuple[int, ...]:
        """The nodes at that position, in descending score; ties go to the older node."""
        level = [(-n.score, n.id) for n in self._nodes.values() if n.position == position]
        return tuple(node_id for _, node_id in sorted(level))

    def expand(self, ids: Iterable[int]) -> None:
        """Note that the children of these nodes are asked of the draft source."""
        for node_id in ids:
            self._nodes[node_id].expanded = True

    def attach(
        self,
        ids: Sequence[int],
        children: Children,
        keep: int,
        last_position: int,
        calibrated: Sequence[float],
    ) -> int:
        """Add the `keep` best of `children`, guessed below nodes `ids`; return how many are new.

        `calibrated` are the children's own scores as they count here (see policy.estimates).
        Parents that are no longer here, and guesses behind `last_position`, are left out. A guess
        that is already here keeps its place and its score. Guesses that have guesses below them
        count as expanded.
        """
        node_of: dict[int, int] = {}  # of guesses that are here
        tokens, drafted = children.tokens.tolist(), children.scores.tolist()
        above, sources = children.parents.tolist(), children.made_by.tolist()
        nodes, before = [self._nodes.get(node_id) for node_id in ids], self.newest
        places = [None if node is None else (node.score, node.position) for node in nodes]
        best = best_below(places, children, last_position, calibrated)
        for rank, (score, index) in enumerate(best[:keep]):
            at = above[index] - len(ids)
            # Of a guess no worse than this one, as no score is above 0.
            parent = self._nodes[ids[above[index]] if at < 0 else node_of[at]]
            parent.expanded |= at >= 0
            if tokens[index] not in parent.children:
                child = self._nodes[self._add(parent, tokens[index], score)]
                if sources[index]:
                    child.drafted, child.rank = drafted[index], rank
            node_id = node_of[index] = parent.children[tokens[index]]
            self._nodes[node_id].sources |= sources[index]
        for at, certain in children.chains:  # nobody need be asked in between
            node = self._nodes.get(ids[at])
            for token in certain:
                if node is not None and node.position < last_position:
                    node.expanded = True
                    known = node.children.get(token) or self._add(node, token, node.score)
                    node = self._nodes[known]
        return self.newest - before

    def rescore(self, node_id: int, own: Mapping[int, float], add_from: float) -> None:
        """Children of a node get these own natural-log scores, by token; what hangs below them
        moves along. Tokens that are no children yet become some if they score `add_from` at least.
        """
        node = self._nodes[node_id]
        for token, score in own.items():
            child = node.children.get(token)
            if child is not None:
                self._move(child, node.score + score - self._nodes[child].score)
            elif score >= add_from:
                self._add(node, token, node.score + score)

    def _move(self, node_id: int, change: float) -> None:
        """A node and all below it score so much more."""
        stack = [node_id] if change else []
        while stack:
            node = self._nodes[stack.pop()]
            node.score += change
            stack.extend(node.children.values())

    # --- sending ------------------------------------------------------------------------------

    def unsent(self, limit: int) -> tuple[int, ...]:
        """Up to `limit` unsent nodes in descending score, never a child before its parent.

        FlowSpec §3.2, score-based segmentation; ties go to the older node. Scores that were
        refreshed at different times may leave a child above its parent: it then follows it.
        """
        # A node can be sent once its parent was; all sendable ones wait in the heap.
        heap = [
            (-node.score, node.id)
            for node in self._nodes.values()
            if not node.sent and (node.id == self.root or self._nodes[node.parent].sent)
        ]
        heapq.heapify(heap)
        chosen: list[int] = []
        while heap and len(chosen) < limit:
            _, node_id = heapq.heappop(heap)
            chosen.append(node_id)
            for child in self._nodes[node_id].children.values():
                heapq.heappush(heap, (-self._nodes[child].score, child))
        return tuple(chosen)

    def send(self, ids: Sequence[int]) -> Rows:
        """Mark nodes as sent and return their rows, in that order.

        Raises LocalProtocolError, changing nothing, if one is not live, was sent before, or
        travels before its parent.
        """
        ahead: set[int] = set()
        for node_id in ids:
            node = self._nodes.get(node_id)
            if node is None or node.sent or node_id in ahead:
                raise LocalProtocolError(f"node {node_id} cannot be sent")
            if node_id != self.root and not (self._nodes[node.parent].sent or node.parent in ahead):
                raise LocalProtocolError(f"node {node_id} would travel before its parent")
            ahead.add(node_id)
        nodes = [self._nodes[i] for i in ids]
        for node in nodes:
            node.sent = True
        return _rows_of(nodes)

    # --- verifying ----------------------------------------------------------------------------

    def record(self, ids: Iterable[int], target_tokens: Iterable[int]) -> None:
        """Note the base model's next token after each node; nodes no longer here are ignored."""
        for node_id, target_token in zip(ids, target_tokens, strict=True):
            if node_id in self._nodes:
                self._nodes[node_id].target_token = target_token

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
        return _rows_of(list(found.values()))

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
            tokens.append(node.target_token)
            passed.append(node.id)
            outcomes += self._outcomes(node)
            child = node.children.get(node.target_token)
            if node.expanded and (child is None or self._nodes[child].drafted is not None):
                ranks.append(None if child is None else self._nodes[child].rank)
            sources.append(0 if child is None else self._nodes[child].sources)
            if child is None:
                missed = True
                node = self._nodes[self._add(node, node.target_token, node.score)]
                break
            node = self._nodes[child]
        if passed:
            self.root = node.id
            self._keep_below(node)
        outcome = tuple(outcomes), tuple(ranks), tuple(sources)
        return Advance(tuple(tokens), tuple(passed), missed, *outcome, before)

    def _outcomes(self, node: TreeNode) -> list[tuple[float, bool]]:
        guesses = [self._nodes[child] for child in node.children.values()]
        return [(g.drafted, g.token == node.target_token) for g in guesses if g.drafted is not None]

    def _keep_below(self, root: TreeNode) -> None:
        kept: dict[int, TreeNode] = {}
        stack = [root]
        while stack:
            node = stack.pop()
            kept[node.id] = node
            stack.extend(self._nodes[c] for c in node.children.values())
        self._nodes = kept


def _rows_of(nodes: Sequence[TreeNode]) -> Rows:
    return Rows(
        np.array([n.id for n in nodes], np.int64),
        np.array([n.parent for n in nodes], np.int64),
        np.array([n.token for n in nodes], np.int64),
        np.array([n.position for n in nodes], np.int64),
    )
