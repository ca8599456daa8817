"""Coordinator machine: schedules requests on the ring, and hands each event to its request.

A request's way: Submit → queue, its prompt encoded (queue.py) → `_start_next` → the decode loop
(request.py), fed with segments, tokens and guesses → `_finish`, and the next one starts. Several
are live at once; after each event the scheduler says what leaves (scheduler.py). A lost ring pauses
them all (`_pause`), and the next ring starts them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgespec.decoding import admission
from edgespec.decoding.admission import CoordinatorSettings, kind_of
from edgespec.decoding.answer import BEGINS, GOES_ON, RING_AGAIN, TextCodec
from edgespec.decoding.d0_times import D0Times
from edgespec.decoding.effects import EncodePrompt, Renew
from edgespec.decoding.events import (
    Drafted,
    HeadDone,
    MasksFound,
    PromptEncoded,
    SegmentArrived,
    StageBeat,
)
from edgespec.decoding.finish import finished
from edgespec.decoding.flights import Flights
from edgespec.decoding.holdings import Holdings
from edgespec.decoding.masking import Ends
from edgespec.decoding.ppd_rows import ChainValues
from edgespec.decoding.queue import RequestQueue
from edgespec.decoding.request import Request
from edgespec.decoding.ring_state import RingState
from edgespec.decoding.row_account import RowAccount
from edgespec.decoding.scheduler import Scheduler
from edgespec.decoding.shared import Shared
from edgespec.decoding.snapshot import SnapshotKeeper
from edgespec.errors import ConfigError, EdgespecError, LocalProtocolError, RemoteProtocolError
from edgespec.machines.effects import Effect, SendPeer
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
from edgespec.planning.memory import SPECULATIVE_ROWS
from edgespec.policy.estimates import Learnt
from edgespec.types.boundaries import AHEAD
from edgespec.wire.client_messages import Cancel, Failed, LiveRequest, Submit
from edgespec.wire.messages import Credit, Fault
from edgespec.wire.segment import Segment
from edgespec.wire.snapshots import StageActivity, Subscribe


class CoordinatorMachine:
    """D0 without I/O: `handle(event, now)` answers with effects."""

    def __init__(self, ring: CoordinatorSettings, codec: TextCodec) -> None:
        self._ring, self._codec = ring, codec
        self._state = RingState(ring.recovery)
        self.rows = RowAccount(ring.kept_rows, ring.shares_prefixes)
        self._holdings = Holdings(self.rows, ring.needs if ring.draft else None, ring.folds)
        self._flights = Flights(ring.stages, ring.vocabulary)
        self._numbers, self.learnt = 0, Learnt()
        self._begin_empty()

    def _begin_empty(self) -> None:
        """No request is here."""
        ring = self._ring
        self._requests: dict[int, Request] = {}
        self._waiting = RequestQueue(ring.queue_limit, admission.most_tokens(ring))
        self._snapshot, d0 = SnapshotKeeper(self._codec), D0Times(ring.own_stage)
        self._scheduler = Scheduler(self._flights, d0, self.rows)
        table = ring.needs.ppd_tokens
        ppd = (table, ChainValues(table.depth)) if table else None
        ahead = AHEAD if ring.folds else ring.context_length
        spare = SPECULATIVE_ROWS + ring.state_rows
        self._shared = Shared(self._flights, d0, self._snapshot, ppd, self.learnt, ahead, spare)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """React to one event. Every request gets exactly one of Finished and Failed.

        What it raises is a bug of its own, and what it holds may be wrong: `reset` it then, and
        fail all requests.
        """
        effects = self._react(event, now)
        if self._waiting.has_changed:
            live, most = len(self._scheduler), self._ring.live
            effects += self._waiting.tell(self._state.missing, live, most)
        return effects

    def reset(self) -> list[Effect]:
        """`handle` raised, or something that it wants cannot be carried out: forget all requests,
        of which the clients are not told, and what was learnt of them, which may be why. What still
        comes of them is for nobody; a new ring clears the stages."""
        gone = [*self._requests, *self.rows.clear()]
        self.learnt.clear()
        self._flights.give_up()
        self._begin_empty()
        renew = Renew("it gave up its requests, of which its log says more")
        return [renew, *self._holdings.close_drafts(gone)]

    def _react(self, event: Event, now: float) -> list[Effect]:
        match event:
            case SegmentArrived(segment):
                return self._on_segment(segment, now)
            case HeadDone(request=number) | Drafted(request=number):
                return self._and_ends(self._scheduler.step([(number, event)], now), now)
            case MessageArrived(_, Credit(seq)):
                return self._scheduler.on_credit(seq, now)
            case StageBeat(stage, holds, passed):
                self._flights.watch.beat(stage, holds, passed, now)
                return []
            case MessageArrived(peer, Submit() as submit):
                return self._on_submit(peer, submit, now)
            case MessageArrived(peer, Cancel(tag)):
                return self._on_cancel(peer, tag, now)
            case MessageArrived(_, Fault(request, reason, invalid=invalid)):
                return self._on_refused(request, reason, now, "invalid" if invalid else "")
            case MasksFound():
                effects, failed = self._scheduler.take_masks(event)
                return effects + self._fail_each(failed, now, "invalid")
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
                self._state.hold(reason)
                self._waiting.mark_changed()
                return self._start_next(now)
            case RingEnded(reason):
                self._state.end(reason)
                self._flights.clear()
                return self._fail_each([(r, reason) for r in self._requests.values()], now)
            case PeerGone(peer):
                return self._on_peer_gone(peer, now)
            case Tick():
                return self._on_tick(now)
            case _:
                raise LocalProtocolError(f"the coordinator cannot handle {type(event).__name__}")

    # --- decoding -----------------------------------------------------------------------------

    def _on_segment(self, segment: Segment, now: float) -> list[Effect]:
        try:
            returned = self._flights.returned(segment, now)
        except RemoteProtocolError as problem:
            return [Renew(str(problem), by_sender=True)]
        if not returned:
            return []
        forks = [part.request for part in segment.parts if part.fork_of]
        effects = self._holdings.free(self.rows.settled(forks)) if forks else []
        effects += self._scheduler.deliver(returned, segment.cost, now)
        return self._and_ends(effects, now)

    def _and_ends(self, effects: list[Effect], now: float) -> list[Effect]:
        """These effects, and the ends of the requests whose answers ended with them."""
        for request in self._scheduler.take_over():
            effects += self._finish(request, request.answer.finish_reason, now)
        return effects + self._make_room()

    def _make_room(self) -> list[Effect]:
        """Answers grow: where rows run short answered requests go, then the live ones that started
        last wait again."""
        if not self.rows.limit:
            return []
        effects = self._holdings.free(self.rows.make_room(self._scheduler.rows))
        while len(self._scheduler) > 1 and not self.rows.fit(self._scheduler.rows):
            effects += self._pause(self._scheduler.live[-1:], GOES_ON)
        return effects

    def _start_next(self, now: float) -> list[Effect]:
        """Start the first requests that wait, if their prompts are encoded and may begin."""
        effects: list[Effect] = []
        while (first := self._waiting.first()) and self._free_slots:
            if not self._scheduler.has_room_for(first):
                break
            effects += self._start(self._waiting.take(first), now)
        return effects + (self._scheduler.work(now) if self._state.is_up else [])

    def _start(self, request: Request, now: float) -> list[Effect]:
        if not request.recoveries:
            request.stats.started_at(now)
        reused = self._holdings.begin(request, self._scheduler.live)
        request.begin(request.number, reused)
        self._scheduler.start(request, self._ring.stages, self._ring.prefill_chunk)
        effects = self._make_room()
        if request.policy.drafts:
            effects += [request.drafting.open(len(request.prompt)), request.read_ahead(now)]
        elif reused and reused.ends:
            effects += self._holdings.close_drafts([reused.request])
        return effects + request.client.notify_start()

    # --- the end of a request -----------------------------------------------------------------

    def _finish(self, request: Request, reason: str, now: float) -> list[Effect]:
        reply = finished(request, reason, self._ring, self._flights.clock.now, now)
        return [request.client.reply(reply), *self._forget(request, now, answered=True)]

    def _fail(self, request: Request, reason: str, now: float, kind: str = "") -> list[Effect]:
        client = request.client
        return [client.reply(Failed(client.tag, reason, kind)), *self._forget(request, now)]

    def _forget(self, request: Request, now: float, answered: bool = False) -> list[Effect]:
        """Free the request everywhere, except rows that a next turn may begin with. Its segments
        still come back from the ring, as credits."""
        del self._requests[request.number]
        if request.number not in self._scheduler:
            self._waiting.remove(request)
            return []
        self._scheduler.retire(request)
        self._waiting.mark_changed()  # its place ahead of all others is free
        self._snapshot.ended()
        effects = self._holdings.leave(request, self._scheduler.rows, answered=answered)
        return effects + self._start_next(now)

    def _fail_each(self, ends: Ends, now: float, kind: str = "lost") -> list[Effect]:
        return [effect for r, why in ends for effect in self._fail(r, why, now, kind)]

    # --- requests come and go -----------------------------------------------------------------

    def _on_submit(self, peer: bytes, submit: Submit, now: float) -> list[Effect]:
        try:
            self._check_room(peer, submit)
            self._numbers += 1
            given = self._shared, self._numbers, peer, submit
            request = admission.admit(self._ring, self._codec, *given, now)
        except EdgespecError as problem:
            return [SendPeer(peer, Failed(submit.tag, str(problem), kind_of(problem)))]
        self._requests[request.number] = request
        self._waiting.add(request)
        return self._waiting.encode_next()

    def _check_room(self, peer: bytes, submit: Submit) -> None:
        """Raise why a request cannot be taken in now."""
        self._state.check_open()
        self._waiting.check_room(submit.scope, begins=self._free_slots)
        if any(r.client.asked(peer, submit.tag) for r in self._requests.values()):
            raise ConfigError(f"request {submit.tag} of this client is still running")

    def _on_encoded(self, event: PromptEncoded, now: float) -> list[Effect]:
        """Let the request start in its turn, unless it has ended."""
        self._waiting.encoded(event.request)
        request = self._requests.get(event.request)
        effects: list[Effect] = []
        if request is not None and request.asked is not None:
            only_counted = request.asked.max_new_tokens == 0
            problem, kind = admission.take_prompt(self._ring, request, event)
            if problem:
                effects = self._fail(request, problem, now, kind)
            else:
                effects = request.scores.echo(event)
                if only_counted and request.scores.next_row is None:
                    effects += self._finish(request, "length", now)
        return effects + self._waiting.encode_next() + self._start_next(now)

    def _on_cancel(self, peer: bytes, tag: int, now: float) -> list[Effect]:
        known = [r for r in self._requests.values() if r.client.asked(peer, tag)]
        return self._finish(known[0], "cancelled", now) if known else []

    def _on_peer_gone(self, peer: bytes, now: float) -> list[Effect]:
        self._snapshot.forget(peer)
        theirs = [r for r in self._requests.values() if r.client.peer == peer]
        # Waiting ones first, so that none of them starts only to be forgotten.
        theirs.sort(key=lambda r: r.number in self._scheduler)
        return [effect for r in theirs for effect in self._forget(r, now)]

    def _on_fault(self, number: int, reason: str, now: float, kind: str = "") -> list[Effect]:
        request = self._requests.get(number)
        return [] if request is None else self._fail(request, reason, now, kind)

    def _on_refused(self, number: int, reason: str, now: float, kind: str) -> list[Effect]:
        """A stage could not go on with a request, and dropped its rows: those that were to begin
        with them start once more, without."""
        was_kept, again = self.rows.refused(number)
        effects = self._holdings.free([number] if was_kept else [])
        effects += self._pause([r for r in self._scheduler.live if r.number in again], BEGINS)
        return effects + self._on_fault(number, reason, now, kind) + self._start_next(now)

    def _on_tick(self, now: float) -> list[Effect]:
        effects = self._fail_overdue(now)
        lost = self._flights.watch.overdue(now)
        if (limit := self._scheduler.rows_missing) is not None and now >= limit:
            lost = "rows of a request did not come back"
        if lost:
            self._flights.give_up()
            self._flights.watch.doubt_ring()
            effects.append(Renew(lost))
        return effects + self._show(now)

    def _show(self, now: float) -> list[Effect]:
        """Show watchers what goes on."""
        paused = bool(self._requests) and not self._state.is_up
        shown = list(self._requests.values()) if paused else self._scheduler.live
        return self._snapshot.show(shown, self._flights, paused, now)

    # --- rings come and go --------------------------------------------------------------------

    def _on_ring_up(self, up: RingUp, now: float) -> list[Effect]:
        self._ring = replace(self._ring, stages=up.stages or self._ring.stages)
        self.rows.set_limit(up.rows or self.rows.limit)
        self._state.up()
        self._waiting.mark_changed()  # not their order, but what they wait for
        return self._start_next(now) + self._snapshot.observe(now)

    def _on_ring_down(self, reason: str, lost: bool, now: float) -> list[Effect]:
        """Keep what is committed; the rest comes again from it on the next ring."""
        if lost:
            self._state.down(reason, now)
        else:
            self._state.change(reason)
        self._waiting.mark_changed()
        self._flights.clear()  # nothing comes back from a ring that is gone
        self._snapshot.ended()
        effects = self._holdings.close_drafts(self.rows.clear())
        effects += self._fail_overdue(now)
        effects += self._fail_each(self._state.fruitless(self._scheduler.live, reason), now)
        return effects + self._pause(self._scheduler.live, RING_AGAIN)

    def _pause(self, live: Sequence[Request], told: str) -> list[Effect]:
        """Free what these live requests hold, and let them be the first to start again, when they
        are `told` so."""
        effects = self._holdings.free_all(live)
        for request in live:
            self._scheduler.retire(request)
            del self._requests[request.number]
            self._numbers += 1
            request.restart(self._numbers, told)
        # They stay the oldest.
        self._requests = {r.number: r for r in [*live, *self._requests.values()]}
        self._waiting.put_back(live)
        return effects

    def _fail_overdue(self, now: float) -> list[Effect]:
        return self._fail_each(self._state.overdue(self._requests.values(), now), now)

    # --- what others ask of it ----------------------------------------------------------------

    def deadline(self) -> float | None:
        """When to call with Tick: while rows are missing, or requests wait for a lost ring."""
        requests = self._requests.values()
        due = self._state.deadline(requests), self._snapshot.deadline(bool(requests))
        limits = self._scheduler.rows_missing, self._flights.watch.deadline(), *due
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def idle(self) -> bool:
        """No request waits or runs, and nothing is on the ring."""
        return not self._requests and not self._flights

    def live(self, now: float) -> tuple[LiveRequest, ...]:
        """What a status says of the live requests."""
        return self._scheduler.status(now)

    def rows_told(self) -> tuple[int, int, int]:
        """What a status says of the stages' rows (see RowAccount)."""
        return self.rows.status(self._scheduler.rows)

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

    def encode(self, effect: EncodePrompt) -> PromptEncoded:
        """Carry out an EncodePrompt: in a thread of its own, or where nothing else waits for it."""
        return admission.encode(self._codec, effect)

    @property
    def _free_slots(self) -> int:
        """How many more requests may be live now."""
        return self._ring.live - len(self._scheduler) if not self._state.missing else 0
