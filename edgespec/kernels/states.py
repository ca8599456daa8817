"""Compiled states: what layers that keep a state do between their two products, by states_of.h.

A row's results depend, to the bit, on its own path alone, whatever is beside it and however the
text was cut. Dtypes are those of kernels.rows; states and what rows add to them are float32, or
float64 if the rows are.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from edgespec.kernels.compiled import load
from edgespec.kernels.products import NUMBERS
from edgespec.kernels.rows import Runs

_INT, _LONG, _REAL, _AT = ctypes.c_int, ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
_VECTORS = ("taps", "bias", "step_bias", "decay", "skip", "gain", "scale")
_NUMBERS = ("delta", "heads", "groups", "key", "value", "kernel", "normed", "gate_last", "tiled")


class _CMixer(ctypes.Structure):
    _fields_ = (
        *((name, _AT) for name in _VECTORS),
        *((name, _REAL) for name in ("eps", "step_low", "step_high")),
        *((name, _LONG) for name in _NUMBERS),
    )


class CompiledMixer:
    """What such a layer is, as `Mixer` in rows.c has it. `state`: the shape of its states."""

    def __init__(self, vectors: dict[str, torch.Tensor], **numbers: float) -> None:
        """`vectors`: those that it has, float32, or float64 for rows of float64."""
        self.state = tuple(int(numbers[name]) for name in ("heads", "key", "value"))
        self._held = {name: one.contiguous() for name, one in vectors.items()}
        self.mixer = _CMixer(**numbers)
        for name, one in self._held.items():
            setattr(self.mixer, name, one.data_ptr())


class StateKernels:
    """The functions of rows.c about states."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._rows, self._fold = library.state_rows, library.state_fold
        self._rows.argtypes = [_INT, _AT, _LONG, *[_AT] * 4, _LONG, _INT, _AT, _AT, _AT, _INT]
        self._fold.argtypes = [_INT, _AT, _INT, _AT, _LONG, _LONG, _AT, _INT]
        self._fold.restype = None

    def rows(
        self,
        mixer: CompiledMixer,
        projected: torch.Tensor,
        runs: Runs,
        places: torch.Tensor,
        boundary: int,
        held_as: torch.dtype,
        slots: torch.Tensor,
        state: torch.Tensor,
    ) -> torch.Tensor:
        """Of projections [R, ...] of rows at `places` int64 [R], which all read the `state` [heads,
        key, value] of one boundary, what goes into the layer's last product: [R, heads * value].

        `runs`: which slots they see, see state_rows; `slots` int64 [pieces, 2]: where all are (see
        kernels.layers.Memory), as `held_as` numbers. Raises MemoryError.
        """
        projected = projected.contiguous()
        out = projected.new_empty((len(projected), state.shape[0] * state.shape[2]))
        if self._rows(
            NUMBERS[projected.dtype], ctypes.addressof(mixer.mixer), len(projected),
            projected.data_ptr(), runs.firsts.data_ptr(), runs.ends.data_ptr(), places.data_ptr(),
            boundary, NUMBERS[held_as], slots.data_ptr(), state.data_ptr(), out.data_ptr(),
            torch.get_num_threads(),
        ):  # fmt: skip
            raise MemoryError("no memory for the rows of a layer that keeps a state")
        return out

    def fold(
        self,
        mixer: CompiledMixer,
        held_as: torch.dtype,
        slots: torch.Tensor,
        first: int,
        count: int,
        state: torch.Tensor,
    ) -> None:
        """Take the rows in `count` slots from `first` on, one after the other, into `state`, where
        it is; the rest as `rows` has it."""
        wide = NUMBERS[state.dtype]
        self._fold(
            wide, ctypes.addressof(mixer.mixer), NUMBERS[held_as], slots.data_ptr(), first, count,
            state.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip


@cache
def compiled_states() -> StateKernels | None:
    """None without a compiler (see kernels.compiled)."""
    library = load("rows")
    return None if library is None else StateKernels(library)
