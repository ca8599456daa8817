"""Events of the ring's machines only."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.machines.events import Event
from edgespec.wire.messages import Assign


@dataclass(frozen=True, slots=True)
class RingReached(Event):
    """This node's connection to the next one of the ring stands."""


@dataclass(frozen=True, slots=True)
class RingBroke(Event):
    """This node cannot reach the next one of the ring, and cannot keep its place. `why` is a clause
    whose subject is the node."""

    why: str


@dataclass(frozen=True, slots=True)
class RingFaulty(Event):
    """Segments of this ring were lost, or are wrong: a new one is needed, for which this node keeps
    its place. `why` and `by_sender`: as in decoding.effects.Renew."""

    why: str
    by_sender: bool = False


@dataclass(frozen=True, slots=True)
class ControlEnded(Event):
    """A connection of the control channel has ended, which is the coordinator's to a stage: who had
    it may be dead."""


@dataclass(frozen=True, slots=True)
class KeyRemoved(Event):
    """This public key was removed by the cluster's owner, or by the device itself."""

    key: str


@dataclass(frozen=True, slots=True)
class BlockLoaded(Event):
    """A stage's block is in memory after `seconds`."""

    seconds: float


@dataclass(frozen=True, slots=True)
class BlockLoading(Event):
    """Progress in words, such as "loading 3 of 10 layers"."""

    text: str


@dataclass(frozen=True, slots=True)
class BlockFetched(Event):
    """The block of that Assign to prepare for is on this device's disk."""

    assign: Assign
    seconds: float


@dataclass(frozen=True, slots=True)
class LoadFailed(Event):
    """A stage's block could not be loaded; the reason is fit for a user."""

    reason: str
