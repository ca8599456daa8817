"""int4: a scale and a zero for each group of columns, in tiles of 64 rows."""

from __future__ import annotations

from typing import Any

import torch

from edgespec.config import Quantisation
from edgespec.kernels.products import TILE
from edgespec.model.quantised import int4_kernels
from edgespec.model.quantised.group_scales import (
    check_columns,
    kept_type,
    scale_and_zero,
    scale_parts,
)
from edgespec.model.quantised.int4_kernels import MIDDLE, MOST
from edgespec.model.quantised.rounding import Packed, Parts, inverse, row_chunks
from edgespec.model.quantised.slices import SlicedLinear
from edgespec.model.tensors import TORCH_DTYPES

_PAIRS = {2: torch.int32, 4: torch.int64, 8: torch.complex128}
"""A type that holds two numbers of so many bytes, so that one lookup gives both of a byte."""


def stored_parts(form: Quantisation, shape: torch.Size) -> Parts:
    """`tiles`: two codes a byte, rows padded to whole tiles; and the scales.

    These are `scale_parts`, but where each group has a "middle" `scales` are pairs of scale and
    zero in the order that kernels want, so that they can be computed with as they are.
    """
    out, columns = shape
    check_columns(form, columns)
    tiles = -(-out // TILE)
    parts: Parts = {"tiles": (torch.Size((tiles, columns, TILE // 2)), torch.uint8)}
    if form.zeros != "middle":
        return parts | scale_parts(form, shape)
    pairs = torch.Size((columns // form.group, tiles * TILE, 2))
    return parts | {"scales": (pairs, TORCH_DTYPES[form.scales])}


def stored(codes: torch.Tensor, form: Quantisation, scales: Packed) -> Packed:
    """The stored form of codes, uint8 [out, columns] of 0 to 15, and `scale_parts`."""
    shape, dtype = stored_parts(form, codes.shape)["tiles"]
    tiles = torch.zeros(shape, dtype=dtype)
    int4_kernels.store(codes, tiles)
    return {"tiles": tiles, **scales}


def pack(weight: torch.Tensor, quantisation: Quantisation) -> Packed:
    """Round to the nearest of 16 evenly spaced values per group; w ≈ (code - 8) * scale + zero.

    Of forms with a "middle" alone.
    """
    packed = {
        name: torch.zeros(shape, dtype=dtype)
        for name, (shape, dtype) in stored_parts(quantisation, weight.shape).items()
    }
    for first, chunk in row_chunks(weight, TILE):
        end = first + chunk.shape[0]
        grouped = chunk.view(chunk.shape[0], -1, quantisation.group)
        scale, zero = _scale_and_zero(grouped)
        codes = grouped.sub_(zero.unsqueeze(2)).mul_(inverse(scale).unsqueeze(2))
        codes = codes.round_().add_(MIDDLE).clamp_(0, MOST).to(torch.uint8)
        packed["scales"][:, first:end, 0] = scale.T
        packed["scales"][:, first:end, 1] = zero.T
        int4_kernels.store(codes.view(chunk.shape), packed["tiles"][first // TILE :])
    return packed


def _scale_and_zero(grouped: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both [rows, groups], as they are stored, so that codes make up for their rounding."""
    low, high = grouped.amin(2), grouped.amax(2)
    scale = ((high - low) / MOST).to(torch.bfloat16).float()
    zero = (low + MIDDLE * scale).to(torch.bfloat16).float()
    return scale, zero


def product_parts(packed: Packed, form: Quantisation, dtype: torch.dtype) -> dict[str, Any]:
    """What kernels.products.RowProduct takes of it."""
    # So that the zeros of "low" are what is stored, to the bit.
    middle = 0 if form.zeros == "low" else MIDDLE
    scales = packed["scales"]
    if form.zeros != "middle":
        kept = kept_type(packed, form, dtype)
        scales = int4_kernels.paired(*scale_and_zero(packed, form, middle, kept), kept)
    return {"weight": packed["tiles"], "scales": scales, "group": form.group, "middle": middle}


class Int4Linear(SlicedLinear):
    """Multiplies by torch's packed kernel on CUDA, or by slices of whole tiles."""

    tiles: torch.Tensor
    scales: torch.Tensor
    pairs: torch.Tensor

    def held(self, packed: Packed, quantisation: Quantisation, device: torch.device) -> Packed:
        self.group = int4_kernels.kernel_group(quantisation.group)
        self.form = int4_kernels.best_form(self.dtype, device, self.group)
        kept = self.dtype if self.form.name != "cuda" else torch.bfloat16
        scales = packed["scales"]
        if quantisation.zeros != "middle":
            scales = int4_kernels.paired(*scale_and_zero(packed, quantisation, MIDDLE, kept), kept)
        if self.group < quantisation.group:
            scales = scales.repeat_interleave(quantisation.group // self.group, 0)
        return {
            "tiles": self.form.convert(packed["tiles"], device),
            "scales": scales.to(device, kept),
            "pairs": _pairs(self.dtype).to(device),
        }

    def kernel(self, rows: torch.Tensor) -> torch.Tensor | None:
        if self.form is int4_kernels.PLAIN:
            return None
        result = self.form.multiply(rows, self.tiles, self.group, self.scales)
        return result[:, : self.out_features]

    def slice_rows(self, device: torch.device) -> int:
        tile = 2 * self.tiles.shape[2]
        return max(1, super().slice_rows(device) // tile) * tile

    def slice_product(self, rows: torch.Tensor, first: int, end: int) -> torch.Tensor:
        """By scaled codes, and the zeros by themselves."""
        steps, scale, zero = self._slice(first, end)
        count = rows.shape[0]
        # Zeros are added to the result, where there are fewer numbers than in the weight.
        steps.mul_(scale.unsqueeze(1))
        sums = rows.view(count, -1, self.group).sum(2)
        result = rows @ steps.view(self.in_features, -1) + sums @ zero
        half = self.tiles.shape[2]
        in_order = result.view(count, -1, half, 2).transpose(2, 3).reshape(count, -1)
        return in_order[:, : end - first]

    def weight_rows(self, first: int, end: int) -> torch.Tensor:
        """(code - 8) * scale + zero."""
        steps, scale, zero = self._slice(first, end)
        weight = steps.mul_(scale.unsqueeze(1)).add_(zero.unsqueeze(1))
        half = self.tiles.shape[2]
        in_order = weight.view(self.in_features, -1, half, 2).permute(1, 3, 2, 0)
        return in_order.reshape(-1, self.in_features)[: end - first]

    def _slice(self, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes - 8 [groups, group, rows], scales and zeros [groups, rows], of some whole tiles.

        The rows of a tile come in the order of its nibbles: 0, half, 1, half + 1 and so on.
        """
        half = self.tiles.shape[2]
        tiles = self.tiles[first // (2 * half) : -(-end // (2 * half))]
        bytes_ = tiles.transpose(0, 1).to(torch.int32, memory_format=torch.contiguous_format)
        steps = self.pairs.index_select(0, bytes_.flatten()).view(self.dtype)
        groups = self.in_features // self.group
        rows = tiles.shape[0] * 2 * half
        scales = self.scales[:, first : first + rows].view(groups, -1, 2, half, 2)
        scale, zero = scales.permute(4, 0, 1, 3, 2).reshape(2, groups, rows)
        return steps.view(groups, self.group, rows), scale, zero


def _pairs(dtype: torch.dtype) -> torch.Tensor:
    """For each byte its low and its high code, less 8, in `dtype`, seen as one number."""
    both = torch.arange(256)
    codes = torch.stack((both & MOST, both >> 4), dim=1) - MIDDLE
    return codes.to(dtype).view(_PAIRS[dtype.itemsize]).flatten()
