"""Attention under a visibility mask, registered with transformers as "edgespec_tree"."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from edgespec.errors import ModelError
from edgespec.tree.ledger import BoolArray

ATTENTION = "edgespec_tree"
"""Name under which transformers' layers find `tree_attention`."""


def tree_mask(committed: int, sees: BoolArray, device: torch.device | str = "cpu") -> torch.Tensor:
    """The mask of rows that see all `committed` slots and, behind them, what `sees` says.

    `sees` bool [R, S]; returns bool [1, 1, R, committed + S].
    """
    rows, behind = sees.shape
    mask = torch.ones((1, 1, rows, committed + behind), dtype=torch.bool)
    mask[0, 0, :, committed:] = torch.from_numpy(sees)
    return mask.to(device)


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of R new rows over T cached rows, in the tensors' own dtype.

    `query` [1, heads, R, head_dim]; `key`, `value` [1, kv_heads, T, head_dim]; `attention_mask`
    bool [1, 1, R, T], true where a row sees a slot; every row must see at least one. Returns
    [1, R, heads, head_dim], and None in the place of the weights. Raises ModelError for variants
    of attention that it would otherwise silently leave out.
    """
    if softcap is not None or sliding_window is not None or dropout:
        raise ModelError(
            "this model's attention uses a soft cap, a sliding window or dropout, which edgespec "
            "does not compute; use a model with plain full attention"
        )
    heads, rows, head_dim = query.shape[1:]
    kv_heads = key.shape[1]
    group = heads // kv_heads
    if group > 1:
        # The queries that share a key head become rows of that head: no kernel needs to know of
        # grouped heads then, and the cache is never copied to repeat it for each of them.
        query = query.reshape(1, kv_heads, group * rows, head_dim)
        slots = attention_mask.shape[3]
        attention_mask = attention_mask.expand(1, group, rows, slots)
        attention_mask = attention_mask.reshape(1, 1, group * rows, slots)
    out = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(1, heads, rows, value.shape[3]).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, tree_attention)
