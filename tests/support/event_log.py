"""Log: one short line for everything that happened in a run, and words for messages and effects."""

from __future__ import annotations

from collections import deque

from edgespec.machines.effects import Effect
from edgespec.wire.messages import CloseRequest, Fault, Message, Retain
from edgespec.wire.segment import Segment

LONGEST = 100_000
"""Lines that a log keeps unless told otherwise (None: all); of a longer run, the last ones."""


class EventLog:
    """Lines in the order of events; `skipped` older ones are no longer here."""

    def __init__(self, longest: int | None = LONGEST) -> None:
        self._lines: deque[str] = deque(maxlen=longest)
        self._count = 0

    def add(self, now: float, node: str, what: str) -> None:
        """Note what happened at a node at `now` virtual seconds."""
        self._count += 1
        self._lines.append(f"{now:.9g} {node} {what}")

    @property
    def lines(self) -> tuple[str, ...]:
        """All lines that are kept, the oldest first."""
        return tuple(self._lines)

    @property
    def skipped(self) -> int:
        """How many lines came before the first that is kept."""
        return self._count - len(self._lines)


def message_words(message: Message) -> str:
    """A message in a few words: whose it is, and which of several."""
    match message:
        case Segment():
            requests = ", ".join(str(part.request) for part in message.parts)
            return f"segment {message.header.seq} of {requests}, {message.rows} rows"
        case Retain(request, keep):
            return f"retain {keep.epoch} of {request}"
        case CloseRequest(request):
            return f"end of {request}"
        case Fault(request, reason):
            return f"fault of {request}: {reason}"
        case _:
            return f"{type(message).__name__} {getattr(message, 'tag', '')}".strip()


def effect_words(effect: Effect) -> str:
    """A compute effect in a few words."""
    job = getattr(effect, "job", None)
    words = f"{type(effect).__name__} of {getattr(effect, 'request', '?')}"
    return words if job is None else f"{words}, job {job}"
