"""Places: who holds one, or stands by for one, and how a status tells of it."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.config import Address
from edgespec.wire.codec import DEFAULT_LIMITS
from edgespec.wire.messages import Assign, Join, NodeStatus

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
    loaded: bool = False  # whether it has ever been ready in this place

    def __str__(self) -> str:
        name = f"stage {self.place}" if self.place else "the spare"
        return f"{name} ({self.join.name}, process {self.join.pid})"

    def is_process_of(self, join: Join) -> bool:
        """Whether `join` comes of the same process, through a connection that was made anew.

        The key counts, as it was proved: anybody can say that he is at another's address.
        """
        mine = (self.join.host, self.join.port, self.join.key)
        return mine == (join.host, join.port, join.key)


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
