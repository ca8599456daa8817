"""Adaptive policy (ours): one frontier of calibrated guesses, segments as long as rows pay.

Nothing goes by rounds, levels or steps. Whenever the first stage is free, the best unsent rows
leave; whenever the draft source is free, the best nodes of the frontier are expanded. Both take
nodes in descending probability of being on the model's path, as long as a node's expected gain
covers its cost on this ring; probabilities and costs are learnt while running
(policy.estimates). Where guesses do not pay, none are sent: what is left is autoregressive
decoding. docs/policies.md says what else was tried.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgespec.policy.base import Decision, Expand, Policy, RequestView, Send

LEAST_SHARE = 1 / 32
"""Nothing is started, neither a segment nor a forward pass of the draft, for guesses that are
less likely than this to be on the model's path (of a segment, all its rows together; of a forward
pass, the best node)."""


LEAST_WAY = 1.5
"""Steps of the slowest stage that a way round must take for a segment to wait for that stage. It
comes home a step older, and knows less by the target token that it did not wait for: too much where
a way is hardly longer than a step, as on a ring of one stage."""


@dataclass(frozen=True, slots=True)
class Adaptive(Policy):
    """`width`: children guessed of a node. `most_rows`: limit of one segment and of one expansion,
    so that a wrong first idea of the costs stays cheap; it is meant not to bind."""

    width: int = 10
    most_rows: int = 64
    name: str = "adaptive"
    calibrates = True
    waits_for_credit = True
    starts_with_prompt = True

    def window(self, stages: int) -> int:
        """Two rings full: after a miss one of them is worthless, and on its way home."""
        return 2 * (stages + 1)

    def decide(self, view: RequestView) -> list[Decision]:
        """Send if the first stage is free, expand if the draft source is."""
        root_waits = not view.tree[view.tree.root].sent
        if not view.estimates.step.known:  # the very first prompt: no idea yet what rows cost
            return [Send((view.tree.root,))] if root_waits else []
        decisions: list[Decision] = []
        if root_waits or (not view.queued and view.in_flight < self._room(view)):
            rows = self._rows(view)
            if rows:
                decisions.append(Send(rows))
        if not view.drafting:
            ids = self._frontier(view)
            if ids:
                decisions.append(Expand(ids, self.width, len(ids) * self.width))
        return decisions

    def _room(self, view: RequestView) -> int:
        """Segments that may be in flight: enough that the slowest stage never waits, and no more.

        A segment is on its way as long as `spread` steps of the slowest stage: so many keep that
        one busy, and one more waits for it (see LEAST_WAY). The credit of the first stage alone
        would let them pile up in front of a slow stage after it, each the staler for it. The
        window keeps a place free for a new root, which never waits.
        """
        most = self.window(view.stages) - 1
        spread = view.estimates.step.spread
        waiting = int(spread > LEAST_WAY)
        return min(most, math.ceil(spread) + waiting) if spread else most

    def _rows(self, view: RequestView) -> tuple[int, ...]:
        """The best unsent rows, as long as each one's gain covers its cost.

        Gain: a row that is right comes home earlier than if it waited for the next segment, by one
        step of the pipeline or by D0's work for a segment if that takes longer. Cost: the time that
        it adds to a step, for all that follow. While the segment is no longer than the one ahead of
        it, it waits for that one at every stage anyway; beyond, a row adds its time to this
        segment's own way at each stage that it reaches.
        """
        tree, step, own = view.tree, view.estimates.step, view.estimates.own
        rows = tree.unsent(self.most_rows)
        taken, total = 0, 0.0
        for node_id in rows:
            share = math.exp(tree.score(node_id))
            longer = step.seconds(taken + 1)
            added = longer - step.seconds(taken) if taken else 0.0
            times = view.estimates.reach if taken >= view.ahead else 1.0
            if share * max(longer, own) < added * times:
                break
            taken += 1
            total += share
        return rows[:taken] if total >= LEAST_SHARE else ()

    def _frontier(self, view: RequestView) -> tuple[int, ...]:
        """The best nodes to expand, as long as each one's gain covers the time that it adds.

        Gain as above: the children of a node that is right can leave in the next segment. They are
        not guessed before the next pass ends if not in this one.
        """
        tree, draft = view.tree, view.estimates.draft
        ids = tree.frontier(self.most_rows, view.depth_left)
        if not draft.known:
            return ids[:1]  # to find out
        pace = max(view.estimates.step.seconds(1), view.estimates.own)
        taken = 0
        for node_id in ids:
            share = math.exp(tree.score(node_id))
            if taken == 0:
                worth = share >= LEAST_SHARE
            else:
                added = draft.seconds(taken + 1) - draft.seconds(taken)
                worth = share * pace >= added
            if not worth:
                break
            taken += 1
        return ids[:taken]
