"""Folded rows: one request's rows and states in layers that fold old rows into a state.

Rows lie in the slots that the request's other layers have for them, but only until no row to come
reads them by themselves: then they are in a state, and the first slots are given back. So what such
a layer takes does not grow with the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from edgespec.errors import LocalProtocolError
from edgespec.types.boundaries import boundary_of

STEP = 64
"""Slots are given, and given back, in multiples of so many."""


class FoldedRows:
    """`states`: by layer and boundary, what the rows in the slots before the boundary have left;
    none is written to once it is there, as other requests may have it too."""

    def __init__(self, widths: Mapping[int, int], dtype: torch.dtype, device: torch.device) -> None:
        """Of layers with rows of so many numbers."""
        self.dtype = dtype
        self.states: dict[int, dict[int, torch.Tensor]] = {layer: {} for layer in widths}
        self._gone = 0  # slots that were given back
        self._own = {
            n: torch.zeros((STEP, w), dtype=dtype, device=device) for n, w in widths.items()
        }
        self._places: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of rows and states."""
        states = (one.nbytes for mine in self.states.values() for one in mine.values())
        return sum(own.nbytes for own in self._own.values()) + sum(states)

    def place(self, length: int, rows: int) -> None:
        """Make room for `rows` rows behind `length` slots in use."""
        self._keep_states(0, length)
        folded = min((min(mine, default=0) for mine in self.states.values()), default=0)
        gone = max(self._gone, folded // STEP * STEP)
        slots = next((len(own) for own in self._own.values()), 0)
        if gone == self._gone and length + rows - gone <= slots:
            return
        needed = -(-(length + rows - gone) // STEP) * STEP
        for layer, own in self._own.items():
            self._own[layer] = own.new_zeros((needed, own.shape[1]))
            self._own[layer][: length - gone] = own[gone - self._gone : length - self._gone]
        self._gone = gone
        self._places = None

    def move(self, first: int, source: torch.Tensor) -> None:
        """Put the rows in slots `source` into those from `first` on."""
        for own in self._own.values():
            moved = own.index_select(0, source - self._gone)
            own[first - self._gone : first - self._gone + len(source)] = moved

    def follow(self, committed: int, same: int) -> None:
        """All rows to come stand behind the `committed` first ones; the rows in the `same` first
        slots are still what they were."""
        self._keep_states(boundary_of(committed), same)

    def _keep_states(self, low: int, high: int) -> None:
        """Drop those of other boundaries, but for the last one up to `low`."""
        for mine in self.states.values():
            least = max((at for at in mine if at <= low), default=0)
            for at in [at for at in mine if not least <= at <= high]:
                del mine[at]

    def fork(self, length: int) -> FoldedRows:
        """Those of a request that begins with the same `length` rows.

        Raises LocalProtocolError if some of them that its next ones read were given back.
        """
        other = object.__new__(FoldedRows)
        other.dtype, other._gone, other._places = self.dtype, self._gone, None
        other.states = {layer: dict(mine) for layer, mine in self.states.items()}
        other._keep_states(0, length)
        for layer in other.states:
            other.before(boundary_of(length), other.states[layer])
        other._own = {layer: own[: length - self._gone].clone() for layer, own in self._own.items()}
        return other

    def before(self, boundary: int, states: Iterable[int]) -> int:
        """The last boundary up to this one of which there is a state; 0 if there is none.

        Raises LocalProtocolError if rows behind it were given back.
        """
        here = [at for at in states if at <= boundary]
        if self._gone and not here:
            raise LocalProtocolError(
                f"rows before position {boundary} are folded into later states: guesses are too "
                "far ahead, or a request begins too early in another's rows"
            )
        return max(here, default=0)

    def goes_on(self, length: int) -> bool:
        """Whether what rows read that come behind the first `length` ones is all there."""
        boundary = boundary_of(length)
        every = self.states.values()
        return not self._gone or all(any(at <= boundary for at in mine) for mine in every)

    def places(self) -> torch.Tensor:
        """Where each layer's rows are, as kernels.layers.Memory has it: int64 [layers, 2]. Slots
        that were given back count too."""
        if self._places is None:
            found = []
            for own in self._own.values():
                address = own.data_ptr() - self._gone * own.stride(0) * own.element_size()
                found.append((address, self._gone + len(own)))
            self._places = torch.tensor(found)
        return self._places

    def slots(self, layer: int) -> torch.Tensor:
        """Those of one layer, int64 [2]."""
        return self.places()[list(self._own).index(layer)]

    def held(self, layer: int) -> tuple[torch.Tensor, int]:
        """The rows of one layer where they are, [slots, width], and how many slots before them were
        given back."""
        return self._own[layer], self._gone
