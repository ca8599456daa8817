"""int8: codes of 8 bits, with a scale for each row of the weight, or for groups of columns."""

from __future__ import annotations

from typing import Any

import torch

from edgespec.config import Quantisation
from edgespec.model.quantised.group_scales import kept_type, scale_and_zero, scale_parts
from edgespec.model.quantised.rounding import Packed, Parts, inverse, row_chunks
from edgespec.model.quantised.slices import SlicedLinear

_MOST = 127


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
    """Scales of rows. Multiplies by slices of the codes."""

    codes: torch.Tensor
    scales: torch.Tensor

    def held(self, packed: Packed, quantisation: Quantisation, device: torch.device) -> Packed:
        scales = packed["scales"].to(device, self.dtype)
        return {"codes": packed["codes"].to(device), "scales": scales}

    def slice_product(self, rows: torch.Tensor, first: int, end: int) -> torch.Tensor:
        """By codes, the result scaled, as that has fewer numbers than the weight."""
        codes = self.codes[first:end].to(self.dtype)
        return (rows @ codes.T).mul_(self.scales[first:end])

    def weight_rows(self, first: int, end: int) -> torch.Tensor:
        return self.codes[first:end].to(self.dtype).mul_(self.scales[first:end].unsqueeze(1))


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

    def numbers(self, codes: torch.Tensor) -> torch.Tensor:
        """What some rows of codes stand for, [rows, in] in `dtype`, in new memory."""
        return codes.to(self.dtype)

    def weight_rows(self, first: int, end: int) -> torch.Tensor:
        """code * scale + zero."""
        codes = self.numbers(self.codes[first:end]).view(end - first, -1, self.group)
        weight = codes.mul_(self.scales[first:end].unsqueeze(2))
        if self.zeros is not None:
            weight.add_(self.zeros[first:end].unsqueeze(2))
        return weight.view(end - first, -1)
