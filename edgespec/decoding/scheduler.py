"""Scheduler: which requests are live, and what leaves next of theirs.

A request alone sends what its policy decides, as it decides. Of several, what is to leave waits
here until the first stage is free: then those that have waited longest share a segment, one part
each. So late rows are dropped at no cost, and nobody's rows pile up in front of a stage.

Requests that leave together come home together, and what they do next leaves together: the ring's
other places stay empty. So no more share a segment than are needed to fill all places.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from edgespec.decoding import drafts
from edgespec.decoding.d0_times import D0Times
from edgespec.decoding.effects import SendRing
from edgespec.decoding.flights import Flight, Flights
from edgespec.decoding.request import Request
from edgespec.decoding.row_account import RowAccount
from edgespec.decoding.snapshot import live_request
from edgespec.machines.effects import Effect
from edgespec.machines.events import Event
from edgespec.policy.base import Expand, Send
from edgespec.types.tensor import NO_LAYERS
from edgespec.wire.client_messages import LiveRequest
from edgespec.wire.segment import MOST_PARTS, NO_IDS, Header, Part, Segment

MOST_QUEUED = 2
"""Segments that the first stage may have: the one that it is at, and one that waits."""

SLOWEST = 2.0
"""Times as long a step may take for rows of a prompt in it, while others wait for answers."""

ROOM_TO_GROW = 128
"""Tokens for which there must be room in each answer when a further request starts: one that has to
wait again reads all that it has once more."""

LEAST_CHUNK = 8
"""Rows of a prompt that leave together however long they take: else it would never be read."""


class Scheduler:
    """The live requests of one ring, in the order of their starts."""

    def __init__(self, flights: Flights, d0: D0Times, rows: RowAccount) -> None:
        self._flights = flights
        self._d0 = d0
        self._rows = rows
        self._live: dict[int, Request] = {}
        # Those that go on: of which nothing has left, in order of their starts, and the others,
        # those first of which nothing has left for longest.
        self._new: dict[int, Request] = {}
        self._sent: dict[int, Request] = {}
        self._held = 0
        self._rows_of: dict[int, int] = {}  # cache rows of each with a further token
        self._over: dict[int, Request] = {}
        self.at: Request | None = None
        """Whose turn it is: a failure then is its own."""

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request: int) -> bool:
        return request in self._live

    @property
    def live(self) -> list[Request]:
        """Those that have started and not ended, the oldest first."""
        return list(self._live.values())

    def told(self, now: float) -> tuple[LiveRequest, ...]:
        """What a status says of them."""
        return tuple(live_request(request, now) for request in self._live.values())

    @property
    def rows(self) -> int:
        """Cache rows that they may take up on every stage until each has a further token."""
        return self._held

    def rows_with(self, request: Request) -> int:
        """Cache rows that they and this one may take up, if it starts, until each has
        ROOM_TO_GROW further tokens."""
        return sum(one.rows_after(ROOM_TO_GROW) for one in [*self._live.values(), request])

    def start(self, request: Request, stages: int, most: int) -> None:
        """It is live from now on, on a ring of so many stages: its prefix is read, at most `most`
        rows together."""
        self._flights.clock.change(stages)
        prefix = request.prefix
        prefix.chunk = request.estimates.chunk(len(prefix) - prefix.sent, most, stages)
        self._live[request.number] = self._new[request.number] = request
        self._count(request)
        self._tell_alone()

    def end(self, request: Request) -> None:
        """It is live no more; what of it waits to leave is forgotten."""
        del self._live[request.number]
        self._held -= self._rows_of.pop(request.number)
        self._over.pop(request.number, None)
        self._goes_on_no_more(request)
        self._d0.forget(request.number)
        for other in self._live.values():  # one that is alone now was not asked before
            other.asks = other.asks or other.policy.pool is not None

    def clear(self) -> None:
        """No request is live."""
        for request in self.live:
            self.end(request)

    def take_over(self) -> list[Request]:
        """The live requests whose answers have become whole since this was asked last."""
        over, self._over = self._over, {}
        return list(over.values())

    def _goes_on_no_more(self, request: Request) -> None:
        self._new.pop(request.number, None)
        self._sent.pop(request.number, None)
        self._tell_alone()

    def _tell_alone(self) -> None:
        going_on = self._in_turn()
        for request in going_on:
            request.alone = len(going_on) == 1

    def _count(self, request: Request) -> None:
        """Its answer may have grown."""
        before, rows = self._rows_of.get(request.number, 0), request.rows_after(1)
        self._rows_of[request.number] = rows
        self._held += rows - before

    # --- what happens to them -----------------------------------------------------------------

    def landed(self, flight: Flight, segment: Segment, now: float) -> list[Effect]:
        """A segment is back: each request gets its own part. What each stage computed of it, and in
        how many seconds, is learnt once for each policy that had a part in it."""
        live = [self._live[number] for number in flight.requests if number in self._live]
        ran = [(time.rows, time.seconds) for time in segment.cost]
        self._d0.stages_ran(ran)
        for estimates in {id(r.estimates): r.estimates for r in live}.values():
            estimates.segment(ran, self._flights.clock.stages)
        return self.step([(one.flight.request, one) for one in flight.landed(segment)], now)

    def step(self, events: Iterable[tuple[int, Event]], now: float) -> list[Effect]:
        """Hand events to those of their requests that are live."""
        effects: list[Effect] = []
        told = [(self._live[number], event) for number, event in events if number in self._live]
        for self.at, event in told:
            effects += self.at.handle(event, now)
            self._note(self.at)
        effects += self.work(now)
        for request, _ in told:
            while request.has_result:
                self.at = request
                effects += request.take_result(now)
                self._note(request)
                effects += self.work(now)
        return effects

    def _note(self, request: Request) -> None:
        """Its answer may have grown, and be whole."""
        self._count(request)
        if request.answer.finish_reason:
            self._goes_on_no_more(request)
            self._over[request.number] = request

    def handed_on(self, seq: int, now: float) -> list[Effect]:
        """The first stage has handed on a segment: policies that wait for that are asked."""
        if not self._flights.hand_on(seq):
            return []
        for request in self._live.values():
            request.asks = request.asks or request.policy.waits_for_credit
        return self.work(now)

    # --- what leaves --------------------------------------------------------------------------

    def work(self, now: float) -> list[Effect]:
        """Carry out what the policies decide; whatever may leave leaves."""
        self.at = None
        if len(self._new) + len(self._sent) != 1:
            return self._together(now)
        (request,) = self._in_turn()
        return self._alone(request, now)

    def _alone(self, request: Request, now: float) -> list[Effect]:
        effects = self._decided(now)
        while not request.is_read and request.in_flight <= self._flights.clock.stages:
            request.send_chunk(request.prefix.chunk)
        while request.leaving:
            effects += self._launch([request])
        return effects

    def _decided(self, now: float) -> list[Effect]:
        """Ask the policies that are to be asked, but for the pool's; returns what is to be
        drafted."""
        effects: list[Effect] = []
        going_on = self._in_turn()
        for request in going_on:
            if not request.asks:
                continue
            self.at = request
            if len(going_on) > 1 and request.policy.pool:
                request.asks = False
                continue
            for decision in request.decide():
                if isinstance(decision, Send):
                    request.send(decision.ids)
                else:
                    effects.append(drafts.ask(request, decision, now))
        self.at = None
        return effects

    def _together(self, now: float) -> list[Effect]:
        effects = self._decided(now)
        effects += self._expand(now)
        while self._flights.queued < MOST_QUEUED and len(self._flights) < self._places:
            parts = self._next_parts()
            if not parts:
                break
            effects += self._launch(parts)
            # A part of which nothing is wanted any more is dropped, and its policy asked again.
            effects += self._decided(now)
        return effects

    def _next_parts(self) -> list[Request]:
        """The requests that have something in the next segment.

        Behind a segment that the first stage is at, only what waits for no better guess leaves:
        that spares the stage the way of its credit.
        """
        is_free = not self._flights.queued
        going_on = self._in_turn()
        starting = [request for request in going_on if not request.is_read]
        # PPD rows below a prompt's last row leave before the policy may be asked.
        answering = [r for r in going_on if (r.decodes or r.leaving) and r.is_read]
        first = [request for request in starting if request.policy.prompts_first]
        if first and (parts := self._take_chunk(first[0], 0, others=False)):
            return parts
        share = self._share(answering)
        parts = [request for request in answering if request.leaving][:share]
        if is_free or any(not _root_sent(request) for request in answering):
            roots = min(len(answering), share)
            coming = self._chunk(starting[0], roots, others=bool(answering)) if starting else 0
            parts += self._take_rows(answering, share - len(parts), coming)
        if starting and (parts or is_free or not answering):
            beside = sum(len(request.leaving[0].rows) for request in parts)
            parts += self._take_chunk(starting[0], beside, others=bool(answering))
        return parts

    def _take_chunk(self, request: Request, beside: int, *, others: bool) -> list[Request]:
        """Have rows of its prefix leave (see _chunk)."""
        rows = self._chunk(request, beside, others=others)
        if rows:
            request.send_chunk(rows)
        return [request] if rows else []

    def _chunk(self, request: Request, beside: int, *, others: bool) -> int:
        """How many rows of its prefix may leave; none if so much of it is on the ring that it is
        full.

        Beside answers they are so many that a step takes no more than SLOWEST times as long.
        """
        if request.in_flight > self._flights.clock.stages or request.leaving:
            return 0
        most, step = request.prefix.chunk, request.estimates.step
        if others:
            if not step.known:
                most = min(most, LEAST_CHUNK)
            while most > LEAST_CHUNK and (
                step.seconds(beside + most) > SLOWEST * step.seconds(max(beside, 1))
            ):
                most = max(most - LEAST_CHUNK, LEAST_CHUNK)
        return min(most, len(request.prefix) - request.prefix.sent)

    # --- the pool -----------------------------------------------------------------------------

    def _expand(self, now: float) -> list[Effect]:
        """If no pass of the pool is at work, have its best nodes expanded. A prompt that is read
        keeps nobody but its own request waiting: it may take long, and goes in parts."""
        going_on = self._in_turn()
        drafting = [r.draft for r in going_on if r.draft is not None and r.policy.pool]
        if any(isinstance(draft.plan, Expand) for draft in drafting):
            return []
        requests = [r for r in going_on if r.draft is None and r.policy.pool and r.decodes]
        pool = requests[0].policy.pool if requests else None
        if pool is None or not requests[0].estimates.step.known:
            return []
        chosen = pool.best_nodes([request.view() for request in requests])
        return [
            drafts.ask(request, nodes, now)
            for request, nodes in zip(requests, chosen, strict=True)
            if nodes
        ]

    def _take_rows(self, answering: list[Request], roots: int, beside: int) -> list[Request]:
        """Have the best rows of those that pool leave, with so many new roots at most, beside so
        many rows of a prompt."""
        requests = [r for r in answering if r.policy.pool and r.decodes and not r.leaving]
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

    def _in_turn(self) -> list[Request]:
        """The live requests that go on, those first of which nothing has left for longest."""
        return [*self._new.values(), *self._sent.values()]

    @property
    def _places(self) -> int:
        """Segments that should be in flight: one on every stage, and one on its way."""
        return self._flights.clock.stages + 1

    def _share(self, answering: list[Request]) -> int:
        """Requests that may share a segment: as many as fill all places with what their policies
        want in flight; of the pool that is each one's root."""
        places = self._places
        wanted = sum(
            1 if r.policy.pool else min(r.policy.window(places - 1), places)
            for r in answering
            if r.decodes
        )
        return min(max(math.ceil(wanted / places), 1), MOST_PARTS)

    def _launch(self, requests: Iterable[Request]) -> list[Effect]:
        """What waits longest of each of these requests leaves, as one segment."""
        parts: list[Part] = []
        owners: list[Request] = []
        for self.at in requests:
            part = self._next_part(self.at)
            if part is not None:
                parts.append(part)
                owners.append(self.at)
        self.at = None
        if not parts:
            return []
        seq, flight = self._flights.launch(parts, [request.choosing for request in owners])
        for number in sorted(request.number for request in owners):
            self._new.pop(number, None)
            self._sent.pop(number, None)
            self._sent[number] = self._live[number]
        layers, hints, vectors = NO_LAYERS, NO_LAYERS, None
        tokens = np.concatenate([part.tokens for part in parts])
        for request in owners:
            request.turn = seq
            if request.stats.entered is None:
                request.stats.entered = flight.entered
            layers = layers or request.needs.aux_layers
            hints = hints or request.hinting.asked(request)
            if request.ppd_rows is not None:  # the table is the same for all
                vectors = request.ppd_rows.vectors(tokens)
        return [SendRing(Segment(Header(seq, layers, hints), tuple(parts), ppd_tokens=vectors))]

    def _next_part(self, request: Request) -> Part | None:
        """What leaves first of what waits of a request; None if none of it is wanted any more."""
        leaving, tree = request.leaving.popleft(), request.tree
        rows = leaving.rows
        if not leaving.committed and tree is not None:
            awaited = () if request.ppd_rows is None else request.ppd_rows.awaited(tree)
            wanted = [i in tree or i in awaited for i in rows.ids.tolist()]
            rows = rows if all(wanted) else rows.take(np.flatnonzero(wanted))
        if not len(rows):
            request.in_flight -= 1
            request.asks = True
            return None
        reused = request.prefix.reused if leaving.reserve else None
        want = min(leaving.want, len(rows))
        shared = self._rows.opens(request.number) if leaving.reserve else 0
        none = 0, NO_IDS, False
        begins = (reused.request, np.array(reused.ids, np.int64), reused.ends) if reused else none
        return Part(
            request.number,
            request.retains.epoch,
            leaving.committed,
            leaving.reserve,
            want,
            rows.ids,
            rows.parents,
            rows.positions,
            rows.tokens,
            *begins,
            shared,
            request.choosing if leaving.committed and want else None,
        )


def _root_sent(request: Request) -> bool:
    return request.tree is None or request.tree.is_sent(request.tree.root)
