"""Blocks of a one-pass head in training: where they stand in a text, and what their slots see."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from edgespec.drafting.dspark.head import Attend, BlockPlaces
from edgespec.drafting.dspark.shape import DSparkShape
from edgespec.training.texts import TextRows


class Blocks(NamedTuple):
    """K blocks in each of B rows of text.

    `anchors` int64 [B, K]: positions of their first slots. `revealed` int64 [B, K]: how many tokens
    behind the anchor the block is shown. `places` int64 [B, K · block]: positions of the slots.
    `shown` bool, as `places`: slots that hold the text's own token, the others are masks.
    `sources` int64, as `places`: positions of the tokens before the slots' guesses. `weights`, as
    `places`: how much a slot's guess counts; 0 for one that the slot sees, or that is behind the
    text.
    """

    anchors: torch.Tensor
    revealed: torch.Tensor
    places: torch.Tensor
    shown: torch.Tensor
    sources: torch.Tensor
    weights: torch.Tensor


def drawn(
    rows: TextRows, shape: DSparkShape, count: int, fading: float, dice: torch.Generator
) -> Blocks:
    """Blocks at random places of the text that counts.

    An anchor is a token of the base's own (in drafting the newest one, whose rows are not there
    yet), with at least one behind it. To three quarters of the blocks `shape.revealed` tokens
    behind it are shown, as those that travel are in a ring; to the others 0 to so many, each as
    often. The guess `depth` tokens behind what is shown counts exp(-depth / fading), DFlash's rule.
    """
    batch = len(rows)
    first = rows.starts.clamp(min=0)[:, None] + 1
    room = (rows.ends[:, None] - 1 - first).clamp(min=1)
    anchors = first + (torch.rand(batch, count, generator=dice) * room).long()
    anchors = anchors.clamp(max=rows.tokens.shape[1] - 1)
    shares = torch.rand(batch, count, generator=dice)
    # Of a causal block that is shown all, the first slots are lessons of fewer that are shown.
    revealed = (4 * shares * (shape.revealed + 1)).long().clamp(max=shape.revealed)
    return blocks_at(anchors, revealed, rows, shape, fading)


def blocks_at(
    anchors: torch.Tensor,
    revealed: torch.Tensor,
    rows: TextRows,
    shape: DSparkShape,
    fading: float = math.inf,
) -> Blocks:
    """Blocks at these anchors, int64 [B, K], each with so many tokens behind it shown."""
    slot = torch.arange(shape.block, device=anchors.device)
    ends = rows.ends.to(anchors.device)[:, None, None]
    places = anchors[:, :, None] + slot
    shown = (slot <= revealed[:, :, None]) & (places < ends)
    guessed = places + shape.offset
    depth = (slot + shape.offset - 1 - revealed[:, :, None]).clamp(min=0)
    # A causal block's slots do not see what they guess, also where it is shown. The anchor's slot
    # of a head that guesses each slot's own place guesses nothing.
    seen = torch.zeros_like(revealed) if shape.causal else revealed
    counts = (slot + shape.offset > seen[:, :, None]) & (guessed < ends)
    weights = torch.exp(-depth / fading) * counts
    last = rows.tokens.shape[1] - 1
    return Blocks(
        anchors,
        revealed,
        places.flatten(1),
        shown.flatten(1),
        (guessed - 1).clamp(max=last).flatten(1),
        weights.flatten(1),
    )


def beside(shape: DSparkShape, places: BlockPlaces) -> Attend:
    """Attention in which every slot sees the context before its block's anchor, and its block.

    The same as by packed_masks(...) of a head without windows, without the products of slots
    with other blocks' slots: those would be most of the work.
    """
    context, slots = places
    size = shape.block
    hidden = context[:, None, :] >= slots[:, ::size].repeat_interleave(size, 1)[:, :, None]
    later = torch.ones((size, size), dtype=torch.bool, device=slots.device).triu(1)

    def attend(
        layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        batch, heads, rows, wide = query.shape
        kinds, far = key.shape[1], key.shape[2] - rows
        query = query.unflatten(1, (kinds, -1)) * wide**-0.5
        group = query.shape[2]
        flat = query.flatten(2, 3)
        before = (flat @ key[:, :, :far].transpose(2, 3)).unflatten(2, (group, rows))
        before = before.masked_fill(hidden[:, None, None], float("-inf"))
        near = key[:, :, None, far:].unflatten(3, (-1, size))
        inside = query.unflatten(3, (-1, size)) @ near.transpose(-1, -2)
        if shape.causal:
            inside = inside.masked_fill(later, float("-inf"))
        scores = torch.cat([before, inside.flatten(3, 4)], -1)
        wide_scores = scores.float() if scores.dtype == torch.bfloat16 else scores
        share = torch.softmax(wide_scores, -1).to(value.dtype)
        seen = (share[..., :far].flatten(2, 3) @ value[:, :, :far]).unflatten(2, (group, rows))
        own = value[:, :, None, far:].unflatten(3, (-1, size))
        seen = seen + (share[..., far:].unflatten(3, (-1, size)) @ own).flatten(3, 4)
        out: torch.Tensor = seen.reshape(batch, heads, rows, wide)
        return out

    return attend
