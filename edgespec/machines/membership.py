"""Membership machine: who is in the ring; gives places to stages, watches that everybody lives.

Join → Assign → (Loading …) → Ready; when all are ready, Connect to each: the ring is up. A stage
that leaves, fails or falls silent brings the ring down with one message that names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address
from itertools import pairwise

from edgespec.config import Timing
from edgespec.errors import LocalProtocolError
from edgespec.machines.effects import ConnectRing, Effect, Report, SendPeer, Stop, Tell
from edgespec.machines.events import Event, MessageArrived, PeerGone, RingDown, RingUp, Tick
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
    Status,
    StatusRequest,
    Submit,
)

ALL_REQUESTS = -1
"""The request number of a Fault that means the whole stage."""

STATE_CHARS = 120
"""Of what a stage says about its loading that are shown."""


@dataclass(slots=True)
class _Member:
    """A stage that has its place."""

    peer: bytes
    join: Join
    heard: float
    state: str = "loading"
    ready: bool = False

    def __str__(self) -> str:
        return f"stage {self.join.stage} ({self.join.name}, process {self.join.pid})"


class MembershipMachine:
    """The coordinator's list of stages and clients, without I/O."""

    def __init__(self, places: Sequence[Assign], data_port: int, timing: Timing) -> None:
        """`places[s - 1]` is what stage s shall run; `data_port` is where the last one pushes."""
        self._places = places
        self._data_port = data_port
        self._timing = timing
        self._members: dict[int, _Member] = {}
        self._clients: dict[bytes, float] = {}
        self._is_up = False
        self._next_beat: float | None = None

    @property
    def stage_peers(self) -> list[bytes]:
        """Addresses of the stages that have a place."""
        return [m.peer for m in self._members.values()]

    def stage_of(self, peer: bytes) -> str | None:
        """The stage at that address, in words; None for anybody else."""
        member = self._member_of(peer)
        return str(member) if member else None

    def deadline(self) -> float | None:
        """When to call with Tick next; None while nobody is there."""
        return self._next_beat if self._members or self._clients else None

    def handle(self, event: Event, now: float) -> list[Effect]:
        """React to one event; any message of a peer shows that it lives."""
        match event:
            case MessageArrived(peer, message):
                self._heard(peer, now)
                return self._on_message(peer, message, now)
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
        return next((m for m in self._members.values() if m.peer == peer), None)

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
            case Ready(seconds):
                return self._on_ready(member, seconds)
            case Goodbye(reason):
                return self._lose(member, f"left: {reason}")
            case Fault(request, reason) if request == ALL_REQUESTS:
                return self._lose(member, f"cannot go on: {reason}")
        return []

    # --- stages come and go -------------------------------------------------------------------

    def _on_join(self, peer: bytes, join: Join, now: float) -> list[Effect]:
        stages = len(self._places)
        if not 1 <= join.stage <= stages:
            return _refuse(
                peer,
                f"there is no stage {join.stage}: this ring has {stages} stage(s), numbered from "
                "1; choose another --stage, or start the coordinator with more --stages",
            )
        holder = self._members.get(join.stage)
        if holder is not None and holder.peer == peer:
            return [SendPeer(peer, self._places[join.stage - 1])]  # it asked twice
        other = self._member_of(peer)
        if other is not None:
            return _refuse(peer, f"this daemon is {other} already")
        if holder is not None:
            return _refuse(
                peer,
                f"stage {join.stage} is taken by process {holder.join.pid} on {holder.join.name}; "
                "stop that daemon, or choose another --stage",
            )
        if not _is_address(join.host, join.port):
            return _refuse(peer, f"{join.host!r} port {join.port} is no IPv4 address and TCP port")
        member = _Member(peer, join, now)
        self._members[join.stage] = member
        return [
            SendPeer(peer, self._places[join.stage - 1]),
            Report(f"{member} joined, {len(self._members)} of {stages}"),
        ]

    def _on_ready(self, member: _Member, seconds: float) -> list[Effect]:
        member.ready, member.state = True, "ready"
        effects: list[Effect] = [Report(f"{member} loaded its layers in {seconds:.1f} s")]
        if self._is_up or not self._all_ready():
            return effects
        self._is_up = True
        return [*effects, *self._connect_ring(), Tell(RingUp()), Report("the ring is up")]

    def _all_ready(self) -> bool:
        return len(self._members) == len(self._places) and all(
            m.ready for m in self._members.values()
        )

    def _connect_ring(self) -> list[Effect]:
        """Every node pushes to the next; the last stage to the coordinator."""
        ring = [self._members[stage] for stage in sorted(self._members)]
        effects: list[Effect] = [ConnectRing(ring[0].join.host, ring[0].join.port)]
        for member, following in pairwise(ring):
            effects.append(SendPeer(member.peer, Connect(following.join.host, following.join.port)))
        effects.append(SendPeer(ring[-1].peer, Connect("", self._data_port)))
        return effects

    def _lose(self, lost: _Member, cause: str) -> list[Effect]:
        """A ring without one of its stages cannot go on: say so to everybody, and end."""
        reason = f"{lost} {cause}"
        del self._members[lost.join.stage]
        rest = [SendPeer(m.peer, Goodbye(reason)) for m in self._members.values()]
        return [Tell(RingDown(reason)), *rest, Stop(reason, failed=True)]

    # --- time ---------------------------------------------------------------------------------

    def _on_tick(self, now: float) -> list[Effect]:
        if self._next_beat is None or now < self._next_beat:
            return []
        self._next_beat = now + self._timing.beat
        for member in list(self._members.values()):
            silent = now - member.heard
            if silent > self._timing.silence:
                return self._lose(member, f"has been silent for {silent:.1f} s")
        effects: list[Effect] = [SendPeer(m.peer, Heartbeat()) for m in self._members.values()]
        for peer, heard in list(self._clients.items()):
            if now - heard > self._timing.client_silence:
                del self._clients[peer]
                effects.append(Tell(PeerGone(peer)))
        return effects

    def status(self) -> Status:
        """Every place in one line of text."""
        lines = []
        for place in self._places:
            member = self._members.get(place.stage)
            who = f"{member.join.name} {member.state}" if member else "missing"
            layers = f"layers {place.first} to {place.end - 1}"
            lines.append(f"stage {place.stage}: {layers}: {who}")
        return Status(self._is_up, tuple(lines))


def _is_address(host: str, port: int) -> bool:
    """Whether others can connect to it without asking a name server, which would take its time."""
    try:
        return str(IPv4Address(host)) == host and 1 <= port <= 65535
    except ValueError:
        return False


def _refuse(peer: bytes, reason: str) -> list[Effect]:
    return [SendPeer(peer, Refuse(reason))]
