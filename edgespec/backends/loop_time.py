"""Loop time: what the coordinator's own loop takes for each event, and keeps its worker from.

What a token takes of it depends on what happens, not on the model: how many events there are, and
how many rows they bring or send. Charged are the events that come with every token; those that come
once for a request are not.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from edgespec.decoding.effects import SendRing
from edgespec.decoding.events import Drafted, HeadDone, SegmentArrived
from edgespec.machines.effects import Effect
from edgespec.machines.events import Event, MessageArrived
from edgespec.planning.profile import LoopSeconds, Profile
from edgespec.wire.messages import Credit
from edgespec.wire.segment import Segment


def is_charged(event: Event) -> bool:
    """Whether an event comes with every token."""
    match event:
        case SegmentArrived() | HeadDone() | Drafted() | MessageArrived(_, Credit()):
            return True
    return False


def rows_of(event: Event, effects: Iterable[Effect]) -> int:
    """Guesses that came with an event, rows that came back, and rows that leave for it; those of
    prompts, which go in one piece, are not counted."""
    rows = 0
    match event:
        case Drafted(guesses=guesses):
            rows = len(guesses.tokens)
        case SegmentArrived(segment):
            rows = _rows_in(segment)
    return rows + sum(_rows_in(one.segment) for one in effects if isinstance(one, SendRing))


def _rows_in(segment: Segment) -> int:
    return sum(len(part.ids) for part in segment.parts if not part.committed)


class LoopTime:
    """The charged time of one coordinator's loop, which takes one event after the other.

    Loop and worker share one interpreter, of which one thread runs at a time. A loop that waits
    has its turn between two operations of the worker, so it goes first here. What it takes while
    the worker is at a job, the worker's next job takes longer, as far as that one's own time is
    Python's and not a kernel's.
    """

    def __init__(self, costs: LoopSeconds) -> None:
        self._costs = costs
        self.free_at = -inf
        self.busy = 0.0
        """Seconds in all."""
        self._owed = 0.0

    def starts(self, at: float) -> float:
        """When an event that happened at `at` is taken up."""
        return max(at, self.free_at)

    def ends(self, event: Event, effects: Iterable[Effect], start: float, *, beside: bool) -> float:
        """When the effects of an event leave that was taken up at `start`; `beside`: the worker is
        at a job then."""
        if not is_charged(event):
            return start
        seconds = self._costs.seconds(rows_of(event, effects))
        self.free_at = start + seconds
        self.busy += seconds
        if beside:
            self._owed += seconds
        return self.free_at

    def held_up(self, python: float) -> float:
        """Seconds that the worker's next job takes longer, of which `python` are Python's."""
        owed, self._owed = self._owed, 0.0
        return min(owed, python)


def loop_of(profile: Profile) -> LoopTime | None:
    """The loop of a coordinator on that device; None if it is charged nothing."""
    return LoopTime(profile.loop_seconds) if profile.loop_seconds else None
