"""Plain products of rows by a matrix of numbers, as they are: for GPUs.

A row's bits depend on the row and the matrix alone, as with products by codes (products.py).
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from edgespec.kernels.gpu.launch import Launcher, cdiv

_TILE, _DEPTH, _BLOCK, _WARPS, _STAGES = 32, 128, 16, 4, 4


def plain_product(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x Wᵀ + bias, [R, out], of rows [R, in] and a weight [out, in], in one of these."""
    rows = rows.contiguous()
    count, columns = rows.shape
    out_features = weight.shape[0]
    out = rows.new_empty(count, out_features)
    if count:
        _launcher(columns, rows.element_size(), bias is not None).launch(
            (cdiv(count, _BLOCK), cdiv(out_features, _TILE), 1),
            rows.get_device(),
            (rows, weight, bias, out),
            (count, out_features, weight.stride(0)),
        )
    return out


@cache
def _launcher(columns: int, element_bytes: int, biased: bool) -> Launcher:
    return Launcher(
        _plain_product,
        COLUMNS=columns,
        DEPTH=_DEPTH * 2 // element_bytes,
        BIASED=biased,
        TILE=_TILE,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
        num_stages=_STAGES,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["count"])
def _plain_product(
    rows,
    weight,
    bias,
    out,
    count,
    out_features,
    stride,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BIASED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of rows by a tile of the matrix."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there = (row < count)[:, None]
    inside = column < out_features
    depth = tl.arange(0, DEPTH)
    row_at = rows + row.to(tl.int64)[:, None] * COLUMNS + depth[None, :]
    # Rows of the tile that the matrix does not have are read as its last one, and not stored.
    least = tl.minimum(column, out_features - 1)
    weight_at = weight + least.to(tl.int64)[None, :] * stride + depth[:, None]
    total = tl.zeros([BLOCK, TILE], tl.float32)
    for at in range(0, COLUMNS, DEPTH):
        if COLUMNS % DEPTH == 0:
            x = tl.load(row_at + at, mask=there, other=0.0)
            part = tl.load(weight_at + at)
        else:
            left = at + depth < COLUMNS
            x = tl.load(row_at + at, mask=there & left[None, :], other=0.0)
            part = tl.load(weight_at + at, mask=left[:, None], other=0.0)
        total = tl.dot(x, part, total, input_precision="ieee")
    if BIASED:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    out_at = out + row.to(tl.int64)[:, None] * out_features + column[None, :]
    tl.store(out_at, total.to(rows.dtype.element_ty), mask=there & inside[None, :])
