"""Caches: what a TwoRegionCache holds, as one tensor."""

from __future__ import annotations

import torch

from edgespec.model.kv_cache import TwoRegionCache


def rows_of(cache: TwoRegionCache) -> torch.Tensor:
    """All its rows, those of its stems first, [numbers, rows]: what each layer holds of them."""
    return torch.cat(
        [
            torch.cat([*(stem.layers[number] for stem in cache.stems), own], 2)
            .narrow(2, 0, cache.length)
            .movedim(2, -1)
            .flatten(0, -2)
            for number, own in enumerate(cache._own)
        ]
    )
