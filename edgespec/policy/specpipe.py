"""SpecPipe policy: levels of a fixed width, as wide as its cost model says, one a pipeline step.

SpecPipe (see docs/policies.md). §3.2: each step feeds one level of the speculative tree and
verifies one token, which re-roots the tree. §3.3.1: the token source need only have a level ready
in time, so that it runs one level ahead. §3.3.3: a level has the `w` nodes of highest cumulative
probability; w minimises the expected time between tokens (Eq. 2), here

    TBT(w) = t(w) * (1 + (1 - p(w)) * (n - 1))

with t(w) the time of a step with w rows, p(w) the share of levels whose best w held the model's
token, n the number of steps of the pipeline: a token a step, and n - 1 further ones to refill
after a miss. Both t and p are those measured on this ring.

With several live requests it is SpecPipe-DB (§4, §4.4): each request keeps its own width, whatever
the load, and has one level in each step; a step's levels of all of them are one ragged tensor, a
joint segment; prompts go first; a request joins while fewer than B run, at any step.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.policy.base import Decision, Expand, Policy, RequestView, Send

WIDTHS = (4, 8, 16, 32, 64)

ENOUGH = 32
"""Levels to have seen before p(w) is believed; until then the paper's width serves."""


@dataclass(frozen=True, slots=True)
class SpecPipe(Policy):
    """`width` 64 is what the paper's testbed chose by Eq. 2 (§1); a level holds no more.

    `children` c: candidates of a node (§3.3.3); 16, where PipeDec's (the same authors') plateaus.
    """

    width: int = 64
    children: int = 16
    name: str = "specpipe"
    waits_for_credit = True
    prompts_first = True

    def window(self, stages: int) -> int:
        """One level on every stage and one on its way; a new root enters after a full ring."""
        return stages + 2

    def decide(self, view: RequestView) -> list[Decision]:
        """Feed the next level when the first stage is free; keep one level ahead of it."""
        tree = view.tree
        if not tree.is_sent(tree.root):
            return [Send((tree.root,))]
        fed = tree.lowest_sent
        nodes = tree.level(fed + 1)
        following = tuple(i for i in nodes if tree.is_sent(tree.parent(i)))[: self._width(view)]
        decisions: list[Decision] = []
        if following and not view.queued and view.in_flight <= view.stages:
            decisions.append(Send(following))
        # The source runs one level ahead: of what waits to be fed or, after a refill, of what was.
        above = following or tuple(i for i in tree.level(fed) if tree.is_sent(i))
        grown = any(map(tree.is_expanded, above))
        below = tree.position(above[0]) - tree.position(tree.root)
        if not view.drafting and not grown and below < view.depth_left:
            decisions.append(Expand(above, self.children, self.width))
        return decisions

    def _width(self, view: RequestView) -> int:
        """The width of least expected time between tokens (Eq. 2)."""
        estimates = view.estimates
        if estimates.levels < ENOUGH:
            return self.width
        widths = [w for w in WIDTHS if w <= self.width] or [self.width]
        refill = view.stages - 1

        def time_between_tokens(width: int) -> float:
            missed = 1.0 - estimates.hit_share(width)
            return estimates.step.seconds(width) * (1.0 + missed * refill)

        return min(widths, key=time_between_tokens)
