"""Held rows: what a stage holds of all open requests: row ledgers, and which rows are shared.

Every change of the books comes with the effects that make the caches follow.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from edgespec.decoding.effects import CloseCache, ForkCache, GatherRows, MoveCache, OpenCache
from edgespec.decoding.target_walk import TargetWalk
from edgespec.errors import CapacityError, RemoteProtocolError
from edgespec.machines.effects import BlockPart, Effect
from edgespec.tree.ledger import IntArray, RetainSet, RowLedger, Rows
from edgespec.tree.stems import Stems
from edgespec.wire.segment import Choosing, Part

REMEMBERED_ENDS = 1024
"""Ended requests whose late segments and openings are still recognised."""


@dataclass(slots=True)
class Held:
    """What a stage holds of one open request."""

    ledger: RowLedger = field(default_factory=RowLedger)
    keep: RetainSet = field(default_factory=lambda: RetainSet(0, -1, (), frozenset()))
    walk: TargetWalk | None = None  # if the last stage chooses its tokens, which then travel

    def begin_walk(self, choosing: Choosing) -> None:
        """The last stage chooses, from the end of the prompt on. Raises ConfigError for settings by
        which nothing can be sampled."""
        self.walk = TargetWalk(choosing)

    def retain(self, keep: RetainSet) -> IntArray | None:
        """Apply a newer retained set; how the rows move that stay (see RowLedger.retain)."""
        order = self.ledger.retain(keep)
        self.keep = keep
        return order


class HeldRows:
    """All open requests of a stage, and the ended ones that may still be named."""

    def __init__(self) -> None:
        self.limit = 0
        """Rows of all requests together, shared ones counted once, that may be held."""
        self._held: dict[int, Held] = {}
        self.stems = Stems()
        self._ended: deque[int] = deque(maxlen=REMEMBERED_ENDS)

    def set_limit(self, rows: int) -> None:
        """So many may be held from now on."""
        self.limit = rows

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request: int) -> bool:
        return request in self._held

    def __getitem__(self, request: int) -> Held:
        return self._held[request]

    def get(self, request: int) -> Held | None:
        """What is held of a request; None if it is not open."""
        return self._held.get(request)

    def ledgers(self) -> dict[int, RowLedger]:
        """The row ledgers of all open requests."""
        return {request: held.ledger for request, held in self._held.items()}

    @property
    def rows(self) -> int:
        """Rows of all requests, shared ones counted once."""
        return sum(len(held.ledger) for held in tuple(self._held.values())) - self.stems.saved

    def open(self, part: Part) -> list[Effect]:
        """Begin the part's request, if this is its first: empty, or with rows of another one.

        Raises RemoteProtocolError if those are not here; then the request is open all the same.
        """
        request, base = part.request, part.fork_of
        if request in self._held or request in self._ended or not part.reserve:
            # The rows of `base` were kept for this request, which is over.
            unused = part.fork_ends and base in self._held and request in self._ended
            return self.end(base) if unused else []
        self._held[request] = Held()
        self.stems.open(request)
        if not base:
            return [OpenCache(request, min(part.reserve, self.limit))]
        origin = self._held.get(base)
        if origin is None:
            raise RemoteProtocolError(f"nothing is left of request {base} to begin with")
        if part.fork_ends:
            return self._move(part, origin.ledger)
        return self._fork(part, origin.ledger)

    def _move(self, part: Part, ledger: RowLedger) -> list[Effect]:
        """The base ends: the request goes on with its cache, less the rows that it does not
        name."""
        request, base = part.request, part.fork_of
        shared = self.stems.rows(base)
        if len(part.fork_ids) < shared:
            raise RemoteProtocolError(f"request {base} cannot end within rows that are shared")
        own, order = ledger.fork(part.fork_ids.tolist())
        self._held[request] = Held(own)
        del self._held[base]
        self._ended.append(base)
        self.stems.move(request, base)
        moved = order[shared:] - shared
        return [MoveCache(request, base), GatherRows(request, shared, moved)]

    def _fork(self, part: Part, ledger: RowLedger) -> list[Effect]:
        """The base goes on: of its first rows, which are committed, some are shared from now on."""
        request, base, rows = part.request, part.fork_of, len(part.fork_ids)
        committed = ledger.committed
        order = ledger.commit_path(part.fork_ids.tolist())
        effects: list[Effect] = []
        if order is not None:
            effects.append(GatherRows(base, committed, order))
        how = self.stems.fork(request, base, rows, part.fork_shared, len(ledger))
        self._held[request] = Held(RowLedger(rows))
        return [*effects, ForkCache(request, base, how)]

    def book(self, part: Part, rows: Rows) -> BlockPart:
        """Take these rows into the request's ledger. Raises, changing nothing, CapacityError if
        they are more than may be held, RemoteProtocolError if they do not fit it."""
        ledger = self._held[part.request].ledger
        if self.rows + len(rows) > self.limit:
            raise CapacityError(
                f"{len(rows)} more rows make more than the {self.limit} rows that this stage may "
                "hold of all requests together"
            )
        committed = ledger.committed
        if part.committed:
            ledger.commit(rows)
            sees = np.tri(len(rows), dtype=np.bool_)
        else:
            sees = ledger.append(rows)
        return BlockPart(part.request, rows, committed, sees)

    def end(self, request: int) -> list[Effect]:
        """A request is over; it is remembered in case that it is still to open."""
        if request not in self._ended:
            self._ended.append(request)
        if self._held.pop(request, None) is None:
            return []
        self.stems.close(request)
        return [CloseCache(request)]

    def clear(self) -> list[Effect]:
        """A new ring begins: nothing is open, and nothing has ended."""
        gone = [effect for request in tuple(self._held) for effect in self.end(request)]
        self._ended.clear()
        return gone
