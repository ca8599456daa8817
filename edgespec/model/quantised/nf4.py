"""nf4: NormalFloat (QLoRA), a scale for each 64 columns, which may be quantised too; both are
bitsandbytes' own, bit for bit."""

from __future__ import annotations

from typing import Any

import torch

from edgespec.config import Quantisation
from edgespec.errors import ModelError
from edgespec.model.quantised.levels import table, unpacked
from edgespec.model.quantised.rounding import Packed, Parts, row_chunks
from edgespec.model.quantised.slices import SlicedLinear

KIND = "nf4"
_NESTED = 256  # scales that share a scale, where they are quantised too
_LEAST = 1e-38  # as bitsandbytes has it; a group of zeros is divided by this


def stored_parts(quantisation: Quantisation, shape: torch.Size) -> Parts:
    """`codes`: two a byte, the first in the high nibble; `scales`: the greatest of each group.

    With double quantisation a scale is a code of 8 bit: `nested_map[code]` times the one of
    `nested_scales` that it shares with 256 others, plus `nested_mean`.
    """
    out, columns = shape
    group = quantisation.group
    if columns % group:
        raise ModelError(
            f"nf4 with groups of {group} columns does not fit a weight of {columns} columns; "
            "choose int8"
        )
    scales = torch.Size((out, columns // group))
    parts = {
        "codes": (torch.Size((out, columns // 2)), torch.uint8),
        "scales": (scales, torch.uint8 if quantisation.double else torch.float32),
    }
    if quantisation.double:
        parts["nested_scales"] = (torch.Size((-(-scales.numel() // _NESTED),)), torch.float32)
        parts["nested_map"] = (torch.Size((256,)), torch.float32)
        parts["nested_mean"] = (torch.Size((1,)), torch.float32)
    return parts


def stored(codes: torch.Tensor, form: Quantisation, scales: Packed) -> Packed:
    """The stored form of bitsandbytes' codes, uint8 [out, in / 2], and their scales."""
    return {"codes": codes, **scales}


def pack(weight: torch.Tensor, quantisation: Quantisation) -> Packed:
    """Round to the nearest of the 16 levels times the greatest number of each group."""
    parts = stored_parts(quantisation, weight.shape)
    codes = torch.empty(parts["codes"][0], dtype=torch.uint8)
    scales = torch.empty(parts["scales"][0], dtype=torch.float32)
    for first, chunk in row_chunks(weight):
        end = first + chunk.shape[0]
        grouped = chunk.view(chunk.shape[0], -1, quantisation.group)
        scales[first:end] = grouped.abs().amax(2)
        grouped.mul_((1 / scales[first:end].clamp(min=_LEAST)).unsqueeze(2))
        nearest = _nearest(chunk, table(KIND))
        codes[first:end] = (nearest[:, ::2] << 4) | nearest[:, 1::2]
    if not quantisation.double:
        return {"codes": codes, "scales": scales}
    mean, numbers = scales.mean(), _dynamic_map()
    rest = (scales - mean).flatten()
    filled = rest.new_zeros(parts["nested_scales"][0].numel() * _NESTED)
    filled[: len(rest)] = rest
    shared = filled.view(-1, _NESTED).abs().amax(1)
    scaled = filled.view(-1, _NESTED) / shared.clamp(min=_LEAST).unsqueeze(1)
    return {
        "codes": codes,
        "scales": _nearest(scaled, numbers).flatten()[: len(rest)].view(scales.shape),
        "nested_scales": shared,
        "nested_map": numbers,
        "nested_mean": mean.view(1),
    }


def _nearest(scaled: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Of each value the place of the nearest of these ascending numbers, uint8."""
    return torch.bucketize(scaled, (numbers[1:] + numbers[:-1]) / 2).to(torch.uint8)


def _dynamic_map() -> torch.Tensor:
    """The 256 numbers that codes of scales stand for: a power of ten and, the larger that is, the
    more steps (arXiv 1511.04561)."""
    edges = [torch.linspace(0.1, 1, 2**power + 1) for power in range(7)]
    steps = [(some[:-1] + some[1:]) / 2 * 10.0 ** (at - 6) for at, some in enumerate(edges)]
    above = torch.cat(steps)
    return torch.cat((-above, torch.tensor([0.0, 1.0]), above)).sort().values


def plain_scales(packed: Packed, form: Quantisation) -> torch.Tensor:
    """Scales [out, groups], float32."""
    scales = packed["scales"]
    if not form.double:
        return scales
    shared = packed["nested_scales"].repeat_interleave(_NESTED)[: scales.numel()]
    return packed["nested_map"][scales.int()] * shared.view(scales.shape) + packed["nested_mean"]


def product_parts(packed: Packed, form: Quantisation, dtype: torch.dtype) -> dict[str, Any]:
    """What kernels.products.RowProduct takes of it."""
    scales, levels = plain_scales(packed, form), table(KIND)
    return {"weight": packed["codes"], "scales": scales, "levels": levels, "group": form.group}


class Nf4Linear(SlicedLinear):
    """Multiplies by slices that are looked up in the table."""

    codes: torch.Tensor
    scales: torch.Tensor
    levels: torch.Tensor

    def held(self, packed: Packed, quantisation: Quantisation, device: torch.device) -> Packed:
        self.group = quantisation.group
        parts = {"codes": packed["codes"], "scales": plain_scales(packed, quantisation)}
        return {name: part.to(device) for name, part in (parts | {"levels": table(KIND)}).items()}

    def weight_rows(self, first: int, end: int) -> torch.Tensor:
        """level * scale, rounded to float32 first."""
        numbers = self.levels[unpacked(self.codes[first:end], KIND).int()]
        grouped = numbers.view(end - first, -1, self.group)
        return grouped.mul_(self.scales[first:end].unsqueeze(2)).flatten(1).to(self.dtype)
