"""Adaptive policy (ours): one frontier of calibrated guesses, segments as long as rows pay.

Nothing goes by rounds, levels or steps. Whenever the first stage is free, the best unsent rows
leave; whenever the draft source is free, the best frontier grows. Both take rows in descending
probability of being on the model's path, as long as a row's expected gain covers its cost on this
ring; probabilities and costs are learnt while running (policy.experience). Where guesses do not
pay, none are sent: what remains is autoregressive decoding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgespec.policy.base import Decision, Expand, Send, View


@dataclass(frozen=True, slots=True)
class Adaptive:
    """`width`: children guessed of a node. `most_rows`: limit of one segment and of one expansion,
    so that a wrong first idea of the costs stays cheap; it is meant not to bind."""

    width: int = 10
    most_rows: int = 64
    name: str = "adaptive"
    drafts: bool = True
    verifies_each_result: bool = True
    drafts_in_step: bool = False
    calibrates: bool = True

    def window(self, stages: int) -> int:
        """Two rings full: after a miss one of them is worthless, and on its way home."""
        return 2 * (stages + 1)

    def decide(self, view: View) -> list[Decision]:
        """Send if the first stage is free, expand if the draft source is."""
        decisions: list[Decision] = []
        rows = self._rows(view)
        if rows:
            decisions.append(Send(rows))
        if not view.drafting:
            ids = self._frontier(view)
            if ids:
                decisions.append(Expand(ids, self.width, len(ids) * self.width))
        return decisions

    def _rows(self, view: View) -> tuple[int, ...]:
        """The best unsent rows, as long as each one's gain covers its cost.

        A row that is right comes home one step of the pipeline earlier than if it waited for the
        next segment; it costs everything behind it the time that it adds to a step.
        """
        if view.in_flight >= self.window(view.stages):
            return ()
        tree, step = view.tree, view.experience.step
        root_waits = not tree[tree.root].sent
        if view.queued and not root_waits:
            return ()
        rows = tree.unsent(self.most_rows)
        taken = 0
        for node_id in rows:
            share = math.exp(tree.score(node_id))
            longer = step.seconds(taken + 1)
            if taken and share * longer < longer - step.seconds(taken):
                break
            if not taken and share < LEAST_SHARE:
                break
            taken += 1
        return rows[:taken]

    def _frontier(self, view: View) -> tuple[int, ...]:
        """The nodes to expand: as many of the best as give the most probability a second."""
        tree, draft = view.tree, view.experience.draft
        ids = tree.frontier(self.most_rows, view.depth_left)
        best = count = 0
        shares = rate = 0.0
        for count, node_id in enumerate(ids, start=1):
            shares += math.exp(tree.score(node_id))
            seconds = draft.seconds(count) if draft.known else 1.0
            if shares / seconds > rate:
                best, rate = count, shares / seconds
        return ids[:best]


LEAST_SHARE = 0.05
