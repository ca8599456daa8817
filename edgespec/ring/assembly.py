"""Ring assembly: gives members their layers, connects them, and takes the ring down.

Assign → Ready from every stage → Connect to each → Connected from each → the ring is up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from ipaddress import ip_address

from msgspec.structs import replace

from edgespec.config import Timing
from edgespec.machines.effects import Effect, Forward, SendPeer
from edgespec.machines.events import RingDown, RingProgress, RingUp
from edgespec.ring.assignment import SPARE, Assignment, Member
from edgespec.ring.effects import ConnectRing, Log, OpenRing
from edgespec.ring.events import RingBroke, RingFaulty
from edgespec.ring.health import DeviceRecords
from edgespec.ring.reports import STILL_S, report_pause
from edgespec.wire.messages import Assign, Connect, Join, StandBy

CALM_S = 10.0
"""Seconds without work or a change after which a ring rests: between two questions of one talk it
does not have to be woken."""

MOST_NAMED = 2
"""Stages that a reason names which are not ready: a reason is a line."""

CacheRows = Callable[[Assign, Join], int]
"""Cache rows that a device has room for beside the layers of an Assign."""


class RingAssembly:
    """The stages and spares of the current ring, and whether it is up."""

    def __init__(
        self,
        assignment: Assignment,
        home: Connect,
        rows: CacheRows | None,
        timing: Timing,
        own_stage: int = 0,
    ) -> None:
        """`home`: where the last stage pushes its segments, which is the coordinator; `own_stage`:
        the number of the stage that it starts; 0: none."""
        self.assignment = assignment
        self.timing = self._awake = timing
        """What holds now: it is another one while the ring rests."""
        self._stirred = -math.inf
        self.devices = DeviceRecords()
        self.stages: dict[int, Member] = {}
        self.spares: dict[bytes, Member] = {}
        self.is_up = self.was_up = False
        self.up_since = 0.0
        self.missing_since: float | None = None  # since then a stage that was there is missing
        self.why_down = ""
        self.progressed = -math.inf  # when a stage last came on with its layers
        self._home = home
        self._rows = rows
        self._is_linked = False  # all had to connect, in the current ring
        self._is_reached = False  # stage 1, by the coordinator
        self._next_repeat = 0.0
        self._own_stage = own_stage
        self._loading_since: float | None = None
        self._told_loading = 0.0

    @property
    def members(self) -> list[Member]:
        """Stages, then spares."""
        return [*self.stages.values(), *self.spares.values()]

    @property
    def in_order(self) -> list[Member]:
        """The stages by their numbers."""
        return [self.stages[stage] for stage in sorted(self.stages)]

    @property
    def free(self) -> list[int]:
        """Numbers of the stages that no member holds."""
        return [s for s in range(1, len(self.assignment) + 1) if s not in self.stages]

    def member_at(self, peer: bytes) -> Member | None:
        """The stage or spare at that address."""
        return next((m for m in self.members if m.peer == peer), None)

    # --- rest ---------------------------------------------------------------------------------

    @property
    def rests(self) -> bool:
        """Whether nothing runs, and its nodes are seldom heard."""
        return self.timing is not self._awake

    def stir(self, now: float) -> bool:
        """Something happens that may be work, or a loss; returns whether the ring rested. Silences
        count from now on then: who was asked for little has said little."""
        self._stirred = now
        if not self.rests:
            return False
        self.timing = self._awake
        for member in self.members:
            member.heard = max(member.heard, now)
        return True

    def rest(self, now: float, is_idle: bool) -> None:
        """Let the ring rest if it has had nothing to do for a while. `is_idle`: no request is
        there."""
        is_whole = len(self.assignment) == self.assignment.most or not self.spares
        is_settled = self.is_up and is_whole and all(m.fetching is None for m in self.members)
        if not (is_settled and is_idle):
            self.stir(now)
        elif not self.rests and now - self._stirred > CALM_S:
            self.timing = self._awake.resting

    # --- members ------------------------------------------------------------------------------

    def enter(self, peer: bytes, join: Join, stage: int, heard: float) -> list[Effect]:
        self.devices.health.forget(peer)
        number = self.assignment.next_number()
        member = self.stages[stage] = Member(peer, join, heard, stage, number)
        if not self.free:
            self.missing_since = None
        text = f"{member} joined, {len(self.stages)} of {len(self.assignment)}"
        return [self.assign(member), Log(text)]

    def assign(self, member: Member) -> Effect:
        """Tell a stage its layers in the current ring, and how many cache rows it may hold."""
        return SendPeer(member.peer, self._assign_of(member))

    def _assign_of(self, member: Member) -> Assign:
        assign = replace(self.assignment.of(member.stage), number=member.number)
        return replace(assign, rows=self._rows(assign, member.join)) if self._rows else assign

    def add_spare(self, peer: bytes, join: Join, heard: float, now: float) -> list[Effect]:
        self.devices.health.forget(peer)
        number = self.assignment.next_number()
        member = Member(peer, join, heard, SPARE, number, "", since=now)
        self.spares[peer] = member
        return [self.stand_by(member), Log(f"{member} stands by")]

    def makes_room(self, holder: Member, join: Join) -> bool:
        """Whether, before the ring is first up, a holder that did not ask for its stage moves: for
        a device that asks for it, or, unless its block is loaded, for one that held it last."""
        if self.was_up or join.stage:
            return not self.was_up
        is_home = self.assignment.held(holder.join) == holder.stage
        return not (holder.loaded or holder.join.stage or is_home)

    def take_spare(self, stage: int, is_alive: Callable[[Member], bool]) -> Member:
        """The spare for that stage: one that lives and has the block, or else the one that was
        heard last; it is none any more."""
        block = self.assignment.of(stage).block

        def rank(spare: Member) -> tuple[bool, float]:
            has_it = any(one.block == block for one in spare.fetched)
            return has_it and is_alive(spare), spare.heard

        return self.spares.pop(max(self.spares.values(), key=rank).peer)

    def stand_by(self, spare: Member) -> Effect:
        """Tell a spare that it is one, and why."""
        wish, why = spare.join.stage, ""
        if len(self.assignment) < self.assignment.most:
            why = "; it gets layers again when no request runs"
        elif wish:
            why = f"; stage {wish} was given to another while it was away"
        return SendPeer(spare.peer, StandBy(f"standing by as a spare{why}", spare.number))

    def reassign(self, assigns: Sequence[Assign], to: Sequence[Member], now: float) -> list[Effect]:
        """Begin a ring with other layers, for these members in order; the rest become spares."""
        others = [m for m in self.stages.values() if m not in to] + [*to[len(assigns) :]]
        self.assignment.replace(assigns)
        self.is_up = self._is_linked = False
        self.missing_since = None
        self.stages.clear()
        effects: list[Effect] = []
        for stage, member in enumerate(to[: len(assigns)], start=1):
            self.spares.pop(member.peer, None)
            effects += self.enter(member.peer, member.join, stage, member.heard)
        for member in others:
            effects += self.add_spare(member.peer, member.join, member.heard, now)
        return effects

    # --- up and down --------------------------------------------------------------------------

    def loading(self, member: Member, doing: str, now: float) -> list[Effect]:
        """A stage or spare says what it does."""
        has_come_on, member.state = doing != member.state, doing
        if not has_come_on or member.loaded or member.stage == SPARE:
            return []
        return self._progress(now)

    def _progress(self, now: float) -> list[Effect]:
        """A stage has come on with its layers, or has them now."""
        self.progressed = now
        awaited = [f"{m} is still {m.state}" for m in self.in_order if not m.loaded]
        return [Forward(RingProgress(" and ".join(awaited[:MOST_NAMED])))]

    def still_loading(self, now: float) -> list[Effect]:
        """Say now and then how far the stages are that are not ready yet."""
        loading = [f"{member}: {member.state}" for member in self.in_order if not member.ready]
        loading += [f"stage {number}: not here yet" for number in self.absent]
        if not loading or self._loading_since is None:
            self._loading_since, self._told_loading = (now if loading else None), now
            return []
        pause = report_pause(STILL_S, now - self._loading_since)
        if now - self._told_loading < pause:
            return []
        self._told_loading = now
        return [Log("; ".join(loading))]

    @property
    def absent(self) -> list[int]:
        """Stages that have not come while the first ring comes up: the one that is started here,
        and, once any is there, the others."""
        if self.was_up:
            return []
        return [number for number in self.free if self.members or number == self._own_stage]

    def ready(self, member: Member, seconds: float, number: int, now: float) -> list[Effect]:
        """A stage has the layers of its Assign of that number; the last one has all stages
        connect."""
        if number != member.number or member.ready or member.stage == SPARE:
            return []  # of an earlier place or ring, or repeated
        effects: list[Effect] = []
        is_new = not member.loaded
        if is_new:
            effects.append(Log(f"{member} loaded its layers in {seconds:.1f} s"))
        member.ready = member.loaded = True
        member.state = "ready"
        if not self.free and all(m.ready for m in self.stages.values()):
            self._is_linked, self._is_reached = True, False
            effects += self._connect()
        return effects + self._progress(now) if is_new else effects

    def _connect(self) -> list[Effect]:
        """Have every node push to the next one, and the last stage to the coordinator."""
        first = self.in_order[0].join
        effects: list[Effect] = [
            OpenRing(self.assignment.of(1).ring_key),
            ConnectRing(first.host, first.port, first.key),
        ]
        return [*effects, *self._connects()]

    def _connects(self) -> list[Effect]:
        """A Connect for each stage that has not answered one in this ring."""
        targets = [self._home]
        for member in reversed(self.in_order[1:]):
            join = member.join
            # A stage that reached us over loopback is where we are, by whatever name that is known.
            host = "" if ip_address(join.host).is_loopback else join.host
            targets.insert(0, Connect(host, join.port, join.key))
        return [
            SendPeer(member.peer, replace(target, number=member.number))
            for member, target in zip(self.in_order, targets, strict=True)
            if not member.connected
        ]

    def repeat(self, now: float, every: float) -> list[Effect]:
        """Say again, every so many seconds, what has not been answered: with a connection that
        breaks a message is lost."""
        if now < self._next_repeat:
            return []
        self._next_repeat = now + every
        if self._is_linked:
            return [] if self.is_up else self._connects()
        return [self.assign(member) for member in self.in_order if not member.ready]

    def reached(self, member: Member | None, number: int, now: float) -> list[Effect]:
        """A stage has carried out its Connect of that number, or the coordinator (None) has reached
        the first one; with the last of them the ring is up."""
        if member is None:
            self._is_reached = True
        elif member.number == number:
            member.connected = True
        if self.is_up or not self._is_linked or not self._is_reached:
            return []
        if not all(m.connected for m in self.stages.values()):
            return []
        self.is_up = self.was_up = True
        self.devices.ring_up()
        self.up_since = now
        rows = min(self._assign_of(member).rows for member in self.stages.values())
        return [Forward(RingUp(len(self.assignment), rows)), Log("the ring is up")]

    def why(self, event: RingBroke | RingFaulty) -> str:
        """What the coordinator's own event says, with the name of the stage that it blames."""
        blames = isinstance(event, RingFaulty) and event.by_sender and self.stages
        return f"{self.in_order[-1]} {event.why}" if blames else event.why

    def take_down(self, reason: str) -> list[Effect]:
        """End the ring; the stages keep their layers for the next one."""
        self.why_down = reason
        effects: list[Effect] = [Forward(RingDown(reason)), Log(reason)]
        if not self._is_linked:
            return effects  # nothing was sent in this ring yet
        self.is_up = self._is_linked = False
        self.assignment.ring += 1
        for member in self.stages.values():
            member.number = self.assignment.next_number()
            member.ready, member.connected, member.state = False, False, "waiting"
            effects.append(self.assign(member))
        return effects
