"""Events of the block receiver and the piece sender."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.machines.events import Tick
from edgespec.wire.block_messages import PieceRequest
from edgespec.wire.messages import Message


@dataclass(frozen=True, slots=True)
class SenderLink:
    """The connection to the sender is there (again), or broke: what was on its way is lost."""

    is_up: bool


@dataclass(frozen=True, slots=True)
class SenderSaid:
    """A message of the sender."""

    message: Message


@dataclass(frozen=True, slots=True)
class PartRead:
    """The next bytes of the part file, at most up to the end of a chunk."""

    data: bytes


@dataclass(frozen=True, slots=True)
class PartEnded:
    """All of the part file was read, or all up to what is wrong in it."""


ReceiverEvent = Tick | SenderLink | SenderSaid | PartRead | PartEnded


@dataclass(frozen=True, slots=True)
class PieceAsked:
    """A receiver asks for a piece of a file that is there."""

    peer: bytes
    request: PieceRequest


@dataclass(frozen=True, slots=True)
class PeerLeft:
    """A receiver is gone."""

    peer: bytes


@dataclass(frozen=True, slots=True)
class RingIs:
    """Whether the ring works on a request now."""

    busy: bool
