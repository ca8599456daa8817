"""Pair rows: what an EAGLE head ran for one request, certain pairs first, then guesses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from edgespec.drafting.base import TokenPath
from edgespec.drafting.eagle.head import EagleHead, attention, turns_at
from edgespec.drafting.eagle.shape import Rope
from edgespec.model.kv_cache import TwoRegionCache

_CHUNK = 256  # rows that run together: bounds the mask and the activations
_RESERVE = 512
Embed = Callable[[torch.Tensor], torch.Tensor]


class PairRows:
    """Rows of pairs (features at p, token at p + 1) behind each other, and the trees below them.

    A certain pair is of true features, a guess's are what its parent gave out. Guesses that come
    true are run again with the true ones; what was run below them stays as it is, though it saw the
    imitations: a head is hardly worse four levels down, and running all anew would take a pass for
    every level of the tree after every certain token.
    """

    def __init__(
        self, head: EagleHead, embed: Embed, rope: Rope, dtype: torch.dtype, device: torch.device
    ) -> None:
        """No rows. `embed` gives the vectors [R, hidden] of tokens int64 [R]."""
        shape = head.shape
        self._head, self._embed, self._rope = head, embed, rope
        self._kv = TwoRegionCache(
            first_layer=0,
            layers=1,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            reserve=_RESERVE,
            dtype=dtype,
            device=device,
        )
        self._device = device
        self.certain = 0
        self.work: list[int] = []
        # Guesses in the order of their slots: [1 + guesses, hidden] that came out, the last certain
        # pair's first; for each its ancestors' slots with its own; and where they are, by
        # (slot of the row before, token). Slot 0 is the last certain pair.
        self._out: torch.Tensor | None = None
        self._lines: list[list[int]] = [[]]
        self._slot_behind: dict[tuple[int, int], int] = {}

    @torch.inference_mode()
    def add(self, features: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """Run certain pairs, `features` [n, hidden] and `tokens` [n], n >= 1.

        Guesses that do not lie below them are dropped. Returns what came out, [n, hidden].
        """
        root = self._slot_of(tokens)
        if root is not None and len(tokens) <= _CHUNK:
            return self._come_true(features, tokens, root)
        self._kv.gather(self.certain, np.zeros(0, np.int64))
        outs: list[torch.Tensor] = []
        for begin in range(0, len(tokens), _CHUNK):
            part = tokens[begin : begin + _CHUNK]
            rows = len(part)
            positions = list(range(self.certain, self.certain + rows))
            sees = torch.ones((rows, self.certain + rows), dtype=torch.bool)
            sees = sees.tril(self.certain)
            outs.append(self._run(features[begin : begin + rows], part, positions, sees))
            self.certain += rows
        self._out = outs[-1][-1:].clone()
        self._lines, self._slot_behind = [[]], {}
        return torch.cat(outs)

    @torch.inference_mode()
    def behind(self, paths: Sequence[TokenPath]) -> torch.Tensor:
        """What comes out [n, hidden] for the last token of each path behind the certain pairs.

        The empty path stands for the last certain pair; there must be one. What is missing runs
        level by level, as every guess needs what its parent gave.
        """
        assert self._out is not None
        ends = [0] * len(paths)
        for level in range(max(map(len, paths))):
            fresh: dict[tuple[int, int], int] = {}
            for index, path in enumerate(paths):
                if level < len(path):
                    place = ends[index], path[level]
                    known = self._slot_behind.get(place, fresh.get(place))
                    if known is None:
                        known = fresh[place] = len(self._lines) + len(fresh)
                    ends[index] = known
            if fresh:
                self._run_guesses(list(fresh), self.certain + level)
                self._slot_behind |= fresh
        return self._out.index_select(0, torch.tensor(ends, device=self._device))

    def _slot_of(self, path: TokenPath) -> int | None:
        """Where the last of these guesses is, each below the one before; None if it was not run."""
        slot: int | None = 0
        for token in path:
            slot = None if slot is None else self._slot_behind.get((slot, token))
        return slot

    def _come_true(self, features: torch.Tensor, tokens: Sequence[int], root: int) -> torch.Tensor:
        """The guesses `tokens`, the last of them at the slot `root`, are certain pairs now."""
        assert self._out is not None
        count, guesses = len(tokens), len(self._lines) - 1
        # They run behind the guesses, unseen by these and not seeing them, and then change places.
        sees = torch.zeros((count, self.certain + guesses + count), dtype=torch.bool)
        sees[:, : self.certain] = True
        sees[:, self.certain + guesses :] = torch.ones((count, count), dtype=torch.bool).tril()
        positions = list(range(self.certain, self.certain + count))
        out = self._run(features, tokens, positions, sees)
        below = [s for s, line in enumerate(self._lines) if root in line and s != root]
        order = [*range(guesses, guesses + count), *(slot - 1 for slot in below)]
        self._kv.gather(self.certain, np.array(order, np.int64))
        self.certain += count
        kept = torch.tensor(below, dtype=torch.int64, device=self._device)
        self._out = torch.cat([out[-1:], self._out.index_select(0, kept)])
        new = {root: 0} | {slot: place for place, slot in enumerate(below, start=1)}
        lines = [self._lines[slot] for slot in below]
        self._lines = [[], *([new[s] for s in line if new.get(s)] for line in lines)]
        self._slot_behind = {
            (new[parent], token): new[slot]
            for (parent, token), slot in self._slot_behind.items()
            if parent in new
        }
        return out

    def _run_guesses(self, places: list[tuple[int, int]], position: int) -> None:
        assert self._out is not None
        parents = [parent for parent, _ in places]
        first = len(self._lines)
        self._lines += [
            [*self._lines[parent], first + index] for index, parent in enumerate(parents)
        ]
        sees = torch.ones((len(places), self.certain + first - 1 + len(places)), dtype=torch.bool)
        sees[:, self.certain :] = False
        for row, line in enumerate(self._lines[first:]):
            sees[row, [self.certain + slot - 1 for slot in line]] = True
        features = self._out.index_select(0, torch.tensor(parents, device=self._device))
        tokens = [token for _, token in places]
        out = self._run(features, tokens, [position] * len(places), sees)
        self._out = torch.cat([self._out, out])

    def _run(
        self,
        features: torch.Tensor,
        tokens: Sequence[int],
        positions: list[int],
        sees: torch.Tensor,
    ) -> torch.Tensor:
        self.work.append(len(tokens))
        device, mask = self._device, sees.to(self._device)
        embedded = self._embed(torch.tensor(tokens, device=device))
        places = torch.tensor(positions, device=device)
        turns = turns_at(places, self._rope, self._head.shape.head_dim, embedded.dtype)

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return attention(query, *self._kv.update(key, value, 0), mask)

        out = self._head(features[None], embedded[None], turns, attend)[0]
        self._kv.advance(len(tokens))
        return out
