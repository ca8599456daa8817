"""Repartition: gives the layers to fewer devices after a loss, and to more when spares are there.

Growth is planned while the ring runs: all devices prepare, and the ring ends when no request runs.
If the new ring does not come up, the assignment before it is restored. Spares without a part in a
growth prepare for one place after the other, each of which may be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from edgespec.config import Timing
from edgespec.machines.effects import Effect, Forward, SendPeer
from edgespec.machines.events import Hold, RingDown
from edgespec.machines.patience import patience_ends
from edgespec.ring.assembly import RingAssembly
from edgespec.ring.assignment import SPARE, Member, in_no_ring
from edgespec.ring.effects import KeepHolders, Log
from edgespec.wire.messages import Assign, Join

LEAST_PATIENCE_S = 6.0
"""A device that only hung for a moment must not cost all others their blocks."""

SETTLED_BEATS = 20
"""How long a spare must have been there, and the ring up, before a growth is planned."""

CALM_BEATS = 2400
"""A ring that shrinks again sooner than this has an unsteady device: each time the wait before the
next growth doubles, up to MOST_BACKOFF times."""

MOST_BACKOFF = 512

Replan = Callable[[Sequence[Join]], Sequence[Assign] | None]
"""An assignment for these devices in this order (a device after the last stage is not needed), or
None if they cannot hold the model."""


class _FirstHolders:
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
class _Growth:
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
class _Rollback:
    """The assignment before a growth whose ring is not up yet, and its holders in order."""

    assigns: Sequence[Assign]
    peers: Sequence[bytes]


class Repartition:
    """Decides when the layers move, and to which members of the ring."""

    def __init__(
        self,
        ring: RingAssembly,
        timing: Timing,
        requests: Callable[[], tuple[int, int]],
        replan: Replan | None,
    ) -> None:
        self._ring = ring
        self._timing = timing
        self._requests = requests
        self._replan = replan
        self._first_holders = _FirstHolders()
        self._growth: _Growth | None = None
        self._rollback: _Rollback | None = None  # until the ring that grew is up
        self._changing_since: float | None = None  # until it, or the one before, is up
        self._declined: set[bytes] = set()  # spares that cannot hold a part of the model
        self._has_grown = False
        self._backoff = 1

    @property
    def may_roll_back(self) -> bool:
        """Whether the ring has grown and is not up yet."""
        return self._rollback is not None

    @property
    def _patience(self) -> float:
        return max(self._timing.recovery / 2, LEAST_PATIENCE_S)

    def on_up(self) -> list[Effect]:
        ring, self._rollback, self._changing_since = self._ring, None, None
        if not ring.assignment.is_first:
            return []
        self._first_holders.note(ring.stages)
        before = ring.assignment.holders
        ring.assignment.holders = tuple(member.join.key for member in ring.in_order)
        after = ring.assignment.holders
        return [KeepHolders(after)] if after != before else []

    def on_tick(self, now: float) -> list[Effect]:
        """Look at what has lasted for too long."""
        effects = [*self._on_missing(now), *self._on_slow_change(now), *self._on_spares(now)]
        idle = [one for one in self._ring.spares.values() if one.fetching is None]
        return effects + [e for one in idle if not self._grows_with(one) for e in self.prepare(one)]

    # --- a ring ends --------------------------------------------------------------------------

    def give_up(self, reason: str, now: float) -> list[Effect]:
        """End this ring: the next one has the same assignment or, if this one has just grown, the
        one before."""
        if self._rollback is not None:
            return self._undo(reason, now)
        if self._growth is not None and self._growth.since is not None:
            self._growth.since, self._growth.held = now, False
        return self._ring.take_down(reason)

    def _on_missing(self, now: float) -> list[Effect]:
        """No replacement within recovery/2: give the layers to the remaining stages."""
        ring, missing_since = self._ring, self._ring.missing_since
        if self._replan is None or missing_since is None or not ring.stages:
            return []
        if not self._timing.recovery or now - missing_since < self._patience:
            return []
        ring.missing_since = now  # if they cannot hold the model, try again after as long
        remaining = ring.in_order
        assigns = self._replan([member.join for member in remaining])
        if assigns is None:
            return [Log("the devices that are left have no memory for the whole model")]
        self._back_off(missing_since)
        text = f"the model is shared out anew, over {len(assigns)} device(s)"
        lost = Forward(RingDown(f"{ring.why_down}; {text}"))
        return [lost, Log(text), *self._reassign(assigns, remaining, now)]

    def _reassign(
        self, assigns: Sequence[Assign], to: Sequence[Member], now: float
    ) -> list[Effect]:
        self._changing_since = None
        self._declined = set()
        return self._ring.reassign(assigns, to, now)

    # --- a ring that shrank grows again -------------------------------------------------------

    def _on_spares(self, now: float) -> list[Effect]:
        """Plan a growth if the ring has fewer stages than at first; begin it when all devices are
        prepared and no request runs."""
        ring, growth = self._ring, self._growth
        if not ring.is_up or len(ring.assignment) >= ring.assignment.most:
            return []
        if growth is None:
            return self._plan_growth(now)
        # A silent device may be dead: the ring must not end for it.
        if growth.since is None or not all(d.is_alive(now, self._timing) for d in growth.devices):
            return []
        running, waiting = self._requests()
        if not running and (growth.held or not waiting):
            return self._grow(growth, now)
        if growth.held or now - growth.since < self._patience:
            return []
        growth.held = True
        text = (
            f"the model will be shared out again, over {len(growth.assigns)} device(s): no further "
            "request begins before"
        )
        return [Forward(Hold(text)), Log(text)]

    def _plan_growth(self, now: float) -> list[Effect]:
        ring, most = self._ring, self._ring.assignment.most
        settled = SETTLED_BEATS * self._backoff * self._timing.beat
        fresh = [
            spare
            for spare in ring.spares.values()
            if now - spare.since >= settled and spare.is_alive(now, self._timing)
        ]
        if self._replan is None or now - ring.up_since < settled:
            return []
        if all(spare.peer in self._declined for spare in fresh):
            return []
        stages = self._first_holders.distribute([*ring.stages.values(), *fresh], most)
        devices = [stages[stage] for stage in sorted(stages)]
        is_as_first = len(stages) == most and all(
            self._first_holders.belongs(stage, member) for stage, member in stages.items()
        )
        assigns: Sequence[Assign] | None = ring.assignment.first
        if not is_as_first:
            assigns = self._replan([member.join for member in devices])
        if assigns is None or len(assigns) <= len(ring.assignment):
            self._declined = {spare.peer for spare in fresh}
            return [Log("the spares have no memory for a part of the model")]
        self._growth = _Growth(assigns, devices[: len(assigns)])
        text = (
            f"the model will be shared out again, over {len(assigns)} device(s), when they have "
            "prepared for it and no request runs"
        )
        return [Log(text), *(e for d in self._growth.devices for e in self.prepare(d))]

    def _grows_with(self, member: Member) -> Assign | None:
        """What it prepares for if it has a part in a growth."""
        return self._growth.assign_for(member) if self._growth else None

    def prepare(self, member: Member) -> list[Effect]:
        """Tell a member what it has to prepare for, if that is anything."""
        before, member.fetching = member.fetching, None
        place = self._grows_with(member) or self._likeliest(member)
        if place is None:
            return []
        if before is None or in_no_ring(place, before.number) != before:
            before = in_no_ring(place, self._ring.assignment.next_number())
        member.fetching = before
        return [SendPeer(member.peer, before)]

    def _likeliest(self, spare: Member) -> Assign | None:
        """The place that a spare is to prepare for next: one that no other spare has prepared for,
        was lost most often, and has most layers."""
        if spare.stage != SPARE:
            return None

        def rank(assign: Assign) -> tuple[int, int, int]:
            others = [one for one in self._ring.spares.values() if one is not spare]
            prepared = sum(one.prepares_for(assign) for one in others)
            losses = self._ring.devices.losses(assign.stage)
            return prepared, -losses, assign.first - assign.end

        left = [assign for assign in self._ring.assignment if not spare.prepares_for(assign)]
        return min(left, key=rank, default=None)

    def on_prepared(self, member: Member, number: int, now: float) -> list[Effect]:
        """A member is prepared for the Assign of that number: for its part in a growth or, as a
        spare, for one more place."""
        if member.fetching is None or member.fetching.number != number:
            return []
        member.fetched, member.fetching = (*member.fetched, member.fetching), None
        waits = "waits until no request runs" if self._grows_with(member) else ""
        member.state = "ready" if member.ready else waits
        if self._growth is not None and self._growth.is_prepared(member, now):
            return [Log("all are prepared for the places that they will have")]
        return []

    def _grow(self, growth: _Growth, now: float) -> list[Effect]:
        ring = self._ring
        self._rollback = _Rollback(tuple(ring.assignment), [m.peer for m in ring.in_order])
        self._growth, self._has_grown = None, True
        text = f"the model is shared out again, over {len(growth.assigns)} device(s)"
        down = Forward(RingDown(text, lost=False))
        effects = [down, Log(text), *self._reassign(growth.assigns, growth.devices, now)]
        self._changing_since = now
        return effects

    def _on_slow_change(self, now: float) -> list[Effect]:
        """A ring that changes without a loss has as long to come up as after a loss."""
        since, limit = self._changing_since, self._timing.recovery
        if since is None or now < patience_ends(since, self._ring.progressed, limit):
            return []
        self._changing_since = None
        slow = next((str(m) for m in self._ring.stages.values() if not m.ready), "the ring")
        reason = f"{slow} was not ready within {now - since:.0f} s"
        if self._rollback is not None:
            return self._undo(reason, now)
        return [Forward(RingDown(reason)), Log(reason)]

    def call_off(self, lost: Member) -> list[Effect]:
        """End a planned growth in which the lost member had a part."""
        growth = self._growth
        if growth is None or (lost.stage == SPARE and growth.assign_for(lost) is None):
            return []
        self._growth = None
        others = [d for d in growth.devices if d.stage == SPARE and d is not lost]
        effects = [self._ring.stand_by(spare) for spare in others]
        if growth.held and lost.stage == SPARE:
            effects.append(Forward(Hold("")))
        return effects

    def _undo(self, reason: str, now: float) -> list[Effect]:
        """The ring that grew does not come up: restore the assignment before it."""
        ring, rollback, self._rollback = self._ring, self._rollback, None
        assert rollback is not None, "a growth is undone once"
        self._back_off(now)
        here = {member.peer: member for member in ring.members}
        text = (
            f"{reason}; the model is shared out as before, over {len(rollback.assigns)} device(s)"
        )
        ring.why_down = reason
        is_lost = any(peer not in here for peer in rollback.peers)
        effects: list[Effect] = [Forward(RingDown(text, lost=is_lost)), Log(text)]
        if not is_lost:
            effects += self._reassign(rollback.assigns, [here[p] for p in rollback.peers], now)
            self._changing_since = now
            return effects
        effects += self._reassign(rollback.assigns, [], now)
        for stage, peer in enumerate(rollback.peers, start=1):
            if peer in here:
                del ring.spares[peer]
                effects += ring.enter(peer, here[peer].join, stage, here[peer].heard)
        return effects

    def _back_off(self, until: float) -> None:
        """A device that comes and goes must not move all layers again and again."""
        calm = until - self._ring.up_since >= CALM_BEATS * self._timing.beat
        self._backoff = 1 if calm or not self._has_grown else min(2 * self._backoff, MOST_BACKOFF)
