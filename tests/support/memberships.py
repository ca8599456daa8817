"""A membership machine with a clock, and stages that speak to it."""

from __future__ import annotations

import hashlib

from msgspec.structs import replace

from edgespec.config import Timing
from edgespec.machines.effects import (
    Effect,
    Forward,
    SendPeer,
)
from edgespec.machines.events import (
    MessageArrived,
    RingDown,
    RingUp,
    Tick,
)
from edgespec.ring.assembly import CALM_S
from edgespec.ring.events import RingReached
from edgespec.ring.membership import MembershipMachine
from edgespec.wire.client_messages import Submit
from edgespec.wire.messages import (
    Assign,
    Connect,
    Connected,
    Heartbeat,
    Join,
    Message,
    Ready,
    StandBy,
)

TIMING = Timing(beat=1.0, silence=4.0, client_silence=10.0)
HOME = Connect("", 999, "key of D0")
ASK = Submit(1, "hi", 5, 0.0, 0, 1.0, 0.0, 0, (), "")


class Membership:
    """The machine of a ring of `stages`, with a clock that a test turns. `running`: how many
    requests run."""

    def __init__(self, stages: int) -> None:
        self.running = 0
        self.places = [
            Assign(s, stages, s - 1, s, "model", "mark", "float32", "none", 100, 7, "key")
            for s in range(1, stages + 1)
        ]
        self.machine = MembershipMachine(self.places, HOME, TIMING, lambda: (self.running, 0))
        self.now = 100.0

    def place(self, stage: int, ring: int) -> Assign:
        """What a stage is assigned in that ring."""
        return replace(self.places[stage - 1], ring=ring, ring_key=ring_key(ring))

    def say(self, peer: bytes, message: Message) -> list[Effect]:
        """A message comes."""
        return self.machine.handle(MessageArrived(peer, message), self.now)

    def join(self, stage: int, **changes: object) -> list[Effect]:
        """Stage `stage` asks, from the address b"stage N"."""
        return self.say(address(stage), asks(stage, **changes))

    def tick(self) -> list[Effect]:
        """The deadline comes."""
        deadline = self.machine.deadline()
        assert deadline is not None
        self.now = max(self.now, deadline)
        return self.machine.handle(Tick(), self.now)

    def bring_up(self) -> list[Effect]:
        """Everybody joins and is ready; returns the effects of the last Ready."""
        for place in self.places:
            self.join(place.stage)
        return self.all_ready()

    def number(self, peer: bytes) -> int:
        """That of the Assign which this stage has."""
        member = self.machine.stage_at(peer)
        assert member is not None
        return member.number

    def ready(self, peer: bytes, seconds: float = 1.0) -> list[Effect]:
        """A stage says that it is ready for its place."""
        return self.say(peer, Ready(seconds, self.number(peer)))

    def connected(self, peer: bytes) -> list[Effect]:
        """A stage says that it has reached the next one."""
        return self.say(peer, Connected(self.number(peer)))

    def all_ready(self) -> list[Effect]:
        """Every stage says that it is ready, and then that it has reached the next one, as the
        coordinator has; returns the effects of the last Ready, and of the last of these."""
        effects: list[Effect] = []
        for place in self.places:
            effects = self.ready(address(place.stage), 1.5)
        effects = effects + self.machine.handle(RingReached(), self.now)
        for place in self.places:
            effects = effects + self.connected(address(place.stage))
        return effects

    def rest(self) -> None:
        """It is up, and nothing happens until it rests."""
        self.bring_up()
        calm_at = self.now + CALM_S
        while self.now <= calm_at:
            self.all_beat()
            self.tick()

    def all_beat(self, *silent: int) -> None:
        """Every stage but those says that it lives."""
        for place in self.places:
            if place.stage not in silent:
                self.say(address(place.stage), Heartbeat())


def asks(stage: int, **changes: object) -> Join:
    """The Join of a stage."""
    fields = {"stage": stage, "name": f"board{stage}", "pid": 70 + stage, "host": f"10.0.0.{stage}"}
    fields["key"] = f"key of V{stage}"
    return Join(**{**fields, "port": 5000 + stage, **changes})  # type: ignore[arg-type]


def ring_key(number: int) -> str:
    """The secret of the members of that ring."""
    return hashlib.sha256(f"key ring {number}".encode()).hexdigest()


def address(stage: int) -> bytes:
    """Where a stage's messages come from."""
    return b"stage %d" % stage


def to(effects: list[Effect], peer: bytes) -> list[Message]:
    """What is sent to one peer; no assignment has a number here."""
    sent = [e.message for e in effects if isinstance(e, SendPeer) and e.peer == peer]
    numbered = Assign | StandBy | Connect
    return [replace(m, number=0) if isinstance(m, numbered) else m for m in sent]


def goes_up(effects: list[Effect]) -> bool:
    """Whether the ring is up from now on."""
    return any(isinstance(e, Forward) and isinstance(e.event, RingUp) for e in effects)


def why_down(effects: list[Effect]) -> list[str]:
    """Why the ring was lost, each time."""
    told = (e.event for e in effects if isinstance(e, Forward))
    return [event.reason for event in told if isinstance(event, RingDown)]
