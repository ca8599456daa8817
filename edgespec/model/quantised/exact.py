"""Exact linear: a matrix as kernels.products multiplies by it, as a module of a layer."""

from __future__ import annotations

import torch
from torch import nn

from edgespec.kernels.products import RowProduct


class ExactLinear(nn.Module):
    """y = x Wᵀ + bias on the CPU. All it holds are buffers."""

    def __init__(self, product: RowProduct) -> None:
        super().__init__()
        self.out_features, self.in_features = product.out_features, product.in_features
        self.product = product
        for name, part in product.held.items():
            self.register_buffer(name, part, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] in the dtype of the product to [..., out]."""
        if x.dim() == 2:  # as edgespec's own layers have it: each operation costs
            return self.product(x)
        rows = self.product(x.reshape(-1, self.in_features))
        return rows.reshape(*x.shape[:-1], self.out_features)


def row_product(weight: torch.Tensor, bias: torch.Tensor | None = None) -> RowProduct:
    """By a plain weight [out, in] on the CPU, which is not copied, and a bias of its dtype."""
    held = weight.detach().contiguous()
    return RowProduct(held, (held.shape[0], held.shape[1]), held.dtype, bias=bias)
