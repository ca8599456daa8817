"""compressed-tensors: words of codes along the columns, as llm-compressor writes them.

In the layout 'pack-quantized': `weight_packed` int32 [out, ⌈in · bits / 32⌉], `weight_scale`
[out, groups], `weight_shape` [2], and where they are wanted `weight_zero_point` (words down the
rows, [⌈out · bits / 32⌉, groups]; int8 [out, groups] in early files) and `weight_g_idx` int32 [in],
the group of each column. Codes and zeros are signed, and packed with half their range added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from edgespec.errors import ModelError
from edgespec.model.packed.grouped import Grouped
from edgespec.model.packed.matrix import FLOATS, REMEDY, PackedMatrix, PartReader, Parts
from edgespec.model.packed.words import BITS, WORD, columns_of, rows_of


class CompressedTensors:
    """The dialect of compressed-tensors."""

    mark = "weight_packed"
    parts = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")

    def __init__(self, packing: dict[str, Any]) -> None:
        """All that `packing` may say is said by the tensors too."""

    def matrix(self, parts: Parts) -> PackedMatrix:
        read = PartReader(parts)
        out, columns = read.part("weight_shape", (2,), torch.int64, torch.int32).tolist()
        count = read.any("weight_packed", 2).shape[1]
        # A file may mix matrices of 4 and of 8 bits, so that config.json would not do.
        bits = next((bits for bits in BITS if _words(columns, bits) == count), BITS[0])
        words = read.part("weight_packed", (out, _words(columns, bits)), torch.int32)
        groups = read.any("weight_scale", 2).shape[1]
        scales = read.part("weight_scale", (out, groups), *FLOATS)
        index = None
        # -1 is what writers leave where columns keep their order.
        if "weight_g_idx" in read and (read.any("weight_g_idx", 1) >= 0).all():
            index = read.part("weight_g_idx", (columns,), torch.int32, torch.int64)
        return Grouped(
            torch.Size((out, columns)),
            bits,
            scales,
            codes=lambda: columns_of(words, bits)[:, :columns],
            points=_points(read, out, groups, bits) if "weight_zero_point" in read else None,
            index=index,
        ).matrix()


def _words(codes: int, bits: int) -> int:
    return -(-codes * bits // WORD)


def _points(read: PartReader, out: int, groups: int, bits: int) -> Callable[[], torch.Tensor]:
    """What gives zeros as codes, uint8 [out, groups]."""
    if read.any("weight_zero_point", 2).dtype != torch.int8:
        words = read.part("weight_zero_point", (_words(out, bits), groups), torch.int32)
        return lambda: rows_of(words, bits)[:out]
    zeros = read.part("weight_zero_point", (out, groups), torch.int8)
    middle = 1 << (bits - 1)
    if zeros.min() < -middle or zeros.max() >= middle:
        raise ModelError(f"its 'weight_zero_point' has more than {bits} bits; {REMEDY}")
    return lambda: (zeros.to(torch.int16) + middle).to(torch.uint8)
