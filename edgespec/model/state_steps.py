"""State steps: which states the rows of one request's pass read, and how those that are not there
yet are made, in the order of the rows. They are the same in all layers that keep the same states.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from edgespec.kernels.layers import Folding
from edgespec.kernels.states import CompiledMixer
from edgespec.model.folded_rows import FoldedRows
from edgespec.types.boundaries import AHEAD, boundary_of

NONE = -1
"""In the place of a state's number."""


class Step(NamedTuple):
    """Rows `first` to `end` of a pass read state number `state`, of `boundary`. It is there if
    `begin` is that boundary; else it is made of number `source`, or of nothing if that is NONE, by
    the rows in the slots from `begin` on. `state` NONE: its one row reads one that is made for it
    alone, by its own path from there on, as that is not the first slots."""

    first: int
    end: int
    boundary: int
    state: int
    source: int
    begin: int


class Steps(NamedTuple):
    """`numbers`: of states, those first that were there; `left`: by boundary which are kept."""

    steps: list[Step]
    numbers: int
    left: dict[int, int]


def steps_of(rows: FoldedRows, layer: int, places: Sequence[int], prefixes: Sequence[int]) -> Steps:
    """What a layer does for rows at these positions, each of which sees so many first slots without
    a gap.

    A state that is no more needed by rows to come makes room for another: none stands more than
    AHEAD positions before the last one, as the coordinator sends none that is farther ahead. Raises
    LocalProtocolError for rows that are too far behind.
    """
    left = {boundary: number for number, boundary in enumerate(rows.states[layer])}
    there, known = dict(left), len(left)
    count = known
    steps, spare, first = [], list[int](), 0
    while first < len(places):
        boundary, end = boundary_of(places[first]), first + 1
        if prefixes[first] < boundary:
            begin = rows.before(prefixes[first], there)
            steps.append(Step(first, end, boundary, NONE, there.get(begin, NONE), begin))
            first = end
            continue
        while end < len(places) and boundary_of(places[end]) == boundary <= prefixes[end]:
            end += 1
        begin = rows.before(boundary, left)
        source = left.get(begin, NONE)
        if boundary not in left:
            gone = [left.pop(at) for at in [at for at in left if at < boundary - AHEAD]]
            spare += [number for number in gone if number >= known]  # others may have the others
            if source in spare:
                left[boundary] = source
                spare.remove(source)
            elif spare:
                left[boundary] = spare.pop()
            else:
                left[boundary], count = count, count + 1
        steps.append(Step(first, end, boundary, left[boundary], source, begin))
        first = end
    return Steps(steps, count, left)


class StatePass(ABC):
    """A pass of rows of one request through a layer that keeps states."""

    @abstractmethod
    def prefixes(self) -> list[int]:
        """How many slots from the first one on each row sees without a gap."""

    @abstractmethod
    def path(self, row: int, first: int, end: int) -> Iterable[tuple[int, int]]:
        """Where its path's rows at these positions are: runs of slots, a first one and how many."""

    @abstractmethod
    def read(
        self,
        step: Step,
        source: torch.Tensor | None,
        runs: Iterable[tuple[int, int]],
        state: torch.Tensor,
    ) -> None:
        """Make `state` of the `source`, of nothing without one, by the rows in runs of slots; then
        read what the step's rows do."""

    @abstractmethod
    def out(self) -> torch.Tensor:
        """What all have read, [R, inner]."""


class InTurn(StatePass):
    """One whose states are made before they are read."""

    def __init__(self, projected: torch.Tensor) -> None:
        """Of projections [R, ...]."""
        self.projected = projected
        self._made: list[torch.Tensor] = []

    def read(
        self,
        step: Step,
        source: torch.Tensor | None,
        runs: Iterable[tuple[int, int]],
        state: torch.Tensor,
    ) -> None:
        if source is None:
            state.zero_()
        elif source is not state:
            state.copy_(source)
        for slot, count in runs:
            self.fold(slot, count, state)
        self._made.append(self.rows(step.first, step.end, step.boundary, state))

    def out(self) -> torch.Tensor:
        return torch.cat(self._made) if len(self._made) > 1 else self._made[0]

    @abstractmethod
    def fold(self, slot: int, count: int, state: torch.Tensor) -> None:
        """Take the rows in `count` slots into a state, where it is."""

    @abstractmethod
    def rows(self, first: int, end: int, boundary: int, state: torch.Tensor) -> torch.Tensor:
        """What rows `first` to `end` of the pass, which read the state of one boundary, read."""


class CompiledFolding:
    """What compiled layers of one pass do with one request's rows and states."""

    def __init__(
        self,
        rows: FoldedRows,
        begin: int,
        mixers: Mapping[int, CompiledMixer],
        places: torch.Tensor,
        steps: Steps,
    ) -> None:
        """`begin`: the block's first layer; `mixers`: of the layers that the `steps` are for;
        `places` int64 [R]: of the rows."""
        self._rows, self._begin, self._left = rows, begin, steps.left
        self._states: dict[int, list[torch.Tensor]] = {}
        addresses = []
        for layer, mine in rows.states.items():
            every: list[torch.Tensor] = []
            if layer in mixers:
                new = steps.numbers - len(mine)
                every = [*mine.values(), *(torch.empty(mixers[layer].state) for _ in range(new))]
                self._states[layer] = every
            addresses.append([one.data_ptr() for one in every] or [0] * steps.numbers)
        self.folding = Folding(
            rows.dtype, places, rows.places(), torch.tensor(addresses), torch.tensor(steps.steps)
        )

    def keep(self, first: int, end: int) -> None:
        """Of layers [first, end) of the block, which have run, hold what is left."""
        for layer in range(self._begin + first, self._begin + end):
            if layer in self._states:
                every = self._states[layer]
                kept = {boundary: every[number] for boundary, number in self._left.items()}
                self._rows.states[layer] = kept
