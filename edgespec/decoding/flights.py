"""Flights: the segments that are on the data ring, and the logical time of the ring in trips."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from edgespec.machines.events import Event
from edgespec.tree.draft_tree import DraftTree
from edgespec.tree.ledger import Rows
from edgespec.wire.segment import Choosing, Segment


@dataclass(frozen=True, slots=True)
class Flight:
    """A segment on the ring: whose it is, and when it entered (see RingClock).

    `wanted`: ids of the rows that may come back, of `rows` in all; with hidden rows, or if the last
    stage chooses, by `choosing`, with a verdict.
    """

    request: int
    entered: Fraction
    committed: bool
    wanted: frozenset[int]
    rows: int
    choosing: Choosing | None = None

    def fits(self, result: Segment) -> bool:
        """Whether `result` can be what the stages made of this segment."""
        part, ids = result.parts[0], result.parts[0].ids.tolist()
        return (
            len(result.parts) == 1
            and part.committed == self.committed
            and self.wanted.issuperset(ids)
            and (not ids or self._has_what_was_asked(result))
            and all(time.rows <= self.rows for time in result.cost)
        )

    def _has_what_was_asked(self, result: Segment) -> bool:
        verdict = result.parts[0].verdict
        if self.choosing is None or verdict is None:
            return self.choosing is None and result.hidden is not None and verdict is None
        ids, log_probs = verdict.ids.tolist(), verdict.figures.shape[1] > 1
        told = not ids or log_probs == (self.choosing.top >= 0)
        return result.hidden is None and told and self.wanted.issuperset(ids)

    def lacks_live_rows(self, result: Segment, tree: DraftTree | None) -> bool:
        """Whether a stage dropped rows that no retained set has dropped: it could not go on.

        Live nodes are in every retained set, so that only a failing stage can lose them.
        """
        missing = self.wanted.difference(result.parts[0].ids.tolist())
        return any(tree is None or i in tree for i in missing)


@dataclass(frozen=True, slots=True)
class Landed(Event):
    """A segment of the request is back from the ring."""

    flight: Flight
    segment: Segment


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

    def __init__(self, stages: int) -> None:
        self.clock = RingClock(stages)
        self._flying: dict[int, Flight] = {}
        self._queued: set[int] = set()
        self._newest = 0

    def __len__(self) -> int:
        return len(self._flying)

    def __iter__(self) -> Iterator[tuple[int, Flight]]:
        """Sequence number and flight of each, the oldest first."""
        return iter(self._flying.items())

    @property
    def queued(self) -> int:
        """Segments that the first stage has not handed on."""
        return len(self._queued)

    def launch(
        self,
        request: int,
        rows: Rows,
        committed: bool,
        want: int,
        choosing: Choosing | None = None,
    ) -> tuple[int, Flight]:
        """A segment of these rows leaves, of which the last `want` may come back (see Flight)."""
        self._newest += 1
        wanted = frozenset(rows.ids[len(rows) - want :].tolist())
        flight = Flight(request, self.clock.enter(), committed, wanted, len(rows), choosing)
        self._flying[self._newest] = flight
        self._queued.add(self._newest)
        return self._newest, flight

    def land(self, segment: Segment) -> Flight | None:
        """A segment is back; None for a repeated delivery, or one of an earlier ring."""
        seq = segment.header.seq
        flight = self._flying.get(seq)
        if flight is None or flight.request != segment.request:
            return None
        self._queued.discard(seq)
        return self._flying.pop(seq)

    def hand_on(self, seq: int) -> bool:
        """The first stage has handed this segment on; False if that was known."""
        known = seq in self._queued
        self._queued.discard(seq)
        return known

    def clear(self) -> None:
        """The ring is gone: nothing comes back from it."""
        self._flying.clear()
        self._queued.clear()
