"""Worker: a thread that carries out effects in order and posts events; a node's models have one."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from edgespec.backends.compute import INTERRUPTIBLE, UNHURRIED
from edgespec.backends.jobs import events_of, failure
from edgespec.backends.waiting import Waiting
from edgespec.machines.effects import Effect
from edgespec.machines.events import NO_JOB, ComputeFailed, Event
from edgespec.ring.effects import LoadBlock
from edgespec.ring.events import LoadFailed
from edgespec.types.stop_check import StopCheck

Perform = Callable[[Effect, StopCheck], Event | None]


class Worker:
    """Runs `perform(effect, stop)` in its own thread, so that heartbeats go on; what can be carried
    out together is one effect (see backends.waiting).

    What runs layers calls `stop()` between two of them. Heads that wait are then carried out in the
    middle of a draft, by the same thread, and their events posted at once; the draft goes on with
    the same guesses, as it shares no state with them. Only drafts are interrupted, so that no head
    runs within another (see backends.charged_time).
    """

    def __init__(self, perform: Perform, name: str = "edgespec-worker") -> None:
        self.perform = perform
        # What waits; both are guarded by _more, which tells of news.
        self._waiting = Waiting()
        self._gathering = 0
        self._more = threading.Condition()
        self._events: deque[tuple[float, Event]] = deque()
        # The job that was aborted last, and when for which requests; None: for all.
        self._aborted: tuple[int, dict[int | None, float]] = NO_JOB, {}
        self._stopping = False
        self.asked_at = 0.0
        """When the cause of the effect that is carried out now happened (time.monotonic)."""
        self.ended_at: Callable[[], float] = time.monotonic
        """When the last effect ended; an emulated one ends as charged."""
        self.bell, self.waker = socket.socketpair()
        """What is written to the bell wakes who polls the waker."""
        self.bell.setblocking(False)
        # A daemon thread: a program that must end does not wait for a long forward pass.
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self.thread.start()

    def submit(self, effect: Effect, at: float | None = None) -> None:
        """Carry out an effect after those before it, a head before all but heads and in the middle
        of a draft; `at`: when its cause happened, if not now."""
        with self._more:
            self._waiting.add(effect, time.monotonic() if at is None else at)
            if not isinstance(effect, UNHURRIED):
                self._more.notify()

    @contextlib.contextmanager
    def gathering(self) -> Iterator[None]:
        """What is submitted in between begins when all of it is there."""
        with self._more:
            self._gathering += 1
        try:
            yield
        finally:
            with self._more:
                self._gathering -= 1
                self._more.notify()

    def abort(self, job: int, request: int | None = None, at: float | None = None) -> None:
        """Let the block of `job` stop between two layers, or leave out the rows of one request;
        the latest job counts. `at`: when its cause happened, if not now.

        A stage has one block running or waiting at a time.
        """
        before, requests = self._aborted
        when = {request: time.monotonic() if at is None else at}
        self._aborted = job, when | (requests if before == job else {})  # the first time counts

    def post(self, event: Event, at: float | None = None) -> None:
        """Hand an event, or those of a joint job, to the I/O loop; it happened now, or at `at`."""
        happened = time.monotonic() if at is None else at
        # In one piece, so that the loop finds what came of one job together.
        self._events.extend([(happened, one) for one in events_of(event)])
        self.wake_loop()

    def wake_loop(self) -> None:
        """Have the I/O loop turn; a signal handler may, too."""
        # A full socket means that the loop has plenty of wake-ups to read already, a closed one
        # that it has ended.
        with contextlib.suppress(OSError):
            self.bell.send(b"!")

    def timed_events(self) -> list[tuple[float, Event]]:
        """What was posted since the last call, and when it happened."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def stop(self, timeout: float = 1.0) -> None:
        """End the thread, waiting for a running effect no longer than `timeout` seconds.

        Waiting effects are dropped.
        """
        with self._more:
            self._stopping = True
            self._more.notify()
        if self.thread.is_alive():
            self.thread.join(timeout)
        elif self.thread.ident is None:  # it never ran
            self.bell.close()
        self.waker.close()

    # --- for what runs in its thread -----------------------------------------------------------

    def aborted_at(self, request: int | None) -> float:
        """When the cause of an abort happened that concerns this request (None: all of them);
        infinite without one."""
        _, requests = self._aborted
        return min(requests.get(None, math.inf), requests.get(request, math.inf))

    def head_asked(self, timeout: float) -> float | None:
        """When the cause of the head happened that waits longest; None if there is none in
        `timeout` seconds, or the worker is to end."""
        with self._more:
            self._more.wait_for(lambda: self._head_waits or self._stopping, timeout)
            return self._waiting.head_at if self._head_waits and not self._stopping else None

    def run_head(self) -> None:
        """Carry out the head that waits longest, and those with it, in the middle of another
        effect."""
        asked_at = self.asked_at
        with self._more:
            job = self._waiting.take(self.ended_at())
        self._do(*job)
        self.asked_at = asked_at

    @property
    def _head_waits(self) -> bool:
        return self._waiting.head_at is not None and not self._gathering

    def _run(self) -> None:
        with self.bell:
            while self._await_work():
                with self._more:
                    job = self._waiting.take(self.ended_at())
                self._do(*job)

    def _await_work(self) -> bool:
        """Return when something waits, all of it; False if the worker is to end."""
        with self._more:
            self._more.wait_for(lambda: self._stopping or (self._waiting and not self._gathering))
            return not self._stopping

    def _do(self, asked_at: float, effect: Effect) -> None:
        self.asked_at = asked_at
        event = self._carry_out(effect)
        if event is not None:
            self.post(event, self.ended_at())

    def _carry_out(self, effect: Effect) -> Event | None:
        job = getattr(effect, "job", NO_JOB)

        def stop(request: int | None = None) -> bool:
            while self._head_waits and isinstance(effect, INTERRUPTIBLE) and not self._stopping:
                self.run_head()
            aborted, requests = self._aborted
            return self._stopping or (job == aborted and (None in requests or request in requests))

        try:
            return self.perform(effect, stop)
        except Exception as problem:
            failed = failure(effect, problem)
            if isinstance(effect, LoadBlock) and isinstance(failed, ComputeFailed):
                return LoadFailed(failed.reason)
            return failed
