"""int4: a scale and a zero for each group of columns, in the tiles of torch's own kernels."""

from __future__ import annotations

import torch

from edgespec.config import Quantisation
from edgespec.errors import ModelError
from edgespec.model.quantised import int4_kernels
from edgespec.model.quantised.int4_kernels import MIDDLE, MOST, TILE
from edgespec.model.quantised.rounding import Packed, Parts, inverse, row_chunks
from edgespec.model.quantised.slices import SlicedLinear

_PAIRS = {2: torch.int32, 4: torch.int64, 8: torch.complex128}
"""A type that holds two numbers of so many bytes, so that one lookup gives both of a byte."""


def stored_parts(quantisation: Quantisation, shape: torch.Size) -> Parts:
    """`tiles`: two codes a byte; `scales`: scale and zero. Rows are padded to whole tiles."""
    out, columns = shape
    group = quantisation.group
    if columns % group:
        raise ModelError(
            f"int4 with groups of {group} columns does not fit its {columns} columns; choose a "
            "group that divides them, or int8"
        )
    tiles = -(-out // TILE)
    return {
        "tiles": (torch.Size((tiles, columns, TILE // 2)), torch.uint8),
        "scales": (torch.Size((columns // group, tiles * TILE, 2)), torch.bfloat16),
    }


def pack(weight: torch.Tensor, quantisation: Quantisation) -> Packed:
    """Round to the nearest of 16 evenly spaced values per group; w ≈ (code - 8) * scale + zero."""
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


class Int4Linear(SlicedLinear):
    """Multiplies by torch's packed kernel for few rows, by slices of whole tiles for many."""

    tiles: torch.Tensor
    scales: torch.Tensor
    pairs: torch.Tensor

    def held(self, packed: Packed, quantisation: Quantisation, device: torch.device) -> Packed:
        self.group = quantisation.group
        self.form = int4_kernels.best_form(self.dtype, device, self.group)
        kept = self.dtype if self.form.name != "cuda" else torch.bfloat16
        return {
            "tiles": self.form.convert(packed["tiles"], device),
            "scales": packed["scales"].to(device, kept),
            "pairs": _pairs(self.dtype).to(device),
        }

    def kernel(self, rows: torch.Tensor) -> torch.Tensor | None:
        if rows.shape[0] > self.form.most_rows * torch.get_num_threads():
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
