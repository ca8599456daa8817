"""Compiled states: bits of rows over a state, beside others or alone, by vectors of any width."""

from __future__ import annotations

import ctypes
import math
import platform
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.cases import case

from edgespec.kernels import compiled
from edgespec.kernels.rows import Runs
from edgespec.kernels.states import CompiledMixer, StateKernels, compiled_states
from edgespec.types.boundaries import boundary_of

ROWS, HEADS, GROUPS, KEY, VALUE, TAPS = 90, 4, 2, 24, 68, 4
CUTS = [0, 48, 64, 80, ROWS]
"""Where rows begin to read another state."""


def made(
    kernels: StateKernels, delta: bool, dtype: torch.dtype, together: int = ROWS
) -> torch.Tensor:
    """What random rows of Mamba2 or of the delta rule read, and the last state, side by side; so
    many of the rows `together`."""
    draw = torch.Generator().manual_seed(1)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    keys, inner = GROUPS * KEY, HEADS * VALUE
    conv, terms = 2 * keys + inner, keys + inner + HEADS

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    vectors = {"taps": some(TAPS, conv), "step_bias": some(HEADS), "gain": some(inner)}
    vectors["decay"] = -some(HEADS).abs()
    vectors |= {} if delta else {"bias": some(conv), "skip": some(HEADS)}
    mixer = CompiledMixer(
        {name: one.to(wide) for name, one in vectors.items()},
        **{"eps": 1e-5, "step_low": 0.0, "step_high": math.inf, "delta": delta, "heads": HEADS},
        **{"groups": GROUPS, "key": KEY, "value": VALUE, "kernel": TAPS, "gate_last": delta},
        normed=VALUE if delta else inner // GROUPS,
    )
    projected = some(ROWS, inner + conv + (1 + delta) * HEADS).to(dtype)
    width = -(-(terms * wide.itemsize + conv * dtype.itemsize) // 64) * 64 // dtype.itemsize
    own = torch.zeros((ROWS, width), dtype=dtype)
    slots = torch.tensor([[own.data_ptr(), ROWS]])
    state, found = torch.zeros((HEADS, KEY, VALUE), dtype=wide), []
    for first, end in pairwise(CUTS):
        boundary = boundary_of(first)
        if boundary:
            kernels.fold(mixer, dtype, slots, boundary - 16, 16, state)
        for begin in range(first, end, together):
            places = torch.arange(begin, min(end, begin + together))
            seen = torch.stack((torch.zeros_like(places), places + 1), 1).int()
            runs, part = Runs(torch.arange(len(places) + 1), seen), projected[places]
            found.append(kernels.rows(mixer, part, runs, places, boundary, dtype, slots, state))
    return torch.cat([*(one.double().flatten() for one in found), state.double().flatten()])


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

pytestmark = pytest.mark.skipif(
    bool(compiled.complaint("rows")), reason="no C compiler makes rows here"
)


def test_rows_together_have_the_bits_of_rows_alone() -> None:
    kernels = compiled_states()
    assert kernels is not None
    for dtype in DTYPES:
        for delta in (False, True):
            with case(dtype, delta):
                whole = made(kernels, delta, dtype)
                assert whole.isfinite().all()
                for together in (1, 5):
                    assert torch.equal(whole, made(kernels, delta, dtype, together))


@pytest.mark.thorough
@pytest.mark.skipif(platform.machine() != "x86_64", reason="its options are x86's")
def test_narrower_vectors_have_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, whole = Path(compiled.__file__).with_name("rows.c"), compiled.loaded("rows")[0]
    compiler = compiled._compiler()
    assert whole is not None
    assert compiler is not None
    for option in ("-mno-avx512f", "-mno-avx2"):
        with monkeypatch.context() as changed:
            changed.setattr(compiled, "OPTIONS", (*compiled.OPTIONS, option))
            file = tmp_path / f"{option}.so"
            file.write_bytes(compiled.compile_source(compiler, source))
        narrow = StateKernels(ctypes.CDLL(str(file)))
        for dtype in DTYPES:
            for delta in (False, True):
                with case(option, dtype, delta):
                    usual = made(StateKernels(whole), delta, dtype)
                    assert torch.equal(usual, made(narrow, delta, dtype))
