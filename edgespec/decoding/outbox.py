"""Outbox: the rows of one request on one ring: what waits to leave, what is on its way and back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from edgespec.decoding.flights import Returned
from edgespec.decoding.row_account import ReusedPrefix
from edgespec.decoding.told_rules import MaskBook
from edgespec.tree.draft_tree import DraftTree
from edgespec.tree.ledger import IntArray, RetainSet, Rows
from edgespec.types.record import NO_IDS
from edgespec.wire.messages import Retain
from edgespec.wire.segment import Choosing, Part


class RetainLog:
    """Makes each retained set (FlowSpec §3.3) so that a lost, late or repeated one is harmless: its
    accepted list reaches back to what every stage has acknowledged."""

    def __init__(self, request: int, prefix: int) -> None:
        """`prefix`: rows with smaller ids are committed from the start."""
        self._request = request
        self._prefix = prefix
        self._unacknowledged: list[tuple[int, tuple[int, ...]]] = []
        self.epoch = 0
        """The newest retained set."""
        self.rows: list[int] = []
        """Ids of all guessed rows that became committed, in order."""

    def guessed(self, ids: Iterable[int]) -> tuple[int, ...]:
        """Those of these rows that are no part of the prefix."""
        return tuple(i for i in ids if i >= self._prefix)

    def used(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The target tokens of rows `ids` were used: they are committed. Returns the guessed."""
        guessed = self.guessed(ids)
        self.rows += guessed
        return guessed

    def next(self, watermark: int, passed: Sequence[int], live: Sequence[int]) -> Retain:
        """After rows `passed` became committed: of the ids up to `watermark` keep `live`."""
        self.epoch += 1
        self._unacknowledged.append((self.epoch, self.guessed(passed)))
        accepted = tuple(i for _, ids in self._unacknowledged for i in ids)
        keep = RetainSet(self.epoch, watermark, accepted, frozenset(live))
        return Retain(self._request, keep)

    def last(self, watermark: int) -> Retain:
        """The request is answered: none of its guesses is wanted."""
        self.epoch += 1
        keep = RetainSet(self.epoch, watermark, tuple(self.rows), frozenset())
        return Retain(self._request, keep)

    def acknowledge(self, epoch: int) -> None:
        """Every stage has applied the retained sets up to `epoch`."""
        self._unacknowledged = [entry for entry in self._unacknowledged if entry[0] > epoch]


@dataclass(frozen=True, slots=True)
class Leaving:
    """Rows that shall enter the ring together, of which the last `want` are to come back;
    `committed` and `reserve` as in wire.segment.Part."""

    rows: Rows
    want: int
    committed: bool = False
    reserve: int = 0


class Outbox:
    """The rows of one request that wait to leave, and what is back and waits to be taken up.

    `prefix`: the committed tokens that it begins with, which leave in chunks of `chunk` rows;
    `reused`: what the stages hold of another request's rows already. `scored_from`: the first row
    after which the prefix's own next token is to be scored; None: there is none. `in_flight`: parts
    of segments that wait for their turn, on the ring or here. `last_sent_seq`: the segment in which
    rows of it left last; 0: none has. `rows_before`: rows of the guesses that were put in last, if
    no miss has made them worthless.
    """

    def __init__(
        self,
        number: int,
        prefix: tuple[int, ...],
        reused: ReusedPrefix | None = None,
        scored_from: int | None = None,
    ) -> None:
        self.prefix, self.reused, self.chunk = prefix, reused, len(prefix)
        self.retains = RetainLog(number, len(prefix))
        self._scored_from = scored_from
        self.in_flight = self.last_sent_seq = self.rows_before = 0
        self.masks = MaskBook()
        self._sent = self.reused_rows
        self._number = number
        self._leaving: deque[Leaving] = deque()
        self._returned: deque[Returned] = deque()

    # --- out ----------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Parts that wait to leave."""
        return len(self._leaving)

    @property
    def next_rows(self) -> int:
        """Rows of the part that leaves next; there must be one."""
        return len(self._leaving[0].rows)

    def put_guesses(self, rows: Rows) -> None:
        """Rows of guesses shall leave, with PPD rows that hang from them."""
        self.rows_before = len(rows)
        self.put_chain(rows)

    def put_chain(self, rows: Rows) -> None:
        """PPD rows shall leave in a part of their own."""
        self._put(Leaving(rows, len(rows)))

    @property
    def reused_rows(self) -> int:
        """Rows of the prefix that the stages hold already."""
        return len(self.reused.ids) if self.reused else 0

    @property
    def prefix_left(self) -> int:
        """Rows of the prefix that have not left and do not wait to."""
        return len(self.prefix) - self._sent

    def travel_by(self, chunk: int) -> None:
        """From now on so many rows of the prefix leave together."""
        self.chunk = chunk

    def put_chunk(self, most: int, *, wants_all: bool) -> None:
        """The next rows of the prefix shall leave, `most` at most: they overlap along the ring. The
        first token comes of the last row; `wants_all`: the others are to come back too."""
        reserve = 0 if self._sent > self.reused_rows else len(self.prefix)
        first, self._sent = self._sent, min(self._sent + most, len(self.prefix))
        ids = np.arange(first, self._sent, dtype=np.int64)
        rows = Rows(ids, ids - 1, np.array(self.prefix[first : self._sent], np.int64), ids)
        want = len(rows) if wants_all else len(self.asked(ids))
        self._put(Leaving(rows, want, committed=True, reserve=reserve))

    def asked(self, ids: IntArray) -> IntArray:
        """Those of these rows of the prefix after which a token is chosen or scored."""
        first = len(self.prefix) - 1 if self._scored_from is None else self._scored_from
        return ids[ids >= first]

    def known(self, ids: IntArray) -> IntArray:
        """The tokens after those of these rows after which they are scored."""
        if self._scored_from is None:
            return NO_IDS
        asked = self.asked(ids)
        return np.array([self.prefix[i + 1] for i in asked[asked < len(self.prefix) - 1]], np.int64)

    def _put(self, leaving: Leaving) -> None:
        self.in_flight += 1
        self._leaving.append(leaving)

    def next_part(
        self,
        tree: DraftTree | None,
        awaited: Collection[int],
        choosing: Choosing | None,
        opens: Callable[[int], int],
    ) -> Part | None:
        """What waits longest leaves; None if none of it is wanted any more: neither in the `tree`
        nor PPD rows that are `awaited`. `opens`: says how many rows a request shares that the part
        opens on the stages."""
        leaving = self._leaving.popleft()
        rows = leaving.rows
        if not leaving.committed and tree is not None:
            wanted = [i in tree or i in awaited for i in rows.ids.tolist()]
            rows = rows if all(wanted) else rows.take(np.flatnonzero(wanted))
        if not len(rows):
            self.in_flight -= 1
            return None
        reused = self.reused if leaving.reserve else None
        want = min(leaving.want, len(rows))
        shared = opens(self._number) if leaving.reserve else 0
        none = 0, NO_IDS, False
        begins = (reused.request, np.array(reused.ids, np.int64), reused.ends) if reused else none
        return Part(
            self._number,
            self.retains.epoch,
            leaving.committed,
            leaving.reserve,
            want,
            rows.ids,
            rows.parents,
            rows.positions,
            rows.tokens,
            *begins,
            shared,
            choosing if leaving.committed and want else None,
            known=self.known(rows.ids) if leaving.committed and choosing else NO_IDS,
        )

    def sent(self, seq: int) -> None:
        """A part of it has left, in the segment of that number."""
        self.last_sent_seq = seq

    # --- back ---------------------------------------------------------------------------------

    @property
    def count_returned(self) -> int:
        """Parts that are back and were not taken up."""
        return len(self._returned)

    def put_returned(self, returned: Returned) -> None:
        """Rows are back; they wait to be taken up."""
        self._returned.append(returned)

    def next_returned(self) -> Returned:
        """Take up what is back longest; every stage has applied the retained sets that it names."""
        self.in_flight -= 1
        returned = self._returned.popleft()
        self.retains.acknowledge(returned.part.epoch)
        return returned

    def missed(self) -> None:
        """A walk has left the guesses: the rows that were put in last are worth nothing."""
        self.rows_before = 0
