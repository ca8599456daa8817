"""Growth: which member gets which stage when the layers go to more devices again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from edgespec.ring.assignment import Member
from edgespec.wire.messages import Assign, Join


class FirstHolders:
    """The devices that held the stages when the ring was up with its first assignment."""

    def __init__(self) -> None:
        self._holders: dict[int, Join] = {}

    def note(self, stages: Mapping[int, Member]) -> None:
        """The ring is up with its first assignment."""
        self._holders = {stage: member.join for stage, member in stages.items()}

    def belongs(self, stage: int, member: Member) -> bool:
        """Whether the device, or one of its name, held this stage, or asks for it by number."""
        holder, join = self._holders.get(stage), member.join
        if join.stage == stage or holder is None:
            return join.stage == stage
        return holder.key == join.key or holder.name == join.name

    def distribute(self, devices: Sequence[Member], most: int) -> dict[int, Member]:
        """A stage of `most` for each device: its own if it has one, else any that is left, first
        come first served."""
        stages: dict[int, Member] = {}
        left = list(devices)

        def give(fits: Callable[[int, Member], bool]) -> None:
            for stage in range(1, most + 1):
                member = next((m for m in left if fits(stage, m)), None)
                if stage not in stages and member is not None:
                    stages[stage] = member
                    left.remove(member)

        give(lambda stage, member: member.join.stage == stage)
        give(lambda s, member: s in self._holders and member.is_process_of(self._holders[s]))
        give(self.belongs)
        give(lambda stage, member: True)
        return stages


@dataclass(slots=True)
class Growth:
    """A planned assignment: `devices[s - 1]` gets `assigns[s - 1]` when no request runs.

    `since`: when all were prepared; None before that. `held`: whether new requests wait for it.
    """

    assigns: Sequence[Assign]
    devices: Sequence[Member]
    prepared: set[bytes] = field(default_factory=set)
    since: float | None = None
    held: bool = False

    def assign_for(self, member: Member) -> Assign | None:
        """What a member prepares for; None if it has no part in this."""
        pairs = zip(self.assigns, self.devices, strict=True)
        return next((assign for assign, device in pairs if device is member), None)

    def is_prepared(self, member: Member, now: float) -> bool:
        """Note that a device is prepared; returns whether it was the last one."""
        if self.since is not None or self.assign_for(member) is None:
            return False
        self.prepared.add(member.peer)
        if len(self.prepared) < len(self.devices):
            return False
        self.since = now
        return True


@dataclass(frozen=True, slots=True)
class Rollback:
    """The assignment before a growth whose ring is not up yet, and its holders in order."""

    assigns: Sequence[Assign]
    peers: Sequence[bytes]
