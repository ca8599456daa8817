"""Row ledger: the rows of one request in a stage's KV cache, their slots, and what each row sees.

The cache has two regions: committed rows (committed tokens, contiguous positions) and after them
speculative rows (guesses). The ledger is the bookkeeping alone; the tensors live in the model room.
Stages, draft models and the coordinator's checks all run this one ledger.

Visibility: a row sees every committed row at a position before its own, its ancestors by
parent chain, and itself. Nothing else. That rule alone makes outputs independent of when, or
whether, a retained set arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from edgespec.errors import RemoteProtocolError
from edgespec.types.record import Int64, Numbers, Record

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]

MOST_RETAINED = 1 << 16
"""Rows of a draft tree."""

NO_PARENT = -1
"""Parent id of the first row of a request."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that travel together: equal-length int64 arrays of ids, parent ids, tokens, positions.

    A position is absolute (0-based in the whole sequence). Ids are given out in growing order and
    never twice in a request, so a parent's id is always smaller than its child's.
    """

    ids: IntArray
    parents: IntArray
    tokens: IntArray
    positions: IntArray

    def __len__(self) -> int:
        return len(self.ids)

    @staticmethod
    def none() -> Rows:
        nothing = np.zeros(0, np.int64)
        return Rows(nothing, nothing, nothing, nothing)

    def joined(self, other: Rows) -> Rows:
        return Rows(
            np.concatenate([self.ids, other.ids]),
            np.concatenate([self.parents, other.parents]),
            np.concatenate([self.tokens, other.tokens]),
            np.concatenate([self.positions, other.positions]),
        )

    def take(self, index: IntArray) -> Rows:
        """The rows at `index` (int64 [n]), in that order."""
        return Rows(self.ids[index], self.parents[index], self.tokens[index], self.positions[index])


class RetainSet(Record, frozen=True):
    """What to keep (FlowSpec §3.3, I_retain = I_acc ∪ I_pr).

    `accepted`: ids of the committed path, in order; rows named here become committed.
    `retained`: ids of the live draft tree. `watermark`: the newest id when this set was made;
    rows above it are untouched, rows at or below it and in neither list are dropped.
    `epoch` grows with every set of a request; a later one wins.
    """

    epoch: int
    watermark: int
    accepted: Numbers
    retained: Annotated[frozenset[Int64], Meta(max_length=MOST_RETAINED)]

    def keeps(self, ids: IntArray) -> BoolArray:
        """Which of `ids` (int64 [R]) are not dropped; bool [R]."""
        named = self.retained.union(self.accepted)
        mark = self.watermark
        return np.fromiter((i > mark or i in named for i in ids.tolist()), np.bool_, len(ids))


class RowLedger:
    """Slots of one request's rows: `committed` committed rows, then speculative rows in order."""

    def __init__(self, committed: int = 0) -> None:
        """Of a request that begins with so many committed rows, whose ids are 0, 1, …"""
        self.committed = committed
        self.last_committed = committed - 1 if committed else NO_PARENT
        self.epoch = 0
        self._ids: list[int] = []
        self._slot_of: dict[int, int] = {}
        self._positions: list[int] = []
        self._sees = np.zeros((0, 0), np.bool_)

    @property
    def speculative(self) -> tuple[int, ...]:
        """Ids of the speculative rows in slot order."""
        return tuple(self._ids)

    def __len__(self) -> int:
        return self.committed + len(self._ids)

    def commit(self, rows: Rows) -> None:
        """Append rows that are committed from the start (prefill) to the committed region.

        Raises RemoteProtocolError, changing nothing, if they do not continue it.
        """
        first, ids = self.committed, rows.ids.tolist()
        before = [self.last_committed, *ids]
        if self._ids:
            raise RemoteProtocolError("a committed row arrived behind speculative rows")
        if rows.positions.tolist() != list(range(first, first + len(rows))):
            raise RemoteProtocolError(f"committed rows do not continue at position {first}")
        if rows.parents.tolist() != before[:-1] or before != sorted(set(before)):
            raise RemoteProtocolError(f"committed rows do not continue behind row {before[0]}")
        self.committed += len(rows)
        self.last_committed = before[-1]

    def append(self, rows: Rows) -> BoolArray:
        """Append speculative rows; return what each sees of the speculative region.

        Returns bool [R, S] with S the speculative rows including these. Every row also sees all
        committed rows (they are its ancestors, see `_parent_slot`). Raises RemoteProtocolError,
        changing nothing, for an unknown parent, a repeated id or a position that is not its
        parent's plus one.
        """
        old = len(self._ids)
        slots = self._checked_parent_slots(rows)
        total = old + len(rows)
        sees = np.zeros((total, total), np.bool_)
        sees[:old, :old] = self._sees
        for slot, parent in enumerate(slots, start=old):
            if parent is not None:
                sees[slot] = sees[parent]
            sees[slot, slot] = True
        self._sees = sees
        self._ids += rows.ids.tolist()
        self._positions += rows.positions.tolist()
        self._slot_of |= zip(self._ids[old:], range(old, total), strict=True)
        return sees[old:]

    def _checked_parent_slots(self, rows: Rows) -> list[int | None]:
        slots: list[int | None] = []
        fresh: dict[int, tuple[int, int]] = {}
        triples = zip(
            rows.ids.tolist(), rows.parents.tolist(), rows.positions.tolist(), strict=True
        )
        for offset, (row_id, parent, position) in enumerate(triples):
            if row_id <= parent or row_id in fresh or row_id in self._slot_of:
                raise RemoteProtocolError(f"row {row_id} came twice or before its parent {parent}")
            slot = self._slot_of.get(parent)
            if parent in fresh:
                slot, parent_position = fresh[parent]
            elif slot is not None:
                parent_position = self._positions[slot]
            elif parent == self.last_committed:
                # The only committed row that a live speculative row can hang from is the last:
                # children of earlier ones are dead and were dropped by the set that committed it.
                parent_position = self.committed - 1
            else:
                raise RemoteProtocolError(f"row {row_id} has unknown parent {parent}")
            if position != parent_position + 1:
                raise RemoteProtocolError(
                    f"row {row_id} has position {position}, not behind parent"
                )
            slots.append(slot)
            fresh[row_id] = (len(self._ids) + offset, position)
        return slots

    def fork(self, ids: Sequence[int]) -> tuple[RowLedger, IntArray]:
        """The ledger of a request that begins with the rows of these ids, and the gather of the
        whole cache, int64 [len(ids)], that leaves them alone.

        They are those at the first positions, in order; of the committed ones, whose ids are not
        kept, the number counts. There all are committed, with the ids 0, 1, …. Raises
        RemoteProtocolError for a row that is not here, or not after the one before it.
        """
        here = min(self.committed, len(ids))
        path = self._path(ids)
        order = [*range(here), *(self.committed + slot for slot in path)]
        return RowLedger(len(order)), np.asarray(order, np.int64)

    def commit_path(self, ids: Sequence[int]) -> IntArray | None:
        """Commit those of the rows with these ids (see `fork`) that are not yet, before the
        retained set that accepts them comes; return the gather of the speculative region, int64
        [S], or None for no change. No other row is dropped. Raises as `fork` does."""
        path = self._path(ids)
        if not path:
            return None
        self.last_committed = self._ids[path[-1]]
        self.committed += len(path)
        taken = set(path)
        left = [slot for slot in range(len(self._ids)) if slot not in taken]
        self._keep_slots(left)
        return np.asarray(path + left, np.int64)

    def _path(self, ids: Sequence[int]) -> list[int]:
        """Slots in the speculative region of those of these rows that are not committed."""
        here = min(self.committed, len(ids))
        slots = [self._slot_of.get(row_id) for row_id in ids[here:]]
        wanted = range(here, len(ids))
        for slot, position in zip(slots, wanted, strict=True):
            if slot is None or self._positions[slot] != position:
                raise RemoteProtocolError(f"there is no row to begin with at position {position}")
        path = [slot for slot in slots if slot is not None]
        for last, slot in enumerate(path):
            if np.flatnonzero(self._sees[slot]).tolist() != sorted(path[: last + 1]):
                raise RemoteProtocolError("the rows to begin with are no path")
        return path

    def retain(self, keep: RetainSet) -> IntArray | None:
        """Apply a retained set; return the gather of the speculative region, or None for no change.

        The result (int64 [n]) lists old speculative offsets in their new order: accepted rows
        first (they are committed now), then the survivors. A set that is not newer than the last
        one applied changes nothing. Raises RemoteProtocolError, changing nothing, if the accepted
        path does not continue the committed one, or if a row that stays does not hang from it by
        rows that stay.
        """
        if keep.epoch <= self.epoch:
            return None
        accepted = [self._slot_of[i] for i in keep.accepted if i in self._slot_of]
        stays = keep.keeps(np.asarray(self._ids, np.int64))
        chosen = set(accepted)
        survivors = [s for s in range(len(self._ids)) if stays[s] and s not in chosen]
        self._check_paths(keep, accepted, survivors)
        order = np.asarray(accepted + survivors, np.int64)
        self.epoch = keep.epoch
        if not accepted and len(survivors) == len(self._ids):
            return None
        if accepted:
            self.last_committed = self._ids[accepted[-1]]
            self.committed += len(accepted)
        self._keep_slots(survivors)
        return order

    def _keep_slots(self, slots: list[int]) -> None:
        """Of the speculative rows keep these, in that order."""
        self._sees = self._sees[np.ix_(slots, slots)] if slots else np.zeros((0, 0), np.bool_)
        self._ids = [self._ids[slot] for slot in slots]
        self._positions = [self._positions[slot] for slot in slots]
        self._slot_of = {row_id: slot for slot, row_id in enumerate(self._ids)}

    def _check_paths(self, keep: RetainSet, accepted: list[int], survivors: list[int]) -> None:
        """Accepted rows must be one path after the committed rows, and the others hang from it."""
        for last, slot in enumerate(accepted):
            if np.flatnonzero(self._sees[slot]).tolist() != accepted[: last + 1]:
                raise RemoteProtocolError(
                    f"retained set {keep.epoch} accepts row {self._ids[slot]}, which does not "
                    f"follow the {self.committed} committed rows and those accepted before it"
                )
        if not survivors:  # as after each token without guesses
            return
        sees = self._sees[survivors]
        if np.delete(sees, accepted + survivors, axis=1).any() or not sees[:, accepted].all():
            raise RemoteProtocolError(
                f"retained set {keep.epoch} keeps a row without the rows that it hangs from"
            )
