"""Caches: what a TwoRegionCache holds, as one tensor."""

from __future__ import annotations

import torch

from edgespec.model.kv_cache import TwoRegionCache


def rows_of(cache: TwoRegionCache) -> torch.Tensor:
    """Keys and values of all its rows, those of its stems first: [layers, 2, kv_heads, rows, D]."""
    return torch.stack(
        [
            torch.cat([*(stem.layers[number] for stem in cache.stems), own], 2)
            .narrow(2, 0, cache.length)
            .clone()
            for number, own in enumerate(cache._own)
        ]
    )
