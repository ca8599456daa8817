"""int8: codes of 8 bits, with a scale for each row of the weight, or for groups of columns."""

from __future__ import annotations

import functools
from typing import Any

import torch

from edgespec.config import Quantisation
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
