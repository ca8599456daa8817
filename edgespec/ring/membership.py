"""Membership machine: who is in the ring, and whether stages and clients are alive.

A stage that leaves, fails or falls silent takes the ring down with one reason that names it. Its
layers go to a spare, or to itself when it comes back; a device too many stands by as a spare. The
ring is assembled in `assembly.py`; `repartition.py` moves layers when the devices change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import PurePath

from msgspec.structs import replace

from edgespec.config import Timing
from edgespec.errors import LocalProtocolError
from edgespec.machines.effects import Effect, Forward, SendPeer
from edgespec.machines.events import Event, MessageArrived, PeerGone, Tick
from edgespec.ring.assembly import CacheRows, RingAssembly
from edgespec.ring.assignment import (
    MOST_SHOWN,
    SPARE,
    Assignment,
    Member,
    is_address,
    line_of,
    status_of,
)
from edgespec.ring.effects import Log
from edgespec.ring.events import ControlEnded, KeyRemoved, RingBroke, RingFaulty, RingReached
from edgespec.ring.health import REASON_CHARS, printable
from edgespec.ring.repartition import Repartition, Replan
from edgespec.wire.client_messages import (
    Cancel,
    LiveRequest,
    NodeStatus,
    Status,
    StatusRequest,
    Submit,
)
from edgespec.wire.messages import (
    THIS_RING,
    Assign,
    Connect,
    Connected,
    Fault,
    Goodbye,
    Health,
    Heartbeat,
    Join,
    Loading,
    Ready,
    Refuse,
    Removed,
)
from edgespec.wire.snapshots import Subscribe

_ROUTINE = (Tick, Heartbeat, Health, StatusRequest)
"""What comes in a ring that rests, too."""


class MembershipMachine:
    """The coordinator's list of stages and clients, without I/O."""

    def __init__(
        self,
        assigns: Sequence[Assign],
        home: Connect,
        timing: Timing,
        requests: Callable[[], tuple[int, int]] = lambda: (0, 0),
        names: Sequence[str] = (),
        replan: Replan | None = None,
        own_keys: Collection[str] = (),
        live: Callable[[float], tuple[LiveRequest, ...]] = lambda now: (),
        rows: CacheRows | None = None,
        rows_told: Callable[[], tuple[int, int, int, int]] = lambda: (0, 0, 0, 0),
        here: Callable[[], NodeStatus] = lambda: NodeStatus(0, 0, 0),
        plain: Callable[[], float] = lambda: 0.0,
        about: Callable[[Status], Status] = lambda status: status,
        own_stage: int = 0,
        holders: Sequence[str] = (),
    ) -> None:
        """`assigns`, `names`, `holders`: see Assignment; `home`: where the last stage pushes.
        `requests()`: how many run and how many wait. `replan`: an assignment for other devices.
        `own_keys`: public keys of stages on this machine. `live(now)`: what those that run have
        done. `rows`: cache rows that a device has room for; None: as many as `assigns` say.
        `rows_told()`: see Status.rows_live and those behind it; `here()`, `plain()`: Status.home
        and Status.plain; `about(status)`: with what it tells of the model. `own_stage`: the
        number of the stage that the coordinator starts; 0: none."""
        assignment = Assignment(assigns, names, holders)
        self._ring = RingAssembly(assignment, home, rows, timing, own_stage)
        self._repartition = Repartition(self._ring, timing, requests, replan)
        self._requests, self._live, self._rows_told = requests, live, rows_told
        self._here, self._plain, self._about = here, plain, about
        self._own_keys = own_keys
        self._to_client = Heartbeat(0, timing.answer_silence)
        self._clients: dict[bytes, float] = {}
        self._now = 0.0
        self._next_beat: float | None = 0.0 if own_stage else None

    @property
    def timing(self) -> Timing:
        return self._ring.timing

    @property
    def stage_peers(self) -> list[bytes]:
        return [m.peer for m in self._ring.stages.values()]

    @property
    def daemon_peers(self) -> list[bytes]:
        """Addresses of the stages and spares."""
        return [m.peer for m in self._ring.members]

    @property
    def keys(self) -> list[str]:
        """Public keys of the stages and spares."""
        return [m.join.key for m in self._ring.members]

    def stage_at(self, peer: bytes) -> Member | None:
        """The stage at that address; None for spares and all others."""
        return next((m for m in self._ring.stages.values() if m.peer == peer), None)

    def deadline(self) -> float | None:
        """When to call with Tick next; None if there are no stages and clients, and none is to be
        waited for."""
        wanted = self._ring.members or self._clients or self._ring.absent
        return self._next_beat if wanted else None

    def handle(self, event: Event, now: float) -> list[Effect]:
        """React to one event; any message of a peer shows that it is alive."""
        self._now = now
        if not isinstance(getattr(event, "message", event), _ROUTINE) and self._ring.stir(now):
            self._next_beat = now
        match event:
            case MessageArrived(peer, message):
                member = self._heard(peer, now)
                return self._on_message(peer, member, message, now)
            case KeyRemoved(key):
                return self._on_removed(key, now)
            case PeerGone(peer):
                self._clients.pop(peer, None)
                return []
            case ControlEnded():
                return []
            case RingReached():
                return self._on_reached(None, 0, now)
            case RingBroke() | RingFaulty():
                why = f"the coordinator cannot go on: {self._ring.why(event)}"
                return self._repartition.give_up(why, now)
            case Tick():
                return self._on_tick(now)
            case _:
                raise LocalProtocolError(f"membership cannot handle {type(event).__name__}")

    def _heard(self, peer: bytes, now: float) -> Member | None:
        if self._next_beat is None:
            self._next_beat = now + self.timing.beat
        member = self._ring.member_at(peer)
        if member is not None:
            # Over an emulated link, what was due earlier may come after a heartbeat.
            member.heard = max(member.heard, now)
        elif peer in self._clients:
            self._clients[peer] = now
        return member

    def _on_message(
        self, peer: bytes, member: Member | None, message: object, now: float
    ) -> list[Effect]:
        match message:
            case Join():
                return self._on_join(peer, message, now)
            case StatusRequest():
                return [SendPeer(peer, self.status())]
            case Submit() | Cancel() | Subscribe():
                self._clients[peer] = now
                return []
            case Heartbeat(number) if member is not None:
                self._ring.devices.trips.back(peer, number, now)
                return []
            case Heartbeat():
                # A stage or client of an earlier coordinator, or one that was given up, gets no
                # answer: it must notice that it is not known here.
                return [SendPeer(peer, self._to_client)] if peer in self._clients else []
        if member is None:
            return []  # a stranger, or a stage that was refused
        match message:
            case Loading(text):
                return self._ring.loading(member, printable(text), now)
            case Health():
                layers = self._ring.assignment.layers(member.stage)
                shares = ", beside the coordinator," if member.join.key in self._own_keys else ""
                who = f"{member}{shares}"  # which explains why it may be slow
                return self._ring.devices.health.heard(peer, who, layers, message, now)
            case Ready(seconds, number):
                prepared = self._repartition.on_prepared(member, number, now)
                return prepared + self._ring.ready(member, seconds, number, now)
            case Connected(number):
                return self._on_reached(member, number, now)
            case Goodbye(reason):
                return self._lose(member, f"left: {printable(reason, REASON_CHARS)}", now)
            case Fault(request, reason, number) if number == member.number:  # not of a request
                why = f"cannot go on: {printable(reason, REASON_CHARS)}"
                if request == THIS_RING:
                    return self._repartition.give_up(f"{member} {why}", now)
                return self._lose(member, why, now)
        return []

    def _on_reached(self, member: Member | None, number: int, now: float) -> list[Effect]:
        effects = self._ring.reached(member, number, now)
        return effects + self._repartition.on_up() if effects else []

    # --- devices join -------------------------------------------------------------------------

    def _on_join(self, peer: bytes, join: Join, now: float) -> list[Effect]:
        stages = self._ring.assignment.most
        if not 0 <= join.stage <= stages:
            return _refuse(
                peer,
                f"there is no stage {join.stage}: this ring has {stages} stage(s), numbered from "
                "1; choose another --stage, or start the coordinator with more --stages",
            )
        if not is_address(join.host, join.port):
            return _refuse(peer, f"{join.host!r} port {join.port} is no address for others to use")
        join = replace(join, name=printable(join.name))
        known = self._ring.member_at(peer)
        if known is not None:
            return self._on_join_again(known, join)
        old = next((m for m in self._ring.members if m.is_process_of(join)), None)
        if old is None:
            return self._admit(peer, join, now)
        if old.is_alive(now, self.timing):
            return []  # not before its old connection is silent: this may be an impostor
        return self._replace(old, "lost its connection", peer, join, now)

    def _on_join_again(self, known: Member, join: Join) -> list[Effect]:
        """It asked twice, or it had missed the coordinator for a while."""
        if known.join.stage != join.stage:
            return _refuse(known.peer, f"this daemon is {known} already")
        is_spare = known.stage == SPARE
        answer = self._ring.stand_by(known) if is_spare else self._ring.assign(known)
        return [answer, *self._repartition.prepare(known)]

    def _admit(self, peer: bytes, join: Join, now: float) -> list[Effect]:
        """Make a device a free stage, the stage of a silent predecessor, or else a spare."""
        ring, free = self._ring, self._ring.free
        holder = ring.stages.get(join.stage)
        if holder is not None and holder.join.stage == join.stage:
            return self._on_rival(peer, join, holder, now)
        wish = join.stage or ring.assignment.held(join)
        holder = ring.stages.get(wish)
        if holder is not None and ring.makes_room(holder, join):
            del ring.stages[wish]
            entered = ring.enter(peer, join, wish, now)
            return entered + self._admit(holder.peer, holder.join, now)
        if not free:
            return ring.add_spare(peer, join, now, now)
        if holder is not None and join.stage:
            return ring.enter(peer, join, free[0], now)
        stage = wish if wish in free else ring.assignment.planned(join.name, free)
        return ring.enter(peer, join, stage, now)

    def _on_rival(self, peer: bytes, join: Join, holder: Member, now: float) -> list[Effect]:
        """Another process asks for the same stage by its number: the old one is dead, or both
        are alive."""
        if not holder.is_alive(now, self.timing):
            cause = f"was replaced by process {join.pid} on {join.name}"
            return self._replace(holder, cause, peer, join, now)
        if holder.rival is None or holder.rival[0] != peer:
            holder.rival = peer, now
            return []  # the holder may be dead, which a beat will tell; the newcomer asks again
        if holder.heard <= holder.rival[1] + self.timing.beat:
            return []
        return _refuse(
            peer,
            f"stage {join.stage} is taken by process {holder.join.pid} on {holder.join.name}; "
            "stop that daemon, or choose another --stage",
        )

    # --- devices go ---------------------------------------------------------------------------

    def _replace(
        self, old: Member, cause: str, peer: bytes, join: Join, now: float
    ) -> list[Effect]:
        """Give the stage of a lost member to this device, which may hold its block."""
        if old.stage == SPARE or self._repartition.may_roll_back:
            return self._lose(old, cause, now) + self._admit(peer, join, now)
        return self._remove(old, cause, now) + self._ring.enter(peer, join, old.stage, now)

    def _remove(self, lost: Member, cause: str, now: float) -> list[Effect]:
        self._ring.devices.lost(lost.peer, lost.stage, cause, now)
        effects = self._repartition.call_off(lost)
        if lost.stage == SPARE:
            gone = self._ring.spares.pop(lost.peer, None)
            return [*effects, Log(f"{lost} {cause}")] if gone else []
        del self._ring.stages[lost.stage]
        return effects + self._repartition.give_up(f"{lost} {cause}", now)

    def _lose(self, lost: Member, cause: str, now: float) -> list[Effect]:
        """A ring without one of its stages cannot go on: the others begin the next one."""
        ring, effects = self._ring, self._remove(lost, cause, now)
        free = ring.free
        if lost.stage == SPARE or not free:  # none is free if it had no stage of those restored
            return effects
        if ring.spares:
            stage = lost.stage if lost.stage in free else free[0]
            spare = ring.take_spare(stage, lambda one: one.is_alive(now, self.timing))
            effects += ring.enter(spare.peer, spare.join, stage, spare.heard)
        elif ring.was_up and ring.missing_since is None:
            ring.missing_since = now
        return effects

    def _on_removed(self, key: str, now: float) -> list[Effect]:
        effects: list[Effect] = []
        while member := next((m for m in self._ring.members if m.join.key == key), None):
            effects.append(SendPeer(member.peer, Removed("this device was removed")))
            effects += self._lose(member, "was removed from the cluster", now)
        return effects

    # --- time ---------------------------------------------------------------------------------

    def _on_tick(self, now: float) -> list[Effect]:
        if self._next_beat is None or now < self._next_beat:
            return []
        ring = self._ring
        ring.rest(now, is_idle=not any(self._requests()))
        self._next_beat = now + self.timing.beat
        effects: list[Effect] = []
        for member in ring.members:
            if ring.member_at(member.peer) is not member:
                continue  # it was given another stage just now, as one before it was lost
            silent = now - member.heard
            limit = self.timing.silence if member.loaded else self.timing.loading_silence
            if silent > limit:
                cause = f"has been silent for {silent:.1f} s"
                # If it is alive, it reads this first and comes back at once.
                effects.append(SendPeer(member.peer, Goodbye(f"{member} {cause}")))
                effects += self._lose(member, cause, now)
        if not ring.is_up and ring.stir(now):  # that loss may end the rest
            self._next_beat = now + self.timing.beat
        effects += self._repartition.on_tick(now)
        effects += ring.repeat(now, self.timing.retry)
        effects += ring.still_loading(now)
        beat, limit = ring.devices.trips.beat, self.timing.silence
        effects += [SendPeer(m.peer, beat(m.peer, now, limit, ring.rests)) for m in ring.members]
        for peer, heard in list(self._clients.items()):
            if now - heard > self.timing.client_silence:
                del self._clients[peer]
                effects.append(Forward(PeerGone(peer)))
            elif now - heard > 2 * self.timing.beat:
                # If the client is no longer connected, sending this fails, and the node learns it.
                effects.append(SendPeer(peer, self._to_client))
        return effects

    def status(self) -> Status:
        """Every stage and every spare: as a line of text, and in figures."""
        ring, now = self._ring, self._now
        shown: list[tuple[Assign | None, Member | None]] = [
            (assign, ring.stages.get(assign.stage)) for assign in ring.assignment
        ]
        shown = [*shown, *((None, spare) for spare in ring.spares.values())][:MOST_SHOWN]
        nodes = [
            ring.devices.described(status_of(a, m, now, self._own_keys), m, now) for a, m in shown
        ]
        running, waiting = self._requests()
        of = next(iter(ring.assignment))
        told = Status(
            ring.is_up,
            tuple(line_of(assign, member) for assign, member in shown),
            tuple(nodes),
            len(ring.assignment),
            ring.assignment.ring,
            now - ring.up_since if ring.is_up else 0.0,
            running,
            waiting,
            PurePath(of.model).name,
            of.context_length,
            self._live(now)[:MOST_SHOWN],
            *self._rows_told(),
            self._here(),
            self._plain(),
        )
        return self._about(told)


def _refuse(peer: bytes, reason: str) -> list[Effect]:
    return [SendPeer(peer, Refuse(reason))]
