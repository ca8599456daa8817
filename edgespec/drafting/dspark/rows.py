"""Block rows: what a one-pass head ran for one request: keys of committed rows, and one block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from edgespec.drafting.base import PASS_ROWS
from edgespec.drafting.dspark.head import Attend, BlockPlaces, DSparkHead, packed_masks
from edgespec.drafting.dspark.shape import DSparkShape
from edgespec.drafting.eagle.head import attention
from edgespec.drafting.steps import Steps, call
from edgespec.model.kv_cache import TwoRegionCache

Embed = Callable[[torch.Tensor], torch.Tensor]


MASK = -1
"""Stands for a mask among tokens."""


class ShownRows(NamedTuple):
    """R slots that hold `tokens`, at the positions `places`, and which slots of the cache each of
    them sees, `sees` bool [R, T]: those that are held, the new context rows, and these slots."""

    tokens: Sequence[int]
    places: Sequence[int]
    sees: torch.Tensor


class NextBlocks(NamedTuple):
    """What a request needs of the next pass: `context` [C, hidden], committed rows from position
    `first` on, and whole blocks, side by side: each begins with its `tokens` at that
    position, the anchor's first, and has masks behind them. `last` [blocks, hidden]: the context
    rows before the anchors, for a head with direct maps. `shown`: slots in place of blocks, which
    stay in the cache; blocks are forgotten with their pass."""

    request: int
    shape: DSparkShape
    kv: TwoRegionCache
    first: int
    context: torch.Tensor
    blocks: Sequence[tuple[int, Sequence[int]]] = ()
    last: torch.Tensor | None = None
    shown: ShownRows | None = None

    @property
    def slots(self) -> int:
        """How many slots run."""
        return len(self.shown.tokens) if self.shown else self.shape.block * len(self.blocks)


class BlockPasses:
    """Passes of a one-pass head over the rows of one or several requests."""

    def __init__(
        self,
        head: DSparkHead,
        embed: Embed,
        dtype: torch.dtype,
        device: torch.device,
        ran: Callable[..., None],
        between_layers: Callable[[], object],
    ) -> None:
        """`embed` gives the vectors [R, hidden] of tokens int64 [R]; `ran` is told the rows of
        every pass, whose they were, and how many of them are of the base."""
        self.head, self.dtype, self.device = head, dtype, device
        self._embed, self._ran, self._between_layers = embed, ran, between_layers

    def new_cache(self) -> TwoRegionCache:
        shape = self.head.shape
        return TwoRegionCache(
            first_layer=0,
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            reserve=0,
            dtype=self.dtype,
            device=self.device,
        )

    @torch.inference_mode()
    def run(self, every: Sequence[NextBlocks]) -> Sequence[torch.Tensor]:
        """What the slots of each request's blocks give, [R, hidden]; its context rows are in its
        cache then."""
        contexts = [len(one.context) for one in every]
        slots = [one.slots for one in every]
        places = [self._places(one) for one in every]
        context = torch.cat([one.context for one in every])[None]
        where = BlockPlaces(*(torch.cat(part, 1) for part in zip(*places, strict=True)))
        out: torch.Tensor
        if sum(slots):
            block = torch.cat([self._embedded(one) for one in every])[None]
            attend = self._attend(every, contexts, slots, places)
            out = self.head(context, block, where, attend)[0]
        else:
            self._keep(every, contexts, context, where.context)
            out = context[0, :0]
        for one, rows in zip(every, contexts, strict=True):
            one.kv.advance(rows + (one.slots if one.shown else 0))
        joined = sum(contexts)
        self._ran(joined + sum(slots), *(one.request for one in every), joined=joined)
        return list(out.split(slots))

    def _places(self, one: NextBlocks) -> BlockPlaces:
        """Where its new context rows and its slots are, int64 [1, C] and [1, R]."""
        device = self.device
        context = torch.arange(one.first, one.first + len(one.context), device=device)
        if one.shown:
            places = torch.tensor(one.shown.places, dtype=torch.int64, device=device)
            return BlockPlaces(context[None], places[None])
        anchors = torch.tensor([place for place, _ in one.blocks], dtype=torch.int64, device=device)
        slots = anchors[:, None] + torch.arange(one.shape.block, device=device)
        return BlockPlaces(context[None], slots.reshape(1, -1))

    def _embedded(self, one: NextBlocks) -> torch.Tensor:
        """The vectors [R, hidden] in its slots."""
        shape, own = one.shape, self.head.mask_embedding
        mask = 0 if shape.mask_token is None else shape.mask_token
        given = [] if one.shown is None else list(one.shown.tokens)
        for _, first in one.blocks:
            given += [*first, *[MASK] * (shape.block - len(first))]
        tokens = torch.tensor(given, device=self.device)
        known = tokens != MASK
        words = self._embed(torch.where(known, tokens, mask))
        rows = words if own is None else torch.where(known[:, None], words, own)
        if one.last is None:
            return rows
        return rows + self.head.direct(one.last, words[:: shape.block]).flatten(0, 1)

    def _attend(
        self,
        every: Sequence[NextBlocks],
        contexts: Sequence[int],
        slots: Sequence[int],
        places: Sequence[BlockPlaces],
    ) -> Attend:
        masks = []
        for one, where in zip(every, places, strict=True):
            if one.shown:
                masks.append([one.shown.sees.to(self.device)[None, None]] * one.shape.layers)
                continue
            seen = torch.arange(one.kv.length + len(one.context), device=self.device)
            masks.append(packed_masks(one.shape, BlockPlaces(seen[None], where.slots)))
        cut = [*contexts, *slots]

        def attend(
            layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            self._between_layers()
            queries = query.split(list(slots), 2)
            keys, values = (both.split(cut, 2) for both in (key, value))
            seen = []
            for number, one in enumerate(every):
                own = (number, len(every) + number)
                held_keys, held_values = one.kv.update(
                    torch.cat([keys[at] for at in own], 2),
                    torch.cat([values[at] for at in own], 2),
                    layer,
                )
                assert isinstance(held_keys, torch.Tensor), "a draft's cache has no stems"
                assert isinstance(held_values, torch.Tensor)
                if slots[number]:
                    mask = masks[number][layer]
                    seen.append(attention(queries[number], held_keys, held_values, mask))
            return torch.cat(seen, 2) if len(seen) > 1 else seen[0]

        return attend

    def _keep(
        self,
        every: Sequence[NextBlocks],
        contexts: Sequence[int],
        context: torch.Tensor,
        places: torch.Tensor,
    ) -> None:
        """Keys and values of context rows alone."""

        def keep(layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
            self._between_layers()
            shares = zip(every, key.split(contexts, 2), value.split(contexts, 2), strict=True)
            for one, own_key, own_value in shares:
                one.kv.update(own_key, own_value, layer)

        self.head.keep(context, places, keep)


class BlockRows:
    """One request's committed rows, of which the newest wait for the next block's pass.

    Keys and values of a committed row depend on nothing but that row, so they stay; those of a
    block are forgotten with its pass.
    """

    def __init__(self, request: int, passes: BlockPasses) -> None:
        """No rows."""
        self.request = request
        self._passes = passes
        self._kv = passes.new_cache()
        hidden, dtype, device = passes.head.shape.hidden, passes.dtype, passes.device
        self._waiting = torch.zeros((0, hidden), dtype=dtype, device=device)
        self._every: list[torch.Tensor] = []
        """All committed rows, in parts, if the head has direct maps."""

    @property
    def committed(self) -> int:
        """How many committed rows there are."""
        return self._kv.length + len(self._waiting)

    def add(self, context: torch.Tensor) -> Steps[None]:
        """Committed rows come next, [n, hidden] of DSparkHead.context: more than fit beside a
        block run now."""
        self._waiting = torch.cat([self._waiting, context])
        if self._passes.head.shape.direct:
            self._every.append(context)
        while len(self._waiting) > PASS_ROWS:
            part, self._waiting = self._waiting[:PASS_ROWS], self._waiting[PASS_ROWS:]
            shape = self._passes.head.shape
            given = NextBlocks(self.request, shape, self._kv, self._kv.length, part)
            yield from call(self._passes.run, given)

    def begin_with(self, other: BlockRows, rows: int, ends: bool) -> None:
        """Begin with the first `rows` committed rows of another request at most; `ends`: it is
        about to be closed, and leaves what it has."""
        held = min(rows, other._kv.length)
        self._waiting = other._waiting[: rows - held].clone()
        self._every = [torch.cat(other._every)[:rows]] if other._every else []
        if ends:
            self._kv = other._kv
            self._kv.length = held
        else:
            self._kv = other._kv.fork(0, held)

    def behind(
        self, shape: DSparkShape, blocks: Sequence[tuple[int, Sequence[int]]]
    ) -> Steps[torch.Tensor]:
        """What the slots of these blocks (see NextBlocks) give, [R, hidden]."""
        waiting, self._waiting = self._waiting, self._waiting[:0]
        held, last = self._kv.length, self._before(blocks)
        given = NextBlocks(self.request, shape, self._kv, held, waiting, blocks, last)
        return (yield from call(self._passes.run, given))

    def _before(self, blocks: Sequence[tuple[int, Sequence[int]]]) -> torch.Tensor | None:
        """The context rows before these anchors, for direct maps."""
        if not self._passes.head.shape.direct:
            return None
        empty = self._waiting.new_zeros((1, self._passes.head.shape.hidden))
        if all(place == sum(map(len, self._every)) for place, _ in blocks):
            last = self._every[-1][-1:] if self._every else empty
            return last.expand(len(blocks), -1)
        every = torch.cat([empty, *self._every])
        return every[[place for place, _ in blocks]]
