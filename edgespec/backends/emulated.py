"""Emulated: real compute that takes as long as it would on another device, by its costs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from edgespec.backends.charged_time import SAME_S, ChargedTime
from edgespec.backends.compute import INTERRUPTIBLE
from edgespec.backends.timed import EffectDurations
from edgespec.machines.effects import Effect, RunBlock
from edgespec.machines.events import Event
from edgespec.types.stop_check import StopCheck

Perform = Callable[[Effect, StopCheck], Event | None]

HEADROOM = 1.5
"""A block is begun this many times its usual time before its charged time ends: other processes of
the machine may slow it down."""


class Asked(Protocol):
    """What a worker was asked for, by that worker's own thread."""

    @property
    def asked_at(self) -> float:
        """When the effect that is now carried out was asked for."""

    def aborted_at(self, request: int | None) -> float:
        """When the rows of that request were said to be no longer wanted (None: of all) of the
        block that runs; infinite if they were not."""

    def head_asked(self, timeout: float) -> float | None:
        """When the head was asked for that waits longest; None if there is none in `timeout`
        seconds."""

    def run_head(self) -> None:
        """Carry out that head, in the middle of another effect."""


class Emulated:
    """Carries out compute effects (see backends.compute), each in the time that it is charged.

    The real work hides inside that time. What took longer than charged delays only itself: the
    next effect that waited for it is charged from where this one should have ended. `began` and
    `free_at`: the charged time of the last effect; `gaps`: from when to when heads ran within it;
    `late`: seconds by which it ended after that.
    """

    def __init__(
        self,
        perform: Perform,
        durations: EffectDurations,
        asked: Asked,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`asked`: of the worker that calls `perform`; its times are on `clock`."""
        self._perform = perform
        self._durations = durations
        self._asked = asked
        self._clock = clock
        self._sleep = sleep
        self._usual: dict[int, float] = {}  # seconds that a block really takes, by size class
        self.began = self.free_at = clock()
        self.late = 0.0
        self.gaps: list[tuple[float, float]] = []
        self._charged: ChargedTime | None = None  # of what runs, if nothing has to go before it

    @property
    def ends_at(self) -> float:
        """When what runs ends, as charged, or began if that is not known yet; infinite if nothing
        runs."""
        charged = self._charged
        return math.inf if charged is None else charged.end

    def perform(self, effect: Effect, stop: StopCheck) -> Event | None:
        """Carry out one effect; returns when its charged time is over, or a block was stopped."""
        gaps: list[tuple[float, float]] = []
        start = end = max(self._asked.asked_at, self.free_at)
        outer, self._charged = self._charged, ChargedTime(start, 0.0)
        try:
            if isinstance(effect, RunBlock):
                event, end = self._block(effect, stop, start)
            elif isinstance(effect, INTERRUPTIBLE):
                event, end = self._draft(effect, start, gaps)
            else:
                event = self._perform(effect, stop)
                self._charged = ChargedTime(start, self._durations.seconds(effect, event))
                end = self._charged.end
            self._wait_until(end)
        finally:
            self._charged = outer
        self.began, self.free_at, self.gaps = start, end, gaps
        self.late = max(self._clock() - end, 0.0)
        return event

    def _draft(
        self, effect: Effect, start: float, gaps: list[tuple[float, float]]
    ) -> tuple[Event | None, float]:
        """Run a draft at once, give event and end; heads run at its boundaries, by when they were
        asked for, however late that is noticed."""
        event = self._perform(effect, lambda request=None: False)
        charged = self._charged = ChargedTime(start, self._durations.seconds(effect, event))
        parts = self._durations.parts(effect)
        while (asked := self._asked.head_asked(charged.end - self._clock())) is not None:
            if not self._makes_way(charged, parts, asked, gaps):
                break
        return event, charged.end

    def _block(self, effect: RunBlock, stop: StopCheck, start: float) -> tuple[Event | None, float]:
        """Wait, run the block just in time for its charged end, give event and end.

        A block that is no longer wanted ends after the layer that it is in, as real ones do, and
        goes on without a part of which no row is.
        """
        block = _Block(effect, self._durations, start, self._asked.aborted_at)
        self._charged = block.charged
        size = len(effect.rows).bit_length()
        usual = self._usual.get(size, block.end - start)

        def unwanted(request: int | None = None) -> bool:
            return block.unwanted(stop, request, self._clock())

        boundary: float | None = start
        while boundary is not None and boundary <= max(block.end - HEADROOM * usual, start):
            self._wait_until(boundary)
            if block.ends(stop, boundary):
                return self._perform(effect, lambda request=None: True), block.end
            boundary = block.following(boundary)
        self._wait_until(max(block.end - HEADROOM * usual, start))
        started = self._clock()
        event = self._perform(effect, unwanted)
        if not block.gone:
            took = self._clock() - started
            self._usual[size] = max(took, 0.9 * self._usual.get(size, took))
        return event, block.end

    def _makes_way(
        self,
        charged: ChargedTime,
        parts: Sequence[float],
        asked: float,
        gaps: list[tuple[float, float]],
    ) -> bool:
        """The head that was asked for then runs from the next boundary on, and those that were
        asked for by its end, before the rest of this; False if this runs its last part."""
        boundary = charged.boundary(asked, parts)
        if boundary is None:
            return False
        self._charged = None
        charged.pause(boundary)
        self._wait_until(boundary)  # heads that are asked for by then join
        self.free_at = boundary
        while (head := self._asked.head_asked(0.0)) is not None and head <= self.free_at:
            self._asked.run_head()
        charged.go_on(self.free_at)
        self._charged = charged
        gaps.append((boundary, self.free_at))
        return True

    def _wait_until(self, at: float) -> None:
        if (left := at - self._clock()) > 0:
            self._sleep(left)


class _Block:
    """A block's charged time, by layers. `gone`: the requests whose rows were no longer wanted;
    None: all."""

    def __init__(
        self,
        effect: RunBlock,
        durations: EffectDurations,
        start: float,
        aborted_at: Callable[[int | None], float],
    ) -> None:
        self._effect, self._durations, self._aborted_at = effect, durations, aborted_at
        self.charged = ChargedTime(start, durations.seconds(effect, None))
        self.layers = durations.parts(effect)
        self.gone: set[int | None] = set()

    @property
    def end(self) -> float:
        return self.charged.end

    def following(self, boundary: float) -> float | None:
        """The next boundary after this one."""
        return self.charged.boundary(boundary + 2 * SAME_S, self.layers)

    def ends(self, stop: StopCheck, boundary: float) -> bool:
        """Whether nothing is wanted at that boundary; parts that are not are left out."""
        if self.unwanted(stop, None, boundary):
            return True
        if len(self._effect.parts) > 1:
            for part in self._effect.parts:
                self.unwanted(stop, part.request, boundary)
        return False

    def unwanted(self, stop: StopCheck, request: int | None, now: float) -> bool:
        """What `stop` says; once it is true, less is charged from the boundary on that comes next
        after it was asked for, however late that is noticed."""
        if request not in self.gone and stop(request):
            self.gone.add(request)
            asked = min(self._aborted_at(request), now)
            boundary = self.charged.boundary(asked, self.layers)
            if boundary is not None:
                left = self._effect.without(self.gone)
                wanted = None not in self.gone and bool(left.parts)
                seconds = self._durations.seconds(left, None) if wanted else 0.0
                self.charged.change(boundary, seconds)
        return request in self.gone
