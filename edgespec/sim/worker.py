"""Worker: one node's compute in virtual time, one effect at a time, heads first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import inf

from edgespec.backends.charged_time import ChargedTime, LoopTime
from edgespec.backends.compute import FIRST, INTERRUPTIBLE, lane_of
from edgespec.backends.emulated import Perform
from edgespec.backends.jobs import effects_of, events_of, failure
from edgespec.backends.waiting import Waiting
from edgespec.errors import EdgespecError
from edgespec.machines.effects import Effect, RunBlock
from edgespec.machines.events import Event
from edgespec.sim.clock import Booking, Clock


@dataclass(slots=True)
class _RunningEffect:
    """`start`: since when it runs, or goes on after an interruption."""

    effect: Effect
    start: float
    charged: ChargedTime
    booking: Booking
    stopped: bool
    result: Event | None
    left_out: set[int | None] = field(default_factory=set)  # requests of a block


class Turns:
    """One device's time, which the nodes on it share: one part of one effect at a time.

    What runs makes way at its next boundary if something of a better lane waits (see lane_of); of
    one lane, the coordinator's comes first.
    """

    def __init__(self) -> None:
        self._workers: dict[int, VirtualWorker] = {}
        self._gathering = 0
        self.running: VirtualWorker | None = None

    def join(self, node: int, worker: VirtualWorker) -> None:
        """Any earlier worker of this node is gone."""
        self._workers[node] = worker

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """What is added in between waits until all of it is there."""
        self._gathering += 1
        try:
            yield
        finally:
            self._gathering -= 1
        self.look()

    def look(self) -> None:
        """Something waits, or the device is free."""
        if self._gathering:
            return
        lanes = [(lane, n) for n, one in self._workers.items() if (lane := one.lane) is not None]
        if not lanes:
            return
        lane, node = min(lanes)
        if self.running is None:
            self._workers[node].go()
        elif lane < self.running.running_lane:
            self.running.give_way(self._workers[node])


class VirtualWorker:
    """Carries out compute effects in order, those together that can be (see backends.waiting); each
    job takes virtual time, and each effect gives at most one event.
    What runs gives way to what comes first on its device (see Turns and backends.charged_time).

    A head, and with `at_start` every effect, is carried out when its time begins, because what it
    did decides how long it takes; else when its time ends, because an abort may come meanwhile.
    Either way its event is delivered at the end.
    """

    def __init__(
        self,
        node: int,
        clock: Clock,
        perform: Perform,
        seconds: Callable[[Effect, Event | None], float],
        parts: Callable[[Effect], Sequence[float]],
        done: Callable[[int, Effect, Event | None], None],
        turns: Turns,
        *,
        at_start: bool,
    ) -> None:
        """`seconds`: how long an effect that starts now takes, and what came of it if it was
        carried out; `parts`: the lengths of the parts that this falls into, in any unit."""
        self.node = node
        self._clock = clock
        self._carry_out = perform
        self._seconds, self._parts = seconds, parts
        self._done = done
        self._turns = turns
        self._at_start = at_start
        self._queue = Waiting()
        self._running: _RunningEffect | None = None
        self._interrupted: _RunningEffect | None = None
        self._unwanted: dict[int, set[int | None]] = {}  # of blocks that wait; None: all
        self.busy = 0.0
        turns.join(node, self)

    @property
    def quiet(self) -> bool:
        """Whether everything asked for is done."""
        return self._running is None and self.lane is None

    @property
    def is_at_work(self) -> bool:
        return self._running is not None

    @property
    def lane(self) -> int | None:
        """Of what waits for its turn first; None if nothing does."""
        if self._interrupted is not None and not self._head_waits:
            return lane_of(self._interrupted.effect)
        return lane_of(self._queue.first[1]) if self._queue else None

    @property
    def running_lane(self) -> int:
        assert self._running is not None
        return lane_of(self._running.effect)

    @property
    def _head_waits(self) -> bool:
        return self._queue.head_at is not None

    def add(self, effect: Effect) -> None:
        """Carry out this effect after all others; a head only after other heads, and at the next
        boundary of a draft that runs."""
        self._queue.add(effect)
        self._turns.look()

    def abort(self, job: int, request: int | None = None) -> None:
        """Stop a block at the end of the layer that runs now, or leave out the rows of one request
        from there on; not at all if that is its last."""
        at_work = (self._interrupted, self._running)
        running = next((one for one in at_work if one and _is_block(one.effect, job)), None)
        if running is None:
            if any(_is_block(effect, job) for effect in self._queue):
                self._unwanted.setdefault(job, set()).add(request)
        elif request is not None:
            self._leave_out(running, request)
        elif running is self._interrupted:
            running.stopped = True
        elif not running.stopped:
            running.stopped = self._cut(running, self._end)

    def _leave_out(self, running: _RunningEffect, request: int) -> None:
        """Its rows are neither computed nor charged from the next boundary on."""
        effect, interrupted = running.effect, running is self._interrupted
        since = -inf if interrupted else self._clock.now
        at = running.charged.boundary(since, self._parts(effect))
        if at is None or running.stopped or request in running.left_out:
            return
        running.left_out.add(request)
        assert isinstance(effect, RunBlock)
        running.charged.change(at, self._seconds(effect.without(running.left_out), None))
        if not interrupted:
            running.booking.cancel()
            running.booking = self._clock.book(running.charged.end, self._end)
            self._turns.look()

    def vanish(self) -> None:
        """The node is gone, and with it all that it had to do."""
        self._queue.clear()
        self._unwanted.clear()
        if self._running is not None:
            self._running.booking.cancel()
            self.busy += self._clock.now - self._running.start
            self._turns.running = None
        self._running = self._interrupted = None
        self._turns.look()

    def go(self) -> None:
        """The device is free: a head starts, or what was interrupted goes on, or another starts."""
        now = self._clock.now
        self._turns.running = self
        if self._interrupted is not None and not self._head_waits:
            running, self._interrupted = self._interrupted, None
            running.charged.go_on(now)
            running.start = now
            at = now if running.stopped else running.charged.end
            running.booking = self._clock.book(at, self._end)
            self._running = running
        else:
            _, effect = self._queue.take()
            self._running = self._begun(effect, now)

    def give_way(self, other: VirtualWorker) -> None:
        """Something of a better lane waits there; of its own work, only drafts make way."""
        running = self._running
        assert running is not None
        may = other is not self or isinstance(running.effect, INTERRUPTIBLE)
        if may and not running.stopped:
            self._cut(running, self._interrupt)

    def _cut(self, running: _RunningEffect, act: Callable[[], None]) -> bool:
        """Let `act` happen at the next boundary of what runs; False if that runs its last part."""
        at = running.charged.boundary(self._clock.now, self._parts(running.effect))
        if at is None:
            return False
        running.booking.cancel()
        running.booking = self._clock.book(at, act)
        return True

    def _interrupt(self) -> None:
        """What runs makes way for the heads that wait."""
        running, now = self._running, self._clock.now
        assert running is not None, "a booking of a worker that does nothing"
        if now > running.start:
            self.note_run(running.effect, running.start, now, running.stopped)
        running.charged.pause(now)
        self._running, self._interrupted = None, running
        self._turns.running = None
        self._turns.look()

    def _begun(self, effect: Effect, now: float) -> _RunningEffect:
        out = self._unwanted.pop(effect.job, set()) if isinstance(effect, RunBlock) else set()
        unwanted = None in out
        result = self._perform(effect, stopped=False) if self._is_early(effect) else None
        left = effect.without(out) if out and isinstance(effect, RunBlock) else effect
        seconds = 0.0 if unwanted else self._seconds(left, result)
        charged = ChargedTime(now, seconds)
        booking = self._clock.book(charged.end, self._end)
        return _RunningEffect(effect, now, charged, booking, unwanted, result, out)

    def _is_early(self, effect: Effect) -> bool:
        return self._at_start or isinstance(effect, FIRST)

    def _end(self) -> None:
        running = self._running
        assert running is not None, "a booking of a worker that does nothing"
        self._running = self._turns.running = None
        effect = running.effect
        self.note_run(effect, running.start, self._clock.now, running.stopped)
        event = running.result
        if not self._is_early(effect):
            event = self._perform(effect, running.stopped, running.left_out)
        effects, events = effects_of(effect), events_of(event) or (None,)
        with self._turns.gathering():
            for one, of_one in zip(effects, events, strict=True):
                self._done(self.node, one, of_one)

    def note_run(self, effect: Effect, start: float, end: float, stopped: bool) -> None:
        """It ran so long, to its end or to an interruption; `stopped`: it was aborted."""
        self.busy += end - start

    def _perform(
        self, effect: Effect, stopped: bool, left_out: Collection[int | None] = ()
    ) -> Event | None:
        try:
            return self._carry_out(effect, lambda request=None: stopped or request in left_out)
        except EdgespecError as problem:
            return failure(effect, problem)


class VirtualLoop:
    """D0's own loop, which takes up one event after the other, in the time that it is charged."""

    def __init__(
        self,
        time: LoopTime | None,
        clock: Clock,
        turns: Turns,
        worker: VirtualWorker,
        handle: Callable[[Event], list[Effect]],
        taken: Callable[[list[Effect]], None],
    ) -> None:
        """`time` None: it takes none. `handle` gives the effects of an event, which leave when
        `taken` is called with them."""
        self.time = time
        self._clock, self._turns, self._worker = clock, turns, worker
        self._handle, self._taken = handle, taken
        self._events: deque[Event] = deque()
        self._is_awake = False

    def add(self, event: Event) -> None:
        """It happened now."""
        if self.time is None:
            self._taken(self._handle(event))
            return
        self._events.append(event)
        self._wake()

    def _wake(self) -> None:
        if self._events and not self._is_awake:
            self._is_awake = True
            self._clock.book(self._clock.now, self._turn)  # behind all that happens at this time

    def _turn(self) -> None:
        """All that waits is taken up. What several events ask of the models may be one job: it
        begins when all are done."""
        events, self._events = self._events, deque()
        gathered = ExitStack()
        if len(events) > 1:
            gathered.enter_context(self._turns.gathering())
        self._take(events, gathered)

    def _take(self, events: deque[Event], gathered: ExitStack) -> None:
        assert self.time is not None
        event = events.popleft()
        effects = self._handle(event)
        now, beside = self._clock.now, self._worker.is_at_work
        end = self.time.ends(event, effects, now, beside=beside)
        self._clock.book(end, self._end, effects, events, gathered)

    def _end(self, effects: list[Effect], events: deque[Event], gathered: ExitStack) -> None:
        self._taken(effects)
        if events:
            self._take(events, gathered)
            return
        gathered.close()
        self._is_awake = False
        self._wake()


def _is_block(effect: Effect, job: int) -> bool:
    return isinstance(effect, RunBlock) and effect.job == job
