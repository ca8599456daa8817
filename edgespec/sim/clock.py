"""Clock: what happens next in virtual time; at one instant, what was booked first."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(order=True, slots=True)
class Booking:
    """Something that happens at `at` (virtual seconds), unless it is cancelled."""

    at: float
    serial: int
    act: Callable[..., None] | None = field(compare=False)
    args: tuple[Any, ...] = field(compare=False)

    def cancel(self) -> None:
        """Drop it."""
        self.act = None


class Clock:
    """A heap of bookings ordered by (time, serial number): the same bookings, the same order."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[Booking] = []
        self._serial = 0

    def book(self, at: float, act: Callable[..., None], *args: Any) -> Booking:
        """Let `act(*args)` happen at `at` seconds, now if that has passed."""
        self._serial += 1
        booking = Booking(max(at, self.now), self._serial, act, args)
        heapq.heappush(self._heap, booking)
        return booking

    def step(self, until: float | None = None) -> bool:
        """Let the next thing happen; False if there is none (up to `until` seconds)."""
        while self._heap:
            if until is not None and self._heap[0].at > until:
                return False
            booking = heapq.heappop(self._heap)
            if booking.act is None:
                continue
            self.now = booking.at
            booking.act(*booking.args)
            return True
        return False
