"""Effects that the ring's machines alone have."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.machines.effects import Effect
from edgespec.wire.messages import Assign


@dataclass(frozen=True, slots=True)
class LoadBlock(Effect):
    """Load the block that the coordinator assigned; comes back as BlockLoaded or LoadFailed."""

    assign: Assign


@dataclass(frozen=True, slots=True)
class FetchBlock(Effect):
    """Have that block on this device's disk, beside the one that runs; comes back as BlockFetched,
    or not at all. With None, whatever is fetched is not wanted any more."""

    assign: Assign | None


@dataclass(frozen=True, slots=True)
class ResetStage(Effect):
    """A new ring begins, in which the stage's block has this place: forget the one before."""

    assign: Assign


@dataclass(frozen=True, slots=True)
class OpenRing(Effect):
    """From now on, exchange segments with whoever shows this key; send none before ConnectRing."""

    key: str


@dataclass(frozen=True, slots=True)
class ConnectRing(Effect):
    """From now on, push segments to this TCP address (empty host: the coordinator's).

    `key`: the public key that the node there has to prove.
    """

    host: str
    port: int
    key: str


@dataclass(frozen=True, slots=True)
class CloseRing(Effect):
    """This node has no part in a ring: push to nobody."""


@dataclass(frozen=True, slots=True)
class Log(Effect):
    """Tell the person at the terminal how things stand."""

    text: str


@dataclass(frozen=True, slots=True)
class Stop(Effect):
    """End this node's program; `failed` says whether the reason is an error."""

    reason: str
    failed: bool
