"""Code words: a matrix of codes of 4 or 8 bits in groups, as products on GPUs take it.

Codes lie in words of 16 bits: of a step of 4 chunks of columns, a word has the codes of one row of
the matrix at the same column of each chunk, the first chunk's in the low bits. Words lie as the
threads of a warp want them: what a thread reads at once, 16 bytes, is all that it gives to a tensor
core's instruction for each of four chunks. Nothing is exchanged between threads. Codes that
stand for the numbers of a table are looked up in pairs, so two words side by side have the codes of
two columns in a byte for each chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from edgespec.kernels.gpu.launch import cdiv

STRIP = 32
"""Rows of a matrix whose words lie together."""

PADDED = 64
"""Rows of a matrix are filled up to a multiple of this."""

PARTS = 4
"""Chunks of a step: codes of a word."""

WARPS = 2
"""Threads / 32 of a program by codes. Not measured. More would have other instructions of tensor
cores on devices of 9.0 and later."""

_CHUNKS = (32, 16)
_SCALE_BYTES = 8
"""What a row's scales of one step may take: they are read as one number."""


class Codes(NamedTuple):
    """A matrix [out, in] of codes, as the kernel takes it.

    `words` int16 [planes, strips, steps, chunk * 32] (see `words_of`); of 8 bits the high halves
    are the first plane. `scales`, `zeros` [units, rows]: see `numbers_of`; `scale_type` and
    `zero_type` are their dtypes. With `blocks` both are whole numbers, and `blocks`, `zero_blocks`
    [in / 256, rows] their factors. `zero`: what zeros are, "middle", "low" or "points" (see
    Quantisation), or "". `levels` [256]: what pairs of codes of 4 bits stand for (see `pairs_of`),
    with words of pairs; without them code - 8. Rows are filled up to a multiple of PADDED.
    """

    words: torch.Tensor
    out: int
    columns: int
    group: int
    scales: torch.Tensor
    scale_type: torch.dtype
    zeros: torch.Tensor | None = None
    zero_type: torch.dtype | None = None
    zero: str = ""
    blocks: torch.Tensor | None = None
    zero_blocks: torch.Tensor | None = None
    levels: torch.Tensor | None = None


def chunk_of(group: int, columns: int, scale_bytes: int) -> int | None:
    """Columns of a chunk for groups that divide `columns`, with scales of so many bytes; None where
    the kernel cannot take them.

    Groups and steps have to end together, unless all columns are one group. Steps that end with
    the columns need not be filled up.
    """
    fits = [
        chunk
        for chunk in _CHUNKS
        if group == columns
        or (
            group % chunk == 0
            and 0 in (group % (PARTS * chunk), PARTS * chunk % group)
            and _groups_of_step(group, chunk) * scale_bytes <= _SCALE_BYTES
        )
    ]
    whole = (chunk for chunk in fits if columns % (PARTS * chunk) == 0)
    return next(whole, fits[0] if fits else None)


def _groups_of_step(group: int, chunk: int) -> int:
    return max(1, PARTS * chunk // group)


def words_of(codes: torch.Tensor, chunk: int, paired: bool = False) -> torch.Tensor:
    """Words int16 [strips, steps, chunk * 32] of codes, uint8 [rows, columns] of 0 to 15; `paired`:
    as those are that are looked up.

    Rows and columns are filled up. In a step of a strip the order is that of `_fragment`.
    """
    rows, columns = codes.shape
    strips, steps = cdiv(rows, PADDED) * PADDED // STRIP, cdiv(columns, PARTS * chunk)
    whole = codes.new_zeros(strips * STRIP, steps * PARTS * chunk)
    whole[:rows, :columns] = codes
    # Of a row: strip, warp, 8 rows of an instruction's 16, row. Of a column: step, part, 16 of the
    # chunk, 8 of these, pair, number; or pairs of 4 columns in a row.
    columns_of = (4, 2) if paired else (2, 4)
    parts = whole.view(strips, WARPS, 2, 8, steps, PARTS, chunk // 16, *columns_of, 2)
    four, two = (7, 8) if paired else (8, 7)
    parts = parts.permute(5, 0, 4, 6, 1, 3, four, two, 2, 9).to(torch.int32)
    if paired:
        pairs = parts[..., 0] | parts[..., 1] << 4
        words = pairs[0] | pairs[1] << 8 | pairs[2] << 16 | pairs[3] << 24
        words = words.reshape(strips, steps, -1).view(torch.int16)
    else:
        words = parts[0] | parts[1] << 4 | parts[2] << 8 | parts[3] << 12
    return words.to(torch.int16).reshape(strips, steps, chunk * STRIP)


def pairs_of(levels: torch.Tensor) -> torch.Tensor:
    """Of 16 numbers all pairs, as whole numbers [256] twice as wide: that of two codes at the first
    one plus 16 times the second, with the first one's bits the lowest."""
    both = torch.stack([levels.repeat(16), levels.repeat_interleave(16)], 1)
    return both.view({2: torch.int32, 4: torch.int64}[levels.itemsize])[:, 0]


def numbers_of(numbers: torch.Tensor, group: int, chunk: int) -> torch.Tensor:
    """Scales or zeros [out, groups] of any dtype: whole numbers [units, rows, filled up], each with
    the bits of a row's groups of one step, the first ones the lowest, or of a longer group."""
    out, count = numbers.shape
    each = _groups_of_step(group, chunk)
    units = cdiv(count, each)
    turned = numbers.new_zeros(cdiv(out, PADDED) * PADDED, units * each)
    turned[:out, :count] = numbers
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    whole = turned.view(-1, units, each).view(kind[each * numbers.itemsize])
    return whole[:, :, 0].T.contiguous()
