"""Rivals: members of a hybrid that cost about as much each, of which one is asked at a time.

Two neural drafts name much the same tokens, and asking both takes the time of both, for which the
ring waits. So each is tried alone, the one whose first guess is right more often goes on, and now
and then another is tried again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

ALL = 16
"""Committed tokens for which all members are asked, to see what each costs."""
TRIAL = 48
"""Committed tokens of a trial, at least: it ends with its request."""
AGAIN = 512
"""Committed tokens until the others are tried again; doubled each time, up to 8 times."""
DEAR = 0.1
"""Of the dearest member's time, what makes another one its rival: n-grams take less."""


@dataclass(slots=True)
class _Record:
    """How often a member's first guess was right, of so many."""

    right: float = 0.0
    tried: float = 0.0

    @property
    def share(self) -> float:
        return (self.right + 1.0) / (self.tried + 2.0)


@dataclass(slots=True)
class Rivals:
    """Which of the rivals is asked; until it is known who they are, all members are."""

    _records: dict[int, _Record] = field(default_factory=dict)
    _asked: int = -1
    _left: int = 0
    _to_try: list[int] = field(default_factory=list)
    _rounds: int = 0
    _is_settled: bool = False

    def compare(self, seconds: Sequence[float]) -> None:
        """What each member took for the same guesses: those that are dear are rivals."""
        least = DEAR * max(seconds)
        dear = [number for number, took in enumerate(seconds) if 0 < took >= least]
        if len(dear) > 1:
            self._records = {number: _Record() for number in dear}
            self._to_try = dear
            self._next()

    def asks(self, number: int) -> bool:
        """Whether that member is asked now, as far as it depends on its rivals."""
        return number not in self._records or number == self._asked

    def learn(self, number: int, right: bool) -> None:
        """A member that was asked had guessed first what came, or not."""
        if number in self._records:
            record = self._records[number]
            record.right, record.tried = record.right + right, record.tried + 1
            self._left -= number == self._asked

    def opens(self) -> None:
        """A request begins: another one may be asked from now on, as no text is half read."""
        if self._records and self._left <= 0:
            self._next()

    def _next(self) -> None:
        """A trial, or the time between two, is over."""
        if self._is_settled:  # what was found longer ago counts for less
            for record in self._records.values():
                record.right, record.tried = record.right / 2, record.tried / 2
            self._to_try = [number for number in self._records if number != self._asked]
        self._is_settled = not self._to_try
        if self._to_try:
            self._asked, self._left = self._to_try.pop(0), TRIAL
            return
        self._asked = max(self._records, key=lambda number: self._records[number].share)
        self._left = AGAIN << min(self._rounds, 3)
        self._rounds += 1
