"""GPTQ: words of eight (or four) codes down the columns, a scale and a zero for each group.

As AutoGPTQ and GPTQModel write it: `qweight` int32 [in · bits / 32, out], `qzeros` int32
[groups, out · bits / 32], `scales` [groups, out] and `g_idx` int32 [in], the group of each column.
Its layout 'gptq' stores zeros less one, 'gptq_v2' as they are.
"""

from __future__ import annotations

from typing import Any

import torch

from edgespec.errors import ModelError
from edgespec.model.packed.grouped import Grouped
from edgespec.model.packed.matrix import FLOATS, PackedMatrix, PartReader, Parts
from edgespec.model.packed.settings import gptq_layout
from edgespec.model.packed.words import BITS, WORD, columns_of, rows_of


class Gptq:
    """The dialect of GPTQ."""

    mark = "qweight"
    parts = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, packing: dict[str, Any]) -> None:
        self._less = 1 if gptq_layout(packing) == "gptq" else 0
        self._ordered = bool(packing.get("desc_act"))

    def matrix(self, parts: Parts) -> PackedMatrix:
        read = PartReader(parts)
        groups, out = read.any("scales", 2).shape
        # A file may mix matrices of 4 and of 8 bits, so that config.json would not do.
        bits = read.any("qzeros", 2).shape[1] * WORD // out
        if bits not in BITS:
            raise ModelError(
                f"its codes have {bits} bits, and edgespec reads those of 4 and 8; take a release "
                "of 4 bits"
            )
        columns = read.any("qweight", 2).shape[0] * WORD // bits
        scales = read.part("scales", (groups, out), *FLOATS)
        zeros = read.part("qzeros", (groups, out * bits // WORD), torch.int32)
        words = read.part("qweight", (columns * bits // WORD, out), torch.int32)
        index = None
        if self._ordered or "g_idx" in read:
            index = read.part("g_idx", (columns,), torch.int32)
        return Grouped(
            torch.Size((out, columns)),
            bits,
            scales.T,
            codes=lambda: rows_of(words, bits).T,
            # Of a zero of 0, what is stored is the greatest code.
            points=lambda: (columns_of(zeros, bits) + self._less & (1 << bits) - 1).T,
            index=index,
        ).matrix()
