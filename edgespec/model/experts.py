"""Mixture of experts: one linear layer per expert and matrix, each with a name of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.activations import ACT2FN

Gate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Makes one row from what the gate's and the up matrix make of it."""


class Expert(nn.Module):
    """One gated feed-forward network."""

    def __init__(self, hidden: int, inner: int, gate: Gate, bias: bool) -> None:
        """Matrices of `hidden` to `inner` columns and back."""
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)
        self.gate = gate

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.gate(self.gate_proj(rows), self.up_proj(rows)))
        return out


class Experts(nn.ModuleList):
    """Takes the place of transformers' experts, whose matrices are fused into one tensor each.

    So they can be loaded and quantised one by one.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        """The experts of a layer, with biases and a clamped gate in gpt-oss."""
        clamped = config.model_type == "gpt_oss"
        inner = config.intermediate_size if clamped else config.moe_intermediate_size
        gate = _clamped(config) if clamped else _plain(config)
        super().__init__(
            Expert(config.hidden_size, inner, gate, bias=clamped) for _ in range(config.num_experts)
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
    mlp = getattr(layer, "mlp", None)
    if mlp is not None and hasattr(mlp, "experts"):
        mlp.experts = Experts(config)


def _plain(config: PretrainedConfig) -> Gate:
    activation = ACT2FN[config.hidden_act]

    def gate(gated: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = activation(gated) * up
        return out

    return gate


def _clamped(config: PretrainedConfig) -> Gate:
    """gpt-oss' gate: swish of a steeper slope, both of its sides clamped, and 1 added to one."""
    limit, slope = config.swiglu_limit, config.swiglu_alpha

    def gate(gated: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gated = gated.clamp(max=limit)
        return (up.clamp(-limit, limit) + 1) * (gated * torch.sigmoid(gated * slope))

    return gate
