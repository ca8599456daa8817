"""Worker: the one thread that owns a node's models; takes compute effects, posts events."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable

from edgespec.errors import EdgespecError
from edgespec.machines.effects import Effect, LoadBlock
from edgespec.machines.events import ComputeFailed, Event, LoadFailed

log = logging.getLogger(__name__)

Perform = Callable[[Effect, Callable[[], bool]], Event | None]


class Worker:
    """Runs `perform(effect, stop)` in its own thread, so that heartbeats go on meanwhile."""

    def __init__(self, perform: Perform) -> None:
        self._perform = perform
        self._effects: queue.SimpleQueue[Effect | None] = queue.SimpleQueue()
        self._events: deque[Event] = deque()
        self._aborted: int | None = None
        self._stopping = False
        self._bell, self.waker = socket.socketpair()
        self._bell.setblocking(False)
        # A daemon thread: a program that must end does not wait for a long forward pass.
        self._thread = threading.Thread(target=self._run, name="edgespec-worker", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, effect: Effect) -> None:
        """Carry out an effect after those before it."""
        self._effects.put(effect)

    def abort(self, job: int) -> None:
        """Let the block of `job` stop between two layers; the latest call counts.

        A stage has one block running or waiting at a time.
        """
        self._aborted = job

    def post(self, event: Event) -> None:
        """Hand an event to the I/O loop (from the worker's thread)."""
        self._events.append(event)
        # A full socket means that the loop has plenty of wake-ups to read already, a closed one
        # that it has ended.
        with contextlib.suppress(OSError):
            self._bell.send(b"!")

    def events(self) -> list[Event]:
        """What was posted since the last call."""
        taken = []
        while self._events:
            taken.append(self._events.popleft())
        return taken

    def stop(self, timeout: float = 1.0) -> None:
        """End the thread, waiting for a running effect no longer than `timeout` seconds.

        Waiting effects are dropped.
        """
        self._stopping = True
        self._effects.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout)
        elif self._thread.ident is None:  # it never ran
            self._bell.close()
        self.waker.close()

    def _run(self) -> None:
        with self._bell:
            while (effect := self._effects.get()) is not None and not self._stopping:
                event = self._carry_out(effect)
                if event is not None:
                    self.post(event)

    def _carry_out(self, effect: Effect) -> Event | None:
        job = getattr(effect, "job", -1)
        try:
            return self._perform(effect, lambda: self._stopping or self._aborted == job)
        except EdgespecError as problem:
            return _failed(effect, str(problem))
        except Exception as problem:  # a bug, or the device: the request ends, the node lives
            log.exception("%s failed", type(effect).__name__)
            return _failed(effect, f"{type(problem).__name__}: {problem}")


def _failed(effect: Effect, reason: str) -> Event:
    if isinstance(effect, LoadBlock):
        return LoadFailed(reason)
    return ComputeFailed(getattr(effect, "job", -1), getattr(effect, "request", -1), reason)
