"""Effects of the ring's machines only."""

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
    """Put that block on this device's disk, beside the one that runs; comes back as BlockFetched,
    or not at all. None: stop fetching."""

    assign: Assign | None


@dataclass(frozen=True, slots=True)
class DropBlock(Effect):
    """Give up the block that is loaded, and its memory; no ring needs it."""


@dataclass(frozen=True, slots=True)
class ResetStage(Effect):
    """A new ring begins, in which the loaded block is this stage: forget the ring before."""

    assign: Assign


@dataclass(frozen=True, slots=True)
class OpenRing(Effect):
    """From now on, exchange segments with holders of this key; send none before ConnectRing."""

    key: str


@dataclass(frozen=True, slots=True)
class ConnectRing(Effect):
    """From now on, push segments to this TCP address (empty host: the coordinator's), where the
    node must prove this public key."""

    host: str
    port: int
    key: str


@dataclass(frozen=True, slots=True)
class KeepHolders(Effect):
    """Remember over restarts which keys hold stages 1, 2, …, and so have their blocks."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CloseRing(Effect):
    """This node has no part in a ring: push no segments."""


@dataclass(frozen=True, slots=True)
class Log(Effect):
    """Write a line to the log, which is also the node's status."""

    text: str


@dataclass(frozen=True, slots=True)
class Stop(Effect):
    """End this node's program; `failed` says whether the reason is an error."""

    reason: str
    failed: bool
