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
    "sinks",
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
    "gated",
    "centred",
    "ways",
)
_MOST = 4  # matrices of one product


class _CProduct(ctypes.Structure):
    _fields_ = (("matrices", _AT * _MOST), ("outs", _LONG * _MOST))


class _CLayer(ctypes.Structure):
    _fields_ = (
        *((name, _CProduct) for name in _PRODUCTS),
        *((name, _AT) for name in (*_GAINS, "mixer", "mixture")),
        *((name, _REAL) for name in ("eps", "share", "mlp_share", "state_share")),
        *((name, _REAL) for name in ("scaling", "softcap")),
        *((name, _LONG) for name in _SIZES),
    )


class _CExpert(ctypes.Structure):
    _fields_ = (("gate_up", _CProduct), ("down", _CProduct))


class _CMixture(ctypes.Structure):
    _fields_ = (
        ("router", _CProduct),
        ("share", _CProduct),
        ("each", ctypes.POINTER(_CExpert)),
        ("bias", _AT),
        *((name, _REAL) for name in ("scaling", "least", "floor", "slope", "limit")),
        *((name, _LONG) for name in ("hidden", "inner", "experts", "active")),
        *((name, _LONG) for name in ("groups", "kept_groups", "best", "softmax", "normed", "wide")),
        *((name, _LONG) for name in ("activation", "beside")),
    )


def _fill(place: _CProduct, products: Sequence[RowProduct]) -> None:
    for number, product in enumerate(products):
        place.matrices[number] = ctypes.addressof(product.matrix)
        place.outs[number] = product.out_features


def _weights(products: Sequence[RowProduct]) -> int:
    return sum(one.out_features * one.in_features for one in products)


def _pass(parts: tuple[int, int, int], count: int, dtype: torch.dtype, held_as: int) -> object:
    """As Pass of layers.h: where `count` requests, angles and what is seen are."""
    multiply = ctypes.cast(_library("products").multiply, _AT).value or 0
    threads = torch.get_num_threads()
    return (_LONG * 8)(multiply, *parts, count, NUMBERS[dtype], held_as, threads)


def _library(name: str) -> ctypes.CDLL:
    library = load(name)
    assert library is not None
    return library


class CompiledMixture:
    """Experts and what chooses them, as `Mixture` in rows.c has them."""

    def __init__(
        self,
        router: Sequence[RowProduct],
        share: Sequence[RowProduct],
        each: Sequence[tuple[Sequence[RowProduct], Sequence[RowProduct]]],
        bias: torch.Tensor | None,
        activation: str,
        **numbers: float,
    ) -> None:
        """`each`: the products of gate and up, and down, of every expert, and of an MLP beside them
        that is `beside` wide; `share`: of that, or none. `weights`: of those that a row meets."""
        self._held, self._run = (router, share, each, bias), _library("rows").row_mixture
        self._run.argtypes = [_AT, _AT, _LONG, _AT, _AT]
        self._experts = (_CExpert * len(each))()
        kind = ACTIVATIONS[activation]
        self.mixture = _CMixture(each=self._experts, activation=kind, **numbers)
        _fill(self.mixture.router, router)
        _fill(self.mixture.share, share)
        for place, (gate_up, down) in zip(self._experts, each, strict=True):
            _fill(place.gate_up, gate_up)
            _fill(place.down, down)
        self.mixture.bias = None if bias is None else bias.data_ptr()
        met = [*each[: int(numbers["active"])], *each[int(numbers["experts"]) :]]
        self.weights = sum(map(_weights, (router, share, *(one for every in met for one in every))))

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """What they make of rows [R, hidden], in new memory. Raises MemoryError."""
        rows = rows.contiguous()
        out = torch.empty_like(rows)
        given = _pass((0, 0, 0), 0, rows.dtype, 0)
        of, at = ctypes.addressof(self.mixture), rows.data_ptr()
        if self._run(of, given, len(rows), at, out.data_ptr()):
            raise MemoryError("no memory for the rows of a mixture")
        return out


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
        mixture: CompiledMixture | None = None,
        **numbers: float,
    ) -> None:
        """As `Layer` in layers.h has them: of each product up to four matrices, whose results are
        one row; `gains`, sinks, and what a convolution multiplies by, contiguous, float32."""
        self._held = products, gains, mixer, mixture  # they stay where they lie
        self.weights = sum(map(_weights, products))
        self.layer = _CLayer(activation=ACTIVATIONS[activation], **numbers)
        for name, every in zip(_PRODUCTS, products, strict=True):
            _fill(getattr(self.layer, name), every)
        if mixer is not None:
            self.layer.mixer = ctypes.addressof(mixer.mixer)
        if mixture is not None:
            self.layer.mixture = ctypes.addressof(mixture.mixture)
            self.weights += mixture.weights
        for name, gain in zip(_GAINS, gains, strict=True):
            setattr(self.layer, name, None if gain is None else gain.data_ptr())


class CompiledPass:
    """What all layers of one pass are given."""

    def __init__(
        self,
        requests: Sequence[Memory],
        angles: Sequence[tuple[torch.Tensor, ...]],
        seen: Sequence[Runs],
    ) -> None:
        """`angles`, `seen`: as RowKernels makes them, of each kind that layers name by number."""
        self._held = requests, angles, seen
        (dtype,) = {one.dtype for one in requests}  # one is told for all
        self.held_as, self.count = NUMBERS[dtype], len(requests)
        # As Request, Angles and Seen of layers.h, all of whose fields have 8 bytes.
        self.requests = torch.tensor([_numbers(one) for one in requests])
        self.angles = torch.tensor([_turns(*one) for one in angles])
        self.seen = torch.tensor([(one.firsts.data_ptr(), one.ends.data_ptr()) for one in seen])


def _turns(
    cosines: torch.Tensor, sines: torch.Tensor, scales: torch.Tensor | None = None
) -> tuple[int, ...]:
    """As Angles of layers.h has them."""
    at = 0 if scales is None else scales.data_ptr()
    return cosines.data_ptr(), sines.data_ptr(), at, cosines.shape[1]


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
        self._held, self._dtype = layers, dtype
        self.count, self.weights = len(layers), max(one.weights for one in layers)
        self._layers = (_CLayer * len(layers))(*(one.layer for one in layers))
        self._run = _library("rows").run_layers
        self._run.argtypes = [_AT, _LONG, _LONG, _AT, _AT, _AT]

    def run(self, first: int, end: int, hidden: torch.Tensor, given: CompiledPass) -> torch.Tensor:
        """Rows [R, H] after layers [first, end), in new memory; what is held of them is where
        `given` says. Raises MemoryError."""
        hidden = hidden.contiguous()
        out = torch.empty_like(hidden)
        parts = given.requests.data_ptr(), given.angles.data_ptr(), given.seen.data_ptr()
        one = _pass(parts, given.count, self._dtype, given.held_as)
        if self._run(self._layers, first, end, one, hidden.data_ptr(), out.data_ptr()):
            raise MemoryError("no memory for the rows of a layer")
        return out


@cache
def compiles() -> bool:
    """Whether layers can be compiled here."""
    return load("products") is not None and load("rows") is not None
