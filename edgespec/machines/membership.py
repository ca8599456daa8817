"""Membership machine: who is in the ring; gives places to stages, watches that everybody lives.

Join → Assign → (Loading …) → Ready; when all are ready, Connect to each: the ring is up. A stage
that leaves, fails or falls silent takes the ring down with one reason that names it. The others
keep their blocks and are assigned the same places in the next ring; its own is given to a spare, or
to itself when it comes back. A stage too many stands by as a spare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Address
from itertools import pairwise

from edgespec.config import Timing
from edgespec.errors import LocalProtocolError
from edgespec.machines.effects import ConnectRing, Effect, OpenRing, Report, SendPeer, Tell
from edgespec.machines.events import (
    Event,
    MessageArrived,
    PeerGone,
    RingBroke,
    RingDown,
    RingUp,
    Tick,
)
from edgespec.wire.messages import (
    Assign,
    Cancel,
    Connect,
    Fault,
    Goodbye,
    Heartbeat,
    Join,
    Loading,
    Ready,
    Refuse,
    StandBy,
    Status,
    StatusRequest,
    Submit,
)

ALL_REQUESTS = -1
"""The request number of a Fault that means the whole stage."""

STATE_CHARS = 120
"""Of what a stage says about its loading that are shown."""

SPARE = 0
"""The place of a stage that has none."""


@dataclass(slots=True)
class _Member:
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
        """Whether `join` comes of the same process, through a connection that was made anew."""
        return (self.join.host, self.join.port) == (join.host, join.port)


class MembershipMachine:
    """The coordinator's list of stages and clients, without I/O."""

    def __init__(self, places: Sequence[Assign], data_port: int, timing: Timing) -> None:
        """`places[s - 1]` is what stage s shall run; `data_port` is where the last one pushes."""
        self._places = places
        self._data_port = data_port
        self._timing = timing
        self._members: dict[int, _Member] = {}
        self._spares: dict[bytes, _Member] = {}
        self._rivals: dict[int, tuple[bytes, float]] = {}  # who asks for a taken place since when
        self._clients: dict[bytes, float] = {}
        self._ring = 1
        self._is_up = False
        self._was_up = False
        self._next_beat: float | None = None

    @property
    def stage_peers(self) -> list[bytes]:
        """Addresses of the stages that have a place."""
        return [m.peer for m in self._members.values()]

    @property
    def daemon_peers(self) -> list[bytes]:
        """Addresses of the stages and spares."""
        return [m.peer for m in self._everybody]

    @property
    def _everybody(self) -> list[_Member]:
        return [*self._members.values(), *self._spares.values()]

    def stage_of(self, peer: bytes) -> str | None:
        """The stage at that address, in words; None for anybody else."""
        member = self._member_of(peer)
        return str(member) if member else None

    def deadline(self) -> float | None:
        """When to call with Tick next; None while nobody is there."""
        return self._next_beat if self._everybody or self._clients else None

    def handle(self, event: Event, now: float) -> list[Effect]:
        """React to one event; any message of a peer shows that it lives."""
        match event:
            case MessageArrived(peer, message):
                self._heard(peer, now)
                return self._on_message(peer, message, now)
            case RingBroke():
                return self._take_down("the coordinator's connection to stage 1 broke")
            case Tick():
                return self._on_tick(now)
            case _:
                raise LocalProtocolError(f"membership cannot handle {type(event).__name__}")

    def _heard(self, peer: bytes, now: float) -> None:
        if self._next_beat is None:
            self._next_beat = now + self._timing.beat
        member = self._member_of(peer)
        if member is not None:
            member.heard = now
        elif peer in self._clients:
            self._clients[peer] = now

    def _member_of(self, peer: bytes) -> _Member | None:
        return next((m for m in self._everybody if m.peer == peer), None)

    def _on_message(self, peer: bytes, message: object, now: float) -> list[Effect]:
        member = self._member_of(peer)
        match message:
            case Join():
                return self._on_join(peer, message, now)
            case StatusRequest():
                return [SendPeer(peer, self.status())]
            case Submit() | Cancel():
                self._clients[peer] = now
                return []
            case Heartbeat():
                # Only who is known here is answered: a stage or client of an earlier coordinator,
                # or one that was given up, shall notice that nobody works for it.
                return [SendPeer(peer, Heartbeat())] if peer in self._clients else []
        if member is None:
            return []  # a stranger, or a stage that was refused
        match message:
            case Loading(text):
                # A peer's words go to people's terminals: one short line.
                member.state = "".join(c for c in text[:STATE_CHARS] if c.isprintable())
                return []
            case Ready(seconds, ring):
                return self._on_ready(member, seconds, ring)
            case Goodbye(reason):
                return self._lose(member, f"left: {reason}")
            case Fault(request, reason) if request == ALL_REQUESTS:
                return self._lose(member, f"cannot go on: {reason}")
        return []

    # --- stages come --------------------------------------------------------------------------

    def _on_join(self, peer: bytes, join: Join, now: float) -> list[Effect]:
        stages = len(self._places)
        if not 0 <= join.stage <= stages:
            return _refuse(
                peer,
                f"there is no stage {join.stage}: this ring has {stages} stage(s), numbered from "
                "1; choose another --stage, or start the coordinator with more --stages",
            )
        if not _is_address(join.host, join.port):
            return _refuse(peer, f"{join.host!r} port {join.port} is no IPv4 address and TCP port")
        known = self._member_of(peer)
        if known is not None:
            return self._on_join_again(known, join)
        old = next((m for m in self._everybody if m.is_process_of(join)), None)
        if old is None:
            return self._give_place(peer, join, now)
        if now - old.heard <= 2 * self._timing.beat:
            return []  # not before its old connection is silent: this may be an impostor
        return self._lose(old, "lost its connection") + self._give_place(peer, join, now)

    def _on_join_again(self, known: _Member, join: Join) -> list[Effect]:
        """It asked twice, or it had missed the coordinator for a while."""
        if known.join.stage != join.stage:
            return _refuse(known.peer, f"this daemon is {known} already")
        return [self._stand_by(known) if known.place == SPARE else self._assign(known)]

    def _give_place(self, peer: bytes, join: Join, now: float) -> list[Effect]:
        """A free place; that of a predecessor which is silent; or else that of a spare."""
        free = [s for s in range(1, len(self._places) + 1) if s not in self._members]
        holder = self._members.get(join.stage)
        if holder is None and free:
            return self._enter(peer, join, join.stage or free[0], now)
        if holder is None:
            return self._add_spare(peer, join, now)
        if holder.join.stage == join.stage:
            return self._on_rival(peer, join, holder, now)
        if not self._was_up:  # nobody has been missed yet: a spare that came first makes room
            del self._members[join.stage]
            entered = self._enter(peer, join, join.stage, now)
            return entered + self._give_place(holder.peer, holder.join, now)
        return self._enter(peer, join, free[0], now) if free else self._add_spare(peer, join, now)

    def _on_rival(self, peer: bytes, join: Join, holder: _Member, now: float) -> list[Effect]:
        """Another process asks for the same place by its number: the old one dead, or both live."""
        rival, asked = self._rivals.get(join.stage, (b"", now))
        if now - holder.heard > 2 * self._timing.beat:
            del self._members[join.stage]
            cause = f"was replaced by process {join.pid} on {join.name}"
            return [
                *self._take_down(f"{holder} {cause}"),
                *self._enter(peer, join, join.stage, now),
            ]
        if rival != peer:
            self._rivals[join.stage] = peer, now
            return []  # the holder may be dead, which a beat will tell; the newcomer asks again
        if holder.heard <= asked + self._timing.beat:
            return []
        return _refuse(
            peer,
            f"stage {join.stage} is taken by process {holder.join.pid} on {holder.join.name}; "
            "stop that daemon, or choose another --stage",
        )

    def _enter(self, peer: bytes, join: Join, place: int, now: float) -> list[Effect]:
        self._rivals.pop(place, None)
        member = self._members[place] = _Member(peer, join, now, place)
        text = f"{member} joined, {len(self._members)} of {len(self._places)}"
        return [self._assign(member), Report(text)]

    def _assign(self, member: _Member) -> Effect:
        return SendPeer(member.peer, replace(self._places[member.place - 1], ring=self._ring))

    def _add_spare(self, peer: bytes, join: Join, now: float) -> list[Effect]:
        member = self._spares[peer] = _Member(peer, join, now, SPARE, "standing by")
        return [self._stand_by(member), Report(f"{member} stands by")]

    def _stand_by(self, spare: _Member) -> Effect:
        wish = spare.join.stage
        taken = f"; stage {wish} was given to another while it was away" if wish else ""
        return SendPeer(spare.peer, StandBy(f"standing by as a spare{taken}"))

    def _on_ready(self, member: _Member, seconds: float, ring: int) -> list[Effect]:
        if ring != self._ring or member.ready or member.place == SPARE:
            return []  # of a ring before this one, or said twice
        effects: list[Effect] = []
        if not member.loaded:
            effects.append(Report(f"{member} loaded its layers in {seconds:.1f} s"))
        member.ready = member.loaded = True
        member.state = "ready"
        if not self._all_ready():
            return effects
        self._is_up = self._was_up = True
        return [*effects, *self._connect_ring(), Tell(RingUp()), Report("the ring is up")]

    def _all_ready(self) -> bool:
        return len(self._members) == len(self._places) and all(
            m.ready for m in self._members.values()
        )

    def _connect_ring(self) -> list[Effect]:
        """Every node pushes to the next; the last stage to the coordinator."""
        ring = [self._members[stage] for stage in sorted(self._members)]
        key = replace(self._places[0], ring=self._ring).data_key
        effects: list[Effect] = [
            OpenRing(key),
            ConnectRing(ring[0].join.host, ring[0].join.port),
        ]
        for member, following in pairwise(ring):
            effects.append(SendPeer(member.peer, Connect(following.join.host, following.join.port)))
        effects.append(SendPeer(ring[-1].peer, Connect("", self._data_port)))
        return effects

    # --- stages go ----------------------------------------------------------------------------

    def _lose(self, lost: _Member, cause: str) -> list[Effect]:
        """A ring without one of its stages cannot go on: all the others begin the next one."""
        if lost.place == SPARE:
            gone = self._spares.pop(lost.peer, None)
            return [Report(f"{lost} {cause}")] if gone else []
        del self._members[lost.place]
        effects = self._take_down(f"{lost} {cause}")
        if self._spares:
            spare = self._spares.pop(next(iter(self._spares)))
            effects += self._enter(spare.peer, spare.join, lost.place, spare.heard)
        return effects

    def _take_down(self, reason: str) -> list[Effect]:
        effects: list[Effect] = [Tell(RingDown(reason)), Report(reason)]
        if not self._is_up:
            return effects  # nothing was sent in this ring yet
        self._is_up = False
        self._ring += 1
        for member in self._members.values():
            member.ready, member.state = False, "waiting"
            effects.append(self._assign(member))
        return effects

    # --- time ---------------------------------------------------------------------------------

    def _on_tick(self, now: float) -> list[Effect]:
        if self._next_beat is None or now < self._next_beat:
            return []
        self._next_beat = now + self._timing.beat
        effects: list[Effect] = []
        for member in self._everybody:
            silent = now - member.heard
            limit = self._timing.silence if member.loaded else self._timing.loading_silence
            if silent > limit:
                cause = f"has been silent for {silent:.1f} s"
                # Should it live, it reads this first and comes back at once.
                effects.append(SendPeer(member.peer, Goodbye(f"{member} {cause}")))
                effects += self._lose(member, cause)
        effects += [SendPeer(m.peer, Heartbeat()) for m in self._everybody]
        for peer, heard in list(self._clients.items()):
            if now - heard > self._timing.client_silence:
                del self._clients[peer]
                effects.append(Tell(PeerGone(peer)))
        return effects

    def status(self) -> Status:
        """Every place, and every spare, in one line of text."""
        lines = []
        for place in self._places:
            member = self._members.get(place.stage)
            who = f"{member.join.name} {member.state}" if member else "missing"
            layers = f"layers {place.first} to {place.end - 1}"
            lines.append(f"stage {place.stage}: {layers}: {who}")
        lines += [f"spare: {spare.join.name} {spare.state}" for spare in self._spares.values()]
        return Status(self._is_up, tuple(lines))


def _is_address(host: str, port: int) -> bool:
    """Whether others can connect to it without asking a name server, which would take its time."""
    try:
        return str(IPv4Address(host)) == host and 1 <= port <= 65535
    except ValueError:
        return False


def _refuse(peer: bytes, reason: str) -> list[Effect]:
    return [SendPeer(peer, Refuse(reason))]
