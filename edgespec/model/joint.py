"""Joint pass: rows of one or several requests in one forward pass, each with a cache of its own.

Layers run over all rows at once; only attention goes part by part (see tree_attention).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from edgespec.kernels.layers import Memory
from edgespec.model.kv_cache import Held, TwoRegionCache
from edgespec.model.rope import Rotary
from edgespec.model.tree_attention import JointVisibility, Seen, Visibility
from edgespec.types.stop_check import StopCheck


class RowCache(Protocol):
    """What layers ask of a cache (see TwoRegionCache)."""

    def place(self, positions: torch.Tensor) -> torch.Tensor:
        """Note where the rows that come next stand; return the positions of all rows."""

    def append(self, rows: torch.Tensor, layer_idx: int) -> tuple[Held, ...]:
        """Write what is held of new rows, all parts together; return that of all rows."""

    def held(self, rows: int, layer_idx: int) -> tuple[Held, ...]:
        """What `append` of so many rows gave, for another layer that reads the same keys."""

    def advance(self, rows: int) -> None:
        """Take the slots of new rows."""


class CachedPart(NamedTuple):
    """The R >= 1 rows of one request: its cache, and which slots each row sees, its own included,
    as bool [1, 1, R, cache.length + R]."""

    request: int
    cache: RowCache
    mask: torch.Tensor

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return self.mask.shape[2]


class JointCache:
    """The `caches` of several requests, in the place of one."""

    def __init__(self, parts: Sequence[CachedPart]) -> None:
        self.caches = [part.cache for part in parts]
        self._rows = [part.rows for part in parts]

    def append(self, rows: torch.Tensor, layer_idx: int) -> tuple[list[Held], ...]:
        """What TwoRegionCache.append does, for each request's share of the rows [parts, heads, R,
        width]; returns what each holds, part by part."""
        share = zip(self.caches, rows.split(self._rows, 2), strict=True)
        held = [cache.append(new, layer_idx) for cache, new in share]
        return tuple(list(of) for of in zip(*held, strict=True))

    def held(self, rows: int, layer_idx: int) -> tuple[list[Held], ...]:
        """What TwoRegionCache.held gives, for each part's share of the rows."""
        share = zip(self.caches, self._rows, strict=True)
        held = [cache.held(own, layer_idx) for cache, own in share]
        return tuple(list(of) for of in zip(*held, strict=True))


class JointPass:
    """What every layer of one forward pass is given: of all parts at first, then of those that are
    still wanted.

    `rotary`: by the kind of layer; `seen` and `cache`: of one part, or joint ones.
    """

    def __init__(
        self,
        parts: Sequence[CachedPart],
        positions: torch.Tensor,
        rotary: Mapping[str | None, Rotary],
    ) -> None:
        """`positions` int64 [R], absolute, of the rows of all parts."""
        self.rotary = rotary
        self._rows = positions.shape[0]
        self._left: torch.Tensor | None = None  # which of all rows are left, if not all are
        one = len(parts) == 1  # most are, and a split costs
        shares = [positions] if one else positions.split([part.rows for part in parts])
        self._parts = [
            (part, Visibility(part.mask, share, part.cache.place(share)))
            for part, share in zip(parts, shares, strict=True)
        ]
        self._join()

    def _join(self) -> None:
        self.seen: Seen
        self.cache: RowCache | JointCache
        if len(self._parts) == 1:
            ((part, self.seen),) = self._parts
            self.cache = part.cache
        else:
            parts, seen = zip(*self._parts, strict=True)
            self.cache = JointCache(parts)
            self.seen = JointVisibility(seen, [part.rows for part in parts])

    @property
    def parts(self) -> list[tuple[RowCache, Visibility]]:
        """The caches of each part, and what its rows see."""
        return [(part.cache, seen) for part, seen in self._parts]

    @property
    def memories(self) -> list[Memory]:
        """Where the keys and values of each part are."""
        found = []
        for part, _ in self._parts:
            assert isinstance(part.cache, TwoRegionCache), "compiled layers know no other cache"
            found.append(part.cache.memory(part.rows))
        return found

    def kept(self, stop: StopCheck, hidden: torch.Tensor) -> torch.Tensor | None:
        """Of `hidden` [R, H] the rows of the parts that are still wanted; None if none is.

        The others' slots are taken, but no layer sees them from now on.
        """
        if stop():
            return None
        if len(self._parts) == 1:
            return hidden
        wanted = [not stop(part.request) for part, _ in self._parts]
        if all(wanted):
            return hidden
        if not any(wanted):
            return None
        rows = [part.rows for part, _ in self._parts]
        stays = torch.tensor(wanted).repeat_interleave(torch.tensor(rows))
        index = stays.nonzero().squeeze(1).to(hidden.device)
        self.rotary = {
            kind: tuple(one.index_select(0, index) for one in each)
            for kind, each in self.rotary.items()
        }
        self._left = index if self._left is None else self._left.index_select(0, index)
        for (part, _), stay in zip(self._parts, wanted, strict=True):
            if not stay:
                part.cache.advance(part.rows)
        self._parts = [one for one, stay in zip(self._parts, wanted, strict=True) if stay]
        self._join()
        return hidden.index_select(0, index)

    def advance(self) -> None:
        """Take the slots of all rows that are left."""
        for part, _ in self._parts:
            part.cache.advance(part.rows)

    def all_rows(self, hidden: torch.Tensor) -> torch.Tensor:
        """These rows [R, H] in their old places, zeros where rows were left out."""
        if self._left is None:
            return hidden
        whole = hidden.new_zeros((self._rows, hidden.shape[1]))
        return whole.index_copy_(0, self._left, hidden)
