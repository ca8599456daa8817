"""Prefix cache: rows of answered requests that the stages hold, for others to begin with.

A conversation's next prompt begins with all that was said before, and several prompts with one
preamble: those rows are in the caches already. They stay there until their room is needed, the
least recently used first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from edgespec.tree import stems

LEAST_ROWS = 16
"""Fewer rows are read as fast as they are taken over; a stem has more (tree.stems)."""


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The committed rows of a request that every stage holds: their tokens, and their ids in the
    order of their positions. `asker`: the client that asked it."""

    tokens: tuple[int, ...]
    ids: tuple[int, ...]
    asker: str


@dataclass(frozen=True, slots=True)
class ReusedPrefix:
    """What a request begins with: the first rows of another one, by their ids there. `ends`: that
    one is answered and all its rows are taken; it lives on in this one."""

    request: int
    ids: tuple[int, ...]
    ends: bool = False


class PrefixCache:
    """All answered requests whose rows the stages hold, the least recently used first."""

    def __init__(self, across_askers: bool = False) -> None:
        """`across_askers`: rows of one asker may be of use to another."""
        self._across = across_askers
        self._kept: dict[int, CachedPrefix] = {}

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def numbers(self) -> list[int]:
        """Their numbers."""
        return list(self._kept)

    @property
    def rows(self) -> int:
        """Rows of all of them; those that are shared count for each."""
        return sum(len(kept.ids) for kept in self._kept.values())

    def add(self, number: int, kept: CachedPrefix) -> bool:
        """A request was answered; whether its rows are worth keeping."""
        if len(kept.ids) < LEAST_ROWS:
            return False
        self._kept[number] = kept
        return True

    def take(
        self,
        prompt: tuple[int, ...],
        asker: str,
        live: Mapping[int, CachedPrefix],
        awaited: Collection[int] = (),
    ) -> ReusedPrefix | None:
        """The rows that a prompt can begin with: the longest beginning that it has in common with
        an answered request, or with a `live` one; None if that is short. Its last row is left to be
        computed: the first token comes of it.

        An answered request of which all rows are taken goes on in the new one; of any other both
        have the rows, and of one that is `awaited`: others are still to begin with it.
        """
        common = {
            number: _shared(kept.tokens, prompt[:-1])
            for number, kept in [*self._kept.items(), *live.items()]
            if self._across or kept.asker == asker
        }
        whole = {
            number
            for number, rows in common.items()
            if number in self._kept and rows == len(self._kept[number].ids)
        }.difference(awaited)
        shared = {
            number: rows
            for number, rows in common.items()
            if rows >= (LEAST_ROWS if number in whole else stems.LEAST_ROWS)
        }
        if not shared:
            return None
        # Of those that have the same in common, one that need not be shared; then the newest.
        number = max(shared, key=lambda number: (shared[number], number in whole, number))
        ends = number in whole
        if number in self._kept:
            kept = self._kept.pop(number)
            if not ends:
                self._kept[number] = kept  # used just now
        else:
            kept = live[number]
        return ReusedPrefix(number, kept.ids[: shared[number]], ends)

    def oldest(self) -> int:
        """Forget the least recently used; there must be one."""
        number = next(iter(self._kept))
        del self._kept[number]
        return number

    def drop(self, number: int) -> bool:
        """Forget a request; whether it was kept."""
        return self._kept.pop(number, None) is not None

    def clear(self) -> list[int]:
        """The stages hold no rows; returns the requests that went with it."""
        gone = list(self._kept)
        self._kept.clear()
        return gone


def _shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many tokens they have in common at their beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))
