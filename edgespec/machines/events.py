"""Events: what a machine is told. The results of compute effects come back as events too."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.tree.drafted import Children, DraftedTree
from edgespec.types.tensor import Tensor
from edgespec.verify.sampling import Choice
from edgespec.verify.top_logprobs import TopLogprobs
from edgespec.wire.messages import Message, Segment


@dataclass(frozen=True, slots=True)
class SegmentArrived:
    """A segment came along the data ring."""

    segment: Segment


@dataclass(frozen=True, slots=True)
class MessageArrived:
    """A control message came; `peer` is the sender's address (empty: the coordinator).

    `key`: the public key that it has proved to the coordinator; "" elsewhere.
    """

    peer: bytes
    message: Message
    key: str = ""


@dataclass(frozen=True, slots=True)
class BlockDone:
    """RunBlock ended: hidden rows [R, H], or None if it was aborted.

    `aux_hidden` uint8 [R, ...]: what entered the tapped layers of this block; None if it has none.
    """

    job: int
    hidden: Tensor | None
    aux_hidden: Tensor | None = None


@dataclass(frozen=True, slots=True)
class PromptEncoded:
    """EncodePrompt ended: the prompt's tokens; or none and the `problem`, fit for a user, of a
    `kind` that the message Failed knows."""

    request: int
    tokens: tuple[int, ...]
    problem: str = ""
    kind: str = ""


@dataclass(frozen=True, slots=True)
class HeadDone:
    """RunHead ended: the token behind each row, and what else was asked for."""

    job: int
    choice: Choice
    top_logprobs: TopLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Drafted:
    """RunDraft or DeepenDraft ended: the whole drafted tree below the root it was asked for."""

    job: int
    tree: DraftedTree


@dataclass(frozen=True, slots=True)
class Expanded:
    """ExpandDraft ended: the children of every path that it named."""

    job: int
    children: Children


NO_JOB = -1
"""Job of a failed effect that has none (opening, gathering or closing a cache or a draft)."""


@dataclass(frozen=True, slots=True)
class ComputeFailed:
    """A compute effect raised; the reason is fit for a user."""

    job: int
    request: int
    reason: str


@dataclass(frozen=True, slots=True)
class RingUp:
    """Every stage is ready and connected; `stages`: how many there are, 0 for as many as before."""

    stages: int = 0


@dataclass(frozen=True, slots=True)
class RingDown:
    """There is no ring until the next RingUp; the reason names the stage and the cause.

    `lost`: nobody knows whether there will be one; else its devices only get other layers.
    """

    reason: str
    lost: bool = True


@dataclass(frozen=True, slots=True)
class Hold:
    """No further request shall begin, for that reason, until the next RingUp; or, with "", now
    again."""

    reason: str


@dataclass(frozen=True, slots=True)
class RingEnded:
    """There will be no other ring: the coordinator ends; the reason is fit for a user."""

    reason: str


@dataclass(frozen=True, slots=True)
class RingReached:
    """This node's connection to the next one of the ring stands."""


@dataclass(frozen=True, slots=True)
class RingBroke:
    """This node's connection to the next one of the ring does not stand, or not any more: segments
    may have been lost. `why` is a clause whose subject is the node."""

    why: str


@dataclass(frozen=True, slots=True)
class KeyRemoved:
    """The cluster's owner, or the device itself, has this public key admitted no more."""

    key: str


@dataclass(frozen=True, slots=True)
class PeerGone:
    """A client can no longer be reached."""

    peer: bytes


@dataclass(frozen=True, slots=True)
class BlockLoaded:
    """A stage's block is in memory after `seconds`."""

    seconds: float


@dataclass(frozen=True, slots=True)
class BlockLoading:
    """How far a stage's block is, in words: "loading 3 of 10 layers"."""

    text: str


@dataclass(frozen=True, slots=True)
class BlockFetched:
    """The block is on this device's disk."""

    seconds: float


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """A stage's block could not be loaded; the reason is fit for a user."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """The machine's deadline has come."""


Event = (
    SegmentArrived
    | MessageArrived
    | BlockDone
    | PromptEncoded
    | HeadDone
    | Drafted
    | Expanded
    | ComputeFailed
    | RingUp
    | RingDown
    | Hold
    | RingEnded
    | RingReached
    | RingBroke
    | KeyRemoved
    | PeerGone
    | BlockLoaded
    | BlockFetched
    | BlockLoading
    | LoadFailed
    | Tick
)
