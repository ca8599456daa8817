"""Scheduler: which requests are live, and what leaves next of theirs.

A request alone sends what its policy decides, as it decides. Of several, what is to leave waits
here until the first stage is free: then those that have waited longest share a segment, one part
each. So late rows are dropped at no cost, and nobody's rows pile up in front of a stage.

Requests that leave together come home together, and what they do next leaves together. How many
share a segment is decided by what a pass of so many takes (see RingEstimates.segments). A segment
that is not full waits for those whose tokens are being chosen, if the pass that this spares takes
longer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from edgespec.decoding.d0_times import D0Times
from edgespec.decoding.effects import SendRing
from edgespec.decoding.events import MasksFound
from edgespec.decoding.flights import Flights, Returned
from edgespec.decoding.masking import Ends, Masking
from edgespec.decoding.request import Request
from edgespec.decoding.row_account import RowAccount
from edgespec.machines.effects import Effect
from edgespec.machines.events import Event
from edgespec.policy.base import Expand
from edgespec.types.tensor import NO_LAYERS
from edgespec.wire.client_messages import LiveRequest
from edgespec.wire.segment import MOST_PARTS, Header, Part, Segment, StageTime

MOST_QUEUED = 2
"""Segments that the first stage may have: the one that it is at, and one that waits."""

ROOM_TO_GROW = 128
"""Tokens for which there must be room in each answer when a further request starts: one that has to
wait again reads all that it has once more."""


class Scheduler:
    """The live requests of one ring, in the order of their starts."""

    def __init__(self, flights: Flights, d0: D0Times, rows: RowAccount) -> None:
        self._flights = flights
        self._d0 = d0
        self._rows = rows
        self._live: dict[int, Request] = {}
        self._over: dict[int, Request] = {}
        self._masking = Masking()
        self._most_chunk = 1
        # Of each segment that came home: when, with how many, and those of them that decide.
        self._deciding: list[tuple[float, int, set[Request]]] = []

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request: int) -> bool:
        return request in self._live

    @property
    def live(self) -> list[Request]:
        """Those that have started and not ended, the oldest first."""
        return list(self._live.values())

    def status(self, now: float) -> tuple[LiveRequest, ...]:
        """What a status says of them."""
        return tuple(
            LiveRequest(
                number,
                request.policy.name,
                len(request.prompt),
                tokens := len(request.answer.token_ids),
                request.stats.speed(tokens, now),
            )
            for number, request in self._live.items()
        )

    @property
    def rows(self) -> int:
        """Cache rows that they may take up on every stage until each has a further token."""
        return sum(request.rows_after(1) for request in self._live.values())

    def has_room_for(self, request: Request) -> bool:
        """Whether this one may start: there is room until it and each of them has ROOM_TO_GROW
        further tokens; alone it always may."""
        rows = sum(one.rows_after(ROOM_TO_GROW) for one in [*self._live.values(), request])
        return not self._live or self._rows.fit(rows)

    @property
    def rows_missing(self) -> float | None:
        """Until when the first of them waits for an explanation of rows that a stage dropped; a
        ring that counts no more explains nothing."""
        live = () if self._flights.is_given_up else self._live.values()
        return min((at for r in live if (at := r.rows_missing_until) is not None), default=None)

    def start(self, request: Request, stages: int, most: int) -> None:
        """It is live from now on, on a ring of so many stages: its prefix is read, at most `most`
        rows together."""
        self._flights.clock.change(stages)
        self._most_chunk, outbox = most, request.outbox
        outbox.travel_by(request.estimates.chunk(outbox.prefix_left, most, stages))
        self._live[request.number] = request

    def retire(self, request: Request) -> None:
        """It is live no more; what of it waits to leave is forgotten."""
        del self._live[request.number]
        self._over.pop(request.number, None)
        self._d0.forget(request.number)
        self._deciding = [one for one in self._deciding if request not in one[2]]
        for other in self._live.values():  # one that is alone now was not asked before
            if other.policy.pool:
                other.want_decision()

    def take_over(self) -> list[Request]:
        """The live requests whose answers have become whole since this was asked last."""
        over, self._over = self._over, {}
        return list(over.values())

    # --- what happens to them -----------------------------------------------------------------

    def deliver(
        self, returned: Sequence[Returned], cost: Sequence[StageTime], now: float
    ) -> list[Effect]:
        """A segment is back: each request gets its own part. What each stage computed of it, and in
        how many seconds, is learnt once for each policy that had a part in it."""
        told = [(one.flight.request, one) for one in returned]
        owned = [(self._live[number], one) for number, one in told if number in self]
        ran = [(time.rows, time.seconds) for time in cost]
        self._d0.stages_ran(ran)
        is_one, has_prompt = self._is_one, any(one.part.committed for one in returned)
        answers = 0 if is_one or has_prompt else len(returned)
        for estimates in {id(r.estimates): r.estimates for r, _ in owned}.values():
            estimates.segment(ran, self._flights.clock.stages, answers)
            if self._flights.between is not None:
                estimates.links.record(1, self._flights.between)
        deciding = {r for r, one in owned if len(one.part.ids) or not one.part.committed}
        if deciding and not is_one:
            self._deciding.append((now, len(deciding), deciding))
        return self.step(told, now)

    def step(self, events: Iterable[tuple[int, Event]], now: float) -> list[Effect]:
        """Hand events to those of their requests that are live."""
        effects: list[Effect] = []
        told = [(self._live[number], event) for number, event in events if number in self._live]
        for request, event in told:
            request.only_live(self._is_one)
            effects += request.handle(event, now)
            self._note(request, now)
        effects += self.work(now)
        for request, _ in told:
            while request.has_result:
                request.only_live(self._is_one)
                effects += request.take_result(now)
                self._note(request, now)
                effects += self.work(now)
        return effects

    def _note(self, request: Request, now: float) -> None:
        """Its answer may be whole, and what follows known in all that came home with it."""
        if request.answer.finish_reason:
            self._over[request.number] = request
        if not request.decides:
            for since, answers, deciding in self._deciding:
                deciding.discard(request)
                if not deciding:
                    request.estimates.home.record(answers, now - since)
            self._deciding = [one for one in self._deciding if one[2]]

    def on_credit(self, seq: int, now: float) -> list[Effect]:
        """The first stage has handed on a segment: policies that wait for that are asked."""
        if not self._flights.credited(seq):
            return []
        for request in self._live.values():
            if request.policy.waits_for_credit:
                request.want_decision()
        return self.work(now)

    # --- what leaves --------------------------------------------------------------------------

    def work(self, now: float) -> list[Effect]:
        """Carry out what the policies decide; whatever may leave leaves."""
        return self._alone(*self._going_on, now=now) if self._is_one else self._together(now)

    def _alone(self, request: Request, *, now: float) -> list[Effect]:
        effects = self._decided(now)
        outbox = request.outbox
        while not request.is_read and outbox.in_flight <= self._flights.clock.stages:
            request.send_chunk(outbox.chunk)
        while outbox.waiting:
            effects += self._launch([request], now)
        return effects

    def _decided(self, now: float) -> list[Effect]:
        """Ask the policies that are to be asked, but for the pool's; returns what is to be
        drafted."""
        effects: list[Effect] = []
        for request in _in_turn([r for r in self._going_on if r.wants_decision]):
            if request.policy.pool and not self._is_one:
                request.want_decision(False)
                continue
            for decision in request.decide():
                effects += request.carry_out(decision, now)
        return effects

    def _together(self, now: float) -> list[Effect]:
        effects = self._decided(now)
        effects += self._expand(now)
        while self._flights.queued < MOST_QUEUED and (parts := self._next_parts(now)):
            effects += self._launch(parts, now)
            # A part of which nothing is wanted any more is dropped, and its policy asked again.
            effects += self._decided(now)
        return effects

    def _next_parts(self, now: float) -> list[Request]:
        """The requests that have something in the next segment.

        Behind a segment that the first stage is at, only what waits for no better guess leaves:
        that spares the stage the way of its credit.
        """
        is_free = not self._flights.queued
        if len(self._flights) >= self._max_in_flight:
            return []
        going_on = self._going_on
        starting = _in_turn([request for request in going_on if not request.is_read])
        # PPD rows below a prompt's last row leave before the policy may be asked.
        answering = [r for r in going_on if (r.decodes or r.outbox.waiting) and r.is_read]
        first = [request for request in starting if request.policy.prompts_first]
        if first and (parts := self._take_chunk(first, 0)):
            return parts
        count, share = self._share(answering)
        if len(self._flights) >= count or self._holds(going_on, count, share, now):
            return []
        answering = _in_turn(answering)
        parts = [request for request in answering if request.outbox.waiting][:share]
        if is_free or any(request.root_waits for request in answering):
            roots = min(len(answering), share)
            coming = self._chunk(starting, roots) if starting else 0
            parts += self._take_rows(answering, share - len(parts), coming)
        if starting and (parts or is_free or not answering):
            beside = sum(request.outbox.next_rows for request in parts)
            parts += self._take_chunk(starting, max(beside, min(len(answering), 1)))
        return parts

    def _take_chunk(self, starting: Sequence[Request], beside: int) -> list[Request]:
        """Have rows of the first one's prefix leave (see _chunk)."""
        rows = self._chunk(starting, beside)
        if rows:
            starting[0].send_chunk(rows)
        return [starting[0]] if rows else []

    def _chunk(self, starting: Sequence[Request], beside: int) -> int:
        """How many rows of the first one's prefix may leave, beside so many rows of answers, by
        what rows cost; none if so much of it is on the ring that it is full."""
        outbox, stages = starting[0].outbox, self._flights.clock.stages
        if outbox.in_flight > stages or outbox.waiting:
            return 0
        left = sum(request.outbox.prefix_left for request in starting)
        most = starting[0].estimates.chunk_beside(left, self._most_chunk, stages, beside)
        return min(most, outbox.prefix_left)

    # --- the pool -----------------------------------------------------------------------------

    def _expand(self, now: float) -> list[Effect]:
        """If no pass of the pool is at work, have its best nodes expanded. A prompt that is read
        keeps nobody but its own request waiting: it may take long, and goes in parts."""
        pooled = [request for request in self._going_on if request.policy.pool]
        drafts = [request.drafting.running for request in pooled]
        if any(draft is not None and isinstance(draft.plan, Expand) for draft in drafts):
            return []
        requests = _in_turn([r for r in pooled if r.drafting.running is None and r.decodes])
        pool = requests[0].policy.pool if requests else None
        if pool is None or not requests[0].estimates.step.known:
            return []
        chosen = pool.best_nodes([request.view() for request in requests])
        pairs = zip(requests, chosen, strict=True)
        return [effect for r, nodes in pairs if nodes for effect in r.carry_out(nodes, now)]

    def _take_rows(self, answering: list[Request], roots: int, beside: int) -> list[Request]:
        """Have the best rows of those that pool leave, with so many new roots at most, beside so
        many rows of a prompt."""
        requests = [r for r in answering if r.policy.pool and r.decodes and not r.outbox.waiting]
        pool = requests[0].policy.pool if requests else None
        if pool is None:
            return []
        views = [request.view() for request in requests]
        chosen = pool.best_rows(views, self._flights.ahead, roots, beside)
        found = []
        for request, ids in zip(requests, chosen, strict=True):
            if ids:
                request.send(ids)
                found.append(request)
        return found

    @property
    def _going_on(self) -> list[Request]:
        """The live requests that go on, in order of their starts."""
        return [request for request in self._live.values() if not request.answer.finish_reason]

    @property
    def _is_one(self) -> bool:
        """Whether a single request goes on."""
        return len(self._going_on) == 1

    @property
    def _max_in_flight(self) -> int:
        """Segments that should be in flight: one on every stage, and one on its way."""
        return self._flights.clock.stages + 1

    def _share(self, answering: list[Request]) -> tuple[int, int]:
        """Segments that should be in flight, and requests that may share one: together as many as
        their policies want in flight; of the pool that is each one's root."""
        places = self._max_in_flight
        decoding = [request for request in answering if request.decodes]
        wanted = sum(
            1 if r.policy.pool else min(r.policy.window(places - 1), places) for r in decoding
        )
        count = places
        # What waits for a draft of its own does not come home ready to leave.
        if decoding and not any(r.policy.drafts and not r.policy.pool for r in decoding):
            count = decoding[0].estimates.segments(wanted, places - 1)
        return count, min(max(math.ceil(wanted / count), 1), MOST_PARTS)

    def _holds(self, going_on: list[Request], count: int, share: int, now: float) -> bool:
        """Whether a segment that is not full waits for answers that came home and are not decided.

        While the first stage is busy nothing is lost by that. Else what is lost is what is left of
        their time here, and what is gained a pass. Guesses of `count` segments do not take the
        place of roots.
        """
        ready = sum(bool(r.outbox.waiting) or (r.root_waits and r.decodes) for r in going_on)
        if not self._deciding or ready >= share:
            return False
        if self._flights.queued:
            return True
        if not ready:
            return len(self._flights) + 1 >= count < self._max_in_flight
        (since, answers, deciding), times = self._deciding[0], going_on[0].estimates
        if not times.home.known:
            return False
        both = min(ready + len(deciding), share)
        spared = times.pass_seconds(ready) + times.pass_seconds(both - ready)
        left = times.home.seconds(answers) - (now - since)
        return spared - times.pass_seconds(both) > left

    def _launch(self, requests: Iterable[Request], now: float) -> list[Effect]:
        """What waits longest of each of these requests leaves, as one segment."""
        parts: list[Part] = []
        owners: list[Request] = []
        for request in requests:
            part = request.next_part(self._rows.opens)
            if part is not None:
                parts.append(part)
                owners.append(request)
        if not parts:
            return []
        choosing = [request.choosing for request in owners]
        seq, flight = self._flights.launch(parts, choosing, now)
        layers, vectors = NO_LAYERS, None
        tokens = np.concatenate([part.tokens for part in parts])
        for request in owners:
            request.has_left(seq, flight)
            layers = layers or request.needs.aux_layers
            if request.drafting.ppd_rows is not None:  # the table is the same for all
                vectors = request.drafting.ppd_rows.vectors(tokens)
        segment = Segment(Header(seq, layers), tuple(parts), ppd_tokens=vectors)
        if self._masking.waiting or any(one and one.is_masked for one in choosing):
            return [self._masking.send(segment, self._live, self._flights.flying)]
        return [SendRing(segment)]

    def take_masks(self, event: MasksFound) -> tuple[list[Effect], Ends]:
        """See Masking.take."""
        return self._masking.take(event, self._live, self._flights.flying)


def _in_turn(requests: list[Request]) -> list[Request]:
    """Those of which nothing has left, in order of their starts, and then those first of which
    nothing has left for longest."""

    def turn(request: Request) -> tuple[int, int]:
        sent = request.outbox.last_sent_seq
        return sent, request.number if sent else 0

    return sorted(requests, key=turn) if len(requests) > 1 else requests
