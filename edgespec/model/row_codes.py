"""Row codes: rows that caches hold in 8 bits, with a scale for each row and head.

A row of n numbers is as many codes, bytes that fill them up to a multiple of four, and their scale,
float32: a 127th of the greatest of them. A code is a number over the scale, to the nearest integer,
of two to the even one. So a row is the same codes whatever is beside it; kernels/rows_of.h and
kernels/gpu/attention.py read them, and the former writes them too.
"""

from __future__ import annotations

import math

import torch

from edgespec.kernels.gpu.usable import DTYPES, usable

CODED = torch.int8
"""The dtype of what is held so."""

_LEAST = 1e-30
"""Rows of no number as large as this are zeros."""

_SCALE = 4
"""Bytes of a scale."""


def coded_width(numbers: int) -> int:
    """Bytes of a row of so many numbers."""
    return -(-numbers // 4) * 4 + _SCALE if numbers else 0


def as_held(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows [..., n] as a cache of `dtype` takes them; CODED: int8 [..., coded_width(n)]."""
    if dtype != CODED:
        return rows
    numbers = rows.shape[-1]
    if usable(rows.device) and rows.dtype in DTYPES:  # one launch in place of ten
        from edgespec.kernels.gpu.rows import code  # late: it needs triton

        out = rows.new_empty((*rows.shape[:-1], coded_width(numbers)), dtype=CODED)
        code(rows, out, coded_width(numbers) - _SCALE, _LEAST)
        return out
    wide = rows.float()
    greatest = wide.abs().amax(-1, keepdim=True)
    scales = torch.where(greatest < _LEAST, 0.0, greatest / 127)
    coded = (scales > 0) & (scales < math.inf)
    codes = torch.where(coded, wide / scales, 0.0).round_().to(CODED)
    fill = codes.new_zeros((*rows.shape[:-1], coded_width(numbers) - _SCALE - numbers))
    return torch.cat((codes, fill, scales.view(CODED)), -1)


def decoded(held: torch.Tensor, numbers: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows [..., `numbers`] of what is held of them, as `dtype`."""
    if held.dtype != CODED:
        return held.to(dtype)
    scales = held.narrow(-1, held.shape[-1] - _SCALE, _SCALE).view(torch.float32)
    return (held.narrow(-1, 0, numbers).float() * scales).to(dtype)
