"""Worker: a thread that carries out effects in order and posts events; a node's models have one."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from edgespec.backends.compute import FIRST, INTERRUPTIBLE
from edgespec.errors import EdgespecError
from edgespec.machines.effects import Effect
from edgespec.machines.events import NO_JOB, ComputeFailed, Event
from edgespec.ring.effects import LoadBlock
from edgespec.ring.events import LoadFailed
from edgespec.types.stop_check import StopCheck

log = logging.getLogger(__name__)

Perform = Callable[[Effect, StopCheck], Event | None]


class Worker:
    """Runs `perform(effect, stop)` in its own thread, so that heartbeats go on.

    What runs layers calls `stop()` between two of them. Heads that wait are then carried out in the
    middle of a draft, by the same thread, and their events posted at once; the draft goes on with
    the same guesses, as it shares no state with them. Only drafts are interrupted, so that no head
    runs within another (see backends.charged_time).
    """

    def __init__(self, perform: Perform, name: str = "edgespec-worker") -> None:
        self.perform = perform
        # What waits, with when its cause happened; guarded by _more, which tells of news.
        self._heads: deque[tuple[float, Effect]] = deque()
        self._others: deque[tuple[float, Effect]] = deque()
        self._more = threading.Condition()
        self._events: deque[tuple[float, Event]] = deque()
        # The job that was aborted last, and of which requests; None: of all.
        self._aborted: tuple[int, frozenset[int | None]] = NO_JOB, frozenset()
        self._stopping = False
        self.asked_at = 0.0
        """When the cause of the effect that is carried out now happened (time.monotonic)."""
        self.ended_at: Callable[[], float] = time.monotonic
        """When the last effect ended; an emulated one ends as charged."""
        self._bell, self.waker = socket.socketpair()
        self._bell.setblocking(False)
        # A daemon thread: a program that must end does not wait for a long forward pass.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, effect: Effect, at: float | None = None) -> None:
        """Carry out an effect after those before it, a head before all but heads and in the middle
        of a draft; `at`: when its cause happened, if not now."""
        waiting = self._heads if isinstance(effect, FIRST) else self._others
        with self._more:
            waiting.append((time.monotonic() if at is None else at, effect))
            self._more.notify()

    def abort(self, job: int, request: int | None = None) -> None:
        """Let the block of `job` stop between two layers, or leave out the rows of one request;
        the latest job counts.

        A stage has one block running or waiting at a time.
        """
        before, requests = self._aborted
        self._aborted = job, (requests if before == job else frozenset()) | {request}

    def post(self, event: Event, at: float | None = None) -> None:
        """Hand an event to the I/O loop; it happened now, or at `at`."""
        self._events.append((time.monotonic() if at is None else at, event))
        # A full socket means that the loop has plenty of wake-ups to read already, a closed one
        # that it has ended.
        with contextlib.suppress(OSError):
            self._bell.send(b"!")

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
        if self._thread.is_alive():
            self._thread.join(timeout)
        elif self._thread.ident is None:  # it never ran
            self._bell.close()
        self.waker.close()

    # --- for what runs in its thread -----------------------------------------------------------

    def head_asked(self, timeout: float) -> float | None:
        """When the cause of the head happened that waits longest; None if there is none in
        `timeout` seconds, or the worker is to end."""
        with self._more:
            self._more.wait_for(lambda: self._heads or self._stopping, timeout)
            return self._heads[0][0] if self._heads and not self._stopping else None

    def run_head(self) -> None:
        """Carry out the head that waits longest, in the middle of another effect."""
        asked_at = self.asked_at
        self._do(*self._heads.popleft())
        self.asked_at = asked_at

    def _run(self) -> None:
        with self._bell:
            while True:
                with self._more:
                    self._more.wait_for(lambda: self._heads or self._others or self._stopping)
                    if self._stopping:
                        return
                    waiting = self._heads or self._others
                self._do(*waiting.popleft())

    def _do(self, asked_at: float, effect: Effect) -> None:
        self.asked_at = asked_at
        event = self._carry_out(effect)
        if event is not None:
            self.post(event, self.ended_at())

    def _carry_out(self, effect: Effect) -> Event | None:
        job = getattr(effect, "job", NO_JOB)

        def stop(request: int | None = None) -> bool:
            while self._heads and isinstance(effect, INTERRUPTIBLE) and not self._stopping:
                self.run_head()
            aborted, requests = self._aborted
            return self._stopping or (job == aborted and not requests.isdisjoint((None, request)))

        try:
            return self.perform(effect, stop)
        except EdgespecError as problem:
            return _failed(effect, str(problem))
        except Exception as problem:  # a bug, or the device: only the request fails
            log.exception("%s failed", type(effect).__name__)
            return _failed(effect, f"{type(problem).__name__}: {problem}")


def _failed(effect: Effect, reason: str) -> Event:
    if isinstance(effect, LoadBlock):
        return LoadFailed(reason)
    return ComputeFailed(getattr(effect, "job", -1), getattr(effect, "request", -1), reason)
