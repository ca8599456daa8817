"""Kept rows: what the stages still hold of answered requests, for the next turn to begin with.

A conversation's next prompt begins with all that was said before, whose rows are in the caches
already. They stay there until their room is needed, the least recently used first.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST_ROWS = 16
"""Fewer rows are read as fast as they are taken over."""


@dataclass(frozen=True, slots=True)
class Kept:
    """An answered request: its tokens as far as every stage has their rows, and the rows' ids in
    the order of their positions. `capacity`: cache rows that it takes up."""

    tokens: tuple[int, ...]
    ids: tuple[int, ...]
    capacity: int


@dataclass(frozen=True, slots=True)
class Base:
    """What a request begins with: the first rows of an answered one, by their ids there."""

    request: int
    ids: tuple[int, ...]
    capacity: int


class KeptRows:
    """All answered requests whose rows the stages hold, the least recently used first."""

    def __init__(self, limit: int) -> None:
        """`limit`: cache rows that they and the running request may take up together."""
        self._limit = limit
        self._kept: dict[int, Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, number: int, kept: Kept) -> list[int]:
        """A request was answered; returns the requests that have to go for it."""
        if len(kept.ids) < LEAST_ROWS:
            return [number]
        self._kept[number] = kept
        return self.make_room(0)

    def take(self, prompt: tuple[int, ...]) -> Base | None:
        """The rows that a prompt can begin with, which are its own from now on; None if there are
        none. Its last row is left to be computed: the first token comes of it."""
        shared = {n: _shared(kept.tokens, prompt[:-1]) for n, kept in self._kept.items()}
        number = max(shared, key=lambda n: shared[n], default=None)
        if number is None or shared[number] < LEAST_ROWS:
            return None
        kept = self._kept.pop(number)
        return Base(number, kept.ids[: shared[number]], kept.capacity)

    def make_room(self, capacity: int) -> list[int]:
        """A request needs so many cache rows; returns the requests that have to go for it."""
        gone = []
        while self._kept and capacity + sum(k.capacity for k in self._kept.values()) > self._limit:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            gone.append(oldest)
        return gone

    def clear(self) -> list[int]:
        """The stages hold nothing any more; returns the requests that went with it."""
        gone = list(self._kept)
        self._kept.clear()
        return gone


def _shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many tokens they have in common at their beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))
