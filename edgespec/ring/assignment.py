"""Places: what each stage of a ring shall run, who holds or stands by for one, and how a status
tells of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from edgespec.config import Address
from edgespec.wire.client_messages import NodeStatus
from edgespec.wire.codec import DEFAULT_LIMITS
from edgespec.wire.messages import NO_RING, Assign, Join

MOST_SHOWN = DEFAULT_LIMITS.items
"""Places and spares that a status can hold."""

SPARE = 0
"""The place of a stage that has none."""


@dataclass(slots=True)
class Member:
    """A stage that has a place, or stands by for one."""

    peer: bytes
    join: Join
    heard: float
    place: int
    state: str = "loading"
    ready: bool = False
    connected: int = 0  # the ring in which it has reached the next node
    loaded: bool = False  # whether it has ever been ready in this place
    since: float = 0.0  # when it began to stand by

    def __str__(self) -> str:
        name = f"stage {self.place}" if self.place else "the spare"
        return f"{name} ({self.join.name}, process {self.join.pid})"

    def is_process_of(self, join: Join) -> bool:
        """Whether `join` comes of the same process, through a connection that was made anew.

        The key counts, as it was proved: anybody can say that he is at another's address.
        """
        mine = (self.join.host, self.join.port, self.join.key)
        return mine == (join.host, join.port, join.key)


class Places:
    """The places of the ring of now: what stage 1, 2, … shall run, and whom a plan has for it."""

    def __init__(self, assigns: Sequence[Assign], names: Sequence[str]) -> None:
        """`assigns[s - 1]` is what stage s shall run, and its `ring_key` a secret from which the
        rings' own ones are made; `names`: whom a plan has for each place, () for nobody."""
        self._assigns = self._first = tuple(assigns)
        self._names = self._first_names = names
        self.most = len(assigns)
        """How many places there were at first: the stages that may be wished for."""
        self.ring = 1
        """Which ring it is; a new one begins whenever a stage of it is lost."""

    def __len__(self) -> int:
        return len(self._assigns)

    def __iter__(self) -> Iterator[Assign]:
        """In the order of the stages, as they were given."""
        return iter(self._assigns)

    @property
    def first(self) -> Sequence[Assign]:
        """What the stages ran at first."""
        return self._first

    @property
    def are_first(self) -> bool:
        """Whether they run that now."""
        return self._assigns == self._first

    def assign(self, stage: int) -> Assign:
        """In the ring of now, whose secret tells nothing of that of another ring."""
        return _in_ring(self._assigns[stage - 1], self.ring)

    def layers(self, stage: int) -> int:
        """How many layers that stage has; a spare has none."""
        if stage == SPARE:
            return 0
        return self._assigns[stage - 1].end - self._assigns[stage - 1].first

    def planned(self, name: str, free: Sequence[int]) -> int:
        """Of the free places the one that the plan has for a device; else nobody's, or else any."""
        own = [s for s in free if self._names[s - 1 : s] == [name]]
        unplanned = [s for s in free if not self._names[s - 1 : s]]
        return (own or unplanned or free)[0]

    def replace(self, assigns: Sequence[Assign]) -> None:
        """The model is shared out anew: other places, in another ring, for nobody by name; or those
        that there were at first."""
        self._assigns = tuple(assigns)
        self._names = self._first_names if self.are_first else ()
        self.ring += 1


def in_no_ring(place: Assign) -> Assign:
    """A place to prepare for, which is in no ring yet."""
    return _in_ring(place, NO_RING)


def _in_ring(place: Assign, ring: int) -> Assign:
    key = hashlib.sha256(f"{place.ring_key} ring {ring}".encode()).hexdigest()
    return replace(place, ring=ring, ring_key=key)


def line_of(place: Assign | None, member: Member | None) -> str:
    """One line of text on a place and its holder, if any; or on a spare (`place` None)."""
    who = f"{member.join.name} {member.state}" if member else "missing"
    if place is None:
        return f"spare: {who}"
    return f"stage {place.stage}: layers {place.first} to {place.end - 1}: {who}"


def node_of(place: Assign | None, member: Member | None, now: float) -> NodeStatus:
    """The same in figures, as far as the place and its holder tell."""
    stage, first, end = (place.stage, place.first, place.end) if place else (SPARE, 0, 0)
    if member is None:
        return NodeStatus(stage, first, end)
    state = "ready" if member.ready else "waiting" if member.loaded else "loading"
    return NodeStatus(
        stage,
        first,
        end,
        name=member.join.name,
        address=str(Address(member.join.host, member.join.port)),
        state=state if place else "standing by",
        words=member.state,
        heard=now - member.heard,
        memory=member.join.memory,
    )
