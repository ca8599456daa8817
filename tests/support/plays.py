"""Plays: what comes of several policies that play one set-up."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.bench.report import Played
from edgespec.bench.setup import Setup
from edgespec.bench.simulated import play_each


def play_all(setup: Setup, policies: Sequence[str]) -> dict[str, Played]:
    """By policy; what the models say is computed once where it may be."""
    played = play_each([(setup, policy) for policy in policies])
    return dict(zip(policies, played, strict=True))
