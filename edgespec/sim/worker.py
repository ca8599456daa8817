"""Worker: one node's compute in virtual time, one effect at a time, heads first."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from edgespec.backends.compute import FIRST
from edgespec.backends.emulated import Perform
from edgespec.decoding.effects import RunHead
from edgespec.errors import EdgespecError
from edgespec.machines.effects import Effect, RunBlock
from edgespec.machines.events import NO_JOB, ComputeFailed, Event
from edgespec.sim.clock import Booking, Clock
from edgespec.tree.ledger import Rows


@dataclass(frozen=True, slots=True)
class Span:
    """One effect that a node carried out, from `start` to `end` in virtual seconds.

    `kind` is the effect's type. `ids` are the rows of a RunBlock, by which useful rows can be
    told from wasted ones; `rows` counts what a RunBlock or RunHead ran. `stopped`:
    it was aborted between two layers. `job` is -1 where the effect has none.
    """

    node: int
    kind: str
    request: int
    job: int
    start: float
    end: float
    rows: int
    ids: tuple[int, ...]
    stopped: bool


@dataclass(slots=True)
class _RunningEffect:
    effect: Effect
    start: float
    booking: Booking
    stopped: bool
    result: Event | None


class VirtualWorker:
    """Carries out compute effects in order; each takes virtual time and gives at most one event.

    With `at_start` an effect is carried out when its time begins, because what it did decides how
    long it takes; else when its time ends, because an abort may come meanwhile. Either way its
    event is delivered at the end.
    """

    def __init__(
        self,
        node: int,
        clock: Clock,
        perform: Perform,
        seconds: Callable[[Effect], float],
        slices: Callable[[RunBlock], int],
        done: Callable[[int, Effect, Event | None], None],
        spans: list[Span] | None,
        *,
        at_start: bool,
    ) -> None:
        """`seconds`: how long an effect that starts now takes; `slices`: into how many equal parts
        a block's duration falls, between which it can be stopped."""
        self._node = node
        self._clock = clock
        self._carry_out = perform
        self._seconds, self._slices = seconds, slices
        self._done = done
        self._spans = spans
        self._at_start = at_start
        self._queue: deque[Effect] = deque()
        self._running: _RunningEffect | None = None
        self._unwanted: set[int] = set()
        self.busy = 0.0

    @property
    def quiet(self) -> bool:
        """Whether everything asked for is done."""
        return self._running is None and not self._queue

    def add(self, effect: Effect) -> None:
        """Carry out this effect after all others; a head only after other heads."""
        if isinstance(effect, FIRST):
            self._queue.insert(sum(isinstance(waits, FIRST) for waits in self._queue), effect)
        else:
            self._queue.append(effect)
        if self._running is None:
            self._start()

    def abort(self, job: int) -> None:
        """Stop a block at the end of the layer that runs now; not at all if that is its last."""
        running = self._running
        if running is None:
            return
        effect = running.effect
        if not isinstance(effect, RunBlock) or effect.job != job:
            if any(isinstance(e, RunBlock) and e.job == job for e in self._queue):
                self._unwanted.add(job)
            return
        slices = self._slices(effect)
        layer = (running.booking.at - running.start) / slices
        layers = math.ceil((self._clock.now - running.start) / layer - 1e-9) if layer else 0
        if layers < slices and not running.stopped:
            running.stopped = True
            running.booking.cancel()
            running.booking = self._clock.book(running.start + layers * layer, self._end)

    def vanish(self) -> None:
        """The node is gone, and with it all that it had to do."""
        self._queue.clear()
        self._unwanted.clear()
        if self._running is not None:
            self._running.booking.cancel()
            self.busy += self._clock.now - self._running.start
            self._running = None

    def _start(self) -> None:
        effect = self._queue.popleft()
        unwanted = isinstance(effect, RunBlock) and effect.job in self._unwanted
        result = self._perform(effect, stopped=False) if self._at_start else None
        seconds = 0.0 if unwanted else self._seconds(effect)
        if isinstance(effect, RunBlock):
            self._unwanted.discard(effect.job)
        now = self._clock.now
        booking = self._clock.book(now + seconds, self._end)
        self._running = _RunningEffect(effect, now, booking, unwanted, result)

    def _end(self) -> None:
        running = self._running
        assert running is not None, "a booking of a worker that does nothing"
        self._running = None
        now, effect = self._clock.now, running.effect
        self.busy += now - running.start
        if self._spans is not None:
            self._spans.append(_span(self._node, running, now))
        event = running.result if self._at_start else self._perform(effect, running.stopped)
        self._done(self._node, effect, event)
        if self._running is None and self._queue:
            self._start()

    def _perform(self, effect: Effect, stopped: bool) -> Event | None:
        try:
            return self._carry_out(effect, lambda: stopped)
        except EdgespecError as problem:
            job = getattr(effect, "job", NO_JOB)
            return ComputeFailed(job, getattr(effect, "request", -1), str(problem))


def _span(node: int, running: _RunningEffect, now: float) -> Span:
    effect = running.effect
    rows = effect.rows if isinstance(effect, RunBlock | RunHead) else Rows.none()
    return Span(
        node,
        type(effect).__name__,
        getattr(effect, "request", -1),
        getattr(effect, "job", NO_JOB),
        running.start,
        now,
        len(rows),
        tuple(rows.ids.tolist()) if isinstance(effect, RunBlock) else (),
        running.stopped,
    )
