"""Rounding: what the kinds share when they pack a weight, chunk by chunk of its rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from edgespec.errors import ModelError

_CHUNK = 1 << 20  # weights in float32 at a time: 4 MiB, and some temporaries of that size
Parts = dict[str, tuple[torch.Size, torch.dtype]]
Packed = dict[str, torch.Tensor]


def row_chunks(weight: torch.Tensor, multiple: int = 1) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, float32 copy of some rows), in order; all but the last have a multiple of rows.

    Raises ModelError for a weight with infinite values or NaNs.
    """
    step = max(1, _CHUNK // weight.shape[1] // multiple) * multiple
    for first in range(0, weight.shape[0], step):
        chunk = weight[first : first + step].to(torch.float32, copy=True)
        if not torch.isfinite(chunk).all():
            raise ModelError(
                "it holds values that are not finite numbers in float32; download the model again"
            )
        yield first, chunk


def inverse(scale: torch.Tensor) -> torch.Tensor:
    """1 / scale, and 0 where the scale is 0, as it is for constant weights."""
    return torch.where(scale > 0, 1 / scale, torch.zeros_like(scale))
