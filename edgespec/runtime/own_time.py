"""Own time: the clock of a loop that may stand still (a stopped process, a busy or frozen machine).

Who stood still does not judge others by their silence: what they said waits to be read. So a loop's
time goes on by little more in each turn than it meant to wait.
"""

from __future__ import annotations

import time
from collections import deque

SLACK_S = 0.25
"""Seconds by which a turn may last longer than was meant, and still count in full."""

MOST_STALLS = 16
"""Of the latest it is known which time they took."""


class OwnTime:
    """Monotonic seconds, less those in which this loop stood still."""

    def __init__(self) -> None:
        self.stood_still = 0.0
        self.turned_at = time.monotonic()
        """When the loop turned last (time.monotonic)."""
        # When each began and ended, and stood_still before it.
        self._stalls: deque[tuple[float, float, float]] = deque(maxlen=MOST_STALLS)

    def now(self) -> float:
        """For whatever judges how long something lasts."""
        return time.monotonic() - self.stood_still

    def turned(self, meant: float) -> float:
        """The loop has turned, in which it meant to wait `meant` seconds; returns `now()`."""
        at = time.monotonic()
        counted = self.turned_at + meant + SLACK_S
        if at > counted:
            self._stalls.append((counted, at, self.stood_still))
            self.stood_still += at - counted
        self.turned_at = at
        return at - self.stood_still

    def of(self, at: float) -> float:
        """Own time of what happened `at` (time.monotonic), never earlier than that of what happened
        before: other threads go on while a loop stands still."""
        for began, ended, before in self._stalls:
            if at < ended:
                return min(at, began) - before
        return at - self.stood_still
