"""Trace: what one node did when, written to a file while it happens, for `edgespec bench`.

One JSON object a line. All times are of time.monotonic, which the processes of one machine share.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

from edgespec.backends.emulated import Emulated
from edgespec.backends.jobs import effects_of
from edgespec.errors import ConfigError
from edgespec.machines.effects import Effect, RunBlock
from edgespec.machines.events import NO_JOB, BlockDone, Event
from edgespec.runtime.worker import Perform
from edgespec.types.stop_check import StopCheck
from edgespec.wire.messages import Message
from edgespec.wire.segment import Segment

LIMIT_BYTES = 1 << 30
"""The longest trace: a full disk would do more harm."""


class Trace:
    """One node's trace: spans of compute, and messages that it sent for requests."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError if the file cannot be written."""
        self._lock = threading.Lock()
        self._written = 0
        self._interruptions: list[tuple[float, float]] | None = None  # of the effect that runs
        self.node = 0
        try:
            # By lines: the trace is complete even if the process is killed.
            self.file = Path(path).open(  # noqa: SIM115
                "w", encoding="utf-8", buffering=1
            )
        except OSError as problem:
            raise ConfigError(f"cannot write the trace {path}: {problem.strerror}") from None

    def write(self, what: str, **fields: object) -> None:
        """Write one line; any thread may call this."""
        line = json.dumps({"what": what, "node": self.node, **fields}) + "\n"
        with self._lock:
            if self._written < LIMIT_BYTES:
                self.file.write(line)
                self._written += len(line)

    def sent(self, message: Message, nbytes: int) -> None:
        """A segment or a control message of a request left."""
        on_ring = isinstance(message, Segment)
        self.write("sent", request=_request_of(message), on_ring=on_ring, bytes=nbytes)

    def around(self, perform: Perform, emulated: Emulated | None = None) -> Perform:
        """`perform` with a span written for every effect: its charged time, where it has one.

        A draft that heads interrupted has a span for each stretch between them (see sim.worker)."""

        def traced(effect: Effect, stop: StopCheck) -> Event | None:
            inner: list[tuple[float, float]] = []
            outer, self._interruptions = self._interruptions, inner
            start = time.monotonic()
            try:
                event = perform(effect, stop)
            finally:
                self._interruptions = outer
            end, late = time.monotonic(), 0.0
            if emulated is not None:
                start, end, late = emulated.began, emulated.free_at, emulated.late
                inner = emulated.gaps
            if outer is not None:
                outer.append((start, end))
            for begin, after in inner:
                if begin > start:
                    self._span(effect, event, start, begin, 0.0)
                start = after
            self._span(effect, event, start, end, late)
            return event

        return traced

    def _span(
        self, job: Effect, event: Event | None, start: float, end: float, late: float
    ) -> None:
        for effect in effects_of(job):  # each request's trace has what was done for it
            self._span_of(effect, event, start, end, late)

    def _span_of(
        self, effect: Effect, event: Event | None, start: float, end: float, late: float
    ) -> None:
        rows = effect.rows if isinstance(effect, RunBlock) else None
        parts = effect.parts if isinstance(effect, RunBlock) else ()
        self.write(
            "span",
            kind=type(effect).__name__,
            request=_request_of(effect),
            job=getattr(effect, "job", NO_JOB),
            start=start,
            end=end,
            rows=len(getattr(effect, "positions", ()) if rows is None else rows),
            ids=[] if rows is None else rows.ids.tolist(),
            parts=[[part.request, len(part.rows)] for part in parts],
            stopped=isinstance(event, BlockDone) and event.hidden is None,
            late=late,
            **_tree_of(effect),
        )


def _tree_of(effect: Effect) -> dict[str, object]:
    """The rows' places in the draft tree, which only the first stage has."""
    if not isinstance(effect, RunBlock) or effect.hidden is not None:
        return {}
    rows = effect.rows
    return {
        "parents": rows.parents.tolist(),
        "positions": rows.positions.tolist(),
        "tokens": rows.tokens.tolist(),
    }


def _request_of(message: Message | Effect) -> int:
    return int(getattr(message, "request", -1))
