"""Request stats: what is counted of one request, as its client is told at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from edgespec.tree.node import Advance
from edgespec.wire.client_messages import SourceFigures

MOST_FRUITLESS = 10
"""Rings in a row that may end before a request has a further token."""


@dataclass(slots=True)
class RequestStats:
    """Figures of a request; docs/figures.md defines each.

    `sources`: tokens by which members of the draft source guessed them, as bits (see tree.drafted).
    `entered`: when its first segment entered the ring, on the ring's clock, in trips.
    """

    started: float = 0.0
    first_token: float | None = None
    rows_sent: int = 0
    rows_used: int = 0
    ppd_rows: int = 0
    cached: int = 0
    misses: int = 0
    accepted_per_step: Counter[int] = field(default_factory=Counter)
    sources: Counter[int] = field(default_factory=Counter)
    smallest_margin: float = float("inf")
    entered: Fraction | None = None
    newest_token: float | None = None
    fruitless_rings: int = 0
    _tokens_before: int = 0
    _first_token_trip: Fraction | None = None
    _newest_token_trip: Fraction = Fraction(0)

    def ring_lost(self, tokens: int) -> int:
        """The ring is lost, after so many tokens; returns how many in a row gave no further one."""
        self.fruitless_rings = 0 if tokens > self._tokens_before else self.fruitless_rings + 1
        self._tokens_before = tokens
        return self.fruitless_rings

    def walked(self, step: Advance, *, opening: bool, drafts: bool) -> None:
        """The tree was walked; `opening`: the first token comes of the prompt, not of guesses."""
        if not opening or len(step.tokens) > 1:
            self.accepted_per_step[len(step.tokens) - opening] += 1
        self.misses += step.missed and drafts and not opening

    def committed(self, sources: Sequence[int], rows: int, now: float, trip: Fraction) -> float:
        """Tokens of these sources were committed, at `trip` on the ring's clock; `rows` guessed
        rows gave them. Returns seconds since the token before them, 0 for the first."""
        self.sources.update(sources)
        self.rows_used += rows
        self._newest_token_trip = trip
        before, self.newest_token = self.newest_token, now
        if before is None:
            self.first_token = now
            self._first_token_trip = trip
        return 0.0 if before is None else now - before

    def speed(self, tokens: int, now: float) -> float:
        """Tokens a second behind the first one until now, of so many in all."""
        since = now if self.first_token is None else self.first_token
        return max(tokens - 1, 0) / (now - since) if now > since else 0.0

    def trips(self, now: Fraction) -> float:
        """Trips from its first segment until `now` on the ring's clock."""
        return 0.0 if self.entered is None else float(max(now - self.entered, Fraction(0)))

    @property
    def answer_trips(self) -> float:
        """Trips in which the tokens so far were made: one for the first token, however many chunks
        its prompt had, and none for tokens that are still to come."""
        first = self._first_token_trip
        return 0.0 if first is None else float(1 + self._newest_token_trip - first)

    def histogram(self) -> tuple[int, ...]:
        """How many verifications committed 0, 1, 2, … tokens."""
        most = max(self.accepted_per_step, default=-1)
        return tuple(self.accepted_per_step[n] for n in range(most + 1))

    def of_sources(self, names: Sequence[str]) -> tuple[SourceFigures, ...]:
        """What each member of the draft source brought."""
        found = []
        for bit, name in enumerate(names):
            accepted = sum(count for made_by, count in self.sources.items() if made_by >> bit & 1)
            found.append(SourceFigures(name, accepted, self.sources[1 << bit]))
        return tuple(found)
