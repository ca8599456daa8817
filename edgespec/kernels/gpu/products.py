"""Products of rows by a matrix: codes of 4 or 8 bits in groups, or numbers as they are.

A row's bits depend on the row and the matrix alone. Every program multiplies a block of BLOCK rows,
whether so many are there or not, by TILE rows of the matrix, and adds up the columns in one order;
no program shares its columns with another. All shapes follow from the matrix, none from the rows,
and what is compiled is not made for a number of rows (`do_not_specialize`).

Codes lie in words of 16 bits: of a step of 4 chunks of columns, word (k, n) has the codes of row n
at column k of each chunk, the first chunk's in the low bits. So a program reads a step of its tile
as one run of memory, and takes it apart with masks and shifts. Codes are multiplied as whole
numbers, which 16 bits hold exactly, and summed up in float32; scales and zeros come in behind each
group, also in float32, so that nothing is rounded but the result.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from edgespec.kernels.gpu.launch import Launcher, cdiv

TILE = 64
"""Rows of a matrix that a program multiplies by."""

_BLOCK = 16
"""Rows that are multiplied at once, which is the least that tensor cores take."""

_PARTS = 4
"""Chunks of a step: codes of a word."""

_CHUNKS = (32, 16)
_SPREAD = 256
"""Columns that share a number of `blocks`."""

_PLAIN_TILE, _PLAIN_DEPTH = 32, 128
_WARPS, _STAGES = 4, 4
"""Threads / 32 of a program, and steps that it reads ahead. Not measured."""


class Codes(NamedTuple):
    """A matrix [out, in] of codes, as the kernel takes it.

    `words` int16 [planes, tiles, steps, chunk, TILE] (see `words_of`); of 8 bits the high halves
    are the first plane. `scales`, `zeros` [groups, tiles * TILE]: as they are stored; with `blocks`
    both are whole numbers, and `blocks`, `zero_blocks` [in / 256, tiles * TILE] their factors.
    `zero`: what zeros are, "middle", "low" or "points" (see Quantisation), or "". `levels` [16]:
    the numbers that codes of 4 bits stand for, in the rows' dtype; without them code - 8.
    """

    words: torch.Tensor
    out: int
    columns: int
    group: int
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    zero: str = ""
    blocks: torch.Tensor | None = None
    zero_blocks: torch.Tensor | None = None
    levels: torch.Tensor | None = None


def chunk_of(group: int, columns: int) -> int | None:
    """Columns of a chunk for groups that divide `columns`; None where the kernel cannot take them.

    Groups and steps have to end together, unless all columns are one group. Steps that end with
    the columns need not be filled up.
    """
    fits = [
        chunk
        for chunk in _CHUNKS
        if group == columns
        or (group % chunk == 0 and 0 in (group % (_PARTS * chunk), _PARTS * chunk % group))
    ]
    whole = (chunk for chunk in fits if columns % (_PARTS * chunk) == 0)
    return next(whole, fits[0] if fits else None)


def words_of(codes: torch.Tensor, chunk: int) -> torch.Tensor:
    """Words int16 [tiles, steps, chunk, TILE] of codes, uint8 [rows, columns] of 0 to 15.

    Rows and columns are filled up to whole tiles and steps.
    """
    rows, columns = codes.shape
    tiles, steps = -(-rows // TILE), -(-columns // (_PARTS * chunk))
    whole = codes.new_zeros(tiles * TILE, steps * _PARTS * chunk)
    whole[:rows, :columns] = codes
    parts = whole.view(tiles, TILE, steps, _PARTS, chunk).permute(3, 0, 2, 4, 1).to(torch.int32)
    words = parts[0] | parts[1] << 4 | parts[2] << 8 | parts[3] << 12
    return words.to(torch.int16).contiguous()


class CodesProduct:
    """x Wᵀ + bias of rows in the dtype of the bias [out]: float16, bfloat16 or float32."""

    def __init__(self, matrix: Codes, bias: torch.Tensor | None = None) -> None:
        planes, self._tiles, steps, chunk, _ = matrix.words.shape
        self._out = matrix.out
        self._held = (
            *(matrix.words, matrix.scales, matrix.zeros, matrix.blocks),
            *(matrix.zero_blocks, matrix.levels, bias),
        )
        self._launcher = Launcher(
            _codes_product,
            COLUMNS=matrix.columns,
            STEPS=steps,
            GROUP=matrix.group,
            CHUNK=chunk,
            PLANES=planes,
            ZERO=matrix.zero,
            DOUBLE=matrix.blocks is not None,
            LEVELS=matrix.levels is not None,
            BIASED=bias is not None,
            SPREAD=_SPREAD,
            TILE=TILE,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
            num_stages=_STAGES,
            enable_fp_fusion=False,
        )

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [R, in] to [R, out]."""
        rows = rows.contiguous()
        count = rows.shape[0]
        out = rows.new_empty(count, self._out)
        if count:
            self._launcher.launch(
                (cdiv(count, _BLOCK), self._tiles, 1),
                rows.get_device(),
                (rows, *self._held, out),
                (count, self._out),
            )
        return out


def plain_product(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x Wᵀ + bias, [R, out], of rows [R, in] and a weight [out, in], in one of these."""
    rows = rows.contiguous()
    count, columns = rows.shape
    out_features = weight.shape[0]
    out = rows.new_empty(count, out_features)
    if count:
        _plain_launcher(columns, rows.element_size(), bias is not None).launch(
            (cdiv(count, _BLOCK), cdiv(out_features, _PLAIN_TILE), 1),
            rows.get_device(),
            (rows, weight, bias, out),
            (count, out_features, weight.stride(0)),
        )
    return out


@cache
def _plain_launcher(columns: int, element_bytes: int, biased: bool) -> Launcher:
    return Launcher(
        _plain_product,
        COLUMNS=columns,
        DEPTH=_PLAIN_DEPTH * 2 // element_bytes,
        BIASED=biased,
        TILE=_PLAIN_TILE,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
        num_stages=_STAGES,
        enable_fp_fusion=False,
    )


@triton.jit
def _numbers(codes, levels, MIDDLE: tl.constexpr, LEVELS: tl.constexpr, DTYPE: tl.constexpr):
    """Codes of 0 to 15, int16, less `MIDDLE`, or the levels that they stand for.

    A code is put into the last bits of a power of two, from which it is subtracted again: integers
    become floats only a quarter as fast as that.
    """
    if LEVELS:
        return tl.load(levels + codes)
    if tl.bfloat16 == DTYPE:
        return (codes | 0x4300).to(tl.bfloat16, bitcast=True) - (128.0 + MIDDLE)
    if tl.float16 == DTYPE:
        return (codes | 0x6400).to(tl.float16, bitcast=True) - (1024.0 + MIDDLE)
    return codes.to(DTYPE) - MIDDLE


@triton.jit(do_not_specialize=["count"])
def _codes_product(
    rows,
    words,
    scales,
    zeros,
    blocks,
    zero_blocks,
    levels,
    bias,
    out,
    count,
    out_features,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    PLANES: tl.constexpr,
    ZERO: tl.constexpr,
    DOUBLE: tl.constexpr,
    LEVELS: tl.constexpr,
    BIASED: tl.constexpr,
    SPREAD: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of rows by a tile of the matrix."""
    DTYPE: tl.constexpr = rows.dtype.element_ty
    STEP: tl.constexpr = 4 * CHUNK
    MIDDLE: tl.constexpr = 8 if PLANES == 1 else 0
    tile = tl.program_id(1)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = (row < count)[:, None]
    depth = tl.arange(0, CHUNK)
    lane = tl.arange(0, TILE)
    column = tile * TILE + lane
    padded = tl.num_programs(1) * TILE
    row_at = rows + row.to(tl.int64)[:, None] * COLUMNS + depth[None, :]
    size = STEPS * CHUNK * TILE  # words of a tile
    word_at = words + tile.to(tl.int64) * size + depth[:, None] * TILE + lane[None, :]
    plane = tl.num_programs(1).to(tl.int64) * size
    ones = tl.full([CHUNK, TILE], 1.0, DTYPE)
    total = tl.zeros([BLOCK, TILE], tl.float32)
    for step in range(STEPS):
        first = tl.load(word_at + step * (CHUNK * TILE))
        second = first
        if PLANES == 2:
            second = tl.load(word_at + plane + step * (CHUNK * TILE))
        for part in tl.static_range(4):
            at = step * STEP + part * CHUNK
            if COLUMNS % STEP == 0:
                x = tl.load(row_at + at, mask=there, other=0.0)
            else:
                x = tl.load(row_at + at, mask=there & (at + depth < COLUMNS)[None, :], other=0.0)
            weight = _numbers((first >> (4 * part)) & 15, levels, 8, LEVELS, DTYPE)
            if part * CHUNK % GROUP == 0:
                share = tl.dot(x, weight, input_precision="ieee")
            else:
                share = tl.dot(x, weight, share, input_precision="ieee")
            if PLANES == 2:
                # Of high halves and of low ones there are sums apart, joined behind the group.
                low = _numbers((second >> (4 * part)) & 15, levels, 0, LEVELS, DTYPE)
                if part * CHUNK % GROUP == 0:
                    fine = tl.dot(x, low, input_precision="ieee")
                else:
                    fine = tl.dot(x, low, fine, input_precision="ieee")
            if ZERO != "":
                # Sums of the rows' columns, by tensor cores too: so they lie as the result does.
                if part * CHUNK % GROUP == 0:
                    sums = tl.dot(x, ones, input_precision="ieee")
                else:
                    sums = tl.dot(x, ones, sums, input_precision="ieee")
            if (part + 1) * CHUNK % GROUP == 0 or part == 3:
                group = tl.minimum(at // GROUP, COLUMNS // GROUP - 1)
                scale = tl.load(scales + group * padded + column).to(tl.float32)
                if DOUBLE:
                    block = at // SPREAD * padded + column
                    scale *= tl.load(blocks + block).to(tl.float32)
                if PLANES == 2:
                    share = tl.fma(share, tl.full([BLOCK, TILE], 16.0, tl.float32), fine)
                wide = tl.broadcast_to(scale[None, :], [BLOCK, TILE])
                total = tl.fma(share, wide, total)
                if ZERO != "":
                    zero = tl.load(zeros + group * padded + column).to(tl.float32)
                    if ZERO == "points":
                        zero = (MIDDLE - zero) * scale
                    if ZERO == "low":
                        if DOUBLE:
                            zero = -zero * tl.load(zero_blocks + block).to(tl.float32)
                        zero = tl.fma(tl.full([TILE], MIDDLE, tl.float32), scale, zero)
                    total = tl.fma(sums, tl.broadcast_to(zero[None, :], [BLOCK, TILE]), total)
    inside = column < out_features
    if BIASED:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    out_at = out + row.to(tl.int64)[:, None] * out_features + column[None, :]
    tl.store(out_at, total.to(DTYPE), mask=there & inside[None, :])


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
