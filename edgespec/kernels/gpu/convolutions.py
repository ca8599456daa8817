"""Short convolutions over a row's path, for GPUs.

A program has a part of one row and reads the slots that the row's own path says, so no row's bits
depend on those beside it. Rows are float16, bfloat16 or float32, sums are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl

from edgespec.kernels.gpu.attention import addresses_of, held_at, numbers_at
from edgespec.kernels.gpu.launch import Launcher, cdiv, next_power_of_2

_PART = 1024
"""Numbers of a row that a program has."""


def convolved(
    held: Sequence[torch.Tensor],
    slots: torch.Tensor,
    absent: torch.Tensor,
    weights: torch.Tensor,
    bias: torch.Tensor | None,
    mixed: torch.Tensor,
) -> torch.Tensor:
    """A short convolution of rows, times the second third of `mixed` [R, 3 * n]: [R, n].

    `held`: pieces [1, T, n], as `attention` has keys; `slots` int64 [R, taps]: those that a row
    reads, the last one its own, but where `absent` bool [R, taps, 1] is; `weights` float32 [taps,
    n], `bias` [n].
    """
    count, taps = slots.shape
    mixed = mixed.contiguous()
    width = mixed.shape[1] // 3
    out = mixed.new_empty((count, width))
    pieces = None if len(held) == 1 else addresses_of(held, held)
    _convolve_launcher(width, held[0].shape[2], taps, len(held) > 1, bias is not None).launch(
        (count, cdiv(width, _PART), 1),
        mixed.get_device(),
        (held[0], pieces, slots, absent, weights, bias, mixed, out),
        (len(held),),
    )
    return out


@cache
def _convolve_launcher(width: int, row: int, taps: int, pieced: bool, biased: bool) -> Launcher:
    return Launcher(
        _convolve,
        DIM=width,
        ROW=row,
        TAPS=taps,
        PADDED=next_power_of_2(taps),
        PART=_PART,
        PIECED=pieced,
        BIASED=biased,
        num_warps=4,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["piece_count"])
def _convolve(
    held,
    pieces,
    slots,
    absent,
    weights,
    bias,
    mixed,
    out,
    piece_count,
    DIM: tl.constexpr,
    ROW: tl.constexpr,
    TAPS: tl.constexpr,
    PADDED: tl.constexpr,
    PART: tl.constexpr,
    PIECED: tl.constexpr,
    BIASED: tl.constexpr,
):
    """A part of one row."""
    row, tap = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    lane = tl.program_id(1) * PART + tl.arange(0, PART)
    inside, of_tap = lane < DIM, tap < TAPS
    slot = tl.load(slots + row * TAPS + tap, mask=of_tap, other=0)
    there = of_tap & (tl.load(absent + row * TAPS + tap, mask=of_tap, other=1) == 0)
    near = held_at(pieces, piece_count, slot, 0, held, 1, ROW) if PIECED else held + slot * ROW
    gate = tl.load(mixed + row * 3 * DIM + DIM + lane, mask=inside, other=0.0)
    rows = numbers_at(near, there, lane, gate, DIM, ROW).to(tl.float32)
    by = weights + tap[:, None] * DIM + lane[None, :]
    sums = tl.sum(rows * tl.load(by, mask=of_tap[:, None] & inside[None, :], other=0.0), 0)
    if BIASED:
        sums += tl.load(bias + lane, mask=inside, other=0.0)
    made = (sums * gate.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + row * DIM + lane, made, mask=inside)
