"""One by one: a model whose rows are run one a pass, in one block: what all others are compared
with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from edgespec.model.block import Block
from edgespec.model.kv_cache import TwoRegionCache
from edgespec.model.source import TensorSource
from edgespec.model.sources import open_source
from edgespec.model.tree_attention import tree_mask


class OneByOne:
    """Rows by their paths; each is run once."""

    def __init__(self, source: Path | TensorSource, dtype: str) -> None:
        """`dtype` may name that of caches behind a "+"."""
        source = open_source(source) if isinstance(source, Path) else source
        dtype, _, held = dtype.partition("+")
        self._block = Block(source, 0, source.layers, dtype, cache_dtype=held)
        # By path, the row at its end and a cache that holds the path and nothing else.
        self._known: dict[tuple[int, ...], tuple[torch.Tensor, TwoRegionCache]] = {}

    def row(self, path: list[int]) -> torch.Tensor:
        """The hidden row [H] at the end of a path."""
        known = tuple(path)
        while known and known not in self._known:
            known = known[:-1]
        for place in range(len(known), len(path)):
            before = self._known.get(tuple(path[:place]))
            cache = self._block.new_cache(1) if before is None else before[1].fork(0, place)
            self._known[tuple(path[: place + 1])] = self._next(path[place], cache), cache
        return self._known[tuple(path)][0]

    def straight(self, path: list[int]) -> list[torch.Tensor]:
        """All rows of a path, in one cache that is never forked."""
        cache = self._block.new_cache(1)
        return [self._next(token, cache) for token in path]

    def forget(self, trunk: list[int]) -> None:
        """Keep the paths along the trunk alone."""
        kept = {tuple(trunk[:end]) for end in range(1, len(trunk) + 1)}
        self._known = {path: known for path, known in self._known.items() if path in kept}

    def _next(self, token: int, cache: TwoRegionCache) -> torch.Tensor:
        """The row [H] of a token behind what a cache holds, which then has it too."""
        place = cache.length
        mask = tree_mask(place, np.ones((1, 1), np.bool_))
        row = self._block.forward(torch.tensor([token]), torch.tensor([place]), cache, mask)
        assert row is not None
        return row[0]
