"""Stems: which committed rows the caches of one node hold together, and by how many each is held.

A request's cache is a chain: stems, then rows of its own. A stem is a run of committed rows that
several requests begin with; it is there once, and goes with its last holder. Stages and the
coordinator's account run these books alike; keys and values live in the model room.

A fork shares as many of its first rows as it can: the stem in which it ends is split, or rows of
the other request's own become a stem. Where that would make a chain longer than MOST_STEMS, or a
stem shorter than LEAST_ROWS, the rows behind the last whole stem are copied instead: attention goes
stem by stem, so that short ones and long chains cost more than they save. The coordinator says how
many rows are shared, as ends reach stages at other times than openings do.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

MOST_STEMS = 4
"""Stems of a chain at most."""

LEAST_ROWS = 32
"""Rows of a stem at least."""


@dataclass(frozen=True, slots=True)
class Fork:
    """How a request begins with rows of another, the base; each step where it is not 0.

    `split`: so many rows of the base's stem number `stems - 1` become a stem, the others the next
    one, for all who hold it. `frozen`: so many rows behind the base's stems become one. `stems`: of
    the base, with those that were just made, the request's first. `copied`: rows behind them.
    `moved`: rows that are written once more for all that.
    """

    split: int
    frozen: int
    stems: int
    copied: int
    moved: int


@dataclass(slots=True, eq=False)
class _Stem:
    rows: int
    holders: int


class Stems:
    """The chains of all open requests of one node."""

    def __init__(self) -> None:
        self._chains: dict[int, list[_Stem]] = {}

    def __len__(self) -> int:
        return len(self._chains)

    def __contains__(self, request: int) -> bool:
        return request in self._chains

    def open(self, request: int) -> None:
        """A request begins with nothing."""
        self._chains[request] = []

    def shareable(self, base: int, rows: int) -> int:
        """How many of the first `rows` rows of `base` a fork shares best; the others it copies."""
        chain = self._chains[base]
        number, before = _whole(chain, rows)
        left = rows - before
        if number < len(chain):
            return rows if self._can_split(chain[number], left) else before
        return rows if left >= LEAST_ROWS and len(chain) < MOST_STEMS else before

    def fork(self, request: int, base: int, rows: int, shared: int, held: int) -> Fork:
        """A request begins with the first `rows` rows of the `held` ones of `base`, which are
        committed there: it shares the first `shared` of them."""
        chain = self._chains[base]
        number, before = _whole(chain, shared)
        left, copied = shared - before, rows - shared
        split = frozen = moved = 0
        if left and number < len(chain):
            split, moved = left, chain[number].rows
            self._split(chain[number], left)
        elif left:
            frozen, moved = left, held - before
            chain.append(_Stem(left, 1))
        stems = chain[: number + bool(left)]
        for stem in stems:
            stem.holders += 1
        self._chains[request] = stems
        return Fork(split, frozen, len(stems), copied, moved + copied)

    def move(self, request: int, base: int) -> None:
        """A request takes the place of `base`, which is over."""
        self._chains[request] = self._chains.pop(base)

    def close(self, request: int) -> None:
        """A request is over; unknown ones are ignored."""
        for stem in self._chains.pop(request, ()):
            stem.holders -= 1

    def rows(self, request: int) -> int:
        """How many rows of a request are in stems."""
        return sum(stem.rows for stem in self._chains[request])

    @property
    def saved(self) -> int:
        """Rows that all requests together have less than if each held its own."""
        return self.saved_without(())

    def saved_without(self, others: Collection[int]) -> int:
        """The same of all requests but these."""
        chains = [chain for number, chain in self._chains.items() if number not in others]
        every = {id(stem): stem.rows for chain in chains for stem in chain}
        return sum(stem.rows for chain in chains for stem in chain) - sum(every.values())

    def together(self, one: int, other: int) -> int:
        """How many rows two requests share."""
        pairs = zip(self._chains[one], self._chains[other], strict=False)
        return sum(stem.rows for stem, same in pairs if stem is same)

    def shares(self, request: int) -> list[tuple[int, int]]:
        """The rows of each of its stems, and how many requests hold it."""
        return [(stem.rows, stem.holders) for stem in self._chains[request]]

    def _can_split(self, stem: _Stem, rows: int) -> bool:
        """Whether both parts are long enough, and the chains of all holders stay short enough."""
        if min(rows, stem.rows - rows) < LEAST_ROWS:
            return False
        return all(len(chain) < MOST_STEMS for chain in self._chains.values() if stem in chain)

    def _split(self, stem: _Stem, rows: int) -> None:
        rest = _Stem(stem.rows - rows, stem.holders)
        stem.rows = rows
        for chain in self._chains.values():
            if stem in chain:
                chain.insert(chain.index(stem) + 1, rest)


def _whole(chain: Sequence[_Stem], rows: int) -> tuple[int, int]:
    """How many stems of a chain lie within its first `rows` rows, and how many rows they have."""
    before = number = 0
    while number < len(chain) and before + chain[number].rows <= rows:
        before += chain[number].rows
        number += 1
    return number, before
