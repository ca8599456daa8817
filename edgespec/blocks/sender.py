"""Piece sender: which receiver's piece of a block file is sent next, and when."""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgespec.blocks.receiver import WINDOW
from edgespec.wire.block_messages import PieceRequest

SHARE = 0.2
"""The share of a link's time that transfers may take while the ring is busy."""

LONGEST_TURN_S = 5.0
"""Seconds after which a piece that has not arrived no longer delays the next one."""

MOST_PEERS = 256
"""Receivers that may wait at one sender."""


@dataclass(frozen=True, slots=True)
class SendPiece:
    """Read this piece and send it."""

    peer: bytes
    request: PieceRequest


@dataclass(frozen=True, slots=True)
class _Flight:
    """The latest piece sent to a receiver: where it ends in the file, when it was sent."""

    sha256: str
    end: int
    left: float


class PieceSender:
    """Sends one piece to each receiver in turn.

    While the ring is busy, one piece is on its way at a time, with a pause after it that keeps the
    time on the link below SHARE, however fast the link is.
    """

    def __init__(self) -> None:
        self._busy = False
        self._waiting: dict[bytes, dict[int, PieceRequest]] = {}
        self._flights: dict[bytes, _Flight] = {}
        self._rest_until = -math.inf

    def deadline(self) -> float | None:
        """When to call next without an event; None: not before one."""
        if not self._waiting:
            return None
        landing = [flight.left + LONGEST_TURN_S for flight in self._flights.values()]
        return max([self._rest_until, *landing])

    def set_busy(self, busy: bool, now: float) -> list[SendPiece]:
        """Whether the ring works on a request; returns the pieces to send now, in order."""
        self._busy = busy
        return self._leaving(now)

    def left(self, peer: bytes) -> None:
        """A receiver is gone."""
        self._waiting.pop(peer, None)
        self._flights.pop(peer, None)

    def asked(self, peer: bytes, request: PieceRequest, now: float) -> list[SendPiece]:
        """A receiver asks for a piece of a file that is there; returns the pieces to send now."""
        flight = self._flights.get(peer)
        if flight and flight.sha256 == request.sha256 and flight.end <= request.have:
            del self._flights[peer]
            self._rest_until = max(
                self._rest_until, now + (now - flight.left) * (1.0 - SHARE) / SHARE
            )
        if not request.length or (peer not in self._waiting and len(self._waiting) >= MOST_PEERS):
            return self._leaving(now)
        queue = self._waiting.setdefault(peer, {})
        if len(queue) < 2 * WINDOW:  # an honest receiver's window; a repeated request adds nothing
            queue[request.offset] = request
        return self._leaving(now)

    def _leaving(self, now: float) -> list[SendPiece]:
        for peer, flight in list(self._flights.items()):
            if now - flight.left >= LONGEST_TURN_S:
                del self._flights[peer]
        leaving = []
        while self._waiting and not (self._busy and (self._flights or now < self._rest_until)):
            peer = next(iter(self._waiting))
            queue = self._waiting.pop(peer)
            request = queue.pop(next(iter(queue)))
            if queue:
                self._waiting[peer] = queue  # after all others
            self._flights[peer] = _Flight(request.sha256, request.offset + request.length, now)
            leaving.append(SendPiece(peer, request))
        return leaving
