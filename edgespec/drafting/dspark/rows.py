"""Head rows: what a one-pass head ran for one request, of committed rows, a block or guesses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from edgespec.drafting.base import PASS_ROWS, TokenPath
from edgespec.drafting.dspark.head import Attend, BlockPlaces, DSparkHead, packed_masks
from edgespec.drafting.eagle.head import attention
from edgespec.drafting.held_head import GuesserParts, HeadPasses
from edgespec.drafting.steps import Steps, call
from edgespec.model.kv_cache import RowForm, TwoRegionCache

MASK = -1
"""Stands for a mask among tokens."""


class NextSlots(NamedTuple):
    """What a request needs of the next pass: `context` [C, hidden], committed rows from position
    `first` on, and R slots that hold `tokens`, MASK for a mask, at the positions `places`.

    `sees` bool [R, T]: which slots of the cache each of them sees, of those that are held, the new
    context rows, and these slots, which stay in it then. None: they are a block, which begins with
    an anchor and is forgotten with the pass.
    """

    request: int
    kv: TwoRegionCache
    first: int
    context: torch.Tensor
    tokens: Sequence[int] = ()
    places: Sequence[int] = ()
    sees: torch.Tensor | None = None


class BlockPasses(HeadPasses):
    """Passes of a one-pass head over the rows of one or several requests."""

    def __init__(self, head: DSparkHead, parts: GuesserParts) -> None:
        shape, self.head = head.shape, head
        form = RowForm(shape.kv_heads, shape.head_dim)
        super().__init__(parts, shape.hidden, [form] * shape.layers)

    @torch.inference_mode()
    def run(self, every: Sequence[NextSlots]) -> Sequence[torch.Tensor]:
        """What the slots of each request give, [R, hidden]; its context rows are in its cache
        then."""
        contexts = [len(one.context) for one in every]
        slots = [len(one.tokens) for one in every]
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
            one.kv.advance(rows + (0 if one.sees is None else len(one.tokens)))
        joined = sum(contexts)
        self._ran(joined + sum(slots), *(one.request for one in every), joined=joined)
        return list(out.split(slots))

    def _places(self, one: NextSlots) -> BlockPlaces:
        """Where its new context rows and its slots are, int64 [1, C] and [1, R]."""
        context = torch.arange(one.first, one.first + len(one.context), device=self.device)
        slots = torch.tensor(one.places, dtype=torch.int64, device=self.device)
        return BlockPlaces(context[None], slots[None])

    def _embedded(self, one: NextSlots) -> torch.Tensor:
        """The vectors [R, hidden] in its slots."""
        own, mask = self.head.mask_embedding, self.head.shape.mask_token or 0
        tokens = torch.tensor(one.tokens, dtype=torch.int64, device=self.device)
        known = tokens != MASK
        words = self._embed(torch.where(known, tokens, mask))
        return words if own is None else torch.where(known[:, None], words, own)

    def _attend(
        self,
        every: Sequence[NextSlots],
        contexts: Sequence[int],
        slots: Sequence[int],
        places: Sequence[BlockPlaces],
    ) -> Attend:
        masks, shape = [], self.head.shape
        for one, where in zip(every, places, strict=True):
            if one.sees is not None:
                masks.append([one.sees.to(self.device)[None, None]] * shape.layers)
                continue
            seen = torch.arange(one.kv.length + len(one.context), device=self.device)
            masks.append(packed_masks(shape, BlockPlaces(seen[None], where.slots)))
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
        every: Sequence[NextSlots],
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


@dataclass(slots=True)
class SlotLogits:
    """What slots say of the positions behind a path: what they gave, [depths, hidden], and once it
    is needed the logits [depths, vocab] before the Markov head."""

    out: torch.Tensor
    logits: torch.Tensor | None = None


class HeadRows(ABC):
    """One request's committed rows, of which the newest wait for the next pass, and what is `said`
    of what follows paths behind its context.

    Keys and values of a committed row depend on nothing but that row, so they stay.
    """

    def __init__(self, request: int, passes: BlockPasses) -> None:
        """No rows."""
        self.request = request
        self.said: dict[TokenPath, SlotLogits] = {}
        self._passes = passes
        self._kv = passes.new_cache()
        hidden, dtype, device = passes.hidden, passes.dtype, passes.device
        self._waiting = torch.zeros((0, hidden), dtype=dtype, device=device)

    @property
    def committed(self) -> int:
        """How many committed rows there are."""
        return self._held + len(self._waiting)

    @property
    @abstractmethod
    def _held(self) -> int:
        """How many of these are in the cache."""

    def add(self, context: torch.Tensor) -> Steps[None]:
        """Committed rows come next, [n, hidden] of DSparkHead.context: more than fit beside slots
        run now."""
        self._waiting = torch.cat([self._waiting, context])
        while len(self._waiting) > PASS_ROWS:
            yield from self._run(PASS_ROWS)

    def begin_with(self, other: HeadRows, rows: int, ends: bool) -> None:
        """Begin with the first `rows` committed rows of another request at most; `ends`: it is
        about to be closed, and leaves what it has."""
        held = min(rows, other._held)
        self._waiting = other._waiting[: rows - held].clone()
        if ends:
            self._kv = other._kv
            self._kv.length = held
        else:
            self._kv = other._kv.fork(0, held)

    @abstractmethod
    def follow(self, context: Sequence[int]) -> bool:
        """The committed tokens are these now. False if nothing can be guessed behind them."""

    @abstractmethod
    def ask(self, paths: Sequence[TokenPath]) -> Steps[None]:
        """Have it said what follows these paths, by one pass of what is missing."""

    @abstractmethod
    def about(self, path: TokenPath) -> tuple[SlotLogits, int] | None:
        """What was said of what follows a path, and at which depth; None if nothing."""

    @abstractmethod
    def _run(self, count: int) -> Steps[None]:
        """A pass of the first `count` waiting rows."""


class BlockRows(HeadRows):
    """Of a head whose block of slots, the anchor and masks, says what follows any path that is not
    longer; it is forgotten with its pass."""

    def __init__(self, request: int, passes: BlockPasses) -> None:
        super().__init__(request, passes)
        self._anchor = 0  # the last committed token

    @property
    def _held(self) -> int:
        return self._kv.length

    def follow(self, context: Sequence[int]) -> bool:
        """A block stands on the rows of all tokens but the newest."""
        self._anchor = context[-1]
        return self.committed == len(context) - 1

    def ask(self, paths: Sequence[TokenPath]) -> Steps[None]:
        if self.said:
            return
        shape, place = self._passes.head.shape, self.committed
        waiting, self._waiting = self._waiting, self._waiting[:0]
        tokens = [self._anchor, *[MASK] * (shape.block - 1)]
        places = range(place, place + shape.block)
        given = NextSlots(self.request, self._kv, self._held, waiting, tokens, places)
        out = yield from call(self._passes.run, given)
        self.said[()] = SlotLogits(out[shape.slot_of(0) :])

    def about(self, path: TokenPath) -> tuple[SlotLogits, int] | None:
        block = self.said.get(())
        return (block, len(path)) if block and len(path) < len(block.out) else None

    def _run(self, count: int) -> Steps[None]:
        part, self._waiting = self._waiting[:count], self._waiting[count:]
        yield from call(self._passes.run, NextSlots(self.request, self._kv, self._held, part))


class TreeRows(HeadRows):
    """Of a head that is shown guesses: the slots of the tokens behind the committed rows: the
    anchor, which is the first of which the base's rows are not here yet, and a tree of what
    follows, first what is committed (of a prompt that is being read, all that is left), then
    guesses.

    A slot is run once: it stays as long as its token lies behind the anchor. What it saw of tokens
    whose rows are here by now were their slots; only the anchor is run anew.
    """

    def __init__(self, request: int, passes: BlockPasses) -> None:
        super().__init__(request, passes)
        self._place, self._anchor = 0, 0  # where the anchor stands, and its token
        self._tail: tuple[int, ...] = ()  # the committed tokens behind it
        # Of each slot of the cache: the path from the anchor to it, None of a committed row.
        self._slots: list[tuple[int, ...] | None] = []
        self._out: dict[tuple[int, ...], torch.Tensor] = {}

    @property
    def _held(self) -> int:
        return self._slots.count(None)

    def begin_with(self, other: TreeRows, rows: int, ends: bool) -> None:  # type: ignore[override]
        other._keep((), other._tail)
        super().begin_with(other, rows, ends)
        self._slots = [None] * self._kv.length

    def follow(self, context: Sequence[int]) -> bool:
        """Keep what lies behind them; there must be an anchor, and no more tokens behind it than
        run together."""
        place = self.committed
        if not place < len(context) <= place + PASS_ROWS:
            return False
        passed = tuple(context[self._place + 1 : place + 1])
        self._place, self._anchor, self._tail = place, context[place], tuple(context[place + 1 :])
        self._keep(passed, self._tail)
        return True

    def _keep(self, passed: tuple[int, ...], tail: tuple[int, ...]) -> None:
        """Move the anchor by the tokens that were `passed`; drop what lies elsewhere, or not behind
        it and this tail. Committed rows come first then."""
        length, way = len(passed), passed + tail
        known = [slot for slot, path in enumerate(self._slots) if path is None]
        kept = [
            (slot, path)
            for slot, path in enumerate(self._slots)
            if path is not None
            and (len(path) > length or not length)
            and path[: len(way)] == way[: len(path)]
        ]
        self._kv.gather(0, np.array([*known, *(slot for slot, _ in kept)], np.int64))
        self._out = {path[length:]: self._out[path] for _, path in kept}
        self._slots = [*[None] * len(known), *self._out]

    def ask(self, paths: Sequence[TokenPath]) -> Steps[None]:
        missing = {path: (*self._tail, *path) for path in paths if path not in self.said}
        ways = [way[:end] for way in missing.values() for end in range(len(way) + 1)]
        fresh = tuple(dict.fromkeys(way for way in ways if way not in self._out))
        if fresh:
            yield from self._run(len(self._waiting), fresh)
        self.said |= {path: SlotLogits(self._out[way][None]) for path, way in missing.items()}

    def about(self, path: TokenPath) -> tuple[SlotLogits, int] | None:
        found = self.said.get(path)
        return (found, 0) if found else None

    def _run(self, count: int, fresh: Sequence[tuple[int, ...]] = ()) -> Steps[None]:
        """A pass of the first `count` waiting rows, and of fresh slots, ancestors first."""
        part, self._waiting = self._waiting[:count], self._waiting[count:]
        first = self._held
        self._slots += [*[None] * count, *fresh]
        slots = self._shown(fresh) if fresh else ()
        given = NextSlots(self.request, self._kv, first, part, *slots)
        out = yield from call(self._passes.run, given)
        self._out |= dict(zip(fresh, out, strict=True))

    def _shown(self, fresh: Sequence[tuple[int, ...]]) -> tuple[list[int], list[int], torch.Tensor]:
        """These slots, which are the last ones: tokens, places and what they see (NextSlots)."""
        at = {path: slot for slot, path in enumerate(self._slots) if path is not None}
        sees = torch.tensor([path is None for path in self._slots]).repeat(len(fresh), 1)
        for row, path in enumerate(fresh):
            sees[row, [at[path[:end]] for end in range(len(path) + 1)]] = True
        tokens = [path[-1] if path else self._anchor for path in fresh]
        return tokens, [self._place + len(path) for path in fresh], sees
