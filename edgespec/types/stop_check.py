"""Stop check: how what runs layers asks, between two of them, whether it shall go on."""

from __future__ import annotations

from typing import Protocol


class StopCheck(Protocol):
    """Asked by the thread that runs the layers."""

    def __call__(self, request: int | None = None) -> bool:
        """Whether nothing of the effect is wanted any more; with a `request`: no row of it."""
