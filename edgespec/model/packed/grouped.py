"""Grouped codes, w = (code - point) * scale: the dialects of GPTQ, AWQ and compressed-tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from edgespec.config import Quantisation
from edgespec.errors import ModelError
from edgespec.model.packed.matrix import (
    FLOATS,
    REMEDY,
    TORCH_NAMES,
    PackedMatrix,
    PartReader,
    Parts,
)
from edgespec.model.packed.settings import gptq_layout
from edgespec.model.quantised.linear import stored
from edgespec.model.quantised.rounding import Packed

BITS = (4, 8)
"""Bits of a code that are read."""

WORD = 32
"""Bits of a word."""


def columns_of(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of 4 or 8 bits, uint8 [rows, columns], of words int32 [rows, words]."""
    return _codes(words, bits).flatten(1)


def rows_of(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of 4 or 8 bits, uint8 [rows, columns], of words int32 [words, columns]."""
    return _codes(words, bits).transpose(1, 2).reshape(-1, words.shape[1])


def _codes(words: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [first, second, codes a word]. By bytes, as wider integers would need more memory."""
    # A view of a file's bytes, which safetensors has in little-endian order.
    bytes_ = words.flatten().view(torch.uint8).view(*words.shape, WORD // 8)
    if bits == 8:
        return bytes_
    return torch.stack((bytes_ & 15, bytes_ >> 4), dim=-1).flatten(2)


_KINDS: dict[int, Literal["int4", "int8"]] = {4: "int4", 8: "int8"}
_MIDDLE = 128  # codes and points of 8 bits are stored signed, less this


@dataclass(frozen=True)
class Grouped:
    """A matrix [out, in] whose columns lie in equal groups, and how to read it.

    `bits`: 4 or 8. `scales` [out, groups]. `index` [in]: the group of each column; None: one group
    after the other. `codes` gives uint8 [out, in], columns in the file's order. `points` gives
    uint8 [out, groups]; None: each is half the range of codes.
    """

    shape: torch.Size
    bits: int
    scales: torch.Tensor
    codes: Callable[[], torch.Tensor]
    points: Callable[[], torch.Tensor] | None
    index: torch.Tensor | None = None

    def matrix(self) -> PackedMatrix:
        """Raises ModelError for groups that are not equal."""
        columns, groups = self.shape[1], self.scales.shape[1]
        if columns % groups:
            raise ModelError(
                f"its {columns} columns are not divided by its {groups} groups, so that the last "
                "group is smaller; take a release with groups of 32 or 64 columns"
            )
        order = _order(self.index, columns, columns // groups)
        form = Quantisation(
            _KINDS[self.bits],
            columns // groups,
            zeros="points" if self.points else "",
            scales=TORCH_NAMES[self.scales.dtype],
            ordered=order is not None,
        )
        return PackedMatrix(self.shape, form, lambda: self._pack(form, order))

    def _pack(self, form: Quantisation, order: torch.Tensor | None) -> Packed:
        # Parts are copied, as what was read may be a view of the file.
        scales = {"scales": self.scales.clone(memory_format=torch.contiguous_format)}
        if self.points is not None:
            scales["zeros"] = self._signed(self.points()).contiguous().view(torch.int8)
        codes = self.codes()
        if order is not None:
            codes = codes.index_select(1, order)
            scales["order"] = order.to(torch.int32)
        if self.bits == 8:
            codes = self._signed(codes).contiguous().view(torch.int8)
        return stored(codes, form, scales)

    def _signed(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes of 8 bits less half their range, as the bytes of an int8."""
        return codes if self.bits == 4 else codes ^ _MIDDLE


def _order(index: torch.Tensor | None, columns: int, group: int) -> torch.Tensor | None:
    """The column of the matrix, int64 [in], that each of its columns in order of groups is.

    None where they are in order already. Raises ModelError if groups are not equal.
    """
    if index is None:
        return None
    wanted = torch.arange(columns) // group
    if torch.equal(index.long(), wanted):
        return None
    order = torch.argsort(index, stable=True)
    if not torch.equal(index.long()[order], wanted):
        raise ModelError(
            f"its index of groups does not give each of them {group} columns; {REMEDY}"
        )
    return order


_BITS = 4
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in its word each of eight outputs is."""


class Awq:
    """Words of eight codes along the rows, in an order of their own, as AutoAWQ writes them in its
    layout 'gemm'.

    `qweight` int32 [in, out / 8], `qzeros` int32 [groups, out / 8], `scales` [groups, out]. Of
    eight outputs a word has those of even numbers in its low half and those of odd numbers in its
    high half.
    """

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


class Gptq:
    """Words of eight (or four) codes down the columns, a scale and a zero for each group, as
    AutoGPTQ and GPTQModel write them.

    `qweight` int32 [in · bits / 32, out], `qzeros` int32 [groups, out · bits / 32], `scales`
    [groups, out] and `g_idx` int32 [in], the group of each column. The layout 'gptq' stores zeros
    less one, 'gptq_v2' as they are.
    """

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


class CompressedTensors:
    """Words of codes along the columns, as llm-compressor writes them in the layout
    'pack-quantized'.

    `weight_packed` int32 [out, ⌈in · bits / 32⌉], `weight_scale` [out, groups], `weight_shape` [2],
    and where they are wanted `weight_zero_point` (words down the rows, [⌈out · bits / 32⌉, groups];
    int8 [out, groups] in early files) and `weight_g_idx` int32 [in], the group of each column.
    Codes and zeros are signed, and packed with half their range added.
    """

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
