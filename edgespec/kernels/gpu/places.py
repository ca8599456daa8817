"""Where rows find what they see, by position: what attention and states on a GPU go by."""

from __future__ import annotations

from typing import NamedTuple

import torch

from edgespec.types.boundaries import AHEAD, STRIDE

PATH = 64
"""Slots in a row's path over a state: a power of two, with room for more than a row has."""
assert PATH > AHEAD + STRIDE


class Places(NamedTuple):
    """Where R rows find their keys: `slots` int32 [R, P], the slot that a row sees at each
    position, or -1; `common` int32 [P], the slot that all rows see there that see any, as far as
    the first `shared` int32 [1] positions; `rows` int64 [R], their own positions, from 0 on."""

    slots: torch.Tensor
    common: torch.Tensor
    shared: torch.Tensor
    rows: torch.Tensor


def places_of(mask: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> Places:
    """The places of rows at positions `rows` int64 [R], in a cache of slots at positions `slots`
    int64 [T], by a mask bool [R, T].

    Of each position from that of slot 0 on, which all see, a row must see one slot, up to its own
    position. Nothing here waits for the device.
    """
    count, width = mask.shape
    slots, rows = slots - slots[:1], (rows - slots[:1]).clamp(0, width - 1)
    numbers = torch.arange(width, dtype=torch.int32, device=mask.device).expand(count, width)
    # What a row does not see goes behind all positions, where nothing is read.
    where = torch.where(mask, slots, width)
    table = numbers.new_full((count, width + 1), -1).scatter_(1, where, numbers)[:, :width]
    common = table.amax(0)
    agree = ((table == common) | (table < 0)).all(0)
    shared = agree.to(torch.int32).cumprod(0, dtype=torch.int32).sum(0, dtype=torch.int32)
    return Places(table.contiguous(), common, shared.view(1), rows)


class Paths(NamedTuple):
    """Where R rows over states find what they read, counted from the first slot that was not given
    back: `slots` int32 [R, PATH], those of a row's path from its boundary on, the last one its own,
    before them -1; `every` int32 [T], all in order; from `new` on those of these rows."""

    slots: torch.Tensor
    every: torch.Tensor
    new: int
