"""Autoregressive policy: the root alone, one row a trip; what every other policy must equal."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.policy.base import Decision, Policy, RequestView, Send


@dataclass(frozen=True, slots=True)
class Autoregressive(Policy):
    """Plain decoding round the ring, without a draft."""

    name: str = "autoregressive"
    drafts = False

    def window(self, stages: int) -> int:
        """One segment: the next token is not known before this one is back."""
        return 1

    def decide(self, view: RequestView) -> list[Decision]:
        if view.tree.is_sent(view.tree.root):
            return []
        return [Send((view.tree.root,))]
