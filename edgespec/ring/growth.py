"""Growth: who gets which place when a model is shared out over more devices again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from edgespec.ring.assignment import Member
from edgespec.wire.messages import Assign, Join

SETTLED_BEATS = 20
"""So long a spare must have been there, and the ring up, before places are planned for it."""

CALM_BEATS = 2400
"""A ring that was up for less than this before it shrank again has a device that comes and goes:
each time it is waited for twice as long, up to MOST_WARY times."""

MOST_WARY = 512


class Homes:
    """Whose place was whose when the ring had the places that it was first made with."""

    def __init__(self) -> None:
        self._holders: dict[int, Join] = {}

    def note(self, members: Mapping[int, Member]) -> None:
        """Such a ring is up."""
        self._holders = {place: member.join for place, member in members.items()}

    def is_home(self, place: int, member: Member) -> bool:
        """Whether a place is the device's own: it, or one of its name, had it, or it asks so."""
        holder, join = self._holders.get(place), member.join
        if join.stage == place or holder is None:
            return join.stage == place
        return holder.key == join.key or holder.name == join.name

    def settle(self, devices: Sequence[Member], most: int) -> dict[int, Member]:
        """A place for each of the devices, of `most`: its own if it has one, else any that is
        left, those that come first in `devices` before the others."""
        places: dict[int, Member] = {}
        left = list(devices)

        def settle(fits: Callable[[int, Member], bool]) -> None:
            for place in range(1, most + 1):
                member = next((m for m in left if fits(place, m)), None)
                if place not in places and member is not None:
                    places[place] = member
                    left.remove(member)

        settle(lambda place, member: member.join.stage == place)
        settle(lambda place, member: self._is_process(place, member))
        settle(self.is_home)
        settle(lambda place, member: True)
        return places

    def _is_process(self, place: int, member: Member) -> bool:
        return place in self._holders and member.is_process_of(self._holders[place])


@dataclass(slots=True)
class Growth:
    """Places that are planned: `devices[s - 1]` gets `places[s - 1]` at the next quiet moment.

    `since`: when all were prepared; None while any is not. `held`: whether no further request
    begins before that.
    """

    places: Sequence[Assign]
    devices: Sequence[Member]
    prepared: set[bytes] = field(default_factory=set)
    since: float | None = None
    held: bool = False

    def place_for(self, member: Member) -> Assign | None:
        """What it shall prepare for; None if it has no part in this."""
        return next(
            (p for p, d in zip(self.places, self.devices, strict=True) if d is member), None
        )

    def is_prepared(self, member: Member, now: float) -> bool:
        """One device more is; returns whether that was the last one."""
        if self.since is not None or self.place_for(member) is None:
            return False
        self.prepared.add(member.peer)
        if len(self.prepared) < len(self.devices):
            return False
        self.since = now
        return True


@dataclass(frozen=True, slots=True)
class Retreat:
    """The places before a growth whose ring is not up yet, and who had them, in order."""

    places: Sequence[Assign]
    peers: Sequence[bytes]
