"""FlowSpec policy: score order, pruning on every result, context-aware merge, score-aware growth.

FlowSpec (see docs/policies.md). §3.2: a tree of L nodes and depth d0 is cut in descending score
into N + 1 equal segments of at most L_max rows. §3.3: every result is verified and the tree
pruned; a miss exits the round early. §3.4: after accepted tokens a fresh tree from the new root
is merged in by path (context-aware); where nothing was accepted and a stage would idle, the last
drafted tree is grown deeper and its best unused guesses are sent (score-aware).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from edgespec.policy.base import Decision, Deepen, Grow, Policy, RequestView, Results, Send
from edgespec.tree.segments import near_equal


@dataclass(frozen=True, slots=True)
class FlowSpec(Policy):
    """Defaults of the paper and, where it names none, of its reference code.

    `nodes` L = 80 with the root, `depth` d0 = 6, `width` top-k = 10, `longest` L_max = 16;
    expansions, each one segment (appendix A.1: L_exp = -1): `merge_nodes` 64, `merge_depth` d_exp =
    6; `deepen_nodes` L_se = 48, `deepen_levels` d_se = 2.
    """

    nodes: int = 80
    depth: int = 6
    width: int = 10
    longest: int = 16
    merge_nodes: int = 64
    merge_depth: int = 6
    deepen_nodes: int = 48
    deepen_levels: int = 2
    name: str = "flowspec"
    results = Results.IN_STEP

    def window(self, stages: int) -> int:
        """N + 1 segments: one for every stage and one for the coordinator (§3.2)."""
        return stages + 1

    def decide(self, view: RequestView) -> list[Decision]:
        """One continuous step (§3.1): draft on a new context, else send, else grow deeper."""
        if view.drafting:
            return []
        if view.drafted_root != view.tree.root and view.depth_left > 0:
            return [self._draft(view)]
        sends = self._fill(view)
        free = view.in_flight < self.window(view.stages)
        grown = view.drafted_root == view.tree.root and not view.exhausted
        if not sends and free and grown and view.depth_left > 0 and not view.verifying:
            levels = min(self.deepen_levels, view.depth_left)
            return [Deepen(levels, self.width, self.deepen_nodes)]
        return sends

    def _draft(self, view: RequestView) -> Decision:
        if len(view.tree) == 1:
            return Grow(min(self.depth, view.depth_left), self.width, self.nodes - 1)
        return Grow(min(self.merge_depth, view.depth_left), self.width, self.merge_nodes)

    def _fill(self, view: RequestView) -> list[Decision]:
        places = self.window(view.stages)
        credits = places - view.in_flight
        if credits <= 0:
            return []
        unsent = view.tree.unsent()
        if not view.tree.is_sent(view.tree.root):
            ids = tuple(islice(unsent, credits * self.longest))
            return [Send(s) for s in near_equal(ids, credits, self.longest)]
        if places * self.longest >= self.nodes:
            # The whole tree left when the round began: what is unsent is an expansion, one segment.
            return [Send(ids)] if (ids := tuple(unsent)) else []
        ids = tuple(islice(unsent, credits * self.longest))
        return [Send(ids[at : at + self.longest]) for at in range(0, len(ids), self.longest)]
