"""Flights: the segments on the data ring, its logical time in trips, and those that are overdue."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from edgespec.errors import RemoteProtocolError
from edgespec.machines.events import Event
from edgespec.tree.draft_tree import DraftTree
from edgespec.types.tensor import Tensor
from edgespec.wire.segment import Choosing, Part, Segment

LEAST_S = 5.0
"""Seconds that nobody waits less for a segment, which may be in the buffers of a network; twice as
many after each ring, up to MOST_DOUBTS, from which no segment came back: it may be a slow one."""

MOST_DOUBTS = 4

TIMES = 4.0
"""Times as long as the slowest recent trip that a segment may be on its way while no stage has
one."""

BUSY_S, BUSY_TIMES = 600.0, 30.0
"""The same while a stage says that it computes one: it may compile, or read from a slow disk."""

RECENT = 64


@dataclass(frozen=True, slots=True)
class PartFlight:
    """The rows of one request in a segment on the ring.

    `wanted`: ids of the rows that may come back; with hidden rows, or if the last stage chooses, by
    `choosing`, with a verdict.
    """

    request: int
    committed: bool
    wanted: frozenset[int]
    rows: int
    choosing: Choosing | None = None

    def could_return_as(self, part: Part, hidden: Tensor | None, vocabulary: int) -> bool:
        """Whether `part`, of a segment with those hidden rows, can be what the stages made of
        these rows with a model of so many tokens."""
        ids = part.ids.tolist()
        return (
            part.committed == self.committed
            and self.wanted.issuperset(ids)
            and (
                (not ids and part.verdict is None)
                or self._has_what_was_asked(part, hidden, vocabulary)
            )
        )

    def _has_what_was_asked(self, part: Part, hidden: Tensor | None, vocabulary: int) -> bool:
        verdict = part.verdict
        if self.choosing is None or verdict is None:
            return self.choosing is None and hidden is not None and verdict is None
        ids, log_probs = verdict.ids.tolist(), verdict.figures.shape[1] > 1
        told = not ids or log_probs == (self.choosing.top >= 0)
        told = told and verdict.is_of(vocabulary)
        return hidden is None and told and self.wanted.issuperset(ids)

    def lacks_live_rows(self, part: Part, tree: DraftTree | None) -> bool:
        """Whether a stage dropped rows that no retained set has dropped: it could not go on.

        Live nodes are in every retained set, so that only a failing stage can lose them.
        """
        missing = self.wanted.difference(part.ids.tolist())
        return any(tree is None or i in tree for i in missing)


@dataclass(frozen=True, slots=True)
class Flight:
    """A segment on the ring: the rows of each request in it, and when it entered (see
    RingClock). `alone`: no other was there."""

    parts: tuple[PartFlight, ...]
    entered: Fraction
    alone: bool = False

    @property
    def rows(self) -> int:
        """How many rows all parts have."""
        return sum(part.rows for part in self.parts)

    def could_return(self, result: Segment, vocabulary: int) -> bool:
        """Whether `result` can be what the stages made of this segment with a model of so many
        tokens."""
        if [one.request for one in self.parts] != [part.request for part in result.parts]:
            return False
        if any(time.rows > self.rows for time in result.cost):
            return False
        pairs = zip(self.parts, result.parts, strict=True)
        return all(one.could_return_as(part, result.hidden, vocabulary) for one, part in pairs)

    def parts_of(self, result: Segment) -> list[Returned]:
        """What of `result`, which fits, is each request's, the hidden rows of its own part with
        it."""
        found = []
        first = 0
        for flight, part in zip(self.parts, result.parts, strict=True):
            hidden, aux_hidden = result.hidden, result.aux_hidden
            if len(self.parts) > 1:
                own = np.arange(first, first + len(part.ids))
                hidden = None if hidden is None else hidden.take(own)
                aux_hidden = None if aux_hidden is None else aux_hidden.take(own)
            first += len(part.ids)
            found.append(Returned(flight, self.entered, part, hidden, aux_hidden))
        return found


@dataclass(frozen=True, slots=True)
class Returned(Event):
    """Rows of one request are back from the ring, in a segment that `entered` it then.

    `hidden` [R, H] and `aux_hidden` uint8 [R, ...] are those of the part's own rows.
    """

    flight: PartFlight
    entered: Fraction
    part: Part
    hidden: Tensor | None
    aux_hidden: Tensor | None


class RingClock:
    """Logical time of the ring in trips, whatever the devices: what a schedule costs.

    Every stage takes one step for a segment, and one trip is as many steps as there are stages. A
    segment enters the ring at least one step after the one before it and not before the results
    that it was decided on; it is back one trip later. So plain decoding costs one trip a token, and
    a round of N + 1 segments that must all be back costs two.
    """

    def __init__(self, stages: int) -> None:
        self.stages = stages
        self.now = Fraction(0)
        """When the newest result that was taken up came back."""
        self._last_entry = -self._step

    @property
    def _step(self) -> Fraction:
        return Fraction(1, self.stages)

    def change(self, stages: int) -> None:
        """From now on the ring has so many stages."""
        if stages != self.stages:
            self.stages = stages
            self._last_entry = self.now - self._step

    def enter(self) -> Fraction:
        """A segment leaves now; returns when it enters the ring."""
        self._last_entry = max(self._last_entry + self._step, self.now)
        return self._last_entry

    def result(self, entered: Fraction) -> None:
        """The segment that entered at that time is back."""
        self.now = max(self.now, entered + 1)


class Flights:
    """Numbers the segments that leave, and remembers each until it is back."""

    def __init__(self, stages: int, vocabulary: int = 1 << 31) -> None:
        """`vocabulary`: how many tokens the model has."""
        self.clock = RingClock(stages)
        self.watch = FlightWatch()
        self._vocabulary = vocabulary
        self._flying: dict[int, Flight] = {}
        self._queued: set[int] = set()
        self._newest = 0
        self.is_given_up = False
        """What comes back of this ring counts no more."""
        self.between: float | None = None
        """Seconds that the last segment that came back was between stages; None if it may have
        waited there for another one."""

    def __len__(self) -> int:
        return len(self._flying)

    @property
    def queued(self) -> int:
        """Segments that the first stage has not handed on."""
        return len(self._queued)

    @property
    def ahead(self) -> int:
        """Rows of the segment that left last, if it is not back; else 0."""
        flight = self._flying.get(self._newest)
        return flight.rows if flight else 0

    def launch(
        self, parts: Sequence[Part], choosing: Sequence[Choosing | None], now: float
    ) -> tuple[int, Flight]:
        """A segment of these parts leaves; `choosing`: how the last stage chooses the tokens of
        each one's request."""
        self._newest += 1
        flights = tuple(map(_part_flight, parts, choosing))
        alone = not self._flying
        flight = self._flying[self._newest] = Flight(flights, self.clock.enter(), alone)
        self._queued.add(self._newest)
        self.watch.left(self._newest, now)
        return self._newest, flight

    @property
    def flying(self) -> Mapping[int, Flight]:
        """The segments on the ring by their numbers, the oldest first."""
        return self._flying

    def returned(self, segment: Segment, now: float) -> list[Returned]:
        """A segment is back: what each request gets of it; nothing for a repeated delivery.

        Raises RemoteProtocolError if it cannot be what the stages made of a segment, or one that
        left before it was lost; nothing of this ring comes back from then on.
        """
        seq = segment.header.seq
        if self.is_given_up or (seq not in self._flying and seq <= self._newest):
            return []
        oldest = min(self._flying, default=seq)
        flight = self._flying.get(seq)
        if flight is None or seq != oldest or not flight.could_return(segment, self._vocabulary):
            self.is_given_up = True
            is_late = flight is not None and seq != oldest
            raise RemoteProtocolError("left out segments" if is_late else "sent rows of no segment")
        self._queued.discard(seq)
        trip = self.watch.came(seq, now)
        computed = sum(time.seconds for time in segment.cost)
        self.between = max(trip - computed, 0.0) if flight.alone else None
        return self._flying.pop(seq).parts_of(segment)

    def credited(self, seq: int) -> bool:
        """The first stage has handed this segment on; False if that was known."""
        known = seq in self._queued
        self._queued.discard(seq)
        return known

    def give_up(self) -> None:
        """What still comes back of this ring counts no more."""
        self.is_given_up = True

    def clear(self) -> None:
        """The ring is gone: nothing comes back from it."""
        self._flying.clear()
        self._queued.clear()
        self.watch.new_ring()
        self.is_given_up = False


class FlightWatch:
    """Notices segments that will not come back, so that no request waits for them for ever: how
    long segments take, and where the stages say that they are. The ring is first in, first out: the
    oldest segment is the next one to come back."""

    def __init__(self) -> None:
        self._left: dict[int, float] = {}
        self._trips: deque[float] = deque(maxlen=RECENT)
        self._returned_at = self._busy_at = float("-inf")
        self._doubts = 0  # rings in a row that were given up before a segment came back
        self._passed: dict[int, int] = {}  # by stage: the newest segment that it has handed on

    def left(self, seq: int, now: float) -> None:
        """A segment is on the ring."""
        self._left[seq] = now

    def came(self, seq: int, now: float) -> float:
        """It is back, after so many seconds."""
        trip = now - self._left.pop(seq)
        self._trips.append(trip)
        self._returned_at, self._doubts = now, 0
        return trip

    def new_ring(self) -> None:
        """Nothing of the one before comes back."""
        self._left.clear()
        self._passed.clear()

    def doubt_ring(self) -> None:
        """The ring is given up, which may have been rash."""
        self._doubts = min(self._doubts + 1, MOST_DOUBTS)
        self.new_ring()

    def beat(self, stage: int, holds: int, passed: int, now: float) -> None:
        """A stage says how many segments it holds, and which one it has passed on last."""
        if holds or passed != self._passed.get(stage):
            self._busy_at = now
        self._passed[stage] = passed

    def deadline(self) -> float | None:
        """When the oldest segment is overdue, if nothing is heard until then."""
        return min(self._limits()) if self._left else None

    def overdue(self, now: float) -> str:
        """Why the ring cannot go on, as a clause whose subject is the coordinator; "" if it can."""
        if not self._left or now < min(self._limits()):
            return ""
        seq = min(self._left)
        seconds = now - max(self._left[seq], self._returned_at)
        before = [stage for stage, passed in self._passed.items() if passed >= seq]
        behind = [stage for stage, passed in self._passed.items() if passed < seq]
        seen = [f"stage {max(before)} has passed it on"] if before else []
        seen += [f"stage {min(behind)} has not"] if behind else []
        return f"it has waited for a segment for {seconds:.1f} s: {', '.join(seen) or 'lost'}"

    def _limits(self) -> tuple[float, float]:
        """When the oldest one is overdue by what the stages say, and in any case."""
        slowest = max(self._trips, default=0.0)
        since = max(self._left[min(self._left)], self._returned_at)
        idle = max(since, self._busy_at) + max(LEAST_S * 2**self._doubts, TIMES * slowest)
        return idle, since + max(BUSY_S, BUSY_TIMES * slowest)


def _part_flight(part: Part, choosing: Choosing | None) -> PartFlight:
    wanted = frozenset(part.ids[len(part.ids) - part.want :].tolist())
    return PartFlight(part.request, part.committed, wanted, len(part.ids), choosing)
