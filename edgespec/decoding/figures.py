"""Figures: what is counted of one request, and the trips that its rows took round the ring."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from edgespec.wire.client_messages import SourceFigures


@dataclass(slots=True)
class RequestStats:
    """Figures of a request; docs/commands.md defines each. `sources`: tokens by who had guessed
    them, as bits (see tree.drafted)."""

    started: float = 0.0
    first_token: float | None = None
    rows_sent: int = 0
    rows_used: int = 0
    prompt_rows: int = 0
    cached: int = 0
    misses: int = 0
    accepted_per_step: Counter[int] = field(default_factory=Counter)
    sources: Counter[int] = field(default_factory=Counter)
    smallest_margin: float = float("inf")

    def histogram(self) -> tuple[int, ...]:
        """How many verifications made 0, 1, 2, … tokens committed."""
        return tuple(
            self.accepted_per_step[n] for n in range(max(self.accepted_per_step, default=-1) + 1)
        )

    def of_sources(self, names: Sequence[str]) -> tuple[SourceFigures, ...]:
        """What each member of the draft source brought."""
        found = []
        for bit, name in enumerate(names):
            accepted = sum(count for made_by, count in self.sources.items() if made_by >> bit & 1)
            found.append(SourceFigures(name, accepted, self.sources[1 << bit]))
        return tuple(found)


class RingClock:
    """Logical time of a request in trips, whatever the devices: what its schedule costs.

    Every stage takes one step for a segment, a segment enters the ring at least one step behind
    the one before and not before the results that it was decided on: it is back `stages` steps
    later. One trip is `stages` steps, so that autoregressive decoding costs one trip a token, and
    a round of N + 1 segments that must all be back costs two.
    """

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._before = 0.0  # trips round rings of other lengths
        self._now = 0
        self._last_entry = -1
        self._first_token: float | None = None
        self._newest_token = 0.0

    @property
    def trips(self) -> float:
        """Trips until the newest result."""
        return self._before + self._now / self._stages

    @property
    def answer_trips(self) -> float:
        """Trips in which the tokens so far were made: one for the first token, however many chunks
        its prompt had, and none whose tokens are still to come."""
        if self._first_token is None:
            return 0.0
        return 1.0 + self._newest_token - self._first_token

    def committed(self) -> None:
        """The newest result has made tokens committed."""
        self._newest_token = self.trips
        if self._first_token is None:
            self._first_token = self._newest_token

    def lead_over(self, stages: int) -> None:
        """From now on the ring has so many stages."""
        if stages != self._stages:
            self._before, self._stages = self.trips, stages
            self._now, self._last_entry = 0, -1

    def send(self) -> int:
        """A segment leaves now; returns the step at which it enters the ring."""
        self._last_entry = max(self._last_entry + 1, self._now)
        return self._last_entry

    def result(self, entered: int) -> None:
        """The segment that entered at that step is back."""
        self._now = max(self._now, entered + self._stages)
