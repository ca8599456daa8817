"""Stems: which committed rows the caches of one node hold together, and by how many each is held.

A request's cache is a chain: stems, then rows of its own. A stem is a run of committed rows that
several requests begin with; it is there once, and goes with its last holder. Stages, draft sources
and the coordinator's account run these books alike; keys and values live in the model room.

A fork shares as many of its first rows as it can: the stem in which it ends is split, or rows of
the other request's own become a stem. Where that would make a chain longer than MOST_STEMS, or a
stem shorter than LEAST_ROWS, the rows behind the last whole stem are copied instead: attention goes
stem by stem, so that short ones and long chains cost more than they save.
"""

from __future__ import annotations

from collections.abc import Collection
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

    def open(self, request: int) -> None:
        """A request begins with nothing."""
        self._chains[request] = []

    def fork(self, request: int, base: int, rows: int, held: int) -> Fork:
        """A request begins with the first `rows` rows of the `held` ones of `base`, which are
        committed there."""
        chain = self._chains[base]
        before = number = 0
        while number < len(chain) and before + chain[number].rows <= rows:
            before += chain[number].rows
            number += 1
        left = rows - before
        split = frozen = moved = 0
        if number < len(chain):
            if self._can_split(chain[number], left):
                split, moved = left, chain[number].rows
                self._split(chain[number], left)
        elif left >= LEAST_ROWS and len(chain) < MOST_STEMS:
            frozen, moved = left, held - before
            chain.append(_Stem(left, 1))
        made = split or frozen
        copied = left - made
        shared = chain[: number + bool(made)]
        for stem in shared:
            stem.holders += 1
        self._chains[request] = shared
        return Fork(split, frozen, len(shared), copied, moved + copied)

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
