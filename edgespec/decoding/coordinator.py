"""Coordinator machine: schedules requests on the ring, and hands each event to its request.

A request's way: Submit → queue, its prompt encoded (queue.py) → `_start_next` → the decode loop
(request.py), fed with segments, tokens and guesses → `_finish`, and the next one starts. Several
are live at once; after each event the scheduler says what leaves (scheduler.py). A lost ring pauses
them all (`_pause`), and the next ring starts them again. It has a little more than 400 lines, as
everything that can happen has its handler here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgespec.config import FREE_SOURCES
from edgespec.decoding import drafts
from edgespec.decoding.admission import Ring, admit, encode, kind_of, most_tokens, take_prompt
from edgespec.decoding.answer import TextCodec
from edgespec.decoding.d0_times import D0Times
from edgespec.decoding.effects import CloseDraft, EncodePrompt, Renew
from edgespec.decoding.events import (
    Drafted,
    HeadDone,
    Hinted,
    PromptEncoded,
    SegmentArrived,
    StageBeat,
)
from edgespec.decoding.finish import cached_prefix, finished, last_effects, live_prefixes, whole
from edgespec.decoding.flights import Flights
from edgespec.decoding.give_up import ending, harmless
from edgespec.decoding.hints import HintingStages
from edgespec.decoding.overdue import FlightWatch
from edgespec.decoding.ppd_chains import ChainValues
from edgespec.decoding.queue import BEGINS, GOES_ON, RING_AGAIN, WaitingRoom, say_once
from edgespec.decoding.request import Request
from edgespec.decoding.request_stats import MOST_FRUITLESS
from edgespec.decoding.ring_state import RingState
from edgespec.decoding.row_account import RowAccount
from edgespec.decoding.scheduler import Scheduler
from edgespec.decoding.shared import Shared
from edgespec.decoding.snapshot import SnapshotKeeper
from edgespec.errors import (
    ConfigError,
    EdgespecError,
    LocalProtocolError,
    RemoteProtocolError,
)
from edgespec.machines.effects import Effect, SendPeer, SendStages
from edgespec.machines.events import (
    ComputeFailed,
    Event,
    Hold,
    MessageArrived,
    PeerGone,
    RingDown,
    RingEnded,
    RingProgress,
    RingUp,
    Tick,
)
from edgespec.policy.estimates import Learnt, RingEstimates
from edgespec.wire.client_messages import Cancel, Failed, Submit
from edgespec.wire.hints import Hint
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
        self._state = RingState(ring.recovery)
        self.rows = RowAccount(ring.kept_rows, ring.shares_prefixes)
        self._numbers = 0
        self._flights = Flights(ring.stages, ring.vocabulary)
        d0 = D0Times(ring.own_stage)
        self._scheduler = Scheduler(self._flights, d0, self.rows)
        self.live = self._scheduler.told
        self.rows_told = lambda: self.rows.told(self._scheduler.rows)
        self.learnt = Learnt()
        self._snapshot = SnapshotKeeper(codec)
        table = ring.needs.ppd_tokens
        ppd = (table, ChainValues(table.depth)) if table else None
        self._hinting = HintingStages(ring.lenses)
        walked = self._snapshot.walked
        self._watch = FlightWatch()
        free = 0 < sum(name in FREE_SOURCES for name in ring.sources) < len(ring.sources)
        self._shared = Shared(self._flights, d0, walked, ppd, self.learnt, self._hinting, free)
        self._before: dict[Request, int] = {}  # while an event is handled: tokens of each before it

    def handle(self, event: Event, now: float) -> list[Effect]:
        """React to one event. Every request gets exactly one of Finished and Failed."""
        self._before = {r: len(r.answer.token_ids) for r in self._requests.values()}
        self._scheduler.at = None
        effects = self._react(event, now)
        self._watch.look(self._flights.flying, now)
        effects += self._waiting.tell(self._state.missing, len(self._scheduler), self._ring.live)
        self._before = {}
        return effects

    def _react(self, event: Event, now: float) -> list[Effect]:
        match event:
            case SegmentArrived(segment):
                return self._on_segment(segment, now)
            case HeadDone(request=number) | Drafted(request=number):
                return self._ends(self._scheduler.step([(number, event)], now), now)
            case MessageArrived(_, Credit(seq)):
                return self._scheduler.handed_on(seq, now)
            case StageBeat(stage, holds, passed):
                self._watch.beat(stage, holds, passed, now)
                return []
            case MessageArrived(_, Hint(number) as hint):
                return self._scheduler.step([(number, Hinted(hint))], now)
            case MessageArrived(peer, Submit() as submit):
                return self._on_submit(peer, submit, now)
            case MessageArrived(peer, Cancel(tag)):
                return self._on_cancel(peer, tag, now)
            case MessageArrived(_, Fault(request, reason)):
                return self._on_refused(request, reason, now)
            case MessageArrived(peer, Subscribe() as asked):
                return self._snapshot.watch(peer, asked, now) + self._show(now)
            case MessageArrived(_, StageActivity(runs)):
                self._snapshot.ran(runs, now)
                return []
            case PromptEncoded():
                return self._on_encoded(event, now)
            case ComputeFailed(_, request, reason, kind):
                if self._waiting.is_encoding(request):
                    return self._on_encoded(PromptEncoded(request, (), reason, kind), now)
                return self._on_fault(request, reason, now, kind)
            case RingUp():
                return self._on_ring_up(event, now)
            case RingDown(reason, lost):
                return self._on_ring_down(reason, lost, now)
            case RingProgress(doing):
                self._state.progress(doing, now)
                return []
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
        try:
            flight = self._flights.land(segment)
        except RemoteProtocolError as problem:
            return [Renew(str(problem), by_sender=True)]
        if flight is None:
            return []
        effects = self._ended(self.rows.landed(segment))
        return effects + self._ends(self._scheduler.landed(flight, segment, now), now)

    def _ends(self, effects: list[Effect], now: float) -> list[Effect]:
        """These effects, and the ends of the requests whose answers ended with them."""
        for request in self._scheduler.take_over():
            effects += self._finish(request, request.answer.finish_reason, now)
        return effects + self._make_room()

    def _make_room(self) -> list[Effect]:
        """Answers grow: where rows run short answered requests go, then the live ones that started
        last wait again."""
        effects = self._ended(self.rows.make_room(self._scheduler.rows))
        while len(self._scheduler) > 1 and not self.rows.fit(self._scheduler.rows):
            effects += self._pause(self._scheduler.live[-1:], GOES_ON)
        return effects

    def _start_next(self, now: float) -> list[Effect]:
        """Start the first requests that wait, if their prompts are encoded and may begin."""
        effects: list[Effect] = []
        waiting = self._waiting
        while self._places and (first := waiting.first()) and self._may_start(first):
            effects += self._start(waiting.queue.take(first), now)
        return effects + (self._scheduler.work(now) if self._state.is_up else [])

    def _may_start(self, request: Request) -> bool:
        """Whether its prompt is encoded, and its rows fit; alone it may always."""
        fits = not len(self._scheduler) or self.rows.fit(self._scheduler.rows_with(request))
        return not request.asked and fits

    def _start(self, request: Request, now: float) -> list[Effect]:
        if not request.recoveries:
            request.stats.started = now
        live = {} if self._ring.needs.hidden else live_prefixes(self._scheduler.live)
        request.begin_with(self.rows.begin(request, live))
        self._scheduler.start(request, self._ring.stages, self._ring.prefill_chunk)
        effects = self._make_room()
        if request.policy.drafts:
            effects += [drafts.opening(request), request.read_ahead(now)]
        elif (reused := request.prefix.reused) and reused.ends:
            effects += self._close_drafts([reused.request])
        if request.told:
            effects += say_once(request, request.begins_with or BEGINS)
        return effects

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
        if request.number not in self._scheduler:
            self._waiting.queue.remove(request)
            return []
        self._scheduler.end(request)
        self._waiting.queue.has_changed = True  # its place ahead of all others is free
        self._snapshot.ended()
        # A draft source that needs hidden rows cannot go on from rows that it has not read.
        known = request.policy.drafts or not self._ring.needs.hidden
        keeps = answered and known and request.tree is not None
        effects = self._keep(request) if keeps else self._ended(whole(request))
        return effects + self._start_next(now)

    def _keep(self, request: Request) -> list[Effect]:
        """Have the stages and the draft source keep its committed rows, and drop what is too
        much."""
        gone = self.rows.keep(request.number, cached_prefix(request), self._scheduler.rows)
        kept = [] if request.number in gone else last_effects(request)
        return kept + self._ended(gone)

    def _ended(self, numbers: Sequence[int]) -> list[Effect]:
        ends = [SendStages(CloseRequest(number)) for number in self.rows.end(numbers)]
        return [*ends, *self._close_drafts(numbers)]

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
        if self._places <= len(self._waiting):
            self._waiting.queue.check_room(submit.scope, begins=self._places)
        if any(r.peer == peer and r.tag == submit.tag for r in self._requests.values()):
            raise ConfigError(f"request {submit.tag} of this client is still running")
        self._numbers += 1
        return admit(self._ring, self._codec, self._shared, self._numbers, peer, submit)

    def _on_encoded(self, event: PromptEncoded, now: float) -> list[Effect]:
        """Let the request start in its turn, unless it has ended, or its prompt was encoded twice
        (see give_up)."""
        self._waiting.encoded(event.request)
        request = self._requests.get(event.request)
        effects: list[Effect] = []
        if request is not None and request.asked is not None:
            problem, kind = take_prompt(self._ring, request, event)
            effects = self._fail(request, problem, now, kind) if problem else []
        return effects + self._waiting.encode_next() + self._start_next(now)

    def _on_cancel(self, peer: bytes, tag: int, now: float) -> list[Effect]:
        for request in self._requests.values():
            if (request.peer, request.tag) == (peer, tag):
                return self._finish(request, "cancelled", now)
        return []

    def _on_peer_gone(self, peer: bytes, now: float) -> list[Effect]:
        self._snapshot.forget(peer)
        theirs = [r for r in self._requests.values() if r.peer == peer]
        # Waiting ones first, so that none of them starts only to be forgotten.
        theirs.sort(key=lambda r: r.number in self._scheduler)
        return [effect for r in theirs for effect in self._forget(r, now)]

    def _on_fault(self, number: int, reason: str, now: float, kind: str = "") -> list[Effect]:
        request = self._requests.get(number)
        return [] if request is None else self._fail(request, reason, now, kind)

    def _on_refused(self, number: int, reason: str, now: float) -> list[Effect]:
        """A stage could not go on with a request, and dropped its rows: those that were to begin
        with them start once more, without."""
        was_kept, again = self.rows.refused(number)
        effects = self._ended([number] if was_kept else [])
        effects += self._pause([r for r in self._scheduler.live if r.number in again], BEGINS)
        return effects + self._on_fault(number, reason, now) + self._start_next(now)

    def _on_tick(self, now: float) -> list[Effect]:
        effects = self._fail_overdue(now)
        lost = self._watch.overdue(now)
        if any(now >= limit for limit in self._rows_missing):
            lost = "rows of a request did not come back"
        if lost:
            self._flights.give_up()
            self._watch.give_up()
            for request in self._scheduler.live:
                request.rows_missing_until = None
            effects.append(Renew(lost))
        return effects + self._show(now)

    @property
    def _rows_missing(self) -> list[float]:
        """Until when rows that a stage dropped may be explained by its Fault, for each request."""
        limits = [request.rows_missing_until for request in self._scheduler.live]
        return [limit for limit in limits if limit is not None]

    def _show(self, now: float) -> list[Effect]:
        """Show watchers what goes on."""
        paused = bool(self._requests) and not self._state.is_up
        shown = list(self._requests.values()) if paused else self._scheduler.live
        return self._snapshot.show(shown, self._flights, paused, now)

    # --- rings come and go --------------------------------------------------------------------

    def _on_ring_up(self, up: RingUp, now: float) -> list[Effect]:
        self._ring = replace(self._ring, stages=up.stages or self._ring.stages)
        self.rows.limit = up.rows or self.rows.limit
        told = self._hinting.ring_up(up.ends or self._ring.ends)
        self._state.up()
        self._waiting.queue.has_changed = True  # not their order, but what they wait for
        return told + self._start_next(now) + self._snapshot.observe(now)

    def _on_ring_down(self, reason: str, lost: bool, now: float) -> list[Effect]:
        """Keep what is committed; the rest comes again from it on the next ring."""
        if lost:
            self._state.down(reason, now, self._requests.values())
        else:
            self._state.change(reason)
        self._waiting.queue.has_changed = True
        self._flights.clear()  # nothing comes back from a ring that is gone
        self._watch.new_ring()
        self._snapshot.ended()
        effects = self._close_drafts(self.rows.clear())
        effects += self._fail_overdue(now) + self._fail_fruitless(reason, now)
        return effects + self._pause(self._scheduler.live, RING_AGAIN)

    def _fail_fruitless(self, reason: str, now: float) -> list[Effect]:
        """A ring that fails again and again must not keep a request for ever."""
        effects: list[Effect] = []
        for request in self._scheduler.live:
            if request.stats.ring_lost(len(request.answer.token_ids)) >= MOST_FRUITLESS:
                why = f"{MOST_FRUITLESS} rings in a row gave it no token; the last: {reason}"
                effects += self._fail(request, why, now, "lost")
        return effects

    def _on_hold(self, reason: str, now: float) -> list[Effect]:
        self._state.held = reason
        self._waiting.queue.has_changed = True
        return self._start_next(now)

    def _pause(self, live: Sequence[Request], told: str) -> list[Effect]:
        """Free what these live requests hold, and let them be the first to start again, when they
        are `told` so."""
        effects = self._ended([number for request in live for number in whole(request)])
        for request in live:
            self._scheduler.end(request)
            del self._requests[request.number]
            self._numbers += 1
            request.restart(self._numbers)
            request.begins_with = told
        # They stay the oldest.
        self._requests = {r.number: r for r in [*live, *self._requests.values()]}
        self._waiting.queue.put_back(live)
        return effects

    def _fail_overdue(self, now: float) -> list[Effect]:
        overdue = self._state.overdue(self._requests.values(), now)
        return [effect for r, why in overdue for effect in self._fail(r, why, now, "lost")]

    def _on_ring_ended(self, reason: str, now: float) -> list[Effect]:
        self._state.end(reason)
        self._flights.clear()
        return [e for r in [*self._requests.values()] for e in self._fail(r, reason, now, "lost")]

    # --- what others ask of it ----------------------------------------------------------------

    def give_up(self, cause: Event | Effect, reason: str) -> list[Effect]:
        """`handle` raised on this event, or this effect cannot be carried out: the requests that it
        concerns end with `reason` (see decoding.give_up), the other live ones begin again, and
        those that wait go on waiting. The state may be wrong: a new ring clears it."""
        self._snapshot.reset()  # a watcher asks again
        before, self._before = self._before, {}
        open_ones = list(dict.fromkeys([*before, *self._requests.values()]))
        if (effects := harmless(cause, reason, open_ones)) is not None:
            return effects
        live, waiting = self._scheduler.live, self._waiting.queue.in_order()
        known = {r for r in [*live, *waiting] if self._requests.get(r.number) is r}
        over = ending(cause, self._scheduler.at, open_ones, known, before) or live
        for request in over:
            self._requests.pop(request.number, None)
            self.learnt.pop(request.policy.name, None)  # they may be why
        effects = [Renew("it gave up a request, of which its log says more")]
        effects += [SendPeer(request.peer, Failed(request.tag, reason)) for request in over]
        self._waiting.renew([r for r in waiting if r not in over])
        effects += self._pause([r for r in live if r not in over], RING_AGAIN)
        self._scheduler.clear()
        for request in self._requests.values():
            request.estimates = self.estimates_of(request.policy.name)
        effects += self._close_drafts([request.number for request in over])
        return effects + self._waiting.encode_next()  # the effect that asked for it may be lost

    def deadline(self) -> float | None:
        """When to call with Tick: while rows are missing, or requests wait for a lost ring."""
        limits: list[float | None] = [*self._rows_missing, self._watch.deadline()]
        limits.append(self._state.deadline(self._requests.values()))
        limits.append(self._snapshot.deadline(bool(self._requests)))
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def idle(self) -> bool:
        """No request waits or runs, and nothing is on the ring."""
        return not self._requests and not self._flights

    def load(self) -> tuple[int, int]:
        """How many requests are live, and how many wait."""
        return len(self._scheduler), len(self._waiting)

    @property
    def is_working(self) -> bool:
        """Whether a request is on the ring now; those that only wait for it do not count."""
        return len(self._scheduler) > 0 and self._state.is_up

    def accepts(self, request: int) -> Request | None:
        """The open request of that number, which a lost ring changes; for checks."""
        return self._requests.get(request)

    def estimates_of(self, policy: str) -> RingEstimates:
        """What requests of that policy have taught; its own, so that policies stay comparable."""
        return self.learnt.setdefault(policy, RingEstimates())

    def encode(self, effect: EncodePrompt) -> PromptEncoded:
        """Carry out an EncodePrompt: in a thread of its own, or where nothing else waits for it."""
        return encode(self._codec, effect)

    @property
    def _places(self) -> int:
        """How many more requests may be live now."""
        return self._ring.live - len(self._scheduler) if self._state.may_begin else 0
