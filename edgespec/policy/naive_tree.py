"""Naive tree policy: one static draft tree a round, sent in segments, verified when all is back.

The baseline "Naive PP" of FlowSpec's Table 1: an EAGLE-2 style tree cut into N + 1 near-equal
segments that follow each other round the ring; no pruning on the way, no early exit, no expansion.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from edgespec.policy.base import Decision, Grow, Policy, RequestView, Results, Send
from edgespec.tree.segments import near_equal


@dataclass(frozen=True, slots=True)
class NaiveTree(Policy):
    """`nodes` L = 80 with the root, `depth` d0 = 6, `width` top-k = 10 (FlowSpec §4.1, EAGLE-2)."""

    nodes: int = 80
    depth: int = 6
    width: int = 10
    name: str = "naive_tree"
    results = Results.TOGETHER

    def window(self, stages: int) -> int:
        """N + 1 segments: one for every stage and one for the coordinator."""
        return stages + 1

    def decide(self, view: RequestView) -> list[Decision]:
        """Draft, send the whole tree, wait for all of it."""
        if view.drafting or view.in_flight or view.verifying:
            return []
        depth = min(self.depth, view.depth_left)
        if depth and view.drafted_root != view.tree.root:
            return [Grow(depth, self.width, self.nodes - 1)]
        ids = tuple(islice(view.tree.unsent(), self.nodes))
        return [Send(s) for s in near_equal(ids, view.stages + 1, len(ids) or 1)]
