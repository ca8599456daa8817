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
from edgespec.decoding.snapshot import live_request
from edgespec.machines.effects import Effect
from edgespec.machines.events import Event
from edgespec.policy.base import Send
from edgespec.types.tensor import NO_LAYERS
from edgespec.wire.client_messages import LiveRequest
from edgespec.wire.segment import MOST_PARTS, Header, Part, Segment


class Scheduler:
    """The live requests of one ring, in the order of their starts."""

    def __init__(self, flights: Flights, d0: D0Times) -> None:
        self._flights = flights
        self._d0 = d0
        self._live: dict[int, Request] = {}

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
        """Cache rows that they may take up on every stage."""
        return sum(request.capacity for request in self._live.values())

    def start(self, request: Request, stages: int, most: int) -> None:
        """It is live from now on, on a ring of so many stages: its prefix is read, at most `most`
        rows together."""
        self._flights.clock.change(stages)
        prefix = request.prefix
        prefix.chunk = request.estimates.chunk(len(prefix) - prefix.sent, most, stages)
        self._live[request.number] = request

    def end(self, request: Request) -> None:
        """It is live no more; what of it waits to leave is forgotten."""
        del self._live[request.number]
        self._d0.forget(request.number)

    def clear(self) -> None:
        """No request is live."""
        for request in self.live:
            self.end(request)

    # --- what happens to them -----------------------------------------------------------------

    def landed(self, flight: Flight, segment: Segment, now: float) -> list[Effect]:
        """A segment is back: each request gets its own part. What each stage computed of it, and in
        how many seconds, is learnt once for each policy that had a part in it."""
        live = [self._live[number] for number in flight.requests if number in self._live]
        ran = [(time.rows, time.seconds) for time in segment.cost]
        for estimates in {id(r.estimates): r.estimates for r in live}.values():
            estimates.segment(ran, self._flights.clock.stages)
        return self.step([(one.flight.request, one) for one in flight.landed(segment)], now)

    def step(self, events: Iterable[tuple[int, Event]], now: float) -> list[Effect]:
        """Hand events to those of their requests that are live."""
        effects: list[Effect] = []
        told = [(self._live[number], event) for number, event in events if number in self._live]
        for request, event in told:
            effects += request.handle(event, now)
        effects += self.work(now)
        for request, _ in told:
            while request.has_result:
                effects += request.take_result(now)
                effects += self.work(now)
        return effects

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
        going_on = self._in_turn()
        return self._alone(going_on[0], now) if len(going_on) == 1 else self._together(now)

    def _alone(self, request: Request, now: float) -> list[Effect]:
        effects = self._decided([request], now)
        while not request.is_read and request.in_flight <= self._flights.clock.stages:
            request.send_chunk(request.prefix.chunk)
        while request.leaving:
            effects += self._launch([request])
        return effects

    def _decided(self, requests: Iterable[Request], now: float) -> list[Effect]:
        """Ask the policies that are to be asked; returns what is to be drafted."""
        effects: list[Effect] = []
        for request in requests:
            for decision in request.decide() if request.asks else ():
                if isinstance(decision, Send):
                    request.send(decision.ids)
                else:
                    effects.append(drafts.ask(request, decision, now))
        return effects

    def _together(self, now: float) -> list[Effect]:
        effects = self._decided(self._in_turn(), now)
        # A part of which nothing is wanted any more is dropped, and its policy asked again.
        while not self._flights.queued and len(self._flights) < self._places:
            for request in self._live.values():
                begins = not request.is_read and not request.leaving
                if begins and request.in_flight <= self._flights.clock.stages:
                    request.send_chunk(request.prefix.chunk)
            ready = [request for request in self._in_turn() if request.leaving]
            ready = [r for r in ready if r.policy.prompts_first and not r.decodes] or ready
            if not ready:
                break
            effects += self._launch(ready[: self._share])
            effects += self._decided(self._in_turn(), now)
        return effects

    def _in_turn(self) -> list[Request]:
        """The live requests that go on, those first of which nothing has left for longest."""
        going_on = (r for r in self._live.values() if not r.answer.finish_reason)
        return sorted(going_on, key=lambda request: request.turn)

    @property
    def _places(self) -> int:
        """Segments that should be in flight: one on every stage, and one on its way."""
        return self._flights.clock.stages + 1

    @property
    def _share(self) -> int:
        """Requests that may share a segment: as many as fill all places with what their policies
        want in flight."""
        places = self._places
        wanted = sum(
            min(request.policy.window(places - 1), places)
            for request in self._live.values()
            if request.decodes
        )
        return min(max(math.ceil(wanted / places), 1), MOST_PARTS)

    def _launch(self, requests: Iterable[Request]) -> list[Effect]:
        """What waits longest of each of these requests leaves, as one segment."""
        parts: list[Part] = []
        owners: list[Request] = []
        for request in requests:
            part = _next_part(request)
            if part is not None:
                parts.append(part)
                owners.append(request)
        if not parts:
            return []
        seq, flight = self._flights.launch(parts, [request.choosing for request in owners])
        layers, vectors = NO_LAYERS, None
        tokens = np.concatenate([part.tokens for part in parts])
        for request in owners:
            request.turn = seq
            if request.stats.entered is None:
                request.stats.entered = flight.entered
            layers = layers or request.needs.aux_layers
            if request.ppd_rows is not None:  # the table is the same for all
                vectors = request.ppd_rows.vectors(tokens)
        return [SendRing(Segment(Header(seq, layers), tuple(parts), ppd_tokens=vectors))]


def _next_part(request: Request) -> Part | None:
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
        *((reused.request, reused.ids) if reused else (0, ())),
        choosing=request.choosing if leaving.committed and want else None,
    )
