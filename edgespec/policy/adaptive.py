"""Adaptive policy (ours): one frontier of calibrated guesses, segments as long as rows pay.

Nothing goes by rounds, levels or steps. Whenever the first stage is free, the best unsent rows
leave; whenever the draft source is free, the best nodes of the frontier are expanded. A new root
waits for its first guesses where a pass of the draft takes less than they gain, and for several
passes where a stage on the draft's device would compute before them. Both take nodes in descending
probability of being on the model's path, as long as a node's expected gain covers its cost on this
ring; probabilities and costs are learnt while running (policy.estimates). Where guesses do not pay
by these, or by what tokens really took with and without them (policy.pace), none are sent: what is
left is autoregressive decoding. docs/results/policies.md says what else was tried.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from edgespec.policy.base import Decision, Expand, Pooled, RequestView, Send
from edgespec.policy.pace import Way
from edgespec.policy.pool import least_that_pays, nodes_that_pay, rows_that_pay

LEAST_WAY = 1.5
"""Steps of the slowest stage that a way round must take for a segment to wait for that stage. It
comes home a step older, and knows less by the target token that it did not wait for: too much where
a way is hardly longer than a step, as on a ring of one stage."""

TRIES = 8.0
"""Levels whose best guess is taken to have been right before any was seen, on a shared device:
there none is seen unless something waits for it."""

LEAST_PASSES = 2.0
"""Passes of the draft that must fit between two blocks of the stage on its device for guesses to be
made while rows are on their way. Those of fewer come when the rows are back, and keep the new root
waiting. (Virtual time, llama-3.1-8b on AGX Orins with layers on D0's: on 2, where 1.5 fit, 52.6
tokens/s without them and 45.1 with them; on 6, where 2.8 fit, 50.7 and 54.3.)"""


@dataclass(frozen=True, slots=True)
class Adaptive(Pooled):
    """`width`: children guessed of a node. `most_rows`: limit of one segment and of one expansion,
    so that a wrong first idea of the costs stays cheap; it is meant not to bind."""

    width: int = 10
    most_rows: int = 64
    name: str = "adaptive"
    waits_for_credit = True
    starts_with_prompt = True

    def window(self, stages: int) -> int:
        """Two rings full: after a miss one of them is worthless, and on its way home."""
        return 2 * (stages + 1)

    def decide(self, view: RequestView) -> list[Decision]:
        """Send if the first stage is free, expand if the draft source is."""
        root_waits = not view.tree.is_sent(view.tree.root)
        # The very first prompt: no idea yet what rows cost.
        if not view.estimates.step.known or view.way is Way.PLAIN:
            return [Send((view.tree.root,))] if root_waits else []
        expand = None if view.drafting else self.best_nodes([view])[0]
        if expand and view.way is Way.FREE:
            expand = replace(expand, free=True)
        if view.own_stage and (root_waits or self._is_tight(view)):
            return self._on_shared_device(view, root_waits, expand)
        decisions: list[Decision] = []
        if self._sends(view, root_waits, expand):
            (rows,) = self.best_rows([view], view.ahead, 1)
            if rows:
                decisions.append(Send(rows))
        if expand:
            decisions.append(expand)
        return decisions

    def _sends(self, view: RequestView, root_waits: bool, expand: Expand | None) -> bool:
        """Whether rows leave now: the ring has room, or a new root does not wait for guesses."""
        if root_waits:
            return not self._waits_for_guesses(view, expand)
        return not view.queued and view.in_flight < self.room(view)

    def _on_shared_device(
        self, view: RequestView, root_waits: bool, expand: Expand | None
    ) -> list[Decision]:
        """A stage on the draft source's device goes first there: what is not guessed before a root
        leaves may never be. So the root waits as long as a pass pays, and the first guess is tried
        in any case."""
        tree, known = view.tree, view.estimates
        if view.drafting or not root_waits:
            return []
        if not known.step.one_row:  # nothing else would tell what a guess beside it costs
            return [Send((tree.root,))]
        (rows,) = self.best_rows([view], 0, 1)
        if expand and (not known.draft.known or self._pass_pays(view, rows, expand)):
            return [expand]
        return [Send(rows)]

    def _pass_pays(self, view: RequestView, rows: tuple[int, ...], expand: Expand) -> bool:
        """Whether a pass of the draft, and the rows that come of it, bring a token in less time
        than the trip of these rows does."""
        tree, known = view.tree, view.estimates
        head = known.head.seconds(1) if known.head.known else 0.0
        trip = known.step.seconds(len(rows)) * known.step.spread + head
        token = trip / sum(math.exp(tree.score(node)) for node in rows)
        row = known.step.seconds(len(rows) + 1) - known.step.seconds(len(rows))
        saved = 0.0
        for node in expand.ids:
            for share in known.rank_shares(self.width, TRIES):
                saved += max(math.exp(tree.score(node)) * share * token - row, 0.0)
        return saved > known.draft.seconds(len(expand.ids))

    def _is_tight(self, view: RequestView) -> bool:
        """Whether hardly a pass of the draft fits between two blocks of the stage beside it."""
        draft, step = view.estimates.draft, view.estimates.step
        free = step.seconds(1) * (step.spread - 1.0)
        return not draft.known or free < LEAST_PASSES * draft.seconds(1)

    def best_rows(
        self, views: Sequence[RequestView], ahead: int, roots: int, beside: int = 0
    ) -> list[tuple[int, ...]]:
        """See Pooled: those that pay."""
        return rows_that_pay(views, ahead, self.most_rows, roots, beside)

    def best_nodes(self, views: Sequence[RequestView]) -> list[Expand | None]:
        """See Pooled: those that pay."""
        chosen = nodes_that_pay(views, self.most_rows)
        asked = [ids for ids in chosen if ids]
        least = least_that_pays(views[0].estimates, sum(map(len, asked)))
        most = self.most_rows // max(len(asked), 1) if least else 0
        return [self._expansion(ids, most, least) if ids else None for ids in chosen]

    def _expansion(self, ids: tuple[int, ...], most: int, least: float) -> Expand:
        """These nodes, and up to `most` in all if further ones need no pass of the draft."""
        if most <= len(ids):
            return Expand(ids, self.width, len(ids) * self.width)
        return Expand(ids, self.width, most * self.width, most, math.log(least))

    def _waits_for_guesses(self, view: RequestView, expand: Expand | None) -> bool:
        """Whether a new root waits for its first guesses, which then leave in its segment.

        It comes home later by the pass that guesses them; the guesses, if they are right, come home
        earlier by a step. `expand`: what the draft source is asked now.
        """
        tree, estimates = view.tree, view.estimates
        asked = tree.root in expand.ids if expand else view.drafting and tree.is_expanded(tree.root)
        if len(tree) > 1 or not asked or not estimates.draft.known or not estimates.levels:
            return False
        gain = estimates.hit_share(self.width) * estimates.step.seconds(1)
        return estimates.draft.seconds(1) < gain

    def room(self, view: RequestView) -> int:
        """Segments that may be in flight: enough that the slowest stage never waits, and no more.

        A segment is on its way as long as `spread` steps of the slowest stage: so many keep that
        one busy, and one more waits for it (see LEAST_WAY). The credit of the first stage alone
        would let them pile up in front of a slow stage after it, each the staler for it. The
        window keeps a place free for a new root, which does not wait for the ring.
        """
        most = self.window(view.stages) - 1
        spread = view.estimates.step.spread
        waiting = int(spread > LEAST_WAY)
        return min(most, math.ceil(spread) + waiting) if spread else most
