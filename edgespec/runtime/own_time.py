"""Own time: the clock of a loop that may stand still (a stopped process, a busy or frozen machine).

Who stood still does not judge others by their silence: what they said waits to be read. So a loop's
time goes on by little more in each turn than it meant to wait.
"""

from __future__ import annotations

import time

SLACK_S = 0.25
"""Seconds by which a turn may last longer than was meant, and still count in full."""


class OwnTime:
    """Monotonic seconds, less those in which this loop stood still."""

    def __init__(self) -> None:
        self.stood_still = 0.0
        self._turned = time.monotonic()

    def now(self) -> float:
        """For whatever judges how long something lasts."""
        return time.monotonic() - self.stood_still

    def turned(self, meant: float) -> float:
        """The loop has turned, in which it meant to wait `meant` seconds; returns `now()`."""
        at = time.monotonic()
        self.stood_still += max(at - self._turned - meant - SLACK_S, 0.0)
        self._turned = at
        return at - self.stood_still
