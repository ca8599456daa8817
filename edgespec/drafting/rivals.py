"""Rivals: members of a hybrid whose models cost about the same, of which one is asked at a time.

Two neural drafts name much the same tokens, and asking both takes the time of both, for which the
ring waits. So both are asked for some tokens, until it is clear which guesses better or they have
taken long enough, and then that one alone; now and then they are compared again. They are compared
on the same tokens, as one text is much harder to guess than another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations

LEAST = 16
"""Committed tokens for which all members are asked, each time, at least: to see what each costs."""
MOST = 96
"""The same at most."""
CLEAR = 1.5
"""Standard errors by which a member must be better to end that earlier."""
AGAIN = 512
"""Committed tokens until all are asked again; doubled each time, up to 8 times."""
DEAR = 0.1
"""Of the dearest member's time, what makes another one its rival."""


@dataclass(slots=True)
class _Lead:
    """By how much one member's guesses were better than another's: summed, and in squares."""

    total: float = 0.0
    squares: float = 0.5

    @property
    def errors(self) -> float:
        """How many standard errors that is."""
        return self.total / math.sqrt(self.squares)


@dataclass(slots=True)
class Rivals:
    """Which of the rivals is asked; -1: all of them, and until it is known who they are, too."""

    _numbers: list[int] = field(default_factory=list)
    _leads: dict[tuple[int, int], _Lead] = field(default_factory=dict)
    _asked: int = -1
    _together: int = 0
    _left: int = 0
    _rounds: int = 0

    def asks(self, number: int) -> bool:
        """Whether that member is asked now, as far as it depends on its rivals."""
        return self._asked < 0 or number == self._asked or number not in self._numbers

    def learn(self, worth: Mapping[int, float], seconds: Sequence[float]) -> None:
        """What the guesses of the members that were asked were worth for a committed token; what
        each member took so far, 0 if it runs no model: those that are dear are rivals."""
        if self._asked >= 0:
            self._left -= 1
            return
        for one, other in permutations(worth, 2):
            lead, more = self._leads.setdefault((one, other), _Lead()), worth[one] - worth[other]
            lead.total, lead.squares = lead.total + more, lead.squares + more * more
        self._together += 1
        if self._together == LEAST:
            least = DEAR * max(seconds)
            self._numbers = [number for number, took in enumerate(seconds) if 0 < took >= least]
        if self._together >= LEAST and len(self._numbers) > 1:
            self._settle()

    def _settle(self) -> None:
        """Go on with the best, if it is clear which that is, or took long enough to find out."""
        certain = {one: self._certainty(one) for one in self._numbers}
        best = max(certain, key=certain.__getitem__)
        if certain[best] > CLEAR or self._together >= MOST:
            self._asked, self._left = best, AGAIN << min(self._rounds, 3)
            self._rounds += 1

    def _certainty(self, one: int) -> float:
        """Standard errors by which it leads the rival that comes closest."""
        others = (number for number in self._numbers if number != one)
        return min(self._leads.get((one, other), _Lead()).errors for other in others)

    def opens(self) -> None:
        """A request begins: all may be asked from now on, as no text is half read."""
        if self._asked >= 0 and self._left <= 0:
            self._asked, self._together = -1, 0
            for lead in self._leads.values():  # what was found longer ago counts for less
                lead.total, lead.squares = lead.total / 2, lead.squares / 2
