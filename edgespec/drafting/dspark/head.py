"""A one-pass head: from the base's rows before an anchor to guesses for a block of positions.

The arithmetic of DFlash (arXiv 2602.06036) and DSpark (arXiv 2607.05147, §3.1); tensors have the
published names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from edgespec.drafting.dspark.shape import DSparkShape
from edgespec.drafting.eagle.head import (
    GatedMlp,
    NormGains,
    RopeAngles,
    apply_rope,
    normed,
    rope_at,
)

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""The layer's number, queries [B, heads, R, head_dim] of the slots, keys and values
[B, kv_heads, C + R, head_dim] of the context rows and the slots → as queries."""

Keep = Callable[[int, torch.Tensor, torch.Tensor], None]
"""The layer's number, keys and values [B, kv_heads, C, head_dim] of context rows."""


class BlockPlaces(NamedTuple):
    """Where rows stand, int64: `context` [B, C] or [1, C], `slots` [B, R] or [1, R]."""

    context: torch.Tensor
    slots: torch.Tensor


MARKOV = "markov_head.markov_w2.weight"
"""Has a row for each token that is guessed."""


class DSparkHead(nn.Module):
    """A head of the DSpark family without embedding and output matrix, which may be the base's.

    One pass takes C context rows and R slots of a batch of B. In training R is K blocks of
    `shape.block` slots, one after the other, for K anchors of the same text, and C is the whole
    text: `attend` is then training.blocks.beside(...). In drafting C is what became committed since
    the last pass (possibly nothing), R one block, and `attend` keeps the keys and values of context
    rows: those do not depend on the anchor.

        given   [B, C, taps · base_hidden]    the base's rows that enter its tapped layers
        context = head.context(given)         [B, C, hidden]
        block   [B, R, hidden]                embedded tokens; masks: `mask_rows` or mask_token's
        out     = head(context, block, BlockPlaces(...), attend)      [B, R, hidden], normed
        logits  = out @ output_matrix.T + head.markov(rows_of(token before each guess))
    """

    mask_embedding: nn.Parameter | None
    """[hidden], if the mask is no token."""

    def __init__(self, shape: DSparkShape) -> None:
        """A head with uninitialised weights; load them, or see training."""
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(shape.fused_width, shape.hidden, bias=False)
        self.hidden_norm, self.norm = NormGains(shape.hidden), NormGains(shape.hidden)
        self.layers = nn.ModuleList(_BlockLayer(shape) for _ in range(shape.layers))
        if shape.markov_rank:
            self.markov_head = _Markov(shape)
        own_mask = shape.mask_token is None
        self.mask_embedding = nn.Parameter(torch.zeros(shape.hidden)) if own_mask else None

    def spared(self, group: int) -> set[str]:
        """The matrices that stay plain where others are held in groups of so many columns (0: a row
        is one): the Markov head's if its rank is no multiple of a group. It is small."""
        divided = not group or self.shape.markov_rank % group == 0
        return set() if divided else {MARKOV.removesuffix(".weight")}

    def context(self, given: torch.Tensor) -> torch.Tensor:
        """What the base gave, as all layers read it: [.., C, hidden]."""
        return self._norm(self.fc(given), self.hidden_norm)

    def forward(
        self, context: torch.Tensor, block: torch.Tensor, places: BlockPlaces, attend: Attend
    ) -> torch.Tensor:
        """What the slots give, [B, R, hidden], as the output matrix takes it.

        `context` [B, C, hidden] of `context()`, C may be 0; `block` [B, R, hidden]; `attend` sees
        to what each slot sees.
        """
        context_angles, slot_angles = (self.angles(one, block.dtype) for one in places)
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, _BlockLayer)
            entering = self._norm(block, layer.input_layernorm)
            both = torch.cat([context, entering], 1)
            angles = RopeAngles(
                *(torch.cat(p, 2) for p in zip(context_angles, slot_angles, strict=True))
            )
            own = layer.self_attn
            query = self._heads(own.q_proj(entering), own.q_norm if self.shape.qk_norm else None)
            key = self._heads(own.k_proj(both), own.k_norm if self.shape.qk_norm else None)
            value = self._heads(own.v_proj(both), None)
            seen = attend(number, apply_rope(query, slot_angles), apply_rope(key, angles), value)
            block = block + own.o_proj(seen.transpose(1, 2).flatten(2))
            block = block + layer.mlp(self._norm(block, layer.post_attention_layernorm))
        return self._norm(block, self.norm)

    def keep(self, context: torch.Tensor, places: torch.Tensor, keep: Keep) -> None:
        """Have the keys and values of context rows [B, C, hidden] kept, without any slot; `places`
        int64 [B, C]."""
        angles = self.angles(places, context.dtype)
        for number, layer in enumerate(self.layers):
            own = layer.self_attn
            assert isinstance(own, _BlockAttention)
            key = self._heads(own.k_proj(context), own.k_norm if self.shape.qk_norm else None)
            keep(number, apply_rope(key, angles), self._heads(own.v_proj(context), None))

    def angles(self, places: torch.Tensor, dtype: torch.dtype) -> RopeAngles:
        """Rotary angles of rows at int64 positions [B, R]: [B, 1, R, head_dim]."""
        return rope_at(places[:, None], self.shape.rope, self.shape.head_dim, dtype)

    def markov(self, rows: torch.Tensor) -> torch.Tensor:
        """What the tokens before guesses add to their logits: [.., vocab].

        `rows` int64 [..]: of the tokens before (see rows_of); one of -1 adds nothing.
        """
        before = self.markov_head.markov_w1(rows.clamp(min=0)) * (rows >= 0)[..., None]
        out: torch.Tensor = self.markov_head.markov_w2(before)
        return out

    def _heads(self, projected: torch.Tensor, norm: NormGains | None) -> torch.Tensor:
        """Rows [B, R, heads · head_dim] as [B, heads, R, head_dim], normed by head."""
        split = projected.unflatten(2, (-1, self.shape.head_dim))
        split = split if norm is None else self._norm(split, norm)
        return split.transpose(1, 2)

    def _norm(self, rows: torch.Tensor, gains: NormGains) -> torch.Tensor:
        return normed(rows, gains, self.shape.eps)


class _BlockLayer(nn.Module):
    def __init__(self, shape: DSparkShape) -> None:
        super().__init__()
        self.input_layernorm = NormGains(shape.hidden)
        self.post_attention_layernorm = NormGains(shape.hidden)
        self.self_attn = _BlockAttention(shape)
        self.mlp = GatedMlp(shape.hidden, shape.intermediate)


class _BlockAttention(nn.Module):
    def __init__(self, shape: DSparkShape) -> None:
        super().__init__()
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, queries, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(shape.hidden, keys, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(shape.hidden, keys, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(queries, shape.hidden, bias=shape.o_bias)
        if shape.qk_norm:
            self.q_norm, self.k_norm = NormGains(shape.head_dim), NormGains(shape.head_dim)


class _Markov(nn.Module):
    """Logits of a token that follow from the one before it: [before, vocab], of low rank."""

    def __init__(self, shape: DSparkShape) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(shape.markov_rows, shape.markov_rank)
        self.markov_w2 = nn.Linear(shape.markov_rank, shape.vocab, bias=False)


def rows_of(tokens: torch.Tensor, shape: DSparkShape, scored: torch.Tensor | None) -> torch.Tensor:
    """The Markov head's row of each token int64 [..], -1 for a token that it does not know.

    `scored` int64 [vocab], ascending: the tokens that the head scores; None for all of them.
    """
    if scored is None or shape.markov_rows != len(scored):
        return tokens
    at = torch.searchsorted(scored, tokens).clamp(max=len(scored) - 1)
    return torch.where(scored[at] == tokens, at, -1)


def packed_masks(shape: DSparkShape, places: BlockPlaces) -> list[torch.Tensor]:
    """What each slot sees in each layer, bool [B, 1, R, C + R], of whole blocks side by side.

    A block stands at the position of its first slot, and sees the context before that, and itself.
    Layers without another window share a mask.
    """
    context, slots = places
    block = shape.block
    number = torch.arange(slots.shape[1], device=slots.device) // block
    anchors = slots[:, ::block].repeat_interleave(block, 1)
    before = context[:, None, :] < anchors[:, :, None]
    same = number[:, None] == number[None, :]
    earlier = same & (slots[:, None, :] <= slots[:, :, None])
    made: dict[int | None, torch.Tensor] = {}
    for window in {shape.window(layer) for layer in range(shape.layers)}:
        within = earlier if shape.causal else same.expand_as(earlier)
        sees = torch.cat([before.expand(len(within), -1, -1), within], 2)
        if window is not None:
            every = torch.cat([context.expand(len(slots), -1), slots], 1)
            sees = sees & (slots[:, :, None] - every[:, None, :] < window)
        made[window] = sees[:, None]
    return [made[shape.window(layer)] for layer in range(shape.layers)]
