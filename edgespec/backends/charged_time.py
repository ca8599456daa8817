"""Charged time: where an effect's can be cut, by an abort or by a head; what D0's loop takes.

What a token takes of the loop depends on what happens, not on the model: how many events there are,
and how many rows they bring or send. Charged are the events that come with every token; those that
come once for a request are not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
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


SAME_S = 1e-9
"""Times this close are one time: clocks count in binary fractions."""


class ChargedTime:
    """The charged time of one effect, which falls into parts: layers, and a draft's output matrix.

    What a real worker does, an emulated and a simulated one are charged for by this one rule. A
    head that is asked for while a draft runs starts at the draft's next boundary: before its first
    part, or between two. Heads that wait by then run one after the other; with the end of the last
    one the draft goes on, and takes what it had left. In its last part it ends first. No head is
    interrupted. A block that is aborted ends at such a boundary, and one that goes on without some
    requests' rows takes less from there on.

    A stage that is on D0's device shares its time by the same rule (see compute.lane_of): a block
    waits for heads, and drafts wait for blocks, each from its next boundary on.
    """

    def __init__(self, start: float, seconds: float) -> None:
        self.end = start + seconds
        self._seconds = seconds
        self._since, self._done = start, 0.0  # goes on since then, with so much of it done before

    def boundary(self, at: float, parts: Sequence[float]) -> float | None:
        """When the part that runs at `at` ends; None if it is the last. `parts`: their lengths, in
        any unit."""
        total = sum(parts)
        unit = self._seconds / total if total else 0.0
        ends = [unit * end for end in accumulate(parts, initial=0.0)]
        done = self._done + max(at - self._since, 0.0)
        part = bisect_left(ends, done - SAME_S)
        return self._since + ends[part] - self._done if part < len(parts) else None

    def change(self, boundary: float, seconds: float) -> None:
        """From one of the boundaries on, the parts take what they do if all take `seconds`."""
        done = (self._done + boundary - self._since) / self._seconds if self._seconds else 1.0
        self._seconds, self._since, self._done = seconds, boundary, done * seconds
        self.end = boundary + seconds - self._done

    def pause(self, boundary: float) -> None:
        """Heads run from one of the boundaries on."""
        self._done += boundary - self._since
        self._since = boundary

    def go_on(self, at: float) -> None:
        """The last of those heads ended."""
        self._since = at
        self.end = at + self._seconds - self._done
