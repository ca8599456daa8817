"""Ring state: whether the ring is there, and how long requests wait for one that was lost."""

from __future__ import annotations

import math
from collections.abc import Iterable

from edgespec.decoding.answer import MOST_FRUITLESS
from edgespec.decoding.request import Request
from edgespec.errors import PeerLost
from edgespec.machines.patience import patience_ends


class RingState:
    """What the coordinator machine knows of its ring: not there yet, up, lost, or at its end."""

    def __init__(self, limit: float) -> None:
        """`limit`: seconds that a request waits for a lost ring, or for the next progress of what
        replaces it; with 0 it fails at once."""
        self._limit = limit
        self._lost: str | None = None
        self._lost_at = -math.inf
        self._change = ""  # its devices get other layers, for that reason
        self._doing, self._progressed = "", -math.inf  # what replaces it, and since when
        self.held = ""
        """Why no further request begins though the ring is up."""
        self._ended: str | None = None
        self.is_up = False

    def up(self) -> None:
        """Every stage is there."""
        self.is_up, self._lost = True, None
        self._change = self.held = self._doing = ""
        self._progressed = -math.inf

    def down(self, reason: str, now: float) -> None:
        """The ring is lost. A second loss before it is back gives no request more time."""
        if self._lost is None:
            self._lost_at = now
        self.is_up, self._lost, self._doing = False, reason, ""

    def progress(self, doing: str, now: float) -> None:
        """What replaces it has come on: requests wait on (see machines.patience)."""
        self._doing, self._progressed = doing, now

    def hold(self, reason: str) -> None:
        """No further request begins, for that reason; with "" they may again."""
        self.held = reason

    def change(self, reason: str) -> None:
        """Its devices get other layers. That ends by itself, or with a loss: there is no limit."""
        self.is_up, self._change = False, reason

    def end(self, reason: str) -> None:
        """There will be no other ring."""
        self.is_up, self._ended = False, reason

    def check_open(self) -> None:
        """Raise PeerLost if a new request could only fail."""
        if self._ended is not None:
            raise PeerLost(self._ended)
        if self._lost is not None and self._limit <= 0:
            raise PeerLost(self._lost)

    @property
    def missing(self) -> str:
        """Why requests wait; "" if they wait for nothing but each other."""
        if self.is_up:
            return self.held
        if self._lost is None and self._change:
            return f"{self._change}; waiting until they have loaded their layers"
        if self._lost is None:
            return "waiting for the ring's stages (`edgespec status` tells which are missing)"
        return f"{self._lost}; waiting for it"

    def deadline(self, requests: Iterable[Request]) -> float | None:
        """When the first request has waited long enough for a lost ring."""
        if self._lost is None:
            return None
        return min(map(self._end_of, requests), default=None)

    def overdue(self, requests: Iterable[Request], now: float) -> list[tuple[Request, str]]:
        """The requests that have, each with the reason for its user."""
        if self._lost is None:
            return []
        return [(r, self._why_late(r, now)) for r in requests if now >= self._end_of(r)]

    @staticmethod
    def fruitless(requests: Iterable[Request], reason: str) -> list[tuple[Request, str]]:
        """Those of these live requests that rings have failed again and again, the last one for
        that reason: they must not be kept for ever."""
        why = f"{MOST_FRUITLESS} rings in a row gave it no token; the last: {reason}"
        lost = [(r, r.stats.ring_lost(len(r.answer.token_ids))) for r in requests]
        return [(request, why) for request, rings in lost if rings >= MOST_FRUITLESS]

    def _end_of(self, request: Request) -> float:
        return patience_ends(self._waits_since(request), self._progressed, self._limit)

    def _waits_since(self, request: Request) -> float:
        return max(self._lost_at, request.client.asked_at)

    def _why_late(self, request: Request, now: float) -> str:
        assert self._lost is not None
        if self._limit <= 0:
            return self._lost
        since = self._waits_since(request)
        took = f"{now - since:.0f}" if self._progressed > since else f"{self._limit:g}"
        late = f"it did not come back within {took} s"
        if self._doing:
            doing = f"{self._doing} ({now - self._progressed:.0f} s)"
            late = f"{doing}, and the ring did not come back within {took} s"
        return f"{self._lost}; {late}"
