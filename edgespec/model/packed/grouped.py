"""Grouped codes: what GPTQ, AWQ and compressed-tensors share, w = (code - point) * scale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from edgespec.config import Quantisation
from edgespec.errors import ModelError
from edgespec.model.packed.matrix import REMEDY, PackedMatrix
from edgespec.model.quantised.linear import stored
from edgespec.model.quantised.rounding import Packed

_KINDS: dict[int, Literal["int4", "int8"]] = {4: "int4", 8: "int8"}
_NAMES: dict[torch.dtype, Literal["bfloat16", "float16", "float32"]] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}
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
            scales=_NAMES[self.scales.dtype],
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
