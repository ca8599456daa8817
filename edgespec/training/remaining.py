"""Time that is left of a long piece of work, by what was done of it so far."""

from __future__ import annotations

import time


class Remaining:
    """Counts work, and says how far it is and how long the rest takes at the same speed."""

    def __init__(self, total: int, done: int = 0) -> None:
        """`total` pieces, `done` of which cost nothing: they were there."""
        self._total, self._done, self._given = total, done, done
        self._began = time.monotonic()

    def done(self, pieces: int) -> None:
        self._done += pieces

    @property
    def made(self) -> int:
        """Pieces that cost something."""
        return self._done - self._given

    def __str__(self) -> str:
        made = self.made
        said = f"{self._done} of {self._total}"
        if not made:
            return said
        seconds = (time.monotonic() - self._began) / made * (self._total - self._done)
        return f"{said}, {duration(seconds)} left"


def duration(seconds: float) -> str:
    """The time in words: 40 s, 12 min, 3 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
