"""Compiled layers: some layers of a model over the rows of several requests, in one call.

By layers.h. A layer is described once, what all layers are given once a pass; Python's lock is let
go of for the whole of a call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

from edgespec.kernels.compiled import load
from edgespec.kernels.products import NUMBERS, RowProduct
from edgespec.kernels.rows import ACTIVATIONS, Runs
from edgespec.kernels.states import CompiledMixer

_AT, _LONG, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_PRODUCTS = ("qkv", "out", "gate_up", "down", "entering", "leaving")
_GAINS = (
    "enter",
    "attended",
    "middle",
    "left",
    "query_gain",
    "key_gain",
    "tap_weights",
    "tap_bias",
)
_SIZES = (
    "hidden",
    "inner",
    "heads",
    "kv_heads",
    "head_dim",
    "taps",
    "activation",
    "angles",
    "runs",
    "folded",
    "every",
)
_MOST = 4  # matrices of one product


class _CProduct(ctypes.Structure):
    _fields_ = (("matrices", _AT * _MOST), ("outs", _LONG * _MOST))


class _CLayer(ctypes.Structure):
    _fields_ = (
        *((name, _CProduct) for name in _PRODUCTS),
        *((name, _AT) for name in (*_GAINS, "mixer")),
        *((name, _REAL) for name in ("eps", "share", "mlp_share", "state_share")),
        *((name, _REAL) for name in ("scaling", "softcap")),
        *((name, _LONG) for name in _SIZES),
    )


class Folding(NamedTuple):
    """One request's rows in layers that keep a state: their positions `places` int64 [R]; `slots`
    int64 [layers, 2]: where all rows are, as Slots in rows.c; `states` int64 [layers, n]: addresses
    of states; `steps` int64 [m, 6]: as Step in layers.h. Layers are those with states; `dtype`: of
    what is held of rows there."""

    dtype: torch.dtype
    places: torch.Tensor
    slots: torch.Tensor
    states: torch.Tensor
    steps: torch.Tensor


class Memory(NamedTuple):
    """Where what is held of a request's rows lies, and that of `rows` new ones is to lie.

    `pieces` int64 [layers, pieces, 2]: the address of each piece [parts, heads, slots, width], and
    its slots; all are in use, but of the last piece only the first `begin` slots. `dtype`: of what
    is held of all requests.
    """

    dtype: torch.dtype
    pieces: torch.Tensor
    begin: int
    rows: int
    folding: Folding | None = None


class CompiledLayer:
    """What a layer is, for `CompiledLayers`."""

    def __init__(
        self,
        products: Sequence[Sequence[RowProduct]],
        gains: Sequence[torch.Tensor | None],
        activation: str,
        mixer: CompiledMixer | None = None,
        **numbers: float,
    ) -> None:
        """As `Layer` in layers.h has them: of each product up to four matrices, whose results are
        one row; `gains`, and what a convolution multiplies by, contiguous, float32."""
        self._held = products, gains, mixer  # they stay where they lie
        self.weights = sum(p.out_features * p.in_features for every in products for p in every)
        self.layer = _CLayer(activation=ACTIVATIONS[activation], **numbers)
        for name, every in zip(_PRODUCTS, products, strict=True):
            own = getattr(self.layer, name)
            for place, product in enumerate(every):
                own.matrices[place] = ctypes.addressof(product.matrix)
                own.outs[place] = product.out_features
        if mixer is not None:
            self.layer.mixer = ctypes.addressof(mixer.mixer)
        for name, gain in zip(_GAINS, gains, strict=True):
            setattr(self.layer, name, None if gain is None else gain.data_ptr())


class CompiledPass:
    """What all layers of one pass are given."""

    def __init__(
        self,
        requests: Sequence[Memory],
        angles: Sequence[tuple[torch.Tensor, torch.Tensor]],
        seen: Sequence[Runs],
    ) -> None:
        """`angles`, `seen`: as RowKernels makes them, of each kind that layers name by number."""
        self._held = requests, angles, seen
        (dtype,) = {one.dtype for one in requests}  # one is told for all
        self.held_as, self.count = NUMBERS[dtype], len(requests)
        # As Request, Angles and Seen of layers.h, all of whose fields have 8 bytes.
        self.requests = torch.tensor([_numbers(one) for one in requests])
        self.angles = torch.tensor([(a.data_ptr(), b.data_ptr(), a.shape[1]) for a, b in angles])
        self.seen = torch.tensor([(one.firsts.data_ptr(), one.ends.data_ptr()) for one in seen])


def _numbers(one: Memory) -> tuple[int, ...]:
    """As Request of layers.h has them."""
    found = one.pieces.data_ptr(), one.pieces.shape[1], one.begin, one.rows
    if one.folding is None:
        return (*found, 0, 0, 0, 0, 0, 0, 0)
    dtype, places, slots, states, steps = one.folding
    of_states = states.data_ptr(), states.shape[1], steps.data_ptr(), steps.shape[0], NUMBERS[dtype]
    return (*found, places.data_ptr(), slots.data_ptr(), *of_states)


class CompiledLayers:
    """Layers that are run by one call."""

    def __init__(self, layers: Sequence[CompiledLayer], dtype: torch.dtype) -> None:
        """`dtype`: of all rows."""
        products, rows = load("products"), load("rows")
        assert products is not None
        assert rows is not None
        self._held, self._dtype = layers, dtype
        self.count, self.weights = len(layers), max(one.weights for one in layers)
        self._layers = (_CLayer * len(layers))(*(one.layer for one in layers))
        self._multiply = ctypes.cast(products.multiply, _AT).value or 0
        self._run = rows.run_layers
        self._run.argtypes = [_AT, _LONG, _LONG, _AT, _AT, _AT]

    def run(self, first: int, end: int, hidden: torch.Tensor, given: CompiledPass) -> torch.Tensor:
        """Rows [R, H] after layers [first, end), in new memory; what is held of them is where
        `given` says. Raises MemoryError."""
        hidden = hidden.contiguous()
        out = torch.empty_like(hidden)
        parts = given.requests.data_ptr(), given.angles.data_ptr(), given.seen.data_ptr()
        numbers = given.count, NUMBERS[self._dtype], given.held_as, torch.get_num_threads()
        one = (_LONG * 8)(self._multiply, *parts, *numbers)  # as Pass of layers.h
        if self._run(self._layers, first, end, one, hidden.data_ptr(), out.data_ptr()):
            raise MemoryError("no memory for the rows of a layer")
        return out


@cache
def compiles() -> bool:
    """Whether layers can be compiled here."""
    return load("products") is not None and load("rows") is not None
