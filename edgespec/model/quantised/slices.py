"""Sliced linear: multiplying by a weight that exists dequantised only a few rows at a time."""

from __future__ import annotations

import torch
from torch import nn

from edgespec.config import Quantisation
from edgespec.model.quantised.rounding import Packed

CPU_SLICE = 1 << 20
"""Weights dequantised at a time, on a CPU: 2 MiB in bfloat16. Of 2^17 to 2^20 it was the fastest in
bfloat16 for int8 and nf4 (11008 x 4096, one thread); smaller slices pay more for the calls."""

CUDA_SLICE = 1 << 24
"""The same on CUDA, so that launches are few. Not measured."""


class SlicedLinear(nn.Module):
    """y = x Wᵀ + bias with a packed W [out, in]; each kind says how slices of W are multiplied.

    All it holds are buffers. A kind with a kernel for its packed form also says for which rows
    that is the faster way. Both ways compute the same up to rounding in `dtype`.
    """

    bias: torch.Tensor | None
    order: torch.Tensor | None

    def __init__(
        self,
        packed: Packed,
        bias: torch.Tensor | None,
        shape: torch.Size,
        quantisation: Quantisation,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = shape
        self.dtype = dtype
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)
        order = packed.get("order")
        self.register_buffer("order", None if order is None else order.to(device), persistent=False)
        for name, part in self.held(packed, quantisation, torch.device(device)).items():
            self.register_buffer(name, part, persistent=False)

    def held(self, packed: Packed, quantisation: Quantisation, device: torch.device) -> Packed:
        """The buffers that it keeps of a packed weight beside the order, on `device`."""
        raise NotImplementedError

    def kernel(self, rows: torch.Tensor) -> torch.Tensor | None:
        """x Wᵀ [R, out] by the packed form itself, or None where slices are to be used."""
        return None

    def slice_product(self, rows: torch.Tensor, first: int, end: int) -> torch.Tensor:
        """Columns [first, end) of x Wᵀ, [R, end - first]."""
        return rows @ self.weight_rows(first, end).T

    def weight_rows(self, first: int, end: int) -> torch.Tensor:
        """Rows [first, end) of W, dequantised, [end - first, in] in `dtype`; columns as stored."""
        raise NotImplementedError

    def slice_rows(self, device: torch.device) -> int:
        """Rows of W that are dequantised at a time; a slice begins at a multiple of it."""
        weights = CPU_SLICE if device.type == "cpu" else CUDA_SLICE
        return max(1, weights // self.in_features)

    def slices(self, device: torch.device) -> list[tuple[int, int]]:
        """First row and end of each slice."""
        step = self.slice_rows(device)
        return [
            (first, min(first + step, self.out_features))
            for first in range(0, self.out_features, step)
        ]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] in `dtype` to [..., out]."""
        flat = x.dim() == 2  # as edgespec's own layers have it: each operation costs
        rows = x if flat else x.reshape(-1, self.in_features)
        if self.order is not None:
            rows = rows.index_select(1, self.order)
        result = self.kernel(rows)
        if result is None:
            result = self.by_slices(rows)
        if self.bias is not None:
            result = result + self.bias
        return result if flat else result.reshape(*x.shape[:-1], self.out_features)

    def by_slices(self, rows: torch.Tensor) -> torch.Tensor:
        """x Wᵀ [R, out] of rows in the order of stored columns, one slice after the other."""
        result = rows.new_empty(rows.shape[0], self.out_features)
        for first, end in self.slices(rows.device):
            result[:, first:end] = self.slice_product(rows, first, end)
        return result

    def whole_weight(self) -> torch.Tensor:
        """W, dequantised, [out, in] in `dtype`, on the CPU."""
        weight = torch.empty(self.out_features, self.in_features, dtype=self.dtype)
        for first, end in self.slices(weight.device):
            weight[first:end] = self.weight_rows(first, end)
        if self.order is not None:
            weight[:, self.order] = weight.clone()
        return weight
