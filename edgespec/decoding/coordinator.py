"""Coordinator machine: queues requests, sends what the policy decides, verifies what comes back.

One token's way: Submit → EncodePrompt → PromptEncoded → prefill segments → HeadDone gives the first
root → the policy grows and sends → SegmentArrived → RunHead → HeadDone → the tree advances → Tokens
to the client, Retain to the stages → the policy again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from edgespec.decoding import drafts
from edgespec.decoding.admission import Ring, admit, encode, fitting, kind_of, most_tokens
from edgespec.decoding.answer import TextCodec
from edgespec.decoding.effects import (
    CloseDraft,
    EncodePrompt,
    OpenDraft,
    Renew,
    SendRing,
)
from edgespec.decoding.events import (
    Drafted,
    Expanded,
    HeadDone,
    PromptEncoded,
    SegmentArrived,
)
from edgespec.decoding.flights import InFlight
from edgespec.decoding.ppd_chains import ChainValues
from edgespec.decoding.prefix_cache import PrefixCache
from edgespec.decoding.queue import RequestQueue
from edgespec.decoding.recovery import RingWatch
from edgespec.decoding.request import HeadJob, Request, segment_of
from edgespec.decoding.snapshot import SnapshotKeeper
from edgespec.errors import ConfigError, EdgespecError, LocalProtocolError
from edgespec.machines.effects import (
    Effect,
    SendPeer,
    SendStages,
)
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
from edgespec.policy.base import Deepen, Expand, Grow, Send
from edgespec.policy.estimates import RingEstimates
from edgespec.tree.draft_tree import Advance
from edgespec.tree.ledger import IntArray, Rows
from edgespec.types.features import PPD_TOKENS
from edgespec.verify.sampling import Choice
from edgespec.verify.top_logprobs import TopLogprobs
from edgespec.wire.client_messages import Cancel, Failed, Progress, Submit
from edgespec.wire.messages import CloseRequest, Credit, Fault, Segment
from edgespec.wire.snapshots import StageActivity, Subscribe

LOST_WAIT_S = 1.0
"""A result that lacks live rows is followed by the Fault of the stage that dropped them; after this
many seconds without one, the request fails all the same, so that nothing hangs."""

BEGINS = "reading the prompt"
GOES_ON = "the ring is up again; reading what there is so far"
"""What a request is told that waited, until its next token comes."""


class CoordinatorMachine:
    """D0 without I/O: `handle(event, now)` answers with effects."""

    def __init__(self, ring: Ring, codec: TextCodec) -> None:
        self._ring = ring
        self._codec = codec
        self._requests: dict[int, Request] = {}
        self._waiting = RequestQueue(ring.queue_limit)
        self._active: int | None = None
        self._encoding: int | None = None  # whose prompt is being encoded
        self._watch = RingWatch(ring.recovery)
        self._kept = PrefixCache(ring.kept_rows)
        self._numbers = 0
        self._jobs = 0
        self._seq = 0
        self._flying: dict[int, InFlight] = {}
        self._queued: set[int] = set()  # segments that the first stage has not handed on
        self._estimates: dict[str, RingEstimates] = {}
        self._head_jobs: dict[int, HeadJob] = {}
        self._scene = SnapshotKeeper(codec)
        self._chains = ChainValues(ring.prompts.depth) if ring.prompts else None
        self._before: list[Request] = []  # while an event is handled: the requests open before it

    def handle(self, event: Event, now: float) -> list[Effect]:
        """React to one event. Every request gets exactly one of Finished and Failed."""
        self._before = list(self._requests.values())
        effects = self._react(event, now) + self._tell_waiting()
        self._before = []
        return effects

    def _react(self, event: Event, now: float) -> list[Effect]:
        match event:
            case MessageArrived(peer, Submit() as submit):
                return self._on_submit(peer, submit, now)
            case MessageArrived(peer, Cancel(tag)):
                return self._on_cancel(peer, tag, now)
            case MessageArrived(_, Fault(request, reason)):
                return self._on_fault(request, reason, now)
            case MessageArrived(_, Credit(seq)):
                return self._on_credit(seq, now)
            case MessageArrived(peer, Subscribe(seconds)):
                return self._scene.watch(peer, seconds, now) + self._show(now)
            case MessageArrived(_, StageActivity(runs)):
                self._scene.ran(runs, now)
                return []
            case SegmentArrived(segment):
                return self._on_segment(segment, now)
            case PromptEncoded():
                return self._on_encoded(event, now)
            case HeadDone(job, choice, others):
                return self._on_head_done(job, choice, others, now)
            case Drafted() | Expanded():
                return self._on_drafted(event, now)
            case ComputeFailed(job, request, reason):
                self._head_jobs.pop(job, None)
                if request == self._encoding:
                    return self._on_encoded(PromptEncoded(request, (), reason), now)
                return self._on_fault(request, reason, now)
            case RingUp(stages):
                self._ring = replace(self._ring, stages=stages or self._ring.stages)
                self._watch.up()
                self._waiting.has_changed = True  # not their order, but what they wait for
                return self._start_next(now) + self._scene.observe(now)
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

    def give_up(self, event: Event, reason: str) -> list[Effect]:
        """What follows if `handle` raised: the request that the event concerns ends with `reason`;
        those that only wait go on waiting.

        What was to be sent is lost, and the state may be anything: a new ring clears it.
        """
        self._scene = SnapshotKeeper(self._codec)  # who watches asks again
        open_ones = dict.fromkeys([*self._before, *self._requests.values()])
        match event:
            case MessageArrived(_, Subscribe() | StageActivity()):
                return []
            case MessageArrived(peer, Submit(tag=tag)) if not any(
                (r.peer, r.tag) == (peer, tag) for r in open_ones
            ):
                return [SendPeer(peer, Failed(tag, reason))]  # it was not even admitted
        waiting = self._waiting.in_order()
        over = [r for r in open_ones if self._requests.get(r.number) is not r]
        over += [r for r in self._requests.values() if r not in waiting]
        effects: list[Effect] = [Renew("it gave up a request, of which its log says more")]
        for request in over:
            self._requests.pop(request.number, None)
            self._estimates.pop(request.policy.name, None)  # it may be why
            effects.append(SendPeer(request.peer, Failed(request.tag, reason)))
        self._before = []
        self._active = self._encoding = None
        self._waiting = RequestQueue(self._ring.queue_limit)
        for request in waiting:
            if request.number in self._requests:
                self._waiting.add(request)
        effects += self._close_drafts([request.number for request in over])
        return effects + self._encode_next()  # again, if it was asked for: that may be lost too

    def deadline(self) -> float | None:
        """When to call with Tick: while rows are missing, or requests wait for a lost ring."""
        limits = [r.rows_missing_until for r in self._requests.values()]
        limits.append(self._watch.deadline(self._requests.values()))
        limits.append(self._scene.deadline(bool(self._requests)))
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def idle(self) -> bool:
        """No request waits or runs, and nothing is on the ring."""
        return not self._requests and not self._flying

    def load(self) -> tuple[int, int]:
        """How many requests run, and how many wait."""
        return int(self._active is not None), len(self._waiting)

    @property
    def is_working(self) -> bool:
        """Whether a request is on the ring now; those that only wait for it do not count."""
        return self._active is not None and self._watch.is_up

    def accepts(self, request: int) -> Request | None:
        """The open request of that number, which a lost ring changes; for checks."""
        return self._requests.get(request)

    def estimates_of(self, policy: str) -> RingEstimates:
        """What requests of that policy have taught; its own, so that policies stay comparable."""
        return self._estimates.setdefault(policy, RingEstimates())

    # --- requests come and go -----------------------------------------------------------------

    def _on_submit(self, peer: bytes, submit: Submit, now: float) -> list[Effect]:
        try:
            request = self._admit(peer, submit)
        except EdgespecError as problem:
            return [SendPeer(peer, Failed(submit.tag, str(problem), kind_of(problem)))]
        request.stats.started = request.waiting_since = now
        self._requests[request.number] = request
        self._waiting.add(request)
        return self._encode_next()

    @property
    def _can_start(self) -> bool:
        return self._active is None and self._watch.is_up and not self._watch.held

    def encode(self, effect: EncodePrompt) -> PromptEncoded:
        """Carry out an EncodePrompt: in a thread of its own, or where nothing else waits for it."""
        return encode(self._codec, effect)

    def _encode_next(self) -> list[Effect]:
        """Have one prompt encoded at a time, in the order of the queue; so what is cancelled before
        its turn costs nothing."""
        request = next((r for r in self._waiting.in_order() if r.asked), None)
        if self._encoding is not None or request is None or request.asked is None:
            return []
        self._encoding = request.number
        asked = request.asked
        most = most_tokens(self._ring)
        return [EncodePrompt(request.number, asked.prompt, asked.messages, most)]

    def _on_encoded(self, event: PromptEncoded, now: float) -> list[Effect]:
        """Let the request start in its turn; nothing, if it has ended meanwhile, or its prompt was
        encoded twice (see give_up)."""
        if event.request == self._encoding:
            self._encoding = None
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
        return effects + self._encode_next() + self._start_next(now)

    def _admit(self, peer: bytes, submit: Submit) -> Request:
        self._watch.check_open()
        if not self._can_start or len(self._waiting):
            self._waiting.check_room(submit.scope, begins=self._can_start)
        if any(r.peer == peer and r.tag == submit.tag for r in self._requests.values()):
            raise ConfigError(f"request {submit.tag} of this client is still running")
        request = admit(self._ring, self._codec, self._numbers + 1, peer, submit)
        request.estimates = self.estimates_of(request.policy.name)
        if self._chains is not None and request.policy.drafts:
            assert self._ring.prompts is not None
            request.use_prompts(self._ring.prompts, self._chains)
        self._numbers += 1
        return request

    def _tell_waiting(self) -> list[Effect]:
        """Say to each request that waits why it does, if that is not what it was told last."""
        if not self._waiting.has_changed:
            return []
        self._waiting.has_changed = False
        missing = self._watch.held if self._watch.is_up else self._watch.what_is_missing
        effects: list[Effect] = []
        for place, request in enumerate(self._waiting.in_order(), int(self._active is not None)):
            if missing or place:  # the first one's prompt is being encoded, if nobody is ahead
                effects += _say_once(request, missing or f"waiting behind {place} other request(s)")
        return effects

    def _start_next(self, now: float) -> list[Effect]:
        if not self._can_start or not len(self._waiting):
            return []
        if self._waiting.in_order()[0].asked:
            return []  # its prompt is being encoded
        request = self._waiting.next()
        self._active = request.number
        if not request.recoveries:
            request.stats.started = now
        request.clock.lead_over(self._ring.stages)
        request.begin_with(self._kept.take(request.prefix, request.asker))
        request.chunk = request.estimates.chunk(
            len(request.prefix) - request.prefilled, self._ring.prefill_chunk, self._ring.stages
        )
        effects = self._ended(self._kept.make_room(request.capacity))
        effects += self._open_draft(request)
        if request.policy.drafts:
            # The draft reads the prompt while the stages do: a tree of depth 0.
            effects.append(self._draft(request, drafts.READ_ONLY, now))
        if request.told:
            effects += _say_once(request, GOES_ON if request.recoveries else BEGINS)
        return self._send_prefill(request) + effects

    def _open_draft(self, request: Request) -> list[Effect]:
        """Start it on the draft source, from what that has read of its base."""
        base = request.base
        if request.policy.drafts:
            known = (base.request, len(base.ids)) if base else (0, 0)
            return [OpenDraft(request.number, request.sampling, *known)]
        return self._close_drafts([base.request]) if base else []

    def _on_cancel(self, peer: bytes, tag: int, now: float) -> list[Effect]:
        for request in self._requests.values():
            if (request.peer, request.tag) == (peer, tag):
                return self._finish(request, "cancelled", now)
        return []

    def _on_peer_gone(self, peer: bytes, now: float) -> list[Effect]:
        self._scene.forget(peer)
        effects: list[Effect] = []
        theirs = [r for r in self._requests.values() if r.peer == peer]
        # Those that wait first, so that none of them is started just to be forgotten.
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
        """What is going on, to whoever watches."""
        paused = bool(self._requests) and not self._watch.is_up
        shown = next(iter(self._requests)) if paused else self._active  # the oldest
        request = None if shown is None else self._requests[shown]
        return self._scene.show(request, self._flying, paused, now)

    # --- rings come and go --------------------------------------------------------------------

    def _on_ring_down(self, reason: str, lost: bool, now: float) -> list[Effect]:
        """Keep what is committed; the rest comes again from it on the next ring."""
        if lost:
            self._watch.down(reason, now, self._requests.values())
        else:
            self._watch.change(reason)
        self._waiting.has_changed = True
        self._queued.clear()
        self._flying.clear()  # nothing comes back from a ring that is gone
        self._scene.ended()
        effects = self._close_drafts(self._kept.clear())
        return effects + self._fail_overdue(now) + self._pause()

    def _on_hold(self, reason: str, now: float) -> list[Effect]:
        self._watch.held = reason
        self._waiting.has_changed = True
        return self._start_next(now)

    def _pause(self) -> list[Effect]:
        """Free what the active request holds, and let it be the first to start again."""
        if self._active is None:
            return []
        request = self._requests.pop(self._active)
        effects = self._free(request)
        self._numbers += 1
        request.restart(self._numbers)
        self._requests = {request.number: request, **self._requests}  # it stays the oldest
        self._waiting.put_back(request)
        self._active = None
        return effects

    def _fail_overdue(self, now: float) -> list[Effect]:
        overdue = self._watch.overdue(self._requests.values(), now)
        return [effect for r, why in overdue for effect in self._fail(r, why, now, "lost")]

    def _on_ring_ended(self, reason: str, now: float) -> list[Effect]:
        self._watch.end(reason)
        self._queued.clear()
        self._flying.clear()
        open_ones = list(self._requests.values())
        return [e for r in open_ones for e in self._fail(r, reason, now, "lost")]

    def _finish(self, request: Request, reason: str, now: float) -> list[Effect]:
        ring = self._ring
        reply = request.finished(reason, ring.stages, ring.draft, ring.sources, now)
        return [SendPeer(request.peer, reply), *self._forget(request, now, answered=True)]

    def _fail(self, request: Request, reason: str, now: float, kind: str = "") -> list[Effect]:
        told = SendPeer(request.peer, Failed(request.tag, reason, kind))
        return [told, *self._forget(request, now)]

    def _forget(self, request: Request, now: float, answered: bool = False) -> list[Effect]:
        """Free the request everywhere, but for rows that a next turn may begin with. What it has on
        the ring still comes back as credits."""
        del self._requests[request.number]
        if self._active != request.number:
            self._waiting.remove(request)
            return []
        self._active = None
        self._waiting.has_changed = True  # its place ahead of all others is free
        self._scene.ended()
        # What the draft source has not read it cannot go on from, if it needs the rows themselves.
        known = request.policy.drafts or not self._ring.needs - {PPD_TOKENS}
        keeps = answered and known and request.tree is not None
        return (self._keep(request) if keeps else self._free(request)) + self._start_next(now)

    def _free(self, request: Request) -> list[Effect]:
        return self._ended([request.number])

    def _keep(self, request: Request) -> list[Effect]:
        """Let the stages and the draft source keep its committed rows; drop what is too much
        then."""
        gone = self._kept.add(request.number, request.kept())
        if request.number in gone:
            return self._ended(gone)
        effects: list[Effect] = [SendStages(request.last_retain()), *self._ended(gone)]
        if request.hidden is not None:  # the rest of its rows, which do not come again
            self._jobs += 1
            effects.append(drafts.last_reading(request, self._jobs))
        return effects

    def _ended(self, numbers: Sequence[int]) -> list[Effect]:
        ends: list[Effect] = [SendStages(CloseRequest(number)) for number in numbers]
        return ends + self._close_drafts(numbers)

    def _close_drafts(self, numbers: Sequence[int]) -> list[Effect]:
        """Free requests on the draft source, which ignores those that it does not know."""
        return [CloseDraft(number) for number in numbers] if self._ring.draft else []

    # --- prefill ------------------------------------------------------------------------------

    def _send_prefill(self, request: Request) -> list[Effect]:
        """As many prompt chunks as may be in flight: they overlap along the ring."""
        effects: list[Effect] = []
        while not request.is_read and request.in_flight <= self._ring.stages:
            reserve = 0 if request.has_opened else request.reserve
            rows = request.next_chunk()
            wanted = request.rows_back(rows)
            effects.append(
                self._launch(request, rows, committed=True, reserve=reserve, want=wanted)
            )
        if request.is_read and request.tree is None:
            request.plant()
            effects += self._send_first_chain(request)
        return effects

    def _send_first_chain(self, request: Request) -> list[Effect]:
        """Prompt rows below the prefix's last row, which is committed: in a segment of their
        own."""
        chain = request.with_prompts(Rows.none(), (len(request.prefix) - 1,))
        if not len(chain):
            return []
        return [self._launch(request, chain, committed=False, reserve=0, want=len(chain))]

    def _launch(
        self, request: Request, rows: Rows, *, committed: bool, reserve: int, want: int
    ) -> Effect:
        self._seq += 1
        wanted = frozenset(rows.ids[len(rows) - want :].tolist())
        entered = request.clock.send()
        self._queued.add(self._seq)
        self._flying[self._seq] = InFlight(request.number, entered, committed, wanted, len(rows))
        request.in_flight += 1
        return SendRing(segment_of(request, self._seq, rows, committed, reserve, want))

    # --- results ------------------------------------------------------------------------------

    def _on_segment(self, segment: Segment, now: float) -> list[Effect]:
        flying = self._flying.get(segment.seq)
        if flying is None or flying.request != segment.request:
            return []  # a repeated delivery, or one of an earlier ring
        del self._flying[segment.seq]
        self._queued.discard(segment.seq)
        request = self._requests.get(segment.request)
        if request is None:
            return []
        if not flying.fits(segment):
            return self._fail(request, "the ring returned rows that were not sent round", now)
        ran = [(time.rows, time.seconds) for time in segment.ran]
        request.estimates.segment(ran, self._ring.stages)
        request.results.append((flying, segment))
        return self._take_results(request, now)

    def _on_credit(self, seq: int, now: float) -> list[Effect]:
        """The first stage is free: a policy that waited for it may send."""
        if seq not in self._queued:
            return []
        self._queued.remove(seq)
        request = self._requests.get(self._active) if self._active is not None else None
        if request is None or not request.policy.waits_for_credit:
            return []
        return self._decide(request, now)

    def _take_results(self, request: Request, now: float) -> list[Effect]:
        """Take up what is back, unless the policy wants to finish its step first."""
        effects: list[Effect] = []
        while request.results and not request.is_in_step and request.number in self._requests:
            effects += self._take_result(request, *request.results.popleft(), now)
        return effects

    def _take_result(
        self, request: Request, flying: InFlight, segment: Segment, now: float
    ) -> list[Effect]:
        request.in_flight -= 1
        request.clock.result(flying.entered)
        request.acknowledged(segment.epoch)
        if flying.lacks_live_rows(segment, request.tree):
            request.rows_missing_until = now + LOST_WAIT_S
            return []
        if segment.committed:
            return self._on_prefill_result(request, segment, now)
        return self._on_result(request, flying, segment, now)

    def _on_prefill_result(self, request: Request, segment: Segment, now: float) -> list[Effect]:
        request.arrived(segment, np.arange(len(segment.ids)))
        last = np.flatnonzero(segment.ids == len(request.prefix) - 1)
        effects: list[Effect] = [self._sample(request, segment, last)] if len(last) else []
        effects += self._send_prefill(request)
        if request.hidden is not None and request.draft is None:
            # What the draft reads now it need not read before its first guess.
            effects.append(self._draft(request, drafts.READ_ONLY, now))
        return effects

    def _on_result(
        self, request: Request, flying: InFlight, segment: Segment, now: float
    ) -> list[Effect]:
        assert request.tree is not None
        tree = request.tree
        if request.prompts is not None and segment.hidden is not None:
            request.prompts.arrived(flying.wanted, segment.ids, segment.hidden)
            request.prompts.settle(tree)
        live = np.flatnonzero([i in tree for i in segment.ids.tolist()])
        if len(live) and segment.hidden is not None:
            request.arrived(segment, live)
            return [self._sample(request, segment, live)]
        return self._verify(request, now)

    def _sample(self, request: Request, segment: Segment, index: IntArray) -> Effect:
        self._jobs += 1
        ids = tuple(segment.ids[index].tolist())
        self._head_jobs[self._jobs] = HeadJob(request.number, ids)
        return request.sample(self._jobs, segment, index)

    def _on_head_done(
        self, job: int, choice: Choice, others: TopLogprobs | None, now: float
    ) -> list[Effect]:
        head = self._head_jobs.pop(job, None)
        if head is None:
            raise LocalProtocolError(f"head job {job} ended but was not running")
        request = self._requests.get(head.request)
        if request is None:
            return []
        request.verifying -= 1
        tokens = choice.tokens.tolist()
        request.note_choice(head.ids, choice, others)
        assert request.tree is not None
        request.tree.record(head.ids, tokens)
        return self._verify(request, now) + self._take_results(request, now)

    def _verify(self, request: Request, now: float) -> list[Effect]:
        """Walk the tree as far as verdicts are known; commit, prune, tell everybody."""
        assert request.tree is not None
        waits = request.in_flight or request.verifying
        if waits and not request.policy.verifies_each_result:
            return []
        step = self._scene.advance(request)
        request.advanced(step)
        if not step.tokens:
            return self._decide(request, now)
        # Exactly as many rows were of use as tokens came of them; an answer that ends within
        # this step uses no more.
        effects = self._emit(request, step, now)
        if request.answer.finish_reason:
            return effects
        effects.append(SendStages(request.retain(step.passed)))
        return effects + self._decide(request, now)

    def _emit(self, request: Request, step: Advance, now: float) -> list[Effect]:
        """Give committed tokens to the client, up to the answer's end."""
        news = request.push(step, now)
        effects: list[Effect] = [SendPeer(request.peer, news)]
        if request.answer.finish_reason:
            effects += self._finish(request, request.answer.finish_reason, now)
        return effects

    # --- drafting and sending -----------------------------------------------------------------

    def _on_drafted(self, event: Drafted | Expanded, now: float) -> list[Effect]:
        request = next(
            (r for r in self._requests.values() if r.draft and r.draft.job == event.job), None
        )
        if request is None:
            return []
        drafts.take(request, event, now)
        if request.tree is None:
            return []
        return self._decide(request, now) + self._take_results(request, now)

    def _decide(self, request: Request, now: float) -> list[Effect]:
        """Carry out what the policy decides."""
        effects: list[Effect] = []
        if not request.may_decide:
            return effects
        view = request.view(self._ring.stages, len(self._queued))
        for decision in request.policy.decide(view):
            if isinstance(decision, Send):
                assert request.tree is not None
                rows = request.tree.send(decision.ids)
                request.stats.rows_sent += len(rows)
                rows = request.with_prompts(rows, decision.ids)
                request.ahead = len(rows)
                effects.append(
                    self._launch(request, rows, committed=False, reserve=0, want=len(rows))
                )
            else:
                effects.append(self._draft(request, decision, now))
        return effects

    def _draft(self, request: Request, wanted: Grow | Deepen | Expand, now: float) -> Effect:
        self._jobs += 1
        return drafts.ask(request, wanted, self._jobs, now)


def _say_once(request: Request, text: str) -> list[Effect]:
    """Tell a request's client what it waits for, if it was not told so last."""
    if request.told == text:
        return []
    request.told = text
    return [SendPeer(request.peer, Progress(request.tag, text))]
