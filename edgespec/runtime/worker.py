"""Worker: a thread that carries out effects in order and posts events; a node's models have one."""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from edgespec.backends.compute import FIRST
from edgespec.errors import EdgespecError
from edgespec.machines.effects import Effect
from edgespec.machines.events import ComputeFailed, Event
from edgespec.ring.effects import LoadBlock
from edgespec.ring.events import LoadFailed

log = logging.getLogger(__name__)

Perform = Callable[[Effect, Callable[[], bool]], Event | None]


class Worker:
    """Runs `perform(effect, stop)` in its own thread, so that heartbeats go on."""

    def __init__(self, perform: Perform, name: str = "edgespec-worker") -> None:
        self.perform = perform
        # Lane, number, when its cause happened, the effect (None: end).
        self._effects: queue.PriorityQueue[tuple[int, int, float, Effect | None]]
        self._effects = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._events: deque[tuple[float, Event]] = deque()
        self._aborted: int | None = None
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
        """Carry out an effect after those before it, a head before all but heads; `at`: when its
        cause happened, if not now."""
        lane = 0 if isinstance(effect, FIRST) else 1
        at = time.monotonic() if at is None else at
        self._effects.put((lane, next(self._numbers), at, effect))

    def abort(self, job: int) -> None:
        """Let the block of `job` stop between two layers; the latest call counts.

        A stage has one block running or waiting at a time.
        """
        self._aborted = job

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
        self._stopping = True
        self._effects.put((0, next(self._numbers), 0.0, None))
        if self._thread.is_alive():
            self._thread.join(timeout)
        elif self._thread.ident is None:  # it never ran
            self._bell.close()
        self.waker.close()

    def _run(self) -> None:
        with self._bell:
            while not self._stopping:
                _, _, self.asked_at, effect = self._effects.get()
                if effect is None or self._stopping:
                    break
                event = self._carry_out(effect)
                if event is not None:
                    self.post(event, self.ended_at())

    def _carry_out(self, effect: Effect) -> Event | None:
        job = getattr(effect, "job", -1)
        try:
            return self.perform(effect, lambda: self._stopping or self._aborted == job)
        except EdgespecError as problem:
            return _failed(effect, str(problem))
        except Exception as problem:  # a bug, or the device: only the request fails
            log.exception("%s failed", type(effect).__name__)
            return _failed(effect, f"{type(problem).__name__}: {problem}")


def _failed(effect: Effect, reason: str) -> Event:
    if isinstance(effect, LoadBlock):
        return LoadFailed(reason)
    return ComputeFailed(getattr(effect, "job", -1), getattr(effect, "request", -1), reason)
