"""Stage machine: keeps the row ledgers of one block, runs segments in order, applies retained sets.

A retained set is garbage collection: it is applied when it comes, before a segment is computed
and again before it is sent, and never changes what a live row sees. An emptied segment still
travels, so that the coordinator's credits stay right. If the last stage holds the output head, it
chooses the target tokens along the walk before a segment leaves (target_walk.py). It has some
more than 400 lines, as everything that can come to a stage has its handler here.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from msgspec.structs import replace

from edgespec.decoding.effects import (
    AbortBlock,
    GatherRows,
    Renew,
    RunHead,
    SendRing,
)
from edgespec.decoding.events import HeadDone, SegmentArrived
from edgespec.decoding.held_rows import HeldRows
from edgespec.decoding.stage_stats import RunLog, StageStats
from edgespec.decoding.target_walk import NO_VERDICT, StageJob, TargetWalk, chosen_of, heads_of
from edgespec.errors import CapacityError, ConfigError, LocalProtocolError, RemoteProtocolError
from edgespec.machines.effects import BlockPart, Effect, RunBlock, SendCoordinator
from edgespec.machines.events import NO_JOB, BlockDone, ComputeFailed, Event, MessageArrived, Tick
from edgespec.tree.ledger import IntArray, RetainSet, RowLedger, Rows
from edgespec.tree.stems import Stems
from edgespec.types.tensor import Tensor
from edgespec.wire.messages import CloseRequest, Credit, Fault, Retain
from edgespec.wire.segment import Part, Segment, StageTime, Verdict
from edgespec.wire.snapshots import SubscribeActivity


class StageMachine:
    """One stage of the ring, without I/O: `handle(event, now)` answers with effects."""

    def __init__(
        self, *, is_first: bool, is_last: bool, row_limit: int, keeps_tokens: bool = False
    ) -> None:
        """`row_limit`: rows of all requests (committed and speculative) that may be held, shared
        ones counted once. `keeps_tokens`: the layers of every stage are told of the rows' tokens,
        which so travel on."""
        self.stats = StageStats()
        self._held = HeldRows()
        place = {"is_first": is_first, "is_last": is_last, "keeps_tokens": keeps_tokens}
        self.take_place(row_limit=row_limit, **place)
        self._queue: deque[Segment] = deque()
        self._running: StageJob | None = None
        self._given_up: set[int] = set()  # jobs of an earlier ring that have not come back
        self._last_seq = self.passed = -1
        """`passed`: the number of the segment that was handed on last in this ring; -1: none."""
        self.is_faulty = False
        """Nothing of this ring counts any more: rows may be booked that no cache holds."""
        self._jobs = 0
        self._runs = RunLog()

    def handle(self, event: Event, now: float) -> list[Effect]:
        """React to one event. What cannot be right of a segment ends its ring."""
        match event:
            case SegmentArrived(segment):
                return self._on_segment(segment, now)
            case MessageArrived(_, Retain(request, keep)):
                return self._on_retain(request, keep)
            case MessageArrived(_, CloseRequest(request)):
                return self._end(request)
            case MessageArrived(_, SubscribeActivity(seconds)):
                self._runs.observe(seconds, now)
                return []
            case BlockDone(job, hidden, aux_hidden):
                return self._on_block_done(job, hidden, aux_hidden, now) + self._runs.tell(now)
            case HeadDone():
                return self._on_head_done(event, now) + self._runs.tell(now)
            case Tick():
                return self._runs.tell(now)
            case ComputeFailed():
                return self._on_compute_failed(event, now)
            case _:
                raise LocalProtocolError(f"a stage cannot handle {type(event).__name__}")

    def take_place(
        self, *, is_first: bool, is_last: bool, row_limit: int, keeps_tokens: bool = False
    ) -> None:
        """Change the stage's place in the ring (see __init__), from the next ring on."""
        self._is_first = is_first
        self._is_last = is_last
        self._keeps_tokens = keeps_tokens
        self._held.set_limit(row_limit)
        self.stats.joined()

    def reset(self) -> list[Effect]:
        """A new ring begins: forget everything of the one before.

        The caller must not pass on segments of an earlier ring after this. The result of a block
        that still runs is ignored.
        """
        effects: list[Effect] = []
        if (running := self._running) is not None:
            self._given_up.update(running.heads if running.done else (running.job,))
            effects.append(AbortBlock(running.job))
            self._running = None
        effects += self._held.clear()
        self._queue.clear()
        self._last_seq = self.passed = -1
        self.is_faulty = False
        return effects

    def deadline(self) -> float | None:
        """When to call with Tick, to report runs; None if there is nothing to report."""
        return self._runs.deadline()

    def ledgers(self) -> dict[int, RowLedger]:
        """The row ledgers of all open requests, for checks."""
        return self._held.ledgers()

    @property
    def stems(self) -> Stems:
        """What open requests share, for checks."""
        return self._held.stems

    @property
    def queued(self) -> int:
        """Segments that wait for the block."""
        return len(self._queue)

    @property
    def holds(self) -> int:
        """Segments that are here: at work, or waiting for that."""
        return self.queued + (self._running is not None)

    @property
    def held_rows(self) -> int:
        """Rows of all open requests in the KV cache, shared ones counted once."""
        return self._held.rows

    # --- segments -----------------------------------------------------------------------------

    def _on_segment(self, segment: Segment, now: float) -> list[Effect]:
        seq, before = segment.header.seq, self._last_seq
        if seq <= before or self.is_faulty:
            return []  # a repeated delivery; the first one was or will be computed
        if before >= 0 and seq != before + 1:
            return self._renew(f"left out the segments before number {seq}")
        self._last_seq = seq
        self._queue.append(segment)
        return self._start_next(now)

    def _renew(self, why: str) -> list[Effect]:
        """The node before this one sent what cannot be right: nothing of this ring counts."""
        self.is_faulty = True
        self._queue.clear()
        return [Renew(why, by_sender=True)]

    def _start_next(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        while self._running is None and self._queue:
            effects += self._start(self._queue.popleft(), now)
        return effects

    def _start(self, segment: Segment, now: float) -> list[Effect]:
        """Compute the rows that retained sets have not dropped; hand it on if there are none."""
        effects: list[Effect] = []
        for part in segment.parts:  # all, before rows are booked that no cache holds yet
            try:
                effects += self._held.open(part)
            except RemoteProtocolError as problem:
                effects += self._fault(part, str(problem))
        blocks: list[BlockPart] = []
        rows: list[Rows] = []
        index: list[IntArray] = []
        first = 0
        for part in segment.parts:
            live = Rows.none()
            try:
                stay = self._staying(part, part.ids)
                self._begin_walk(part)
                if len(stay):
                    if self._keeps_tokens and not len(part.tokens):
                        raise RemoteProtocolError("they lack their tokens")
                    live = part.rows().take(stay)
                    blocks.append(self._held.book(part, live))
                    index.append(first + stay)
            except (CapacityError, ConfigError) as problem:
                live = Rows.none()
                effects += self._fault(part, str(problem))
            except RemoteProtocolError as problem:
                return [*effects, *self._renew(f"sent rows that do not fit: {problem}")]
            rows.append(live)
            first += len(part.ids)
        if not blocks:
            return [*effects, *self._hand_on(self._emptied(segment))]
        taken = np.concatenate(index)
        aux_hidden = _take(segment.aux_hidden, taken)
        self._jobs += 1
        self._running = StageJob(self._jobs, segment, tuple(rows), aux_hidden, now)
        hidden, layers = _take(segment.hidden, taken), segment.header.aux_layers
        run = RunBlock(self._jobs, tuple(blocks), hidden, layers, segment.ppd_tokens)
        return [*effects, run]

    def _staying(self, part: Part, ids: IntArray) -> IntArray:
        """Places of the rows that the request's retained set keeps; none if it is not held."""
        held = self._held.get(part.request)
        if held is None:
            return _NOTHING
        return np.arange(len(ids)) if part.committed else np.flatnonzero(held.keep.keeps(ids))

    def _begin_walk(self, part: Part) -> None:
        held = self._held.get(part.request)
        if held is not None and part.choosing is not None and part.committed:
            held.begin_walk(part.choosing)
        if held is not None and held.walk is not None and held.walk.rules is not None:
            held.walk.rules.allow(part.choosing.allowed if part.choosing is not None else None)

    def _on_block_done(
        self, job: int, hidden: Tensor | None, aux_hidden: Tensor | None, now: float
    ) -> list[Effect]:
        if self._was_given_up(job):
            return []
        running = self._finish_job(job)
        parts = running.segment.parts
        if hidden is None or all(part.request not in self._held for part in parts):
            return self._leave(running, None, now)
        done = self._outgoing(running, hidden, aux_hidden)
        if not self._is_last:
            return self._leave(running, done, now)
        done, heads = heads_of(done, self._walk_of, self._jobs + 1)
        if not heads:
            return self._leave(running, chosen_of(done), now)
        self._jobs += len(heads)
        running.begin_heads(done, heads)
        self._running = running
        return [head for head, _ in heads.values()]

    def _on_head_done(self, event: HeadDone, now: float) -> list[Effect]:
        if self._was_given_up(event.job):
            return []
        running, head, place = self._finish_head(event.job)
        walk = self._walk_of(event.request)
        # Without a walk the request has ended meanwhile.
        verdict = NO_VERDICT if walk is None else walk.to_verdict(head, event)
        return self._chose(running, place, verdict, now)

    def _walk_of(self, request: int) -> TargetWalk | None:
        held = self._held.get(request)
        return None if held is None else held.walk

    def _leave(self, running: StageJob, done: Segment | None, now: float) -> list[Effect]:
        """The job is over: its segment leaves, with what it took; or emptied, if there is none."""
        self._note(running, done is None, now)
        if done is None:
            return self._hand_on(self._emptied(running.segment)) + self._start_next(now)
        time = StageTime(sum(map(len, running.rows)), now - running.since)
        done = replace(done, cost=(*done.cost, time))
        return self._hand_on(done) + self._start_next(now)

    def _note(self, running: StageJob, nothing: bool, now: float) -> None:
        """Keep what it took, for those who subscribed, and how many rows are still wanted."""
        computed = wanted = 0
        for part, rows in zip(running.segment.parts, running.rows, strict=True):
            if not len(rows):
                continue
            kept = 0 if nothing else len(self._staying(part, rows.ids))
            seq = running.segment.header.seq
            self._runs.ended(part.request, seq, running.since, len(rows), kept, now)
            computed, wanted = computed + len(rows), wanted + kept
        self.stats.ran(computed, wanted, now - running.since)

    def _outgoing(self, running: StageJob, hidden: Tensor, own: Tensor | None) -> Segment:
        """What the next stage gets: the computed rows that are still wanted."""
        segment, before = running.segment, running.aux_hidden
        aux_hidden = before.beside(own) if before is not None and own is not None else before or own
        parts: list[Part] = []
        index: list[IntArray] = []
        first = 0
        for part, rows in zip(segment.parts, running.rows, strict=True):
            stay = self._staying(part, rows.ids)
            if part.committed and self._is_last:  # the coordinator asked for some of them only
                stay = stay[max(len(stay) - part.want, 0) :]
            parts.append(self._left(part, rows.take(stay)))
            index.append(first + stay)
            first += len(rows)
        taken = np.concatenate(index)
        hidden, aux_hidden = hidden.take(taken), _take(aux_hidden, taken)
        return Segment(segment.header, tuple(parts), segment.cost, hidden, aux_hidden)

    def _emptied(self, segment: Segment) -> Segment:
        """Its header and parts without rows: credits and acknowledgements still come round."""
        parts = tuple(self._left(part, Rows.none()) for part in segment.parts)
        return Segment(segment.header, parts, segment.cost)

    def _left(self, part: Part, rows: Rows) -> Part:
        """The part with these rows alone, and the newest retained set that all stages have."""
        held = self._held.get(part.request)
        epoch = min(part.epoch, held.keep.epoch) if held else part.epoch
        travel = (held and held.walk) or (self._keeps_tokens and not self._is_last)
        tokens = rows.tokens if travel else _NOTHING
        return replace(
            part,
            epoch=epoch,
            ids=rows.ids,
            parents=rows.parents,
            positions=rows.positions,
            tokens=tokens,
            choosing=None if self._is_last else part.choosing,
        )

    def _hand_on(self, segment: Segment) -> list[Effect]:
        """Send a segment to the next node; the first stage says that it is free again."""
        self.passed = segment.header.seq
        self.stats.handed_on(segment.rows)
        if not self._is_first:
            return [SendRing(segment)]
        return [SendRing(segment), SendCoordinator(Credit(segment.header.seq))]

    def _was_given_up(self, job: int) -> bool:
        known = job in self._given_up
        self._given_up.discard(job)
        return known

    def _finish_job(self, job: int) -> StageJob:
        running = self._running
        if running is None or running.job != job:
            raise LocalProtocolError(f"job {job} ended but was not running")
        self._running = None
        return running

    def _finish_head(self, job: int) -> tuple[StageJob, RunHead, int]:
        """The segment at work, the head that has ended, and the place of its part."""
        running = self._running
        if running is None or job not in running.heads:
            raise LocalProtocolError(f"head job {job} ended but was not running")
        return running, *running.pop_head(job)

    def _chose(
        self, running: StageJob, place: int, verdict: Verdict | None, now: float
    ) -> list[Effect]:
        """The part in that place has its verdict, or no rows without one; with the last one the
        segment leaves."""
        assert running.done is not None
        part = running.done.parts[place]
        left = self._left(part, Rows.none()) if verdict is None else part
        left = replace(left, verdict=verdict, known=_NOTHING)
        running.settle(place, left)
        if running.heads:
            return []
        self._running = None
        return self._leave(running, chosen_of(running.done), now)

    # --- retained sets and ends ---------------------------------------------------------------

    def _on_retain(self, request: int, keep: RetainSet) -> list[Effect]:
        held = self._held.get(request)
        if held is None or self.is_faulty or keep.epoch <= held.keep.epoch:
            return []
        start = held.ledger.committed
        try:
            order = held.retain(keep)
        except RemoteProtocolError as problem:  # it names rows that should have come
            self.is_faulty = True
            return [Renew(f"it lacks rows of request {request}: {problem}")]
        gather: list[Effect] = [] if order is None else [GatherRows(request, start, order)]
        return gather + self._abort_unwanted(request)

    def _abort_unwanted(self, request: int) -> list[Effect]:
        """Stop the running block, if it computes rows of that request and none of them is wanted;
        with the rows of others that are wanted it goes on."""
        running = self._running
        if running is None or running.done is not None:
            return []
        computed = {
            part.request: len(self._staying(part, rows.ids))
            for part, rows in zip(running.segment.parts, running.rows, strict=True)
            if len(rows)
        }
        if computed.get(request, 1):
            return []
        return [AbortBlock(running.job, request if any(computed.values()) else None)]

    def _end(self, request: int) -> list[Effect]:
        ended = self._held.end(request)
        return [*ended, *self._abort_unwanted(request)] if ended else []

    def _on_compute_failed(self, failed: ComputeFailed, now: float) -> list[Effect]:
        job, reason = failed.job, failed.reason
        if self._was_given_up(job):
            return []
        if self._running is not None and job in self._running.heads:
            running, _, place = self._finish_head(job)  # it fails alone
            invalid = failed.kind == "invalid"
            faults = self._fault(running.segment.parts[place], reason, invalid=invalid)
            return faults + self._chose(running, place, None, now)
        if job != NO_JOB:
            segment = self._finish_job(job).segment
            faults = [effect for part in segment.parts for effect in self._fault(part, reason)]
            return [*faults, *self._hand_on(self._emptied(segment)), *self._start_next(now)]
        return self._refuse(failed.request, reason)

    def _fault(self, part: Part, reason: str, *, invalid: bool = False) -> list[Effect]:
        """The part's request cannot go on here: free it, with the one that ends with it."""
        effects = self._refuse(part.request, reason, invalid=invalid)
        return effects + (self._end(part.fork_of) if part.fork_ends else [])

    def _refuse(self, request: int, reason: str, *, invalid: bool = False) -> list[Effect]:
        """Say that a request cannot go on, and free it. `invalid`: see Fault."""
        if request not in self._held:
            return []
        self.stats.refused()
        return [SendCoordinator(Fault(request, reason, invalid=invalid)), *self._end(request)]


_NOTHING: IntArray = np.zeros(0, np.int64)


def _take(tensor: Tensor | None, index: IntArray) -> Tensor | None:
    return None if tensor is None else tensor.take(index)
