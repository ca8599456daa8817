"""Ring state: whether the ring is there, and how long requests wait for one that was lost."""

from __future__ import annotations

from collections.abc import Iterable

from edgespec.decoding.request import Request
from edgespec.errors import PeerLost


class RingState:
    """What the coordinator machine knows of its ring: not there yet, up, lost, or at its end."""

    def __init__(self, limit: float) -> None:
        """`limit`: seconds that a request waits for a lost ring; with 0 it fails at once."""
        self._limit = limit
        self._lost: str | None = None
        self._change = ""  # its devices get other layers, for that reason
        self.held = ""
        """Why no further request begins though the ring is up."""
        self._ended: str | None = None
        self.is_up = False

    def up(self) -> None:
        """Every stage is there."""
        self.is_up, self._lost = True, None
        self._change = self.held = ""

    def down(self, reason: str, now: float, requests: Iterable[Request]) -> None:
        """The ring is lost. A second loss before it is back gives no request more time."""
        if self._lost is None:
            for request in requests:
                request.waiting_since = now
        self.is_up, self._lost = False, reason

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
    def may_begin(self) -> bool:
        """Whether a further request may begin."""
        return self.is_up and not self.held

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
        return min((r.waiting_since + self._limit for r in requests), default=None)

    def overdue(self, requests: Iterable[Request], now: float) -> list[tuple[Request, str]]:
        """The requests that have, each with the reason for its user."""
        if self._lost is None:
            return []
        late = f"; it did not come back within {self._limit:g} s" if self._limit > 0 else ""
        reason = self._lost + late
        return [(r, reason) for r in requests if now >= r.waiting_since + self._limit]
