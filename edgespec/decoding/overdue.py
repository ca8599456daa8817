"""Overdue: notices segments that will not come back, so that no request waits for them for ever.

The ring is first in, first out: the oldest segment is the next one to come back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

LEAST_S = 5.0
"""Seconds that nobody waits less for a segment, which may be in the buffers of a network; twice as
many after each ring, up to MOST_DOUBTS, from which no segment came back: it may be a slow one."""

MOST_DOUBTS = 4

TIMES = 4.0
"""Times as long as the slowest recent trip that a segment may be on its way while no stage has
one."""

BUSY_S, BUSY_TIMES = 600.0, 30.0
"""The same while a stage says that it computes one: it may compile, or read from a slow disk."""

RECENT = 64


class FlightWatch:
    """How long segments take, and where the stages say that they are."""

    def __init__(self) -> None:
        self._left: dict[int, float] = {}
        self._trips: deque[float] = deque(maxlen=RECENT)
        self._landed_at = self._busy_at = float("-inf")
        self._doubts = 0  # rings in a row that were given up before a segment came back
        self._passed: dict[int, int] = {}  # by stage: the newest segment that it has handed on

    def look(self, flying: Mapping[int, object], now: float) -> None:
        """After each event: these segments are on the ring, by their numbers."""
        if flying.keys() == self._left.keys():
            return
        for seq in [seq for seq in self._left if seq not in flying]:
            self._trips.append(now - self._left.pop(seq))
            self._landed_at, self._doubts = now, 0
        for seq in flying:
            self._left.setdefault(seq, now)

    def new_ring(self) -> None:
        """Nothing of the one before comes back."""
        self._left.clear()
        self._passed.clear()

    def give_up(self) -> None:
        """The ring is given up, which may have been rash."""
        self._doubts = min(self._doubts + 1, MOST_DOUBTS)
        self.new_ring()

    def beat(self, stage: int, holds: int, passed: int, now: float) -> None:
        """A stage says how many segments it holds, and which one it has passed on last."""
        if holds or passed != self._passed.get(stage):
            self._busy_at = now
        self._passed[stage] = passed

    def deadline(self) -> float | None:
        """When the oldest segment is overdue, if nothing is heard until then."""
        return min(self._limits()) if self._left else None

    def overdue(self, now: float) -> str:
        """Why the ring cannot go on, as a clause whose subject is the coordinator; "" if it can."""
        if not self._left or now < min(self._limits()):
            return ""
        seq = min(self._left)
        seconds = now - max(self._left[seq], self._landed_at)
        before = [stage for stage, passed in self._passed.items() if passed >= seq]
        behind = [stage for stage, passed in self._passed.items() if passed < seq]
        seen = [f"stage {max(before)} has passed it on"] if before else []
        seen += [f"stage {min(behind)} has not"] if behind else []
        return f"it has waited for a segment for {seconds:.1f} s: {', '.join(seen) or 'lost'}"

    def _limits(self) -> tuple[float, float]:
        """When the oldest one is overdue by what the stages say, and in any case."""
        slowest = max(self._trips, default=0.0)
        since = max(self._left[min(self._left)], self._landed_at)
        idle = max(since, self._busy_at) + max(LEAST_S * 2**self._doubts, TIMES * slowest)
        return idle, since + max(BUSY_S, BUSY_TIMES * slowest)
