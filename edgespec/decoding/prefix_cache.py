"""Prefix cache: rows of answered requests that the stages hold, for the next turn to begin with.

A conversation's next prompt begins with all that was said before, and those rows are in the caches
already. They stay there until their room is needed, the least recently used first. A request that
takes rows over leaves none of them to others: see `PrefixCache.take`.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST_ROWS = 16
"""Fewer rows are read as fast as they are taken over."""

MOST = 2 / 3
"""From this share of its rows on, an answered request is taken over by whichever prompt begins so:
at a half it would already lose as much as the prompt gains."""


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """An answered request: its tokens as far as every stage has their rows, and the rows' ids in
    the order of their positions. `capacity`: cache rows that it takes up. `asker`: the client that
    asked it. `prompt`: how many of the tokens were its prompt. `own`: a prompt that has so many of
    the first tokens in common with it belongs to the same conversation.
    """

    tokens: tuple[int, ...]
    ids: tuple[int, ...]
    capacity: int
    asker: str
    prompt: int
    own: int


@dataclass(frozen=True, slots=True)
class ReusedPrefix:
    """What a request begins with: the first rows of an answered one, by their ids there.

    `own`: see CachedPrefix; 0 if nothing is known of their conversation.
    """

    request: int
    ids: tuple[int, ...]
    capacity: int
    own: int = 0


class PrefixCache:
    """All answered requests whose rows the stages hold, the least recently used first."""

    def __init__(self, limit: int) -> None:
        """`limit`: cache rows that they and the running request may take up together."""
        self._limit = limit
        self._kept: dict[int, CachedPrefix] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, number: int, kept: CachedPrefix) -> list[int]:
        """A request was answered; returns the requests that have to go for it."""
        if len(kept.ids) < LEAST_ROWS:
            return [number]
        self._kept[number] = kept
        return self.make_room(0)

    def take(self, prompt: tuple[int, ...], asker: str) -> ReusedPrefix | None:
        """The rows that a prompt can begin with, which are its own from now on; None if there are
        none. Its last row is left to be computed: the first token comes of it.

        They are rows of the same asker's, and of the same conversation as far as can be told (it
        goes on, its last message was changed, or it is asked again): the rows of another one, which
        only begins alike, are left to its own next turn, unless they are few.
        """
        shared = {
            number: _shared(kept.tokens, prompt[:-1])
            for number, kept in self._kept.items()
            if kept.asker == asker
        }
        fit = [n for n in shared if shared[n] >= LEAST_ROWS and self._may_take(n, shared[n])]
        if not fit:
            return None
        # Of those that have the same in common, the one of which least is lost.
        number = max(fit, key=lambda n: (shared[n], -len(self._kept[n].ids)))
        kept, rows = self._kept.pop(number), shared[number]
        own = 0
        if rows < kept.prompt and rows >= kept.own:
            own = kept.own  # its last message was changed, or it is asked again
        elif rows >= kept.prompt and rows >= MOST * len(kept.ids):
            own = rows  # it goes on
        return ReusedPrefix(number, kept.ids[:rows], kept.capacity, own)

    def _may_take(self, number: int, rows: int) -> bool:
        kept = self._kept[number]
        return rows >= kept.own or rows >= MOST * len(kept.ids)

    def make_room(self, capacity: int) -> list[int]:
        """A request needs so many cache rows; returns the requests that have to go for it."""
        gone = []
        while self._kept and capacity + sum(k.capacity for k in self._kept.values()) > self._limit:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            gone.append(oldest)
        return gone

    def clear(self) -> list[int]:
        """The stages hold no rows; returns the requests that went with it."""
        gone = list(self._kept)
        self._kept.clear()
        return gone


def _shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many tokens they have in common at their beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))
