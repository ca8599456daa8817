"""An EAGLE head's one layer: from features of the base and the next token to the next features.

The arithmetic of the papers (EAGLE §4.1, EAGLE-3 §3.1); tensors have the published names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from edgespec.drafting.eagle.shape import HeadShape, Rope

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Queries [B, heads, R, head_dim], new keys and values [B, kv_heads, R, head_dim] → as queries."""


class RopeAngles(NamedTuple):
    """Cosines and sines [..., R, head_dim] of the rotary angles at some positions."""

    cos: torch.Tensor
    sin: torch.Tensor


class EagleHead(nn.Module):
    """An EAGLE head without embedding and output matrix, which may be the base's.

    Rows are pairs: the base's features at position p and the token at p + 1. Features go in and
    come out as [B, R, hidden]; what comes out for a pair imitates the features at p + 1.
    """

    def __init__(self, shape: HeadShape) -> None:
        """A head with uninitialised weights; load them, or see training."""
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(shape.fused_width, shape.hidden, bias=shape.fc_bias)
        self.layer = _Layer(shape)
        if shape.kind == "eagle3":
            self.norm = NormGains(shape.hidden)

    def features(self, given: torch.Tensor) -> torch.Tensor:
        """What the base gave, as the head takes it: [B, R, hidden].

        `given`: the rows after the base's final norm [B, R, hidden] ("eagle"), or the rows that
        enter its tapped layers side by side [B, R, taps · base_hidden] ("eagle3").
        """
        return self.fc(given) if self.shape.kind == "eagle3" else given

    def forward(
        self, features: torch.Tensor, embedded: torch.Tensor, angles: RopeAngles, attend: Attend
    ) -> torch.Tensor:
        """Features [B, R, hidden] of the positions after those of the pairs.

        `features`, `embedded` [B, R, hidden]: of the pairs. `attend` sees to what each row sees.
        """
        if self.shape.kind == "eagle3":
            read = self._norm(features, self.layer.hidden_norm)
            stream = read if self.shape.residual_normed else features
            entering = torch.cat([self._norm(embedded, self.layer.input_layernorm), read], -1)
        else:
            stream = entering = self.fc(torch.cat([embedded, features], -1))
        stream = stream + self._attention(entering, angles, attend)
        after = self._norm(stream, self.layer.post_attention_layernorm)
        out: torch.Tensor = stream + self.layer.mlp(after)
        return out

    def outgoing(self, features: torch.Tensor) -> torch.Tensor:
        """Features that came out of the layer, as the output matrix takes them."""
        return self._norm(features, self.norm) if self.shape.kind == "eagle3" else features

    def _norm(self, rows: torch.Tensor, gains: NormGains) -> torch.Tensor:
        return normed(rows, gains, self.shape.eps)

    def _attention(
        self, entering: torch.Tensor, angles: RopeAngles, attend: Attend
    ) -> torch.Tensor:
        batch, rows = entering.shape[:2]
        attention, dim = self.layer.self_attn, self.shape.head_dim

        def heads(projected: torch.Tensor) -> torch.Tensor:
            return projected.view(batch, rows, -1, dim).transpose(1, 2)

        query = apply_rope(heads(attention.q_proj(entering)), angles)
        key = apply_rope(heads(attention.k_proj(entering)), angles)
        seen = attend(query, key, heads(attention.v_proj(entering)))
        out: torch.Tensor = attention.o_proj(seen.transpose(1, 2).reshape(batch, rows, -1))
        return out


class _Layer(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        wide = shape.hidden
        self.self_attn = _Attention(shape)
        self.mlp = GatedMlp(wide, shape.intermediate)
        self.post_attention_layernorm = NormGains(wide)
        if shape.kind == "eagle3":
            self.input_layernorm, self.hidden_norm = NormGains(wide), NormGains(wide)


class _Attention(nn.Module):
    """The matrices of its attention; those of EAGLE-3 read token and features side by side."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        into = 2 * shape.hidden if shape.kind == "eagle3" else shape.hidden
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(into, queries, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(into, keys, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(into, keys, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(queries, shape.hidden, bias=shape.o_bias)


class GatedMlp(nn.Module):
    """The MLP of a Llama-like layer, [.., hidden] to the same."""

    def __init__(self, wide: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(wide, intermediate, bias=False)
        self.up_proj = nn.Linear(wide, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, wide, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(silu(self.gate_proj(rows)) * self.up_proj(rows))
        return out


class NormGains(nn.Module):
    """The gains of an RMS norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


def normed(rows: torch.Tensor, gains: NormGains, eps: float) -> torch.Tensor:
    """RMS norm of rows [.., width]."""
    # In float32 at least, as the reference has it: squares of bfloat16 lose too much.
    wide = rows.float() if rows.dtype in (torch.bfloat16, torch.float16) else rows
    return rms_norm(wide, rows.shape[-1:], eps=eps).to(rows.dtype) * gains.weight


def rope_at(positions: torch.Tensor, rope: Rope, head_dim: int, dtype: torch.dtype) -> RopeAngles:
    """Cosines and sines for int64 positions [.., R], computed in float32 (float64 for float64)."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    steps = torch.arange(0, head_dim, 2, dtype=exact, device=positions.device)
    frequencies = 1.0 / rope.theta ** (steps / head_dim)
    if rope.llama3 is None:
        frequencies = frequencies / rope.factor
    else:
        frequencies = _llama3(frequencies, rope.factor, *rope.llama3)
    angles = positions.to(exact)[..., None] * frequencies
    angles = torch.cat([angles, angles], -1)
    return RopeAngles(angles.cos().to(dtype), angles.sin().to(dtype))


def apply_rope(rows: torch.Tensor, angles: RopeAngles) -> torch.Tensor:
    """Rotary embedding of queries or keys [B, heads, R, head_dim]: halves, not pairs, turn."""
    first, second = rows.chunk(2, -1)
    return rows * angles.cos + torch.cat([-second, first], -1) * angles.sin


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Grouped-query attention; `mask` bool [.., R, T] says which slots each row sees."""
    group = query.shape[1] // key.shape[1]
    if group > 1:
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask)


def _llama3(
    frequencies: torch.Tensor, factor: float, low: float, high: float, original: int
) -> torch.Tensor:
    """Llama 3.1's rule: waves longer than the original context are slowed, short ones are not."""
    rotations = original * frequencies / (2 * math.pi)  # within the original context
    smooth = ((rotations - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies / factor * (1 - smooth) + frequencies * smooth
