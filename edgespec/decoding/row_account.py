"""Row account: the rows of the stages' caches, as the coordinator counts them.

What a live request holds is known to it, what answered ones left is in the prefix cache, and what
they share in the same books that every stage keeps (tree.stems). All stages hold the same rows, so
one account does for all. What a request shares is settled when the segment leaves that opens it:
openings reach the stages in that order, in whatever order requests have started.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from edgespec.planning.memory import STEP
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


class PrefixCache(dict[int, CachedPrefix]):
    """All answered requests whose rows the stages hold, the least recently used first.

    A conversation's next prompt begins with all that was said before, and several prompts with one
    preamble: those rows are in the caches already. They stay there until their room is needed.
    """

    def __init__(self, across_askers: bool = False, folds: bool = False) -> None:
        """`across_askers`: rows of one asker may be of use to another. `folds`: rows are folded
        into states, so that only all rows of a request can be gone on with."""
        super().__init__()
        self._across = across_askers
        self._least_shared = inf if folds else stems.LEAST_ROWS

    @property
    def rows(self) -> int:
        """Rows of all of them; those that are shared count for each."""
        return sum(len(kept.ids) for kept in self.values())

    def add(self, number: int, kept: CachedPrefix) -> bool:
        """A request was answered; whether its rows are worth keeping."""
        if len(kept.ids) < LEAST_ROWS:
            return False
        self[number] = kept
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
            for number, kept in [*self.items(), *live.items()]
            if self._across or kept.asker == asker
        }
        whole = {
            number
            for number, rows in common.items()
            if number in self and rows == len(self[number].ids)
        }.difference(awaited)
        shared = {
            number: rows
            for number, rows in common.items()
            if rows >= (LEAST_ROWS if number in whole else self._least_shared)
        }
        if not shared:
            return None
        # Of those that have the same in common, one that need not be shared; then the newest.
        number = max(shared, key=lambda number: (shared[number], number in whole, number))
        ends = number in whole
        if number in self:
            kept = self.pop(number)
            if not ends:
                self[number] = kept  # used just now
        else:
            kept = live[number]
        return ReusedPrefix(number, kept.ids[: shared[number]], ends)


class RowAccount:
    """Rows that are used, kept, shared and free on every stage.

    A request that others begin with may not be freed before the segment that says so has been at
    every stage: until then its end is put off.
    """

    def __init__(
        self, limit: int, across_askers: bool = False, folds: bool = False, state_rows: int = 0
    ) -> None:
        """`limit`: rows that live and answered requests may take up together; with 0 nothing is
        kept. `across_askers`, `folds`: see PrefixCache; `state_rows`: how many an answered request
        counts as more, as live ones do, for what their states take."""
        self.limit = limit
        self._cache, self._state_rows = PrefixCache(across_askers, folds), state_rows
        self._stems = stems.Stems()
        self._begun: dict[int, ReusedPrefix | None] = {}  # those whose opening has not left
        self._opening: dict[int, int] = {}  # the bases of requests whose opening is on its way
        self._put_off: set[int] = set()

    def __len__(self) -> int:
        """How many requests it knows of beside those that are kept."""
        opened = len(self._stems) - len(self._cache)
        return opened + len(self._begun) + len(self._opening) + len(self._put_off)

    # --- what there is ------------------------------------------------------------------------

    @property
    def kept(self) -> list[int]:
        """The answered requests whose rows the stages hold."""
        return list(self._cache)

    @property
    def saved(self) -> int:
        """Rows less than if each request, live or answered, held its own."""
        return self._saved_without(())

    def _saved_without(self, others: Collection[int]) -> int:
        """The same of all requests but these; those whose end is put off are as good as gone."""
        gone = {*others, *self._put_off}
        coming = sum(
            self._stems.shareable(reused.request, len(reused.ids))
            for reused in self._begun.values()
            if reused is not None and not reused.ends and reused.request not in gone
        )
        return self._stems.saved_without(gone) + coming

    def together(self, one: int, other: int) -> int | None:
        """How many rows two requests share; None if not both are open. For checks."""
        known = one in self._stems and other in self._stems
        return self._stems.together(one, other) if known else None

    def used(self, live: int) -> int:
        """Rows that are held if live requests hold `live`, shared ones counted for each of them."""
        kept = self._cache.rows + self._state_rows * len(self._cache)
        return live + kept - self.saved

    def status(self, live: int) -> tuple[int, int, int]:
        """What a status says of them: of live requests, kept beside those, and the limit."""
        return live, max(self.used(live) - live, 0), self.limit

    def free(self, live: int) -> int:
        """Rows that there is room for beside `live` ones of live requests, if all that is kept
        gives way: what live ones share with each other is there once, what they share with kept
        ones alone is then theirs."""
        return self.limit - live + self._saved_without(self._cache)

    def fit(self, live: int) -> bool:
        """Whether there is room for so many rows of live requests."""
        return not self.limit or self.free(live) >= 0

    # --- a request's way ----------------------------------------------------------------------

    def begin(
        self, number: int, tokens: tuple[int, ...], asker: str, live: Mapping[int, CachedPrefix]
    ) -> ReusedPrefix | None:
        """A request of that asker starts with these tokens; what it begins with, of answered
        requests and the `live` ones."""
        reused = None
        if self.limit:
            awaited = {reused.request for reused in self._begun.values() if reused}
            reused = self._cache.take(tokens, asker, live, awaited)
        self._begun[number] = reused
        return reused

    def opens(self, number: int) -> int:
        """The segment leaves that opens a request on the stages; returns how many rows it shares
        of those that it begins with."""
        reused = self._begun.pop(number)
        if reused is None:
            self._stems.open(number)
            return 0
        base, rows = reused.request, len(reused.ids)
        self._opening[number] = base
        if reused.ends:
            self._stems.move(number, base)
            return 0
        shared = self._stems.shareable(base, rows)
        self._stems.fork(number, base, rows, shared, rows)
        return shared

    def settled(self, forks: Iterable[int]) -> list[int]:
        """Every stage has opened these requests, which begin with another; returns those whose end
        was put off until now."""
        return [base for number in forks for base in self._released(number)]

    def _released(self, number: int) -> list[int]:
        """A request needs its base no more; returns that if its end was put off until now."""
        reused, base = self._begun.pop(number, None), self._opening.pop(number, None)
        base = reused.request if reused else base
        if base is None or base not in self._put_off or self._is_base(base):
            return []
        self._put_off.remove(base)
        self._stems.close(base)
        return [base]

    def _is_base(self, number: int) -> bool:
        """Whether a request begins with this one whose opening has not come round."""
        begun = any(reused and reused.request == number for reused in self._begun.values())
        return begun or number in self._opening.values()

    def _close(self, number: int) -> bool:
        """A request is over; False if its end has to be put off."""
        if self._is_base(number):
            self._put_off.add(number)
            return False
        self._stems.close(number)
        return True

    def keep(self, number: int, kept: CachedPrefix, live: int) -> list[int]:
        """A request was answered: its rows stay as long as there is room. Returns the requests
        that have to go."""
        if not self.limit or not self._cache.add(number, kept):
            return [number]
        return self.make_room(live)

    def make_room(self, live: int) -> list[int]:
        """Live requests may come to hold `live` rows; returns the answered requests that have to
        go, the least recently used first. Each kept one has up to STEP slots that no row is in, so
        that many short ones take no more memory than long ones."""
        gone: list[int] = []
        while len(self._cache) and self.used(live) + STEP * len(self._cache) > self.limit:
            gone.append(next(iter(self._cache)))
            del self._cache[gone[-1]]
            self._close(gone[-1])
        return gone

    def set_limit(self, limit: int) -> None:
        """From now on there is room for so many rows."""
        self.limit = limit

    def release(self, numbers: Sequence[int]) -> list[int]:
        """Requests are over, and nothing of them is kept; returns those that can be freed now."""
        now: list[int] = []
        for number in numbers:
            released = self._released(number)
            now += [number] if self._close(number) else []
            now += released
        return now

    def refused(self, number: int) -> tuple[bool, list[int]]:
        """A stage dropped a request, which is no base any more: whether it was kept, and the
        requests that begin with it and may find nothing left."""
        begun = [n for n, reused in self._begun.items() if reused and reused.request == number]
        opening = [n for n, base in self._opening.items() if base == number]
        return self._cache.pop(number, None) is not None, begun + opening

    def clear(self) -> list[int]:
        """The ring is lost, and all that the stages held; returns the answered requests that were
        kept, and those whose end was put off."""
        gone = [*self._cache, *self._put_off]
        self._cache.clear()
        self._stems = stems.Stems()
        self._begun.clear()
        self._opening.clear()
        self._put_off.clear()
        return gone


def _shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many tokens they have in common at their beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))
