"""Emulated: real compute that takes as long as it would on another device, by its costs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from edgespec.backends.charged_time import SAME_S, ChargedTime
from edgespec.backends.compute import COMPUTE, HEAD_LANE, INTERRUPTIBLE, OWN_LANE, lane_of
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

    def first_asked(self) -> tuple[float, Effect] | None:
        """What is to be carried out next, and when it was asked for; None if the worker is to
        end."""

    def aborted_at(self, request: int | None) -> float:
        """When the rows of that request were said to be no longer wanted (None: of all) of the
        block that runs; infinite if they were not."""

    def head_asked(self, timeout: float) -> float | None:
        """When the head was asked for that waits longest; None if there is none in `timeout`
        seconds."""

    def run_head(self) -> None:
        """Carry out that head, in the middle of another effect."""


class DeviceTime(Protocol):
    """One device's time. Nodes on it have the use of it in turns, by the rule of sim.worker.Turns:
    at a boundary what runs makes way for what waits in a better lane (see compute.lane_of)."""

    look_again_s: float
    """Seconds after which it may be another node's turn, or this one's."""

    def take(self, lane: int, asked_at: float) -> float | None:
        """Wait for it, with something of that lane which was asked for then. When the last
        part ended that ran on it, as charged, if this node has the use of it now; else None: ask
        again."""

    def outranked(self, lane: int) -> float | None:
        """While this node has it: when something of a better lane was asked for that waits on
        another node; None if nothing does."""

    def give(self, at: float) -> None:
        """Let others have it from then on."""


class OwnDeviceTime:
    """A device with no other node on it."""

    look_again_s = math.inf

    def __init__(self, free_at: float) -> None:
        self.free_at = free_at

    def take(self, lane: int, asked_at: float) -> float | None:
        """Always this node's."""
        return self.free_at

    def outranked(self, lane: int) -> float | None:
        """By nothing."""
        return None

    def give(self, at: float) -> None:
        """The next part starts then, or later."""
        self.free_at = max(self.free_at, at)


class Emulated:
    """Carries out compute effects (see backends.compute), each in the time that it is charged.

    The real work hides inside that time. What took longer than charged delays only itself: the
    next effect that waited for it is charged from where this one should have ended. `began` and
    `free_at`: the charged time of the last effect; `gaps`: from when to when others ran within it;
    `late`: seconds by which it ended after that.
    """

    def __init__(
        self,
        perform: Perform,
        durations: EffectDurations,
        asked: Asked,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        device: DeviceTime | None = None,
    ) -> None:
        """`asked`: of the worker that calls `perform`; its times are on `clock`. `device`: that
        other nodes have the use of, too."""
        self._perform = perform
        self._durations = durations
        self._asked = asked
        self._clock = clock
        self._sleep = sleep
        self._usual: dict[int, float] = {}  # seconds that a block really takes, by size class
        self.began = self.free_at = clock()
        self.late = 0.0
        self.gaps: list[tuple[float, float]] = []
        self._device = device or OwnDeviceTime(self.free_at)
        self._has_turn = False
        self._charged: ChargedTime | None = None  # of what runs, if nothing has to go before it

    @property
    def ends_at(self) -> float:
        """When what runs ends, as charged, or began if that is not known yet; infinite if nothing
        runs."""
        charged = self._charged
        return math.inf if charged is None else charged.end

    def await_turn(self) -> None:
        """Return when it is the turn of what is to be carried out next, whatever that is then."""
        while (first := self._asked.first_asked()) is not None:
            asked_at, effect = first
            if not isinstance(effect, COMPUTE) or self._takes(lane_of(effect), asked_at):
                return
            self._sleep(self._device.look_again_s)

    def perform(self, effect: Effect, stop: StopCheck) -> Event | None:
        """Carry out one effect; returns when its charged time is over, or a block was stopped."""
        while not self._takes(lane_of(effect), self._asked.asked_at):
            self._sleep(self._device.look_again_s)
        gaps: list[tuple[float, float]] = []
        start = end = max(self._asked.asked_at, self.free_at)
        outer, self._charged = self._charged, ChargedTime(start, 0.0)
        try:
            if isinstance(effect, RunBlock):
                event, end = self._block(effect, stop, start, gaps)
            elif isinstance(effect, INTERRUPTIBLE):
                event, end = self._draft(effect, start, gaps)
            else:
                event = self._perform(effect, stop)
                self._charged = ChargedTime(start, self._durations.seconds(effect, event))
                end = self._charged.end
            self._wait_until(end)
        finally:
            self._gives(end)
            self._charged = outer
        self.began, self.free_at, self.gaps = start, end, gaps
        self.late = max(self._clock() - end, 0.0)
        return event

    def _draft(
        self, effect: Effect, start: float, gaps: list[tuple[float, float]]
    ) -> tuple[Event | None, float]:
        """Run a draft at once, give event and end; what it makes way for runs at its boundaries, by
        when that was asked for, however late that is noticed."""
        event = self._perform(effect, lambda request=None: False)
        charged = self._charged = ChargedTime(start, self._durations.seconds(effect, event))
        parts, lane = self._durations.parts(effect), lane_of(effect)
        while (asked := self._better(lane, charged.end)) is not None:
            if not self._makes_way(charged, parts, lane, asked, gaps):
                break
        return event, charged.end

    def _better(self, lane: int, until: float) -> float | None:
        """When a head of this node was asked for, or what another node's turn is for; None if
        neither comes until then."""
        while True:
            left = until - self._clock()
            asked = self._asked.head_asked(min(left, self._device.look_again_s))
            other = self._device.outranked(lane)
            if asked is not None or other is not None:
                return min(one for one in (asked, other) if one is not None)
            if left <= self._device.look_again_s:
                return None

    def _block(
        self, effect: RunBlock, stop: StopCheck, start: float, gaps: list[tuple[float, float]]
    ) -> tuple[Event | None, float]:
        """Wait, run the block just in time for its charged end, give event and end.

        A block that is no longer wanted ends after the layer that it is in, as real ones do, and
        goes on without a part of which no row is.
        """
        block = _Block(effect, self._durations, start, self._asked.aborted_at)
        self._charged = block.charged
        size = len(effect.rows).bit_length()
        usual = self._usual.get(size, block.end - start)

        def makes_way() -> bool:
            asked = self._device.outranked(block.lane)
            return asked is not None and self._makes_way(
                block.charged, block.layers, block.lane, asked, gaps
            )

        def unwanted(request: int | None = None) -> bool:
            makes_way()
            return block.unwanted(stop, request, self._clock())

        boundary: float | None = start
        while boundary is not None and boundary <= max(block.end - HEADROOM * usual, start):
            self._wait_until(boundary)
            if makes_way():
                boundary = self.free_at
            if block.ends(stop, boundary):
                return self._perform(effect, lambda request=None: True), block.end
            boundary = block.following(boundary)
        self._wait_until(max(block.end - HEADROOM * usual, start))
        started, others = self._clock(), len(gaps)
        event = self._perform(effect, unwanted)
        if not block.gone and others == len(gaps):
            took = self._clock() - started
            self._usual[size] = max(took, 0.9 * self._usual.get(size, took))
        while self._clock() < block.end:
            if not makes_way():
                self._wait_until(min(block.end, self._clock() + self._device.look_again_s))
        return event, block.end

    # --- turns --------------------------------------------------------------------------------

    def _takes(self, lane: int, asked_at: float) -> bool:
        """Whether it is this node's turn."""
        if not self._has_turn and (free_at := self._device.take(lane, asked_at)) is not None:
            self._has_turn, self.free_at = True, max(self.free_at, free_at)
        return self._has_turn

    def _gives(self, at: float) -> None:
        self._has_turn = False
        self._device.give(at)

    def _makes_way(
        self,
        charged: ChargedTime,
        parts: Sequence[float],
        lane: int,
        asked: float,
        gaps: list[tuple[float, float]],
    ) -> bool:
        """What was asked for then runs from the next boundary on, and all that comes before the
        rest of this; False if this runs its last part."""
        boundary = charged.boundary(asked, parts)
        if boundary is None:
            return False
        self._charged = None
        charged.pause(boundary)
        self._wait_until(boundary)  # heads that are asked for by then join
        self.free_at = boundary
        self._gives(boundary)
        while True:
            head = self._asked.head_asked(0.0) if lane == OWN_LANE else None
            if not self._takes(*((lane, boundary) if head is None else (HEAD_LANE, head))):
                self._sleep(self._device.look_again_s)
            elif head is not None and head <= self.free_at:
                self._asked.run_head()
            else:
                break
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
        self.layers, self.lane = durations.parts(effect), lane_of(effect)
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
