"""Mixture of experts: one linear layer per expert and matrix, under the names of the checkpoint."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.activations import ACT2FN


class Expert(nn.Module):
    """One gated feed-forward network."""

    def __init__(self, hidden: int, inner: int, activation: str) -> None:
        """Matrices of `hidden` to `inner` columns and back, without biases."""
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        self._activation = ACT2FN[activation]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        inner = self._activation(self.gate_proj(rows)) * self.up_proj(rows)
        out: torch.Tensor = self.down_proj(inner)
        return out


class Experts(nn.ModuleList):
    """Takes the place of transformers' experts, whose matrices are fused into one tensor each.

    Checkpoints hold them one by one, and so they can be loaded and quantised one by one.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(
            Expert(config.hidden_size, config.moe_intermediate_size, config.hidden_act)
            for _ in range(config.num_experts)
        )

    def forward(
        self, rows: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor
    ) -> torch.Tensor:
        """The sum of what each row's experts make of it, by their shares.

        `rows` [n, hidden]; `chosen` int64 [n, k]: the experts of each row; `shares` [n, k].
        Returns [n, hidden]. An expert that no row chose is not touched.
        """
        out = torch.zeros_like(rows)
        # In the order of the experts, so that sums are rounded as transformers rounds them.
        for number in torch.unique(chosen).tolist():
            row, rank = torch.where(chosen == number)
            made = self[number](rows[row]) * shares[row, rank, None]
            out.index_add_(0, row, made.to(out.dtype))
        return out


def separate_experts(layer: nn.Module, config: PretrainedConfig) -> None:
    """Replace the fused experts of a decoder layer, if it has any, by `Experts`."""
    if hasattr(layer.mlp, "experts"):
        layer.mlp.experts = Experts(config)
