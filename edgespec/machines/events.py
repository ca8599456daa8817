"""Events: what a machine is told. The results of compute effects come back as events too."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.types.tensor import Tensor
from edgespec.wire.messages import Message


class Event:
    """Base of all events: each room has its own."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class MessageArrived(Event):
    """A control message came; `peer` is the sender's address (empty: the coordinator).

    `key`: the public key that it has proved to the coordinator; "" elsewhere.
    """

    peer: bytes
    message: Message
    key: str = ""


@dataclass(frozen=True, slots=True)
class BlockDone(Event):
    """RunBlock ended: hidden rows [R, H], or None if it was aborted.

    `aux_hidden` uint8 [R, ...]: what entered the tapped layers of this block; None if it has none.
    """

    job: int
    hidden: Tensor | None
    aux_hidden: Tensor | None = None


NO_JOB = -1
"""Job of a failed effect that has none (opening, gathering or closing a cache or a draft)."""


@dataclass(frozen=True, slots=True)
class ComputeFailed(Event):
    """A compute effect raised; the reason is fit for a user, of a `kind` that the message Failed
    knows."""

    job: int
    request: int
    reason: str
    kind: str = ""


@dataclass(frozen=True, slots=True)
class RingUp(Event):
    """Every stage is ready and connected; `stages`: how many there are, 0 for as many as before.

    `rows`: cache rows that each of them has room for, of all requests; 0: as before.
    """

    stages: int = 0
    rows: int = 0


@dataclass(frozen=True, slots=True)
class RingDown(Event):
    """There is no ring until the next RingUp; the reason names the stage and the cause.

    `lost`: whether there will be one is not known; else its devices only get other layers.
    """

    reason: str
    lost: bool = True


@dataclass(frozen=True, slots=True)
class RingProgress(Event):
    """A stage of the next ring has come on with its layers, such as by receiving more of them.
    `doing`: what those do that lack theirs, as a clause that names them; "": none is left."""

    doing: str


@dataclass(frozen=True, slots=True)
class Hold(Event):
    """No further request begins, for that reason, until the next RingUp; or, with "", now
    again."""

    reason: str


@dataclass(frozen=True, slots=True)
class RingEnded(Event):
    """There will be no other ring: the coordinator ends; the reason is fit for a user."""

    reason: str


@dataclass(frozen=True, slots=True)
class PeerGone(Event):
    """A client can no longer be reached."""

    peer: bytes


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """The machine's deadline has come."""
