"""int8: codes of 8 bits, with a scale for each row of the weight, or for groups of columns."""

from __future__ import annotations

import functools
from typing import Any

import torch

from edgespec.config import Quantisation
from edgespec.kernels.products import TILE
from edgespec.model.quantised import int4_kernels
from edgespec.model.quantised.group_scales import kept_type, scale_and_zero, scale_parts
from edgespec.model.quantised.kernels import agrees
from edgespec.model.quantised.rounding import Packed, Parts, inverse, row_chunks
from edgespec.model.quantised.slices import SlicedLinear

_MOST = 127
_KERNEL_ROWS = 16
"""Rows up to which torch's kernel is used on CUDA, in bfloat16. Not measured there."""

_KERNEL_COLUMNS = 64
"""Columns are a multiple of these where it is: on CPUs it reads whole vectors, past the end of a
weight. Not looked at on CUDA."""


def stored_parts(form: Quantisation, shape: torch.Size) -> Parts:
    """`codes`: int8 [out, in]; `scales`: bfloat16 [out], or, with groups, `scale_parts`."""
    codes: Parts = {"codes": (torch.Size(shape), torch.int8)}
    if form.group:
        return codes | scale_parts(form, shape)
    return codes | {"scales": (torch.Size(shape[:1]), torch.bfloat16)}


def stored(codes: torch.Tensor, form: Quantisation, scales: Packed) -> Packed:
    """The stored form of codes, int8 [out, in], and their scales."""
    return {"codes": codes, **scales}


def pack(weight: torch.Tensor, quantisation: Quantisation) -> Packed:
    """Round to the nearest of 255 evenly spaced values per row; w ≈ code * scale."""
    packed = {
        name: torch.empty(shape, dtype=dtype)
        for name, (shape, dtype) in stored_parts(quantisation, weight.shape).items()
    }
    for first, chunk in row_chunks(weight):
        end = first + chunk.shape[0]
        # Codes are chosen against the scale as it is stored, so that they make up for its rounding.
        scale = (chunk.abs().amax(1) / _MOST).to(torch.bfloat16).float()
        codes = chunk.mul_(inverse(scale).unsqueeze(1)).round_().clamp_(-_MOST, _MOST)
        packed["codes"][first:end] = codes
        packed["scales"][first:end] = scale
    return packed


def product_parts(packed: Packed, form: Quantisation, dtype: torch.dtype) -> dict[str, Any]:
    """What kernels.products.RowProduct takes of it."""
    if not form.group:
        return {"weight": packed["codes"], "scales": packed["scales"]}
    scale, zero = scale_and_zero(packed, form, 0, kept_type(packed, form, dtype))
    return {"weight": packed["codes"], "scales": scale, "zeros": zero, "group": form.group}


class Int8Linear(SlicedLinear):
    """Scales of rows. Multiplies by torch's packed kernel for few rows, by slices for many."""

    codes: torch.Tensor
    scales: torch.Tensor

    def held(self, packed: Packed, quantisation: Quantisation, device: torch.device) -> Packed:
        whole = self.in_features % _KERNEL_COLUMNS == 0
        works = whole and device.type == "cuda" and kernel_works(self.dtype, device)
        self.kernel_rows = _KERNEL_ROWS if works else 0
        scales = packed["scales"].to(device, self.dtype)
        return {"codes": packed["codes"].to(device), "scales": scales}

    def kernel(self, rows: torch.Tensor) -> torch.Tensor | None:
        if rows.shape[0] > self.kernel_rows:
            return None
        return _multiply(rows, self.codes, self.scales)

    def slice_product(self, rows: torch.Tensor, first: int, end: int) -> torch.Tensor:
        """By codes, the result scaled, as that has fewer numbers than the weight."""
        codes = self.codes[first:end].to(self.dtype)
        return (rows @ codes.T).mul_(self.scales[first:end])

    def weight_rows(self, first: int, end: int) -> torch.Tensor:
        return self.codes[first:end].to(self.dtype).mul_(self.scales[first:end].unsqueeze(1))


def _multiply(rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.ops.aten._weight_int8pack_mm(rows.contiguous(), codes, scales)
    return out


@functools.cache
def kernel_works(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch's kernel is there for `dtype` on `device`, right, and worth using."""
    if dtype != torch.bfloat16:
        return False
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-_MOST, _MOST + 1, (64, 128), generator=generator).to(torch.int8)
    scales = torch.rand(64, generator=generator).to(torch.bfloat16)
    weight = codes.double() * scales.double().unsqueeze(1)
    return agrees(
        lambda rows: _multiply(rows, codes.to(device), scales.to(device)), weight, dtype, device
    )


_HIGH = 16
"""What a step of the high nibble of a code is worth."""
_CHUNK = 1 << 20  # codes that are split at a time


def layer_for(form: Quantisation, dtype: torch.dtype, device: torch.device) -> type[SlicedLinear]:
    """The way to multiply by codes in groups that is the fastest here."""
    kernel = int4_kernels.best_form(dtype, device, int4_kernels.kernel_group(2 * form.group))
    return Int8GroupLinear if kernel is int4_kernels.PLAIN else NibblesLinear


class Int8GroupLinear(SlicedLinear):
    """Multiplies by slices of the codes as they are stored."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None

    def held(self, packed: Packed, quantisation: Quantisation, device: torch.device) -> Packed:
        self.group = quantisation.group
        scale, zero = scale_and_zero(packed, quantisation, 0, self.dtype)
        self.register_buffer("zeros", None if zero is None else zero.to(device), persistent=False)
        return {"codes": packed["codes"].to(device), "scales": scale.to(device)}

    def weight_rows(self, first: int, end: int) -> torch.Tensor:
        """code * scale + zero."""
        codes = self.codes[first:end].to(self.dtype).view(end - first, -1, self.group)
        weight = codes.mul_(self.scales[first:end].unsqueeze(2))
        if self.zeros is not None:
            weight.add_(self.zeros[first:end].unsqueeze(2))
        return weight.view(end - first, -1)


class NibblesLinear(SlicedLinear):
    """Multiplies by torch's CUDA kernel for 4 bits, as torch has none for 8 bits in groups.

    A code + 128 is 16 high + low, two nibbles. So the weight is one of twice the columns in 4 bits,
    each group's high nibbles and then its low ones, with the scale of the group, for rows that hold
    16 x and x.
    """

    tiles: torch.Tensor
    scales: torch.Tensor
    factors: torch.Tensor

    def held(self, packed: Packed, quantisation: Quantisation, device: torch.device) -> Packed:
        wide = int4_kernels.kernel_group(2 * quantisation.group)
        self.group = wide // 2
        self.form = int4_kernels.best_form(self.dtype, device, wide)
        scale, zero = scale_and_zero(packed, quantisation, 0, torch.float32)
        # The kernel takes 8 from each nibble: 136 from a code + 128. It adds its zero 17 times.
        zero = scale * (_HIGH // 2) + (0 if zero is None else zero)
        pairs = int4_kernels.paired(scale, zero / (_HIGH + 1), torch.bfloat16)
        pairs = pairs.repeat_interleave(quantisation.group // self.group, 0)
        return {
            "tiles": self.form.convert(_nibbles(packed["codes"], self.group), device),
            "scales": pairs.to(device),
            "factors": torch.tensor([[_HIGH], [1]], dtype=torch.bfloat16, device=device),
        }

    def kernel(self, rows: torch.Tensor) -> torch.Tensor | None:
        if self.form is int4_kernels.PLAIN:
            return None
        parts = rows.view(rows.shape[0], -1, 1, self.group).to(torch.bfloat16) * self.factors
        twice = parts.view(rows.shape[0], -1)
        result = self.form.multiply(twice, self.tiles, 2 * self.group, self.scales)
        return result[:, : self.out_features].to(self.dtype)

    def slice_rows(self, device: torch.device) -> int:
        tile = 2 * self.tiles.shape[2]
        return max(1, super().slice_rows(device) // tile) * tile

    def slice_product(self, rows: torch.Tensor, first: int, end: int) -> torch.Tensor:
        """By scaled codes, and the zeros by themselves, as of these there are fewer."""
        scaled, zero = self._slice(first, end)
        sums = rows.view(rows.shape[0], -1, self.group).sum(2)
        return (rows @ scaled.view(self.in_features, -1) + sums @ zero)[:, : end - first]

    def weight_rows(self, first: int, end: int) -> torch.Tensor:
        """code * scale + zero."""
        scaled, zero = self._slice(first, end)
        return scaled.add_(zero.unsqueeze(1)).view(self.in_features, -1).T[: end - first]

    def _slice(self, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes * scale [groups, group, rows] and zeros [groups, rows] of some whole tiles."""
        half = self.tiles.shape[2]
        tiles = self.tiles[first // (2 * half) : -(-end // (2 * half))]
        groups = self.in_features // self.group
        split = tiles.view(-1, groups, 2, self.group, half)
        high, low = split.permute(2, 1, 3, 0, 4).contiguous()
        # Of a byte the low nibble is of a row in the tile's first half, the high one in its second.
        shifted = torch.stack(((high << 4) | (low & 15), (high & 240) | (low >> 4)), dim=3)
        codes = shifted.bitwise_xor_(128).view(torch.int8).view(groups, self.group, -1)
        pairs = self.scales[:, first : first + codes.shape[2]].to(self.dtype)
        scale, zero = pairs.permute(2, 0, 1)
        scaled = codes.to(self.dtype).mul_(scale.unsqueeze(1))
        return scaled, zero * (_HIGH + 1) - scale * (_HIGH // 2)


def _nibbles(codes: torch.Tensor, group: int) -> torch.Tensor:
    """Tiles of the nibbles of codes [out, columns] + 128: of each group the high, then the low."""
    out, columns = codes.shape
    tiles = torch.zeros(-(-out // TILE), 2 * columns, TILE // 2, dtype=torch.uint8)
    step = max(1, _CHUNK // columns // TILE) * TILE
    for first in range(0, out, step):
        shifted = codes[first : first + step].view(torch.uint8) ^ 128
        grouped = shifted.view(shifted.shape[0], -1, 1, group)
        both = torch.cat((grouped >> 4, grouped & 15), dim=2)
        int4_kernels.store(both.view(shifted.shape[0], -1), tiles[first // TILE :])
    return tiles
