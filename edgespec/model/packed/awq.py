"""AWQ: words of eight codes along the rows, in an order of their own.

As AutoAWQ writes it in its layout 'gemm': `qweight` int32 [in, out / 8], `qzeros` int32
[groups, out / 8], `scales` [groups, out]. Of eight outputs a word has those of even numbers in its
low half and those of odd numbers in its high half.
"""

from __future__ import annotations

from typing import Any

import torch

from edgespec.model.packed.grouped import Grouped
from edgespec.model.packed.matrix import FLOATS, PackedMatrix, PartReader, Parts
from edgespec.model.packed.words import WORD, columns_of

_BITS = 4
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in its word each of eight outputs is."""


class Awq:
    """The dialect of AWQ."""

    mark = "qweight"
    parts = ("qweight", "qzeros", "scales")

    def __init__(self, packing: dict[str, Any]) -> None:
        """All that `packing` may say is said by the tensors too."""

    def matrix(self, parts: Parts) -> PackedMatrix:
        read = PartReader(parts)
        columns = read.any("qweight", 2).shape[0]
        groups, out = read.any("scales", 2).shape
        count = out * _BITS // WORD
        words = read.part("qweight", (columns, count), torch.int32)
        zeros = read.part("qzeros", (groups, count), torch.int32)
        scales = read.part("scales", (groups, out), *FLOATS)
        return Grouped(
            torch.Size((out, columns)),
            _BITS,
            scales.T,
            codes=lambda: _outputs(words),
            points=lambda: _outputs(zeros),
        ).matrix()


def _outputs(words: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [out, n] of words [n, out / 8]."""
    mixed = columns_of(words, _BITS).view(words.shape[0], -1, len(_PLACES))
    return mixed[..., list(_PLACES)].flatten(1).T
