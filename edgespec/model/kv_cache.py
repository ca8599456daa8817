"""Two-region KV cache: one request's keys and values, committed rows first, then speculative."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from edgespec.errors import LocalProtocolError
from edgespec.tree.ledger import IntArray


class TwoRegionCache:
    """Keys and values of a block's layers in preallocated slots, and the position of each slot's
    row; which slot holds which row is the RowLedger's knowledge. `length`: slots in use, in both
    regions together; it may be set lower. `store`: [layers, 2, kv_heads, capacity, head_dim];
    `places` int64 [capacity]: the positions. Both move when the cache grows.

    Keys carry their positions (rotary embedding at the absolute position), so rows may be moved
    freely. Takes the place of transformers' Cache: attention calls `update` with its own layer
    index, which counts from the model's first layer, not from the block's.
    """

    def __init__(
        self,
        *,
        first_layer: int,
        layers: int,
        kv_heads: int,
        head_dim: int,
        reserve: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """Room for `reserve` rows in each of `layers` layers from `first_layer` on."""
        self._first_layer = first_layer
        self.length = 0
        capacity = max(1, reserve)
        self._use(_zeros((layers, 2, kv_heads, capacity, head_dim), dtype, device))
        self.places = _zeros((capacity,), torch.int64, device)

    @property
    def capacity(self) -> int:
        """Slots that there is memory for."""
        return self.store.shape[3]

    @torch.inference_mode()
    def place(self, positions: torch.Tensor) -> torch.Tensor:
        """Note where the R rows that come next stand; return the positions of all rows.

        `positions` int64 [R]; returns int64 [length + R], in the order of the slots, which after
        the committed rows is not that of the positions. Like keys, they count once `advance` is
        called.
        """
        rows = positions.shape[0]
        self.make_room(rows)
        self.places.narrow(0, self.length, rows).copy_(positions)
        return self.places.narrow(0, 0, self.length + rows)

    @torch.inference_mode()
    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new rows after the slots in use; return views of all rows.

        `key`, `value` [1, kv_heads, R, head_dim]; returns both as [1, kv_heads, length + R,
        head_dim]. The new rows count only once `advance` is called, after the last layer.
        """
        rows = key.shape[2]
        self.make_room(rows)
        keys, values = self._views[layer_idx - self._first_layer]
        end = self.length + rows
        keys.narrow(2, self.length, rows).copy_(key)
        values.narrow(2, self.length, rows).copy_(value)
        return keys.narrow(2, 0, end), values.narrow(2, 0, end)

    def advance(self, rows: int) -> None:
        """Take `rows` slots, written by all layers or (a stopped block) by some."""
        self.make_room(rows)
        self.length += rows

    @torch.inference_mode()
    def gather(self, start: int, order: IntArray) -> None:
        """After the first `start` slots keep slot `start + i` for i in `order`, in that order.

        Only rows that change their slot are moved. Raises LocalProtocolError for slots that are
        not in use.
        """
        behind = self.length - start
        count = len(order)
        if start < 0 or behind < 0 or (count and not 0 <= order.min() <= order.max() < behind):
            raise LocalProtocolError(
                f"gather behind slot {start} of {self.length} names slots that are not in use"
            )
        moved = np.flatnonzero(order != np.arange(count))
        if len(moved):
            skip = int(moved[0])
            source = torch.from_numpy(order[skip:] + start).to(self.store.device)
            # index_select copies, so rows may move onto slots that others still have to leave.
            tail = self.store.index_select(3, source)
            self.store.narrow(3, start + skip, count - skip).copy_(tail)
            places = self.places.index_select(0, source)
            self.places.narrow(0, start + skip, count - skip).copy_(places)
        self.length = start + count

    def _use(self, store: torch.Tensor) -> None:
        self.store = store
        # [1, kv_heads, capacity, head_dim] of every layer, cut once, as slicing costs at each call.
        self._views = [(layer[0].unsqueeze(0), layer[1].unsqueeze(0)) for layer in store]

    @torch.inference_mode()
    def make_room(self, rows: int) -> None:
        """Grow, at least twofold, if `rows` more do not fit."""
        needed = self.length + rows
        if needed <= self.capacity:
            return
        layers, two, heads, capacity, dim = self.store.shape
        larger = max(needed, 2 * capacity)
        device = self.store.device
        grown = _zeros((layers, two, heads, larger, dim), self.store.dtype, device)
        # All old slots, not only those in use: a block may be between two of its layers.
        grown.narrow(3, 0, capacity).copy_(self.store)
        self._use(grown)
        places = _zeros((larger,), torch.int64, device)
        places.narrow(0, 0, capacity).copy_(self.places)
        self.places = places


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    # Not `empty`: a slot that no row sees still meets the softmax with weight 0, and 0 · NaN
    # would spoil the rows that do not see it.
    return torch.zeros(shape, dtype=dtype, device=device)
