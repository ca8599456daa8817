"""Static passes: layers over few rows of one request, in shapes that a CUDA graph can hold.

The host launches the operations of a layer one by one, which on a small board takes about as long
as the device takes for them. A captured pass is launched a group of layers at a time. For that
nothing in it may depend on a number that the host knows: rows are padded to a bucket, keys and
values are written by index, and attention goes over a bucket of slots under a mask.
"""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch

from edgespec.model.cuda_graphs import Captured, GraphMaker
from edgespec.model.joint import CachedPart, JointPass
from edgespec.model.kv_cache import TwoRegionCache, views
from edgespec.model.row_codes import as_held
from edgespec.types.static_shapes import ROW_BUCKETS, groups, room_for, row_bucket, slot_bucket
from edgespec.types.stop_check import StopCheck

log = logging.getLogger(__name__)

MOST_SHAPES = 24
"""Shapes, of all caches together, whose passes a block keeps; the least recently used goes."""


class Layers(Protocol):
    """What a static pass asks of the layers that it runs (see model.block)."""

    first: int
    end: int
    device: torch.device

    def enter(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        parts: Sequence[CachedPart],
        told: torch.Tensor | None,
    ) -> tuple[torch.Tensor, JointPass]:
        """The rows [R, H] that enter the first layer, and what all layers are given."""

    def layer(self, index: int, hidden: torch.Tensor, joint: JointPass) -> torch.Tensor:
        """Rows [R, H] after layer `index` of the block."""

    def leave(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows [R, H] after the last layer as they leave the block."""


class IndexedRows:
    """A cache's memory in the place of a TwoRegionCache: rows are written where `slots` says,
    and all of the first `end` slots are attended to."""

    def __init__(self, cache: TwoRegionCache, first: int, slots: torch.Tensor, end: int) -> None:
        """`first`: the model's layer that the block begins with; `slots` int64 [R]: a buffer."""
        self._first, self._slots, self._end = first, slots, end
        self._places = cache.places
        self._layers = [cache.layer(number) for number in range(cache.layers)]
        self._views = [views(layer) for layer in self._layers]

    def place(self, positions: torch.Tensor) -> torch.Tensor:
        """Note where the R rows stand; returns the positions int64 [end] of all slots."""
        self._places.index_copy_(0, self._slots, positions)
        return self._places.narrow(0, 0, self._end)

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values [1, kv_heads, R, head_dim]; returns views of the first `end`."""
        keys, values = self._views[layer_idx - self._first]
        keys.index_copy_(2, self._slots, as_held(key, keys.dtype))
        values.index_copy_(2, self._slots, as_held(value, values.dtype))
        return keys.narrow(2, 0, self._end), values.narrow(2, 0, self._end)

    def append(self, rows: torch.Tensor, layer_idx: int) -> tuple[torch.Tensor, ...]:
        """The same of all parts together: `rows` [parts, heads, R, width]."""
        layer = self._layers[layer_idx - self._first]
        layer.index_copy_(2, self._slots, as_held(rows, layer.dtype))
        return self.held(rows.shape[2], layer_idx)

    def held(self, rows: int, layer_idx: int) -> tuple[torch.Tensor, ...]:
        """What `append` gave, for another layer that reads the same keys."""
        views = self._views[layer_idx - self._first]
        return tuple(part.narrow(2, 0, self._end) for part in views)

    def advance(self, rows: int) -> None:
        """The cache itself counts."""


class StaticPass:
    """One shape of a pass over one cache's memory: its buffers, and its graphs once captured.

    Padding rows are at position 0, see slot 0 alone and write behind the real rows, into slots that
    nothing sees and the next rows overwrite. So all they compute is finite: what a row does not see
    still meets its softmax, with weight 0.
    """

    def __init__(
        self,
        layers: Layers,
        cache: TwoRegionCache,
        rows: int,
        end: int,
        like: torch.Tensor,
        told: torch.Tensor | None,
    ) -> None:
        """For `rows` rows and the first `end` slots; `like`, `told`: inputs of the same kind, and
        what layers are told of tokens (see Block.token_rows)."""
        device = layers.device
        self._layers = layers
        self._told = None if told is None else told.new_zeros((rows, *told.shape[1:]))
        self._inputs = torch.zeros((rows, *like.shape[1:]), dtype=like.dtype, device=device)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self._counted = torch.arange(rows, device=device)
        self._slots = self._counted.clone()
        self._mask = torch.zeros((1, 1, rows, end), dtype=torch.bool, device=device)
        indexed = IndexedRows(cache, layers.first, self._slots, end)
        self._part = CachedPart(0, indexed, self._mask)
        # Of the pass that runs or was captured: the rows so far, and what all layers are given. Its
        # masks and turns are read by every graph, so they are kept as long as those.
        self._hidden: torch.Tensor | None = None
        self._joint: JointPass | None = None
        self._groups = groups(layers.end - layers.first)
        self._graphs: list[Captured] = []
        self._warm = False

    def fill(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        length: int,
        told: torch.Tensor | None,
    ) -> None:
        """Take the rows of the next pass, after `length` slots in use."""
        rows, slots = mask.shape[2:]
        if self._told is not None and told is not None:
            self._told.narrow(0, 0, rows).copy_(told)
        self._inputs.narrow(0, 0, rows).copy_(inputs)
        self._positions.zero_()
        self._positions.narrow(0, 0, rows).copy_(positions)
        torch.add(self._counted, length, out=self._slots)
        self._mask.zero_()
        self._mask.narrow(3, 0, 1).fill_(True)
        self._mask.narrow(2, 0, rows).narrow(3, 0, slots).copy_(mask)

    def run(self, maker: GraphMaker, rows: int, stop: StopCheck | None) -> torch.Tensor | None:
        """Hidden rows [rows, H] of what was filled in; None if `stop()` was true before a group.

        The first pass prepares for a capture, the second one is captured: shapes that come once
        are not. Raises RuntimeError if the capture fails, before anything of this pass is done.
        """
        if self._warm and not self._graphs:
            self._graphs = [maker.capture(partial(self._run, *group)) for group in self._groups]
        for number, group in enumerate(self._groups):
            if stop is not None and stop():
                return None
            if self._graphs:
                self._graphs[number].replay()
            else:
                maker.warm(partial(self._run, *group))
        self._warm = True
        assert self._hidden is not None
        return self._hidden.narrow(0, 0, rows).clone()

    def _run(self, first: int, end: int) -> None:
        """What is captured as one graph: some layers, with what comes before and after them."""
        layers = self._layers
        if first == 0:
            self._hidden, self._joint = layers.enter(
                self._inputs, self._positions, [self._part], self._told
            )
        assert self._hidden is not None
        assert self._joint is not None
        for index in range(first, end):
            self._hidden = layers.layer(index, self._hidden, self._joint)
        if end == layers.end - layers.first:
            self._hidden = layers.leave(self._hidden)


class StaticPasses:
    """The static passes of one block's layers.

    They are made for a cache's memory where it lies, and go with it: when a cache grows, or ends.
    """

    def __init__(self, layers: Layers, maker: GraphMaker) -> None:
        self._layers, self._maker = layers, maker
        self._passes: OrderedDict[tuple[int, ...], StaticPass] = OrderedDict()
        # Where each cache's memory lies, for which there are passes.
        self._memory: weakref.WeakKeyDictionary[TwoRegionCache, list[int]]
        self._memory = weakref.WeakKeyDictionary()
        self._failed = False

    def __len__(self) -> int:
        """Shapes that are kept."""
        return len(self._passes)

    @property
    def works(self) -> bool:
        """Whether no capture has failed so far."""
        return not self._failed

    def take(self, parts: Sequence[CachedPart]) -> bool:
        """Whether `forward` runs rows of these parts: not of several requests, nor very many, nor
        after rows that several requests share."""
        if not self.works or len(parts) != 1 or parts[0].rows > ROW_BUCKETS[-1]:
            return False
        cache = parts[0].cache
        return isinstance(cache, TwoRegionCache) and not cache.stems

    def forward(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        part: CachedPart,
        stop: StopCheck | None,
        told: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, bool]:
        """What Block.forward_joint returns for one part, asking `stop` between groups of layers;
        and whether it was done. False: a capture failed, and nothing was changed."""
        cache, rows = part.cache, part.rows
        assert isinstance(cache, TwoRegionCache)
        padded = row_bucket(rows)
        assert padded is not None
        cache.make_room(room_for(cache.length + padded) - cache.length)
        end = min(slot_bucket(cache.length + rows), cache.capacity)
        one = self._pass_for(cache, padded, end, inputs, told)
        one.fill(inputs, positions, part.mask, cache.length, told)
        try:
            hidden = one.run(self._maker, rows, stop)
        except RuntimeError as problem:
            self._failed = True
            self._passes.clear()
            log.warning(
                "CUDA graphs are off for layers %d to %d, which run slower so: a pass of %d rows "
                "could not be captured (%s)",
                self._layers.first,
                self._layers.end - 1,
                padded,
                problem,
            )
            return None, False
        cache.advance(rows)
        return hidden, True

    def _pass_for(
        self,
        cache: TwoRegionCache,
        rows: int,
        end: int,
        inputs: torch.Tensor,
        told: torch.Tensor | None,
    ) -> StaticPass:
        address = cache.layer(0).data_ptr()
        memory = self._memory.get(cache)
        if memory is None:
            memory = self._memory[cache] = [address]
            weakref.finalize(cache, self._forget, memory).atexit = False
        elif memory != [address]:
            self._forget(memory)
            memory[0] = address
        key = address, rows, end, inputs.dim()
        if key not in self._passes:
            self._passes[key] = StaticPass(self._layers, cache, rows, end, inputs, told)
            if len(self._passes) > MOST_SHAPES:
                self._passes.popitem(last=False)
        self._passes.move_to_end(key)
        return self._passes[key]

    def _forget(self, memory: list[int]) -> None:
        for key in [key for key in self._passes if key[0] in memory]:
            del self._passes[key]
