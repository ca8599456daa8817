"""How fast this device reads memory and moves cache rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from edgespec.daemon.layer_times import settled
from edgespec.daemon.timing import Sample, timed
from edgespec.model.kv_cache import RowForm, TwoRegionCache

CACHE_ROWS = 2048
"""Rows of the cache of which every second one is gathered."""
MIB = 2**20
LEAST_BUFFER, MOST_BUFFER = 256 * MIB, 1024 * MIB


@dataclass(frozen=True, slots=True)
class Rate:
    """Bytes a second, of how many bytes at a time, and the times they come from."""

    per_second: float
    bytes: int
    sample: Sample


def memory_rate(device: torch.device, *, room: int, beyond_cache: int, seconds: float) -> Rate:
    """Reading a buffer larger than the caches, for its sum."""
    size = int(_buffer_size(room, beyond_cache))
    buffer = torch.ones(size // 4, dtype=torch.float32, device=device)

    def work() -> None:
        buffer.sum()
        settled(device)

    return _rate(size, work, seconds)


def gather_rate(
    device: torch.device,
    dtype: torch.dtype,
    kv_heads: int,
    head_dim: int,
    *,
    room: int,
    beyond_cache: int,
    seconds: float,
) -> Rate:
    """Keeping every second row of a cache; each byte that moves is read and written."""
    row = 2 * kv_heads * head_dim * dtype.itemsize
    layers = max(1, math.ceil(_buffer_size(room, beyond_cache) / (row * CACHE_ROWS)))
    cache = TwoRegionCache(
        first_layer=0,
        forms=[RowForm(kv_heads, head_dim)] * layers,
        reserve=CACHE_ROWS,
        dtype=dtype,
        device=device,
    )
    cache.advance(CACHE_ROWS)
    order = torch.arange(0, CACHE_ROWS, 2).numpy()

    def work() -> None:
        cache.gather(0, order)
        settled(device)
        cache.advance(CACHE_ROWS - len(order))

    moved = 2 * (len(order) - 1) * row * layers  # the first row stays where it is
    return _rate(moved, work, seconds)


def _buffer_size(room: int, beyond_cache: int) -> float:
    return min(max(beyond_cache, LEAST_BUFFER), MOST_BUFFER, room / 4)


def _rate(size: int, work: Callable[[], object], seconds: float) -> Rate:
    sample = timed({0: work}, seconds)[0]
    return Rate(size / sample.median, size, sample)
