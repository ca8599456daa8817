"""Two-region KV cache: one request's rows in each layer, committed ones first, then speculative.

What a row has in a layer are its keys and values, or whatever later rows read of it (see RowForm).
The first committed rows may be stems: rows that several requests begin with, held once. Which rows
are is for tree.stems to say; here are the tensors, and the caches that share them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from edgespec.errors import LocalProtocolError
from edgespec.kernels.layers import Memory
from edgespec.model.folded_rows import FoldedRows
from edgespec.model.row_codes import CODED, as_held, coded_width
from edgespec.tree.ledger import IntArray
from edgespec.tree.stems import Fork

STEP = 64
"""Slots are given in multiples of so many."""


class RowForm(NamedTuple):
    """What a layer holds of each row: `parts` times `heads` times `width` numbers.

    Of attention these are keys and values, two parts; of a convolution one part, what it reads.
    `folded`: numbers that it holds in FoldedRows.
    """

    heads: int
    width: int
    parts: int = 2
    folded: int = 0


Held = torch.Tensor | tuple[torch.Tensor, ...]
"""A part of a layer's rows, as keys or values are, [1, heads, T, width], maybe as row_codes has
them; of a cache with stems in pieces, of which each has its share of the T slots, in order."""

AnyHeld = Held | list[Held]
"""Those of one request, or of each of several."""


class Stem:
    """Committed rows that several caches begin with; they never change.

    `layers`: [parts, heads, rows, width] of each layer.
    """

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        self.layers = list(layers)
        self.rows = self.layers[0].shape[2]
        self.views = [views(layer) for layer in self.layers]

    def split(self, rows: int) -> tuple[Stem, Stem]:
        """Its first `rows` rows, and the others, as two stems."""
        first = [layer.narrow(2, 0, rows).clone() for layer in self.layers]
        rest = [layer.narrow(2, rows, self.rows - rows).clone() for layer in self.layers]
        return Stem(first), Stem(rest)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(layer.nbytes for layer in self.layers)


class TwoRegionCache:
    """The rows of a block's layers, and the position of each slot's row; which slot holds which row
    is the RowLedger's knowledge. `length`: slots in use, in both regions together; it may
    be set lower, not into the stems. `places` int64 [capacity]: the positions.

    Slots are given as they are used: a cache that is full grows by an eighth, so that a row is
    copied about eight times however long the text gets, in microseconds. It grows one layer after
    the other: no more than one layer's rows are there twice.

    Keys carry their positions (rotary embedding at the absolute position), so rows may be moved
    freely: in all layers together, whatever each holds of them. Layers call `append`, those of
    transformers, whose Cache it replaces, `update`, with their index in the model, not the block.
    """

    _pieces: torch.Tensor | None
    """See Memory; made when asked for, until something moves."""

    def __init__(
        self,
        *,
        first_layer: int,
        forms: Sequence[RowForm],
        reserve: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        folded_as: torch.dtype | None = None,
    ) -> None:
        """Room for `reserve` rows in each of the layers from `first_layer` on, of these forms.

        `dtype`: CODED for rows in 8 bits (see row_codes); `folded_as`: of folded ones, None: the
        same.
        """
        self.first_layer = first_layer
        self.stems: tuple[Stem, ...] = ()
        self._before = 0  # slots of the stems
        self.length = 0
        self._dtype = dtype
        slots = _whole_steps(reserve)
        width = coded_width if dtype == CODED else int
        # [parts, heads, slots, width] of each layer: the slots after the stems.
        self._own = [
            _zeros((form.parts, form.heads, slots, width(form.width)), dtype, device)
            for form in forms
        ]
        widths = {n: form.folded for n, form in enumerate(forms, first_layer) if form.folded}
        self.folded: FoldedRows | None = None
        if widths:
            self.folded = FoldedRows(widths, folded_as or dtype, torch.device(device))
        self._cut()
        self.places = _zeros((slots,), torch.int64, device)

    @property
    def capacity(self) -> int:
        """Slots that there is memory for, those of the stems included."""
        return self._before + self._own[0].shape[2]

    @property
    def own_bytes(self) -> int:
        """Bytes of its rows, without those of the stems."""
        own = sum(layer.nbytes for layer in self._own)
        return own if self.folded is None else own + self.folded.nbytes

    @property
    def layers(self) -> int:
        """How many layers it is for."""
        return len(self._own)

    def layer(self, number: int) -> torch.Tensor:
        """The slots [parts, heads, slots, width] of the block's layer of that number; those of
        the stems are not among them. They move when the cache grows."""
        return self._own[number]

    @torch.inference_mode()
    def place(self, positions: torch.Tensor) -> torch.Tensor:
        """Note where the R rows that come next stand; return the positions of all rows.

        `positions` int64 [R]; returns int64 [length + R], in the order of the slots, which after
        the committed rows is not that of the positions. Like keys, they count once `advance` is
        called.
        """
        rows = positions.shape[0]
        self.make_room(rows)
        if self.folded is not None:
            self.folded.place(self.length, rows)
        self.places.narrow(0, self.length, rows).copy_(positions)
        return self.places.narrow(0, 0, self.length + rows)

    @torch.inference_mode()
    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int) -> tuple[Held, Held]:
        """Write new keys and values after the slots in use; return views of all.

        `key`, `value` [1, kv_heads, R, head_dim]; returns both as [1, kv_heads, length + R,
        head_dim], or in pieces (see Held). The new rows count only once `advance` is called, after
        the last layer.
        """
        rows = key.shape[2]
        self.make_room(rows)
        layer = layer_idx - self.first_layer
        keys, values = self._views[layer]
        begin = self.length - self._before
        keys.narrow(2, begin, rows).copy_(as_held(key, self._dtype))
        values.narrow(2, begin, rows).copy_(as_held(value, self._dtype))
        held_keys, held_values = self._held(layer, begin + rows)
        return held_keys, held_values

    def append(self, rows: torch.Tensor, layer_idx: int) -> tuple[Held, ...]:
        """The same of all parts together: `rows` [parts, heads, R, width]."""
        new = rows.shape[2]
        self.make_room(new)
        layer, begin = layer_idx - self.first_layer, self.length - self._before
        # One copy: each is an operation that the host has to launch.
        self._own[layer].narrow(2, begin, new).copy_(as_held(rows, self._dtype))
        return self._held(layer, begin + new)

    def held(self, rows: int, layer_idx: int) -> tuple[Held, ...]:
        """What `append` of so many rows gave, for another layer that reads the same keys."""
        return self._held(layer_idx - self.first_layer, self.length - self._before + rows)

    def _held(self, layer: int, end: int) -> tuple[Held, ...]:
        """Each part in the stems, and in the `end` slots behind them."""
        own = tuple(part.narrow(2, 0, end) for part in self._views[layer])
        if not self.stems:
            return own
        return tuple(zip(*(stem.views[layer] for stem in self.stems), own, strict=True))

    def memory(self, rows: int) -> Memory:
        """Where `rows` new rows, which there is room for (see `place`), and all before are."""
        if self._pieces is None:
            every = (
                [*(stem.layers[number] for stem in self.stems), own]
                for number, own in enumerate(self._own)
            )
            self._pieces = torch.tensor(
                [[(p.data_ptr(), p.shape[2]) for p in own] for own in every]
            )
        return Memory(self._dtype, self._pieces, self.length - self._before, rows)

    def advance(self, rows: int) -> None:
        """Take `rows` slots, written by all layers or (a stopped block) by some."""
        self.make_room(rows)
        self.length += rows

    @torch.inference_mode()
    def gather(self, start: int, order: IntArray) -> None:
        """After the first `start` slots keep slot `start + i` for i in `order`, in that order.

        Only rows that change their slot are moved. Raises LocalProtocolError for slots that are
        not in use, and for those of the stems.
        """
        behind = self.length - start
        count = len(order)
        if start < 0 or behind < 0 or (count and not 0 <= order.min() <= order.max() < behind):
            raise LocalProtocolError(
                f"gather behind slot {start} of {self.length} names slots that are not in use"
            )
        if start < self._before:
            raise LocalProtocolError(
                f"gather behind slot {start} moves some of {self._before} shared rows"
            )
        moved = np.flatnonzero(order != np.arange(count))
        if len(moved):
            skip = int(moved[0])
            source = torch.from_numpy(order[skip:] + (start - self._before)).to(self._device)
            first, rows = start - self._before + skip, count - skip
            for own in self._own:
                # index_select copies, so rows may move onto slots that others still have to leave.
                own.narrow(2, first, rows).copy_(own.index_select(2, source))
            if self.folded is not None:
                self.folded.move(start + skip, source + self._before)
            places = self.places.index_select(0, source + self._before)
            self.places.narrow(0, start + skip, rows).copy_(places)
        if self.folded is not None:
            self.folded.follow(start, start + (int(moved[0]) if len(moved) else count))
        self.length = start + count

    # --- rows that are shared -----------------------------------------------------------------

    @torch.inference_mode()
    def freeze(self, rows: int) -> None:
        """Make a stem of the first `rows` rows behind the stems; no other slot holds them then."""
        left = self.length - self._before - rows
        assert left >= 0
        slots, layers = _whole_steps(left), []
        for number, own in enumerate(self._own):
            layers.append(own.narrow(2, 0, rows).clone())
            self._own[number] = _resized(own.narrow(2, rows, left), slots)
        self.stems += (Stem(layers),)
        self._before += rows
        self._cut()
        self._place_anew()

    def replace(self, stem: Stem, by: Sequence[Stem]) -> None:
        """Hold `by`, which have the same rows, in the place of `stem`, if that is here."""
        self.stems = tuple(n for one in self.stems for n in (by if one is stem else (one,)))
        self._pieces = None

    @torch.inference_mode()
    def fork(self, stems: int, copied: int) -> TwoRegionCache:
        """A cache that begins with the first `stems` stems of this one, and with copies of the
        `copied` rows behind them."""
        other = object.__new__(TwoRegionCache)
        other.first_layer, other._dtype = self.first_layer, self._dtype
        other.stems = self.stems[:stems]
        other._before = sum(stem.rows for stem in other.stems)
        other.length = other._before + copied
        other.folded = None if self.folded is None else self.folded.fork(other.length)
        slots = _whole_steps(copied)
        other._own = [
            _resized(self._rows(layer, other._before, copied), slots)
            for layer in range(self.layers)
        ]
        other._cut()
        other.places = self.places
        other._place_anew()
        return other

    def goes_on(self, length: int) -> bool:
        """Whether other rows may follow its first `length` ones, here or in a fork."""
        return self.folded is None or self.folded.goes_on(length)

    def _rows(self, layer: int, first: int, count: int) -> torch.Tensor:
        """The rows [parts, heads, count, width] in slots that lie in one stem or behind all."""
        begin = 0
        for stem in self.stems:
            if first < begin + stem.rows:
                return stem.layers[layer].narrow(2, first - begin, count)
            begin += stem.rows
        return self._own[layer].narrow(2, first - begin, count)

    @property
    def _device(self) -> torch.device:
        return self._own[0].device

    def _cut(self) -> None:
        # Cut once, as slicing costs at each call.
        self._views = [views(layer) for layer in self._own]
        self._pieces = None

    @torch.inference_mode()
    def make_room(self, rows: int) -> None:
        """Grow, by an eighth at least, if `rows` more do not fit."""
        needed = self.length + rows
        if needed <= self.capacity:
            return
        slots = self.capacity - self._before
        larger = _whole_steps(max(needed - self._before, slots + slots // 8))
        for number, own in enumerate(self._own):
            # All old slots, not only those in use: a block may be between two of its layers.
            self._own[number] = _resized(own, larger)
            self._views[number] = views(self._own[number])
        self._pieces = None
        self._place_anew()

    def _place_anew(self) -> None:
        """Copy the positions into a tensor with room for those of all slots."""
        old = self.places[: self.capacity]
        self.places = _zeros((self.capacity,), torch.int64, self._device)
        self.places.narrow(0, 0, len(old)).copy_(old)


def views(layer: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The parts, [1, heads, slots, width], of a layer's [parts, ...]."""
    parts: tuple[torch.Tensor, ...] = layer.split(1)
    return parts


def _whole_steps(rows: int) -> int:
    """So many slots, or a few more; at least one step."""
    return max(STEP, -(-rows // STEP) * STEP)


def _resized(rows: torch.Tensor, slots: int) -> torch.Tensor:
    """A tensor of its own with these rows [parts, heads, R, width] in the first of its slots."""
    parts, heads, count, width = rows.shape
    larger = _zeros((parts, heads, slots, width), rows.dtype, rows.device)
    larger.narrow(2, 0, count).copy_(rows)
    return larger


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    # Not `empty`: in torch's attention a slot that no row sees still meets the softmax, with weight
    # 0, and 0 · NaN would spoil the rows that do not see it.
    return torch.zeros(shape, dtype=dtype, device=device)


class SharedCaches:
    """A cache for every open request (see tree.stems, which says what is shared)."""

    def __init__(self, new_cache: Callable[[int], TwoRegionCache]) -> None:
        """`new_cache` makes an empty one with room for so many rows."""
        self._new_cache = new_cache
        self._caches: dict[int, TwoRegionCache] = {}

    def __getitem__(self, request: int) -> TwoRegionCache:
        """Raises LocalProtocolError if the request is not open."""
        if request not in self._caches:
            raise LocalProtocolError(f"request {request} is not open on this block")
        return self._caches[request]

    def open(self, request: int, reserve: int) -> None:
        """An empty cache with room for `reserve` rows."""
        self._caches[request] = self._new_cache(reserve)

    def move(self, request: int, base: int) -> None:
        """A request goes on with the cache of `base`, which has none afterwards."""
        self._caches[request] = self[base]
        del self._caches[base]

    def fork(self, request: int, base: int, how: Fork) -> None:
        """A request begins with the first rows of `base`."""
        origin = self[base]
        if how.split:
            stem = origin.stems[how.stems - 1]
            two = stem.split(how.split)
            for cache in self._caches.values():
                cache.replace(stem, two)
        if how.frozen:
            origin.freeze(how.frozen)
        self._caches[request] = origin.fork(how.stems, how.copied)

    def close(self, request: int) -> None:
        """Free a request's cache, and the stems that it held last; unknown ones are ignored."""
        self._caches.pop(request, None)

    @property
    def rows(self) -> int:
        """Rows that are held, shared ones once."""
        own = sum(
            cache.length - sum(stem.rows for stem in cache.stems) for cache in self._caches.values()
        )
        return own + sum(stem.rows for stem in self._stems)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows that are held."""
        own = sum(cache.own_bytes for cache in self._caches.values())
        return own + sum(stem.nbytes for stem in self._stems)

    @property
    def _stems(self) -> list[Stem]:
        every = (stem for cache in self._caches.values() for stem in cache.stems)
        return list({id(stem): stem for stem in every}.values())
