"""Pruned policy: the naive tree in score order, pruned on every result, with early exit.

"Pruned PP" of FlowSpec's Table 2 (see docs/policies.md): a round sends one static draft tree in
descending score (§3.2), every result prunes it (§3.3), and the round ends as soon as the model's
token is not in the tree, or a leaf is reached. Nothing is drafted on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from edgespec.policy.base import Decision, Grow, Policy, RequestView, Send
from edgespec.tree.segments import near_equal


@dataclass(frozen=True, slots=True)
class Pruned(Policy):
    """`nodes` L = 80 with the root, `depth` d0 = 6, `width` top-k = 10, `longest` L_max = 16
    (FlowSpec §4.1 and appendix A.1)."""

    nodes: int = 80
    depth: int = 6
    width: int = 10
    longest: int = 16
    name: str = "pruned"

    def window(self, stages: int) -> int:
        """N + 1 segments of a round; those of the round that ended early may still be under way."""
        return 2 * (stages + 1)

    def decide(self, view: RequestView) -> list[Decision]:
        """A new root starts a round: draft, then send the whole tree; else wait."""
        tree = view.tree
        if view.drafting or tree.is_sent(tree.root):
            return []
        depth = min(self.depth, view.depth_left)
        if depth and view.drafted_root != tree.root:
            return [Grow(depth, self.width, self.nodes - 1)]
        ids = tuple(islice(tree.unsent(), self.nodes))
        return [Send(s) for s in near_equal(ids, view.stages + 1, self.longest)]
