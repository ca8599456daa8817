"""Row account: the rows of the stages' caches, as the coordinator counts them.

What a live request holds is known to it, what answered ones left is in the prefix cache, and what
they share in the same books that every stage keeps (tree.stems). All stages hold the same rows, so
one account does for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from edgespec.decoding.prefix_cache import CachedPrefix, PrefixCache, ReusedPrefix
from edgespec.decoding.request import Request
from edgespec.tree.stems import Stems
from edgespec.wire.segment import Segment


class RowAccount:
    """Rows that are used, kept, shared and free on every stage.

    A request that others begin with may not be freed before the segment that says so has been at
    every stage: until then its end is put off.
    """

    def __init__(self, limit: int, across_askers: bool = False) -> None:
        """`limit`: rows that live and answered requests may take up together; with 0 nothing is
        kept. `across_askers`: see PrefixCache."""
        self.limit = limit
        self._cache = PrefixCache(across_askers)
        self._stems = Stems()
        self._opening: dict[int, int] = {}  # the bases of requests whose opening is on its way
        self._put_off: set[int] = set()

    def __len__(self) -> int:
        """How many requests it knows of beside those that are kept."""
        begun = len(self._stems) - len(self._cache)
        return begun + len(self._opening) + len(self._put_off)

    # --- what there is ------------------------------------------------------------------------

    @property
    def kept(self) -> list[int]:
        """The answered requests whose rows the stages hold."""
        return self._cache.numbers

    @property
    def saved(self) -> int:
        """Rows less than if each request, live or answered, held its own."""
        return self._stems.saved

    def used(self, live: int) -> int:
        """Rows that are held if live requests hold `live`, shared ones counted for each of them."""
        return live + self._cache.rows - self._stems.saved

    def free(self, live: int) -> int:
        """Rows that there is room for beside `live` ones of live requests, if all that is kept
        gives way: what live ones share with each other is there once, what they share with kept
        ones alone is then theirs."""
        return self.limit - live + self._stems.saved_without(self._cache.numbers)

    def fit(self, live: int) -> bool:
        """Whether there is room for so many rows of live requests."""
        return not self.limit or self.free(live) >= 0

    # --- a request's way ----------------------------------------------------------------------

    def begin(self, request: Request, live: Mapping[int, CachedPrefix]) -> ReusedPrefix | None:
        """A request starts; what it begins with, of answered requests and the `live` ones."""
        number, asker = request.number, request.asker
        reused = self._cache.take(request.prefix.tokens, asker, live) if self.limit else None
        if reused is None:
            self._stems.open(number)
        elif reused.ends:
            self._stems.move(number, reused.request)
        else:
            rows = len(reused.ids)
            self._stems.fork(number, reused.request, rows, rows)
            self._opening[number] = reused.request
        return reused

    def landed(self, segment: Segment) -> list[int]:
        """A segment was at every stage; returns the requests whose end was put off until now."""
        opened = [part.request for part in segment.parts if part.fork_of]
        return [base for number in opened for base in self._opened(number)]

    def _opened(self, number: int) -> list[int]:
        base = self._opening.pop(number, None)
        if base is None or base not in self._put_off or base in self._opening.values():
            return []
        self._put_off.remove(base)
        return [base]

    def keep(self, number: int, kept: CachedPrefix, live: int) -> list[int]:
        """A request was answered: its rows stay as long as there is room. Returns the requests
        that have to go."""
        if not self.limit or not self._cache.add(number, kept):
            return [number]
        return self.make_room(live)

    def make_room(self, live: int) -> list[int]:
        """Live requests may come to hold `live` rows; returns the answered requests that have to
        go, the least recently used first."""
        gone: list[int] = []
        while len(self._cache) and self.used(live) > self.limit:
            gone.append(self._cache.oldest())
            self._stems.close(gone[-1])
        return gone

    def end(self, numbers: Sequence[int]) -> list[int]:
        """Requests are over, and nothing of them is kept; returns those that can be freed now."""
        now: list[int] = []
        for number in numbers:
            self._stems.close(number)
            now += self._opened(number)
            if number in self._opening.values():
                self._put_off.add(number)
            else:
                now.append(number)
        return now

    def clear(self) -> list[int]:
        """The ring is lost, and all that the stages held; returns the answered requests that were
        kept, and those whose end was put off."""
        gone: Iterable[int] = [*self._cache.clear(), *self._put_off]
        self._stems = Stems()
        self._opening.clear()
        self._put_off.clear()
        return list(gone)
