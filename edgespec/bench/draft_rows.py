"""Draft rows: what a draft model ran on one known text and beside it, each row once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np
import torch

from edgespec.model.block import Block
from edgespec.model.kv_cache import TwoRegionCache
from edgespec.model.tree_attention import tree_mask
from edgespec.tree.ledger import IntArray

Place = tuple[int, tuple[int, ...]]
"""Where a path ends: it has the text's first tokens, so many of them, and then these others."""

_CHUNK = 256  # rows of the text that run together
_RESERVE = 512  # rows that a new cache has room for


class DraftRows:
    """The rows of one text, and of paths that leave it somewhere.

    A text is known from its beginning to its end before anybody guesses along it, so its rows run
    first, many at a time. A row beside it sees the text up to where its path leaves it.
    """

    def __init__(self, block: Block, text: Sequence[int], most_rows: int) -> None:
        """`block`: all layers of the draft model, of which nothing runs before it is asked. Rows
        after the first `most_rows`, or from a token on that the model lacks, are not the text's."""
        self._block = block
        usable = list(takewhile(lambda token: token < block.vocab_size, text[:most_rows]))
        self._text = tuple(usable)
        self._slots: dict[Place, int] = {}
        self._hidden: list[torch.Tensor] = []  # [H] of each slot, after the final norm
        self._kept = block.new_cache(_RESERVE)  # all rows
        self._work = block.new_cache(_RESERVE)  # those that the rows of one pass see

    def places(self, context: Sequence[int], paths: Sequence[Sequence[int]]) -> list[Place]:
        """Where each path after the context ends; the context begins with the text's beginning."""
        before, size = tuple(context), len(context)
        if self._text[:size] == before:
            return [self._leaving(size, path) for path in paths]
        return [self._leaving(0, (*before, *path)) for path in paths]

    def _leaving(self, at: int, path: Sequence[int]) -> Place:
        """The place of a path behind the text's first `at` tokens."""
        shared = 0
        for token, own in zip(path, self._text[at : at + len(path)], strict=False):
            if token != own:
                break
            shared += 1
        return at + shared, tuple(path[shared:])

    def hidden(self, places: Sequence[Place]) -> torch.Tensor:
        """Hidden rows [P, H] of the last tokens of these paths, none of them empty.

        One forward pass runs the rows that are missing, ancestors included.
        """
        if not self._hidden:
            self._run_text()
        fresh: dict[Place, int] = {}
        for at, path in places:
            for size in range(1, len(path) + 1):
                place = at, path[:size]
                if place not in self._slots:
                    fresh.setdefault(place, len(self._slots) + len(fresh))
        if fresh:
            self._run_beside(fresh)
        return torch.stack([self._hidden[self._slots[place]] for place in places])

    def _run_text(self) -> None:
        text = np.array(self._text, np.int64)
        for first in range(0, len(text), _CHUNK):
            part = text[first : first + _CHUNK]
            sees = np.tri(len(part), dtype=np.bool_)
            self._run(self._kept, part, first + np.arange(len(part)), tree_mask(first, sees))
        self._slots = {(at, ()): at - 1 for at in range(1, len(text) + 1)}

    def _run_beside(self, fresh: dict[Place, int]) -> None:
        """Run rows of paths that left the text, ancestors first."""
        shared = max(at for at, _ in fresh)  # slots of the text
        needed = list(range(shared))
        columns: dict[Place, int] = {}  # of ancestors and of the new rows
        for at, path in fresh:
            for size in range(1, len(path)):
                place = at, path[:size]
                if place not in fresh and place not in columns:
                    columns[place] = len(needed)
                    needed.append(self._slots[place])
        columns |= {place: column for column, place in enumerate(fresh, len(needed))}
        sees = np.zeros((len(fresh), len(needed) + len(fresh)), np.bool_)
        for row, (at, path) in enumerate(fresh):
            sees[row, :at] = True
            sees[row, [columns[at, path[: size + 1]] for size in range(len(path))]] = True
        tokens = np.array([path[-1] for _, path in fresh])
        positions = np.array([at + len(path) - 1 for at, path in fresh])
        self._work.length = 0
        _copy(self._kept, np.array(needed, np.int64), self._work)
        self._run(self._work, tokens, positions, tree_mask(0, sees))
        _copy(self._work, np.arange(len(needed), self._work.length), self._kept)
        self._slots |= fresh

    def _run(
        self, cache: TwoRegionCache, tokens: IntArray, positions: IntArray, mask: torch.Tensor
    ) -> None:
        place = torch.from_numpy(positions)
        hidden = self._block.forward(torch.from_numpy(tokens), place, cache, mask)
        assert hidden is not None, "nothing stops it"
        self._hidden += hidden.unbind()


@torch.inference_mode()
def _copy(source: TwoRegionCache, slots: IntArray, target: TwoRegionCache) -> None:
    """Append what is in these slots to another cache of the same layers."""
    index, end = torch.from_numpy(slots), target.length
    target.place(source.places.index_select(0, index))
    for number in range(source.layers):
        held = source.layer(number).index_select(2, index)
        target.layer(number).narrow(2, end, len(slots)).copy_(held)
    target.advance(len(slots))
