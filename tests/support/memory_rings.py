"""Rings of real nodes in one thread: sockets in memory, a clock of their own, compute at once.

What goes from one node to another passes through the codec, and may be altered on its way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_draft import FakeDraft
from support.keys import OWN, ListedKeys
from support.toy_answers import Expected, plain_answer

from edgespec.backends.compute import CoordinatorCompute, StageCompute
from edgespec.config import Address, Timing
from edgespec.decoding.admission import CoordinatorSettings
from edgespec.decoding.coordinator import CoordinatorMachine
from edgespec.errors import PeerLost, RemoteProtocolError
from edgespec.machines.effects import (
    Effect,
)
from edgespec.net.zmq_transport import Incoming
from edgespec.ring.member import MemberMachine
from edgespec.ring.membership import MembershipMachine
from edgespec.runtime import node, own_time, stage_node
from edgespec.runtime.access_policy import CLIENT
from edgespec.runtime.coordinator_node import CoordinatorNode
from edgespec.runtime.node import RingNode
from edgespec.runtime.stage_node import StageNode
from edgespec.runtime.worker import Worker
from edgespec.sim.toy import VOCABULARY, ToyCodec
from edgespec.sim.toy_model import FakeBlock, FakeHead
from edgespec.wire.client_messages import Failed, Finished, Submit
from edgespec.wire.codec import decode, encode, packed
from edgespec.wire.messages import Assign, Connect, Health, Join, Message
from edgespec.wire.segment import Segment

CONTEXT = 200
BEAT_S = 0.05
"""Seconds that pass in a round, in which every node takes one step."""

TIMING = Timing(
    beat=0.1, silence=0.6, answer_silence=9, client_silence=3000, retry=0.2, recovery=60
)
CLIENT_PEER = b"client"

Alter = Callable[[str, Message], Message]
"""Of a sender ("coordinator", "stage 1", "client") and what it says: what is said instead."""


class _Sockets:
    """Those of one node."""

    def __init__(self, ring: MemoryRing, name: str, port: int, key: str) -> None:
        self._ring, self.name, self.data_port, self.key = ring, name, port, key
        self.inbox: deque[Incoming] = deque()
        self.early: deque[Segment] = deque()
        self.ring_key = self._next_key = ""
        self._next: _Sockets | None = None
        self.ring_broke = self.ring_awaited = None
        self.ring_reached, self.ring_fault = False, ""
        self.control_ended = False
        self.next_node = ""

    def poll(self, timeout: float) -> list[Incoming]:
        """All that has come, control before segments, as ZmqTransport reads it."""
        came = sorted(self.inbox, key=lambda one: one.on_ring)
        self.inbox.clear()
        return came

    def open_ring(self, key: str) -> None:
        """See ZmqTransport."""
        self.ring_key, self.ring_fault = key, ""
        self._next = None
        self.early.clear()

    def connect_ring(self, address: Address, key: str) -> None:
        """See ZmqTransport."""
        self._next = self._ring.at_port.get(address.port)
        self._next_key = self.ring_key
        self.ring_reached = self._next is not None
        for _ in range(len(self.early)):  # without a node at that port they wait on
            self.send_ring(self.early.popleft())

    def close_ring(self) -> None:
        """See ZmqTransport."""
        self._next = None

    def send_ring(self, segment: Segment) -> None:
        """See ZmqTransport."""
        if self._next is None:
            self.early.append(segment)
            return
        said = self._ring.carried(self.name, segment)
        if self._next.ring_key != self._next_key:
            return
        if said is None:
            self._next.ring_fault = "sent a segment that cannot be read"
        else:
            self._next.inbox.append(Incoming(True, b"", said, ring_key=self._next_key))

    def send_control(self, peer: bytes, message: Message) -> None:
        """See ZmqTransport."""
        if self.name == "coordinator" and peer not in self._ring.at_peer:
            raise PeerLost("a peer is no longer connected")
        said = self._ring.carried(self.name, message)
        if said is None:
            return
        if self.name != "coordinator":
            self._ring.hand_in(self.name, said)
        else:
            self._ring.at_peer[peer].append(Incoming(False, b"", said))


class _AtOnce(Worker):
    """A worker that needs no thread."""

    def submit(self, effect: Effect, at: float | None = None) -> None:
        event = self._carry_out(effect)
        if event is not None:
            self.post(event, at)


class MemoryRing:
    """A coordinator and its stages. `bugs`: what was caught by a node that should not have been
    raised; what leaves a node's step is raised by `round`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stages: int) -> None:
        self.now = 100.0
        self.stages = stages
        self.alter: Alter = lambda name, message: message
        self.bugs: list[str] = []
        self.at_port: dict[int, _Sockets] = {}
        self.at_peer: dict[bytes, deque[Incoming]] = {CLIENT_PEER: deque()}
        self._keys: dict[str, str] = {}
        self._codec = ToyCodec()
        clock = SimpleNamespace(monotonic=lambda: self.now)
        for module in (node, stage_node, own_time):
            monkeypatch.setattr(module, "time", clock)
        keys = ListedKeys()
        self._keys["client"] = keys.add("client", CLIENT).own.public
        places = [
            Assign(s, stages, s - 1, s, "toy", "toy", "float64", "none", CONTEXT, 7, "11" * 8)
            for s in range(1, stages + 1)
        ]
        self._home = self._sockets("coordinator", 7000, OWN.public)
        self.machine = CoordinatorMachine(
            CoordinatorSettings(stages, CONTEXT, "fake", 8, recovery=60), self._codec
        )
        self.membership = MembershipMachine(places, Connect("", 7000, OWN.public), TIMING)
        draft = FakeDraft(stages, VOCABULARY, 0.7)
        self.coordinator = CoordinatorNode(
            self._home,  # type: ignore[arg-type]
            CoordinatorCompute(FakeHead(VOCABULARY), draft),
            self.machine,
            self.membership,
            keys,
        )
        self.nodes: list[RingNode] = [self._tamed(self.coordinator)]
        for stage in range(1, stages + 1):
            self._add_stage(stage, keys.add(f"stage {stage}").own.public)

    def _sockets(self, name: str, port: int, key: str) -> _Sockets:
        made = self.at_port[port] = _Sockets(self, name, port, key)
        self._keys[name] = key
        return made

    def _add_stage(self, stage: int, key: str) -> None:
        sockets = self._sockets(f"stage {stage}", 7000 + stage, key)
        self.at_peer[sockets.name.encode()] = sockets.inbox
        join = Join(stage, "toybox", stage, "127.0.0.1", sockets.data_port, key)
        member = MemberMachine(join, "memory", 60.0, TIMING)
        where = Address("127.0.0.1", 7000)
        health = Health(40.0, 90.0, 9, 5, 0.5, False, "")
        made = StageNode(
            sockets,  # type: ignore[arg-type]
            member,
            where,
            lambda assign, say, stop: StageCompute(FakeBlock(stage - 1)),
            device=lambda: health,
        )
        self.nodes.append(self._tamed(made))

    def _tamed(self, made: RingNode) -> RingNode:
        """Computing at once, and telling of its bugs."""
        for worker in made.workers:
            worker.stop()
        made.workers = [_AtOnce(worker.perform) for worker in made.workers]
        made.worker = made.workers[0]
        if isinstance(made, CoordinatorNode):
            made._prompts = made.workers[1]
        noted = made.note_bug

        def note_bug(cause: Any, now: float) -> None:
            self.bugs.append(repr(cause)[:300])
            noted(cause, now)

        made.note_bug = note_bug  # type: ignore[method-assign]
        return made

    def close(self) -> None:
        """Free the workers' sockets."""
        for one in self.nodes:
            for worker in one.workers:
                worker.stop()

    # --- what is said -------------------------------------------------------------------------

    def carried(self, name: str, message: Message) -> Message | None:
        """What arrives of it; None if the codec drops it."""
        try:
            return decode(packed(self.alter(name, decode(encode(message)))))
        except RemoteProtocolError:
            return None

    def hand_in(self, name: str, message: Message) -> None:
        """A stage or the client says something to the coordinator."""
        self._home.inbox.append(Incoming(False, name.encode(), message, self._keys[name]))

    def say(self, sender: str, to: str, message: Message) -> None:
        """The same out of turn; a Segment along the ring, anything else on control."""
        inbox = next(s.inbox for s in self.at_port.values() if s.name == to)
        on_ring = isinstance(message, Segment)
        peer, key = (
            (b"", "")
            if on_ring or to != "coordinator"
            else (
                sender.encode(),
                self._keys[sender],
            )
        )
        inbox.append(Incoming(on_ring, peer, message, key))

    # --- what happens -------------------------------------------------------------------------

    def round(self) -> None:
        """Every node takes a step."""
        self.now += BEAT_S
        for one in self.nodes:
            one.step()
            assert one.ended is None, one.ended

    def until(self, happened: Callable[[], bool], rounds: int) -> bool:
        """Whether it happens within so many rounds."""
        for _ in range(rounds):
            if happened():
                return True
            self.round()
        return happened()

    def ends(self, tag: int) -> list[Finished | Failed]:
        """The ends of that request so far."""
        replies = [i.message for i in self.at_peer[CLIENT_PEER]]
        return [r for r in replies if isinstance(r, Finished | Failed) and r.tag == tag]

    def ask(self, submit: Submit) -> None:
        """The client asks."""
        self.hand_in("client", submit)

    def expected(self, submit: Submit) -> Expected:
        """The answer of plain decoding."""
        return plain_answer(self._codec, submit, self.stages, CONTEXT)
