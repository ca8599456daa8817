"""Tree rows: what a head that is shown guesses ran for one request: committed rows and guesses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from edgespec.drafting.base import PASS_ROWS, TokenPath
from edgespec.drafting.dspark.rows import BlockPasses, NextBlocks, ShownRows
from edgespec.drafting.steps import Steps, call


class TreeRows:
    """One request's committed rows, of which the newest wait for the next pass, and the slots of
    the tokens behind them: the anchor, which is the first of which the base's rows are not here
    yet, and a tree of what follows, first what is committed (of a prompt that is being read, all
    that is left), then guesses.

    A slot is run once: it stays as long as its token lies behind the anchor. What it saw of tokens
    whose rows are here by now were their slots; only the anchor is run anew.
    """

    def __init__(self, request: int, passes: BlockPasses) -> None:
        """No rows."""
        self.request = request
        self._passes = passes
        self._kv = passes.new_cache()
        hidden, dtype, device = passes.head.shape.hidden, passes.dtype, passes.device
        self._waiting = torch.zeros((0, hidden), dtype=dtype, device=device)
        self._place, self._anchor = 0, 0  # where the anchor stands, and its token
        self._tail: tuple[int, ...] = ()  # the committed tokens behind it
        # Of each slot of the cache: the path from the anchor to it, None of a committed row.
        self._slots: list[tuple[int, ...] | None] = []
        self._out: dict[tuple[int, ...], torch.Tensor] = {}

    @property
    def committed(self) -> int:
        """How many committed rows there are."""
        return self._slots.count(None) + len(self._waiting)

    def add(self, context: torch.Tensor) -> Steps[None]:
        """Committed rows come next, [n, hidden] of DSparkHead.context: more than fit beside guesses
        run now."""
        self._waiting = torch.cat([self._waiting, context])
        while len(self._waiting) > PASS_ROWS:
            yield from self._run(PASS_ROWS)

    def follow(self, context: Sequence[int]) -> bool:
        """The committed tokens are these now: keep what lies behind them. False if nothing can be
        guessed: with no anchor, or more tokens behind it than run together."""
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

    def begin_with(self, other: TreeRows, rows: int, ends: bool) -> None:
        """Begin with the first `rows` committed rows of another request at most; `ends`: it is
        about to be closed, and leaves what it has."""
        other._keep((), other._tail)
        held = min(rows, other._slots.count(None))
        self._waiting = other._waiting[: rows - held].clone()
        self._slots = [None] * held
        if ends:
            self._kv = other._kv
            self._kv.length = held
        else:
            self._kv = other._kv.fork(0, held)

    def behind(self, paths: Sequence[TokenPath]) -> Steps[torch.Tensor]:
        """What the slots of these paths' last tokens give, [n, hidden], () being the context's; one
        pass runs what is missing, the slots above them included."""
        wanted = [(*self._tail, *path) for path in paths]
        fresh: dict[tuple[int, ...], None] = {}
        for path in wanted:
            above = (path[:end] for end in range(len(path) + 1))
            fresh |= {one: None for one in above if one not in self._out}
        if fresh:
            yield from self._run(len(self._waiting), tuple(fresh))
        return torch.stack([self._out[path] for path in wanted])

    def _run(self, count: int, fresh: Sequence[tuple[int, ...]] = ()) -> Steps[None]:
        """A pass of the first `count` waiting rows, and of fresh slots, ancestors first."""
        part, self._waiting = self._waiting[:count], self._waiting[count:]
        first = self._slots.count(None)
        self._slots += [*[None] * count, *fresh]
        shown = self._shown(fresh) if fresh else None
        shape = self._passes.head.shape
        given = NextBlocks(self.request, shape, self._kv, first, part, shown=shown)
        out = yield from call(self._passes.run, given)
        self._out |= dict(zip(fresh, out, strict=True))

    def _shown(self, fresh: Sequence[tuple[int, ...]]) -> ShownRows:
        """These slots, which are the last ones."""
        at = {path: slot for slot, path in enumerate(self._slots) if path is not None}
        sees = torch.tensor([path is None for path in self._slots]).repeat(len(fresh), 1)
        for row, path in enumerate(fresh):
            sees[row, [at[path[:end]] for end in range(len(path) + 1)]] = True
        tokens = [path[-1] if path else self._anchor for path in fresh]
        return ShownRows(tokens, [self._place + len(path) for path in fresh], sees)
