"""Layer assignment: which layers each stage runs, which member holds them, and their status."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from msgspec.structs import replace

from edgespec.config import Address, Timing
from edgespec.types.record import MOST_RECORDS
from edgespec.wire.client_messages import NodeStatus
from edgespec.wire.messages import NO_RING, Assign, Join

MOST_SHOWN = MOST_RECORDS
"""Stages and spares that a status can hold."""

SPARE = 0
"""The stage number of a spare."""


@dataclass(slots=True)
class Member:
    """A stage of the ring, or a spare."""

    peer: bytes
    join: Join
    heard: float
    stage: int
    number: int  # of its newest Assign, or StandBy, by which it names it in what it answers
    state: str = "loading"  # what it does, in words; of a spare, beside standing by
    ready: bool = False
    connected: bool = False  # whether it has reached the next node, in that place
    loaded: bool = False  # whether it was ever ready for this stage
    since: float = 0.0  # when it became a spare
    fetching: Assign | None = None  # the Assign that it was told to prepare for
    fetched: tuple[Assign, ...] = ()  # the places that it is prepared for
    rival: tuple[bytes, float] | None = None  # another process that asks for this stage, since when

    def __str__(self) -> str:
        name = f"stage {self.stage}" if self.stage else "the spare"
        return f"{name} ({self.join.name}, process {self.join.pid})"

    @property
    def words(self) -> str:
        """What it does, for a person."""
        if self.stage:
            return self.state
        layers = ", ".join(f"{one.first} to {one.end - 1}" for one in self.fetched)
        told = ("standing by", f"layers {layers} fetched" if layers else "", self.state)
        return "; ".join(filter(None, told))

    def prepares_for(self, assign: Assign) -> bool:
        """Whether it has, or fetches, the layers of that place."""
        found = (*self.fetched, self.fetching) if self.fetching else self.fetched
        return any(one.block == assign.block for one in found)

    def is_alive(self, now: float, timing: Timing) -> bool:
        """Whether it was heard within two beats."""
        return now - self.heard <= 2 * timing.beat

    def is_process_of(self, join: Join) -> bool:
        """Whether `join` comes from the same process, over a new connection.

        The key is proved by the connection; an address alone could be claimed by any node.
        """
        mine = (self.join.host, self.join.port, self.join.key)
        return mine == (join.host, join.port, join.key)


class Assignment:
    """The layers of each stage in the current ring, and the device that is planned for each."""

    def __init__(
        self, assigns: Sequence[Assign], names: Sequence[str], holders: Sequence[str]
    ) -> None:
        """`assigns[s - 1]`: layers of stage s; its `ring_key` is the secret from which the key of
        each ring is made. `names[s - 1]`: the planned device's name, "" if any may have it; () if
        there is no plan. `holders[s - 1]`: the key of the device that held it last, as far as that
        is known."""
        self._assigns = self.first = tuple(assigns)
        self._names = self._first_names = names
        self.holders = tuple(holders)
        """Keys of the devices that held the first assignment's stages when they were up last."""
        self.most = len(assigns)
        """The number of stages at first, which a later assignment does not exceed."""
        self.ring = 1
        """The number of the current ring; a new ring begins whenever a stage is lost."""
        self._number = _start_of(assigns[0].ring_key)

    def __len__(self) -> int:
        return len(self._assigns)

    def __iter__(self) -> Iterator[Assign]:
        return iter(self._assigns)

    @property
    def is_first(self) -> bool:
        """Whether this is the assignment that the ring began with."""
        return self._assigns == self.first

    def next_number(self) -> int:
        """A number for the next Assign, see there."""
        self._number += 1
        return self._number

    def of(self, stage: int) -> Assign:
        """The stage's Assign with the number and the key of the current ring."""
        return _in_ring(self._assigns[stage - 1], self.ring)

    def layers(self, stage: int) -> int:
        """The number of layers of that stage; 0 for a spare."""
        if stage == SPARE:
            return 0
        return self._assigns[stage - 1].end - self._assigns[stage - 1].first

    def held(self, join: Join) -> int:
        """The stage that this device held last, and that is planned for no other; 0: none."""
        if not self.is_first or join.name in self._names:
            return 0
        known = [s for s in range(1, self.most + 1) if join.key in self.holders[s - 1 : s]]
        return next((s for s in known if not any(self._names[s - 1 : s])), 0)

    def planned(self, name: str, free: Sequence[int]) -> int:
        """Prefer the stage planned for this device, then an unplanned one that no other device
        held, then an unplanned one, then any."""
        own = [s for s in free if name in self._names[s - 1 : s]]
        unplanned = [s for s in free if not any(self._names[s - 1 : s])]
        new = [s for s in unplanned if not any(self.holders[s - 1 : s])]
        return (own or new or unplanned or free)[0]

    def replace(self, assigns: Sequence[Assign]) -> None:
        """Begin the next ring with these layers; planned names hold for the first ones only."""
        self._assigns = tuple(assigns)
        self._names = self._first_names if self.is_first else ()
        self.ring += 1


def is_address(host: str, port: int) -> bool:
    """Whether others can connect to it without asking a name server, which would take time."""
    # A zone names an interface of the node that sent it: other nodes have other names.
    try:
        return str(ip_address(host)) == host and "%" not in host and 1 <= port <= 65535
    except ValueError:
        return False


def in_no_ring(assign: Assign, number: int) -> Assign:
    """An Assign of that number to prepare for, which belongs to no ring yet."""
    return replace(_in_ring(assign, NO_RING), number=number)


def _start_of(secret: str) -> int:
    """Far from where another run of the coordinator started, which had another secret."""
    return int(hashlib.sha256(f"{secret} numbers".encode()).hexdigest()[:12], 16)


def _in_ring(assign: Assign, ring: int) -> Assign:
    # A hash, so that the key of one ring does not reveal that of another.
    key = hashlib.sha256(f"{assign.ring_key} ring {ring}".encode()).hexdigest()
    return replace(assign, ring=ring, ring_key=key)


def line_of(assign: Assign | None, member: Member | None) -> str:
    """One line of status text on a stage, or on a spare (`assign` None)."""
    who = f"{member.join.name} {member.words}" if member else "missing"
    if assign is None:
        return f"spare: {who}"
    head = " and the output head" if assign.head else ""
    return f"stage {assign.stage}: layers {assign.first} to {assign.end - 1}{head}: {who}"


def status_of(
    assign: Assign | None, member: Member | None, now: float, own_keys: Collection[str]
) -> NodeStatus:
    """The status of a stage, or of a spare (`assign` None), without its health.

    `own_keys`: of members on the coordinator's machine."""
    stage, first, end = (assign.stage, assign.first, assign.end) if assign else (SPARE, 0, 0)
    if member is None:
        return NodeStatus(stage, first, end)
    state = "ready" if member.ready else "waiting" if member.loaded else "loading"
    return NodeStatus(
        stage,
        first,
        end,
        name=member.join.name,
        address=str(Address(member.join.host, member.join.port)),
        state=state if assign else "standing by",
        words=member.words,
        heard=now - member.heard,
        memory=member.join.memory,
        with_coordinator=member.join.key in own_keys,
    )
