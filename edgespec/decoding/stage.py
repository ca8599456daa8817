"""Stage machine: keeps the row ledgers of one block, runs segments in order, applies retained sets.

A retained set is garbage collection: it is applied when it comes, before a segment is computed
and again before it is sent, and never changes what a live row sees. An emptied segment still
travels, so that the coordinator's credits stay right.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from edgespec.decoding.effects import (
    AbortBlock,
    CloseCache,
    GatherRows,
    MoveCache,
    OpenCache,
    SendRing,
)
from edgespec.decoding.events import (
    SegmentArrived,
)
from edgespec.decoding.snapshot import RunLog
from edgespec.decoding.stage_stats import StageStats
from edgespec.errors import LocalProtocolError, RemoteProtocolError
from edgespec.machines.effects import (
    Effect,
    RunBlock,
    SendCoordinator,
)
from edgespec.machines.events import (
    NO_JOB,
    BlockDone,
    ComputeFailed,
    Event,
    MessageArrived,
    Tick,
)
from edgespec.tree.ledger import IntArray, RetainSet, RowLedger, Rows
from edgespec.types.tensor import Tensor
from edgespec.wire.messages import CloseRequest, Credit, Fault, Retain, Segment, StageTime
from edgespec.wire.snapshots import SubscribeActivity

REMEMBERED_ENDS = 1024
"""Ended requests whose late segments and openings are still recognised."""


@dataclass(slots=True)
class _Held:
    """What a stage holds of one open request."""

    ledger: RowLedger = field(default_factory=RowLedger)
    keep: RetainSet = field(default_factory=lambda: RetainSet(0, -1, (), frozenset()))


@dataclass(frozen=True, slots=True)
class _Running:
    """The one job at the block: the segment as it came in, the rows that are computed, and what
    the stages before tapped of them."""

    job: int
    segment: Segment
    rows: Rows
    aux_hidden: Tensor | None
    since: float


class StageMachine:
    """One stage of the ring, without I/O: `handle(event, now)` answers with effects."""

    def __init__(self, *, is_first: bool, is_last: bool, row_limit: int) -> None:
        """`row_limit`: rows of one request (committed and speculative) that may be held."""
        self.stats = StageStats()
        self.take_place(is_first=is_first, is_last=is_last, row_limit=row_limit)
        self._held: dict[int, _Held] = {}
        self._ended: deque[int] = deque(maxlen=REMEMBERED_ENDS)
        self._queue: deque[Segment] = deque()
        self._running: _Running | None = None
        self._given_up: set[int] = set()  # jobs of an earlier ring that have not come back
        self._last_seq = -1
        self._jobs = 0
        self._runs = RunLog()

    def handle(self, event: Event, now: float) -> list[Effect]:
        """React to one event. A peer's nonsense ends its request with a Fault, nothing else."""
        match event:
            case SegmentArrived(segment):
                return self._on_segment(segment, now)
            case MessageArrived(_, Retain() as retain):
                return self._on_retain(retain)
            case MessageArrived(_, CloseRequest(request)):
                return self._end(request)
            case MessageArrived(_, SubscribeActivity(seconds)):
                self._runs.observe(seconds, now)
                return []
            case BlockDone(job, hidden, aux_hidden):
                return self._on_block_done(job, hidden, aux_hidden, now) + self._runs.tell(now)
            case Tick():
                return self._runs.tell(now)
            case ComputeFailed(job, request, reason):
                return self._on_compute_failed(job, request, reason, now)
            case _:
                raise LocalProtocolError(f"a stage cannot handle {type(event).__name__}")

    def take_place(self, *, is_first: bool, is_last: bool, row_limit: int) -> None:
        """From the next ring on, be that stage of it (see __init__)."""
        self._is_first = is_first
        self._is_last = is_last
        self._row_limit = row_limit
        self.stats.rings += 1

    def reset(self) -> list[Effect]:
        """A new ring begins: forget all that it had of the one before.

        The caller sees to it that no segment of an earlier ring comes any more. A block that still
        runs does so for nobody.
        """
        effects: list[Effect] = []
        if self._running is not None:
            self._given_up.add(self._running.job)
            effects.append(AbortBlock(self._running.job))
            self._running = None
        effects += [CloseCache(request) for request in self._held]
        self._held.clear()
        self._ended.clear()
        self._queue.clear()
        self._last_seq = -1
        return effects

    def deadline(self) -> float | None:
        """When to call with Tick, to tell runs; else a stage waits for nothing but events."""
        return self._runs.deadline()

    def ledgers(self) -> dict[int, RowLedger]:
        """The row ledgers of all open requests, for checks."""
        return {request: held.ledger for request, held in self._held.items()}

    @property
    def queued(self) -> int:
        """Segments that wait for the block."""
        return len(self._queue)

    @property
    def held_rows(self) -> int:
        """Rows of all open requests in the KV cache."""
        return sum(len(held.ledger) for held in tuple(self._held.values()))

    # --- segments -----------------------------------------------------------------------------

    def _on_segment(self, segment: Segment, now: float) -> list[Effect]:
        if segment.seq <= self._last_seq:
            return []  # a repeated delivery; the first one was or will be computed
        self._last_seq = segment.seq
        self._queue.append(segment)
        return self._start_next(now)

    def _start_next(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        while self._running is None and self._queue:
            segment = self._queue.popleft()
            try:
                effects += self._start(segment, now)
            except RemoteProtocolError as problem:
                effects += self._fault(segment, str(problem))
        return effects

    def _start(self, segment: Segment, now: float) -> list[Effect]:
        effects: list[Effect] = []
        request = segment.request
        if segment.reserve and request not in self._held and request not in self._ended:
            effects += self._open(segment)
        elif segment.base in self._held and request in self._ended:
            effects += self._end(segment.base)  # nobody wants its rows any more
        held = self._held.get(request)
        if held is None:
            return [*effects, *self._hand_on(_emptied(segment, segment.epoch))]
        rows, hidden, aux_hidden = _live_rows(segment, held.keep)
        if not len(rows):
            return [*effects, *self._hand_on(_emptied(segment, held.keep.epoch))]
        return [*effects, self._run(segment, held, rows, hidden, aux_hidden, now)]

    def _open(self, segment: Segment) -> list[Effect]:
        """Begin a request: with nothing, or with rows of one that is over."""
        held = self._held[segment.request] = _Held()
        if not segment.base:
            return [OpenCache(segment.request, min(segment.reserve, self._row_limit))]
        base = self._held.get(segment.base)
        if base is None:
            raise RemoteProtocolError(f"nothing is left of request {segment.base} to begin with")
        held.ledger, order = base.ledger.heir(segment.base_ids)
        del self._held[segment.base]
        self._ended.append(segment.base)
        moved = MoveCache(segment.request, segment.base)
        return [moved, GatherRows(segment.request, 0, order)]

    def _run(
        self,
        segment: Segment,
        held: _Held,
        rows: Rows,
        hidden: Tensor | None,
        aux_hidden: Tensor | None,
        now: float,
    ) -> RunBlock:
        if len(held.ledger) + len(rows) > self._row_limit:
            raise RemoteProtocolError(f"more than {self._row_limit} rows in one request")
        committed = held.ledger.committed
        if segment.committed:
            held.ledger.commit(rows)
            sees = np.tri(len(rows), dtype=np.bool_)
        else:
            sees = held.ledger.append(rows)
        self._jobs += 1
        self._running = _Running(self._jobs, segment, rows, aux_hidden, now)
        return RunBlock(
            self._jobs,
            segment.request,
            rows,
            hidden,
            committed,
            sees,
            segment.aux_layers,
            segment.prompts,
        )

    def _on_block_done(
        self, job: int, hidden: Tensor | None, aux_hidden: Tensor | None, now: float
    ) -> list[Effect]:
        if self._was_given_up(job):
            return []
        running = self._finish_job(job)
        segment = running.segment
        held = self._held.get(segment.request)
        self._note(running, held, hidden is None, now)
        if held is None or hidden is None:
            epoch = held.keep.epoch if held else segment.epoch
            done = self._hand_on(_emptied(segment, epoch))
        else:
            done = self._hand_on(self._outgoing(running, held, hidden, aux_hidden, now))
        return done + self._start_next(now)

    def _note(self, running: _Running, held: _Held | None, aborted: bool, now: float) -> None:
        """Keep what it took, for whoever watches, and how many rows are of use still."""
        segment, rows = running.segment, running.rows
        kept = 0
        if held is not None and not aborted:
            kept = len(rows) if segment.committed else int(held.keep.keeps(rows.ids).sum())
        self._runs.ended(segment.request, segment.seq, running.since, len(rows), kept, now)
        self.stats.ran(len(rows), kept, now - running.since)

    def _outgoing(
        self, running: _Running, held: _Held, hidden: Tensor, own: Tensor | None, now: float
    ) -> Segment:
        segment, rows = running.segment, running.rows
        before = running.aux_hidden
        aux_hidden = before.beside(own) if before is not None and own is not None else before or own
        index = np.flatnonzero(held.keep.keeps(rows.ids))
        if segment.committed:
            # Certain rows are never dropped; behind the last stage only the wanted ones go on.
            first = len(rows) - segment.wanted if self._is_last else 0
            index = np.arange(max(first, 0), len(rows))
        return Segment(
            segment.request,
            segment.seq,
            min(segment.epoch, held.keep.epoch),
            segment.committed,
            segment.reserve,
            segment.wanted,
            rows.ids[index],
            rows.parents[index],
            rows.positions[index],
            _NO_TOKENS,
            hidden.take(index),
            (*segment.ran, StageTime(len(rows), now - running.since)),
            segment.base,
            segment.base_ids,
            segment.aux_layers,
            None if aux_hidden is None else aux_hidden.take(index),
        )

    def _hand_on(self, segment: Segment) -> list[Effect]:
        """Send a segment to the next node; the first stage says that it is free again."""
        self.stats.segments += 1
        self.stats.emptied += not len(segment.ids)
        if not self._is_first:
            return [SendRing(segment)]
        return [SendRing(segment), SendCoordinator(Credit(segment.seq))]

    def _was_given_up(self, job: int) -> bool:
        known = job in self._given_up
        self._given_up.discard(job)
        return known

    def _finish_job(self, job: int) -> _Running:
        running = self._running
        if running is None or running.job != job:
            raise LocalProtocolError(f"job {job} ended but was not running")
        self._running = None
        return running

    # --- retained sets and ends ---------------------------------------------------------------

    def _on_retain(self, retain: Retain) -> list[Effect]:
        held = self._held.get(retain.request)
        if held is None or retain.epoch <= held.keep.epoch:
            return []
        keep = RetainSet(
            retain.epoch, retain.watermark, retain.accepted, frozenset(retain.retained)
        )
        start = held.ledger.committed
        try:
            order = held.ledger.retain(keep)
        except RemoteProtocolError as problem:
            self.stats.faults += 1
            return [SendCoordinator(Fault(retain.request, str(problem)))]
        held.keep = keep
        effects: list[Effect] = []
        if order is not None:
            effects.append(GatherRows(retain.request, start, order))
        running = self._running
        if (
            running is not None
            and running.segment.request == retain.request
            and not running.segment.committed
            and not keep.keeps(running.rows.ids).any()
        ):
            effects.append(AbortBlock(running.job))
        return effects

    def _end(self, request: int) -> list[Effect]:
        if request not in self._ended:
            self._ended.append(request)
        if self._held.pop(request, None) is None:
            return []
        effects: list[Effect] = [CloseCache(request)]
        if self._running is not None and self._running.segment.request == request:
            effects.append(AbortBlock(self._running.job))
        return effects

    def _on_compute_failed(self, job: int, request: int, reason: str, now: float) -> list[Effect]:
        if self._was_given_up(job):
            return []
        if job != NO_JOB:
            segment = self._finish_job(job).segment
            return self._fault(segment, reason) + self._start_next(now)
        if request not in self._held:
            return []
        self.stats.faults += 1
        return [SendCoordinator(Fault(request, reason)), *self._end(request)]

    def _fault(self, segment: Segment, reason: str) -> list[Effect]:
        """The request cannot go on here: say so, free it, keep the credits right."""
        effects: list[Effect] = []
        if segment.request in self._held:
            self.stats.faults += 1
            effects.append(SendCoordinator(Fault(segment.request, reason)))
            effects += self._end(segment.request)
        if segment.base:
            effects += self._end(segment.base)
        return [*effects, *self._hand_on(_emptied(segment, segment.epoch))]


_NOTHING: IntArray = np.zeros(0, np.int64)
_NO_TOKENS = _NOTHING


def _live_rows(segment: Segment, keep: RetainSet) -> tuple[Rows, Tensor | None, Tensor | None]:
    """The segment's rows that `keep` does not drop, with their hidden vectors and their taps."""
    tokens = segment.tokens
    if len(tokens) != len(segment.ids):  # behind the first stage tokens travel empty
        tokens = np.zeros(len(segment.ids), np.int64)
    rows = Rows(segment.ids, segment.parents, tokens, segment.positions)
    if segment.committed:
        return rows, segment.hidden, segment.aux_hidden
    index = np.flatnonzero(keep.keeps(rows.ids))
    hidden = None if segment.hidden is None else segment.hidden.take(index)
    aux_hidden = None if segment.aux_hidden is None else segment.aux_hidden.take(index)
    return rows.take(index), hidden, aux_hidden


def _emptied(segment: Segment, epoch: int) -> Segment:
    """The header alone, so that credits and acknowledgements still come round."""
    return Segment(
        segment.request,
        segment.seq,
        min(segment.epoch, epoch),
        segment.committed,
        segment.reserve,
        segment.wanted,
        _NOTHING,
        _NOTHING,
        _NOTHING,
        _NOTHING,
        None,
        segment.ran,
        segment.base,
        segment.base_ids,
        segment.aux_layers,
    )
