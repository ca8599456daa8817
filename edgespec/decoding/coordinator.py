"""Coordinator machine: schedules requests on the ring, and hands each event to its request.

A request's way: Submit → queue, its prompt encoded (queue.py) → `_start_next` → the decode loop
(request.py), fed with segments, tokens and guesses → `_finish`, and the next one starts. A lost
ring pauses the active request (`_pause`), and the next ring starts it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgespec.decoding.admission import Ring, admit, encode, fitting, kind_of, most_tokens
from edgespec.decoding.answer import TextCodec
from edgespec.decoding.effects import CloseDraft, EncodePrompt, OpenDraft, Renew
from edgespec.decoding.events import Drafted, HeadDone, PromptEncoded, SegmentArrived
from edgespec.decoding.finish import cached_prefix, finished, last_effects
from edgespec.decoding.flights import Flights, Landed
from edgespec.decoding.ppd_chains import ChainValues
from edgespec.decoding.prefix_cache import PrefixCache
from edgespec.decoding.queue import BEGINS, GOES_ON, WaitingRoom, say_once
from edgespec.decoding.request import Request
from edgespec.decoding.ring_state import RingState
from edgespec.decoding.shared import Shared
from edgespec.decoding.snapshot import SnapshotKeeper
from edgespec.errors import ConfigError, EdgespecError, LocalProtocolError
from edgespec.machines.effects import Effect, SendPeer, SendStages
from edgespec.machines.events import (
    ComputeFailed,
    Event,
    Hold,
    MessageArrived,
    PeerGone,
    RingDown,
    RingEnded,
    RingUp,
    Tick,
)
from edgespec.policy.estimates import RingEstimates
from edgespec.wire.client_messages import Cancel, Failed, Submit
from edgespec.wire.messages import CloseRequest, Credit, Fault
from edgespec.wire.segment import Segment
from edgespec.wire.snapshots import StageActivity, Subscribe


class CoordinatorMachine:
    """D0 without I/O: `handle(event, now)` answers with effects."""

    def __init__(self, ring: Ring, codec: TextCodec) -> None:
        self._ring = ring
        self._codec = codec
        self._requests: dict[int, Request] = {}
        self._waiting = WaitingRoom(ring.queue_limit, most_tokens(ring))
        self._active: int | None = None
        self._state = RingState(ring.recovery)
        self._cache = PrefixCache(ring.kept_rows)
        self._numbers = 0
        self._flights = Flights(ring.stages)
        self._estimates: dict[str, RingEstimates] = {}
        self._snapshot = SnapshotKeeper(codec)
        table = ring.needs.ppd_tokens
        ppd = (table, ChainValues(table.depth)) if table else None
        self._shared = Shared(self._flights, self._snapshot.walked, ppd, self._estimates)
        self._before: list[Request] = []  # while an event is handled: the requests open before it

    def handle(self, event: Event, now: float) -> list[Effect]:
        """React to one event. Every request gets exactly one of Finished and Failed."""
        self._before = list(self._requests.values())
        effects = self._react(event, now)
        effects += self._waiting.tell(self._state.missing, int(self._active is not None))
        self._before = []
        return effects

    def _react(self, event: Event, now: float) -> list[Effect]:
        match event:
            case SegmentArrived(segment):
                return self._on_segment(segment, now)
            case HeadDone(request=number) | Drafted(request=number):
                return self._step(self._requests.get(number), event, now)
            case MessageArrived(_, Credit(seq)):
                known = self._flights.hand_on(seq)
                return self._step(self._running, event, now) if known else []
            case MessageArrived(peer, Submit() as submit):
                return self._on_submit(peer, submit, now)
            case MessageArrived(peer, Cancel(tag)):
                return self._on_cancel(peer, tag, now)
            case MessageArrived(_, Fault(request, reason)):
                return self._on_fault(request, reason, now)
            case MessageArrived(peer, Subscribe(seconds)):
                return self._snapshot.watch(peer, seconds, now) + self._show(now)
            case MessageArrived(_, StageActivity(runs)):
                self._snapshot.ran(runs, now)
                return []
            case PromptEncoded():
                return self._on_encoded(event, now)
            case ComputeFailed(_, request, reason):
                if self._waiting.is_encoding(request):
                    return self._on_encoded(PromptEncoded(request, (), reason), now)
                return self._on_fault(request, reason, now)
            case RingUp(stages):
                self._ring = replace(self._ring, stages=stages or self._ring.stages)
                self._state.up()
                self._waiting.queue.has_changed = True  # not their order, but what they wait for
                return self._start_next(now) + self._snapshot.observe(now)
            case RingDown(reason, lost):
                return self._on_ring_down(reason, lost, now)
            case Hold(reason):
                return self._on_hold(reason, now)
            case RingEnded(reason):
                return self._on_ring_ended(reason, now)
            case PeerGone(peer):
                return self._on_peer_gone(peer, now)
            case Tick():
                return self._on_tick(now)
            case _:
                raise LocalProtocolError(f"the coordinator cannot handle {type(event).__name__}")

    # --- decoding -----------------------------------------------------------------------------

    def _on_segment(self, segment: Segment, now: float) -> list[Effect]:
        flight = self._flights.land(segment)
        request = self._requests.get(segment.request)
        if flight is None or request is None:
            return []
        if not flight.fits(segment):
            return self._fail(request, "the ring returned rows that were not sent round", now)
        ran = [(time.rows, time.seconds) for time in segment.cost]
        request.estimates.segment(ran, self._ring.stages)
        return self._step(request, Landed(flight, segment), now)

    def _step(self, request: Request | None, event: Event, now: float) -> list[Effect]:
        """Hand an event to its request, if that is open; the request ends once its answer does."""
        if request is None:
            return []
        effects = request.handle(event, now)
        reason = request.answer.finish_reason
        return effects + self._finish(request, reason, now) if reason else effects

    def _start_next(self, now: float) -> list[Effect]:
        """Start the first request that waits, if its prompt is encoded and the ring is free."""
        waiting = self._waiting.queue
        if not self._can_start or not len(waiting) or waiting.in_order()[0].asked:
            return []
        request = waiting.next()
        self._active = request.number
        if not request.recoveries:
            request.stats.started = now
        self._flights.clock.change(self._ring.stages)
        request.begin_with(self._cache.take(request.prefix.tokens, request.asker))
        request.prefix.chunk = request.estimates.chunk(
            len(request.prefix) - request.prefix.sent, self._ring.prefill_chunk, self._ring.stages
        )
        effects = self._ended(self._cache.make_room(request.capacity))
        effects += self._open_draft(request)
        if request.policy.drafts:
            effects.append(request.read_ahead(now))
        if request.told:
            effects += say_once(request, GOES_ON if request.recoveries else BEGINS)
        return request.send_prefix() + effects

    def _open_draft(self, request: Request) -> list[Effect]:
        """Start it on the draft source, from what that has read of the reused rows."""
        reused = request.prefix.reused
        if request.policy.drafts:
            known = (reused.request, len(reused.ids)) if reused else (0, 0)
            return [OpenDraft(request.number, request.sampling, *known)]
        return self._close_drafts([reused.request]) if reused else []

    # --- the end of a request -----------------------------------------------------------------

    def _finish(self, request: Request, reason: str, now: float) -> list[Effect]:
        ring = self._ring
        reply = finished(request, reason, ring.stages, ring.draft, ring.sources, now)
        return [SendPeer(request.peer, reply), *self._forget(request, now, answered=True)]

    def _fail(self, request: Request, reason: str, now: float, kind: str = "") -> list[Effect]:
        told = SendPeer(request.peer, Failed(request.tag, reason, kind))
        return [told, *self._forget(request, now)]

    def _forget(self, request: Request, now: float, answered: bool = False) -> list[Effect]:
        """Free the request everywhere, except rows that a next turn may begin with. Its segments
        still come back from the ring, as credits."""
        del self._requests[request.number]
        if self._active != request.number:
            self._waiting.queue.remove(request)
            return []
        self._active = None
        self._waiting.queue.has_changed = True  # its place ahead of all others is free
        self._snapshot.ended()
        # A draft source that needs hidden rows cannot go on from rows that it has not read.
        known = request.policy.drafts or not self._ring.needs.hidden
        keeps = answered and known and request.tree is not None
        return (self._keep(request) if keeps else self._ended([request.number])) + self._start_next(
            now
        )

    def _keep(self, request: Request) -> list[Effect]:
        """Have the stages and the draft source keep its committed rows, and drop what is too
        much."""
        gone = self._cache.add(request.number, cached_prefix(request))
        if request.number in gone:
            return self._ended(gone)
        return last_effects(request) + self._ended(gone)

    def _ended(self, numbers: Sequence[int]) -> list[Effect]:
        ends: list[Effect] = [SendStages(CloseRequest(number)) for number in numbers]
        return ends + self._close_drafts(numbers)

    def _close_drafts(self, numbers: Sequence[int]) -> list[Effect]:
        """Free requests on the draft source, which ignores those that it does not know."""
        return [CloseDraft(number) for number in numbers] if self._ring.draft else []

    # --- requests come and go -----------------------------------------------------------------

    def _on_submit(self, peer: bytes, submit: Submit, now: float) -> list[Effect]:
        try:
            request = self._admit(peer, submit)
        except EdgespecError as problem:
            return [SendPeer(peer, Failed(submit.tag, str(problem), kind_of(problem)))]
        request.stats.started = request.waiting_since = now
        self._requests[request.number] = request
        self._waiting.queue.add(request)
        return self._waiting.encode_next()

    def _admit(self, peer: bytes, submit: Submit) -> Request:
        self._state.check_open()
        if not self._can_start or len(self._waiting):
            self._waiting.queue.check_room(submit.scope, begins=self._can_start)
        if any(r.peer == peer and r.tag == submit.tag for r in self._requests.values()):
            raise ConfigError(f"request {submit.tag} of this client is still running")
        number = self._numbers + 1
        request = admit(self._ring, self._codec, self._shared, number, peer, submit)
        self._numbers = number
        return request

    def _on_encoded(self, event: PromptEncoded, now: float) -> list[Effect]:
        """Let the request start in its turn, unless it has ended, or its prompt was encoded twice
        (see give_up)."""
        self._waiting.encoded(event.request)
        request = self._requests.get(event.request)
        effects: list[Effect] = []
        if request is None or request.asked is None:
            pass
        elif event.problem:
            effects = self._fail(request, event.problem, now, event.kind)
        else:
            try:
                fits = fitting(self._ring, len(event.tokens), request.asked.max_new_tokens)
            except EdgespecError as problem:
                effects = self._fail(request, str(problem), now, kind_of(problem))
            else:
                request.encoded(event.tokens, fits)
        return effects + self._waiting.encode_next() + self._start_next(now)

    def _on_cancel(self, peer: bytes, tag: int, now: float) -> list[Effect]:
        for request in self._requests.values():
            if (request.peer, request.tag) == (peer, tag):
                return self._finish(request, "cancelled", now)
        return []

    def _on_peer_gone(self, peer: bytes, now: float) -> list[Effect]:
        self._snapshot.forget(peer)
        effects: list[Effect] = []
        theirs = [r for r in self._requests.values() if r.peer == peer]
        # Waiting ones first, so that none of them starts only to be forgotten.
        for request in sorted(theirs, key=lambda r: r.number == self._active):
            effects += self._forget(request, now)
        return effects

    def _on_fault(self, number: int, reason: str, now: float) -> list[Effect]:
        request = self._requests.get(number)
        return [] if request is None else self._fail(request, reason, now)

    def _on_tick(self, now: float) -> list[Effect]:
        effects = self._fail_overdue(now)
        for request in list(self._requests.values()):
            limit = request.rows_missing_until
            if limit is not None and now >= limit:
                effects += self._fail(request, "a stage lost rows of this request", now)
        return effects + self._show(now)

    def _show(self, now: float) -> list[Effect]:
        """Show watchers what goes on."""
        paused = bool(self._requests) and not self._state.is_up
        shown = next(iter(self._requests)) if paused else self._active  # the oldest
        request = None if shown is None else self._requests[shown]
        return self._snapshot.show(request, self._flights, paused, now)

    # --- rings come and go --------------------------------------------------------------------

    def _on_ring_down(self, reason: str, lost: bool, now: float) -> list[Effect]:
        """Keep what is committed; the rest comes again from it on the next ring."""
        if lost:
            self._state.down(reason, now, self._requests.values())
        else:
            self._state.change(reason)
        self._waiting.queue.has_changed = True
        self._flights.clear()  # nothing comes back from a ring that is gone
        self._snapshot.ended()
        effects = self._close_drafts(self._cache.clear())
        return effects + self._fail_overdue(now) + self._pause()

    def _on_hold(self, reason: str, now: float) -> list[Effect]:
        self._state.held = reason
        self._waiting.queue.has_changed = True
        return self._start_next(now)

    def _pause(self) -> list[Effect]:
        """Free what the active request holds, and let it be the first to start again."""
        if self._running is None:
            return []
        request = self._requests.pop(self._running.number)
        effects = self._ended([request.number])
        self._numbers += 1
        request.restart(self._numbers)
        self._requests = {request.number: request, **self._requests}  # it stays the oldest
        self._waiting.queue.put_back(request)
        self._active = None
        return effects

    def _fail_overdue(self, now: float) -> list[Effect]:
        overdue = self._state.overdue(self._requests.values(), now)
        return [effect for r, why in overdue for effect in self._fail(r, why, now, "lost")]

    def _on_ring_ended(self, reason: str, now: float) -> list[Effect]:
        self._state.end(reason)
        self._flights.clear()
        open_ones = list(self._requests.values())
        return [e for r in open_ones for e in self._fail(r, reason, now, "lost")]

    # --- what others ask of it ----------------------------------------------------------------

    def give_up(self, event: Event, reason: str) -> list[Effect]:
        """`handle` raised: the request that the event concerns ends with `reason`; those that wait
        go on waiting. The effects are lost and the state may be wrong: a new ring clears it."""
        self._snapshot.reset()  # a watcher asks again
        open_ones = dict.fromkeys([*self._before, *self._requests.values()])
        match event:
            case MessageArrived(_, Subscribe() | StageActivity()):
                return []
            case MessageArrived(peer, Submit(tag=tag)) if not any(
                (r.peer, r.tag) == (peer, tag) for r in open_ones
            ):
                return [SendPeer(peer, Failed(tag, reason))]  # it was not even admitted
        waiting = self._waiting.renew()
        over = [r for r in open_ones if self._requests.get(r.number) is not r]
        over += [r for r in self._requests.values() if r not in waiting]
        effects: list[Effect] = [Renew("it gave up a request, of which its log says more")]
        for request in over:
            self._requests.pop(request.number, None)
            self._estimates.pop(request.policy.name, None)  # it may be why
            effects.append(SendPeer(request.peer, Failed(request.tag, reason)))
        self._before = []
        self._active = None
        for request in waiting:
            if request.number in self._requests:
                self._waiting.queue.add(request)
        effects += self._close_drafts([request.number for request in over])
        return effects + self._waiting.encode_next()  # the effect that asked for it may be lost

    def deadline(self) -> float | None:
        """When to call with Tick: while rows are missing, or requests wait for a lost ring."""
        limits = [r.rows_missing_until for r in self._requests.values()]
        limits.append(self._state.deadline(self._requests.values()))
        limits.append(self._snapshot.deadline(bool(self._requests)))
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def idle(self) -> bool:
        """No request waits or runs, and nothing is on the ring."""
        return not self._requests and not self._flights

    def load(self) -> tuple[int, int]:
        """How many requests run, and how many wait."""
        return int(self._active is not None), len(self._waiting)

    @property
    def is_working(self) -> bool:
        """Whether a request is on the ring now; those that only wait for it do not count."""
        return self._active is not None and self._state.is_up

    def accepts(self, request: int) -> Request | None:
        """The open request of that number, which a lost ring changes; for checks."""
        return self._requests.get(request)

    def estimates_of(self, policy: str) -> RingEstimates:
        """What requests of that policy have taught; its own, so that policies stay comparable."""
        return self._estimates.setdefault(policy, RingEstimates())

    def encode(self, effect: EncodePrompt) -> PromptEncoded:
        """Carry out an EncodePrompt: in a thread of its own, or where nothing else waits for it."""
        return encode(self._codec, effect)

    @property
    def _running(self) -> Request | None:
        return None if self._active is None else self._requests[self._active]

    @property
    def _can_start(self) -> bool:
        return self._active is None and self._state.may_begin
