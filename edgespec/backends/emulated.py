"""Emulated: real compute that takes as long as it would on another device, by its costs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from edgespec.backends.timed import EffectDurations
from edgespec.machines.effects import Effect, RunBlock
from edgespec.machines.events import Event

Perform = Callable[[Effect, Callable[[], bool]], Event | None]

HEADROOM = 1.5
"""A block is begun this many times its usual time before its charged time ends: other processes of
the machine may slow it down."""


class Emulated:
    """Carries out compute effects (see backends.compute), each in the time that it is charged.

    The real work hides inside that time. What took longer than charged delays only itself: the
    next effect that waited for it is charged from where this one should have ended. `began` and
    `free_at`: the charged time of the last effect; `late`: seconds by which it ended after that.
    """

    def __init__(
        self,
        perform: Perform,
        durations: EffectDurations,
        asked_at: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`asked_at`: when the effect that is now carried out was asked for, on `clock`."""
        self._perform = perform
        self._durations = durations
        self._asked_at = asked_at
        self._clock = clock
        self._sleep = sleep
        self._usual: dict[int, float] = {}  # seconds that a block really takes, by size class
        self.began = self.free_at = clock()
        self.late = 0.0

    def perform(self, effect: Effect, stop: Callable[[], bool]) -> Event | None:
        """Carry out one effect; returns when its charged time is over, or a block was stopped."""
        start = max(self._asked_at(), self.free_at)
        if isinstance(effect, RunBlock):
            event, end = self._block(effect, stop, start)
        else:
            event = self._perform(effect, stop)
            end = start + self._durations.seconds(effect)
        self._wait_until(end)
        self.began, self.free_at = start, end
        self.late = max(self._clock() - end, 0.0)
        return event

    def _block(
        self, effect: RunBlock, stop: Callable[[], bool], start: float
    ) -> tuple[Event | None, float]:
        """Wait, run the block just in time for its charged end, give event and end.

        A block that is no longer wanted ends after the layer that it is in, as real ones do.
        """
        charged, slices = self._durations.seconds(effect), self._durations.slices(effect)
        end, layer = start + charged, charged / slices
        size = len(effect.rows).bit_length()
        begin = max(end - HEADROOM * self._usual.get(size, charged), start)
        for boundary in (start + n * layer for n in range(slices)):
            if boundary > begin:
                break
            self._wait_until(boundary)
            if stop():
                return self._perform(effect, lambda: True), boundary
        self._wait_until(begin)
        started = self._clock()
        stopped_at: list[float] = []

        def asks() -> bool:
            if not stopped_at and stop():
                stopped_at.append(self._clock())
            return bool(stopped_at)

        event = self._perform(effect, asks)
        if stopped_at:
            layers = math.ceil((stopped_at[0] - start) / layer) if layer else 0
            return event, min(start + layers * layer, end)
        took = self._clock() - started
        self._usual[size] = max(took, 0.9 * self._usual.get(size, took))
        return event, end

    def _wait_until(self, at: float) -> None:
        if (left := at - self._clock()) > 0:
            self._sleep(left)
