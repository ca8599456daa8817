"""A policy of one's own: the best guess of each level, as many as `depth`, once a trip."""

from dataclasses import dataclass

from edgespec import Decision, Grow, Policy, RequestView, Send


@dataclass(frozen=True)
class Chain(Policy):
    depth: int = 4

    def decide(self, view: RequestView) -> list[Decision]:
        if view.drafting or view.in_flight or view.verifying:
            return []
        if view.drafted_root != view.tree.root and view.depth_left:
            return [Grow(depth=min(self.depth, view.depth_left), width=1, keep=self.depth)]
        return [Send(tuple(view.tree.unsent()))]
