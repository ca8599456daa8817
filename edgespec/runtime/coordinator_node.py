"""Coordinator node: routes messages between its sockets, the membership and the request machine."""

from __future__ import annotations

from edgespec.backends.compute import CoordinatorCompute
from edgespec.errors import PeerLost
from edgespec.machines.coordinator import CoordinatorMachine
from edgespec.machines.effects import (
    ConnectRing,
    Effect,
    OpenRing,
    SendPeer,
    SendRing,
    SendStages,
    Tell,
)
from edgespec.machines.events import Event, MessageArrived, PeerGone, RingBroke, RingEnded, Tick
from edgespec.machines.membership import MembershipMachine
from edgespec.net.zmq_transport import ZmqTransport
from edgespec.runtime.equipment import Equipment
from edgespec.runtime.node import Node, ring_address
from edgespec.wire.messages import Cancel, Credit, Fault, Goodbye, Submit, Tokens


class CoordinatorNode(Node):
    """D0 as a program: membership and coordinator machines over one transport."""

    def __init__(
        self,
        transport: ZmqTransport,
        compute: CoordinatorCompute,
        machine: CoordinatorMachine,
        membership: MembershipMachine,
        equipment: Equipment | None = None,
    ) -> None:
        super().__init__(transport, compute.perform)
        if equipment is not None:
            self.worker.instead(equipment.equip(None, compute.perform, self))
        self._machine = machine
        self._membership = membership

    def route(self, event: Event, now: float) -> list[Effect]:
        """Requests to the coordinator machine; everything that shows life to the membership."""
        match event:
            case MessageArrived(_, Submit() | Cancel()):
                return self._membership.handle(event, now) + self._machine.handle(event, now)
            case MessageArrived(peer, Fault(request, reason)):
                stage = self._membership.stage_of(peer)
                if stage is None:
                    return []  # only a stage may end a request of others
                named = MessageArrived(peer, Fault(request, f"{stage}: {reason}"))
                return self._membership.handle(event, now) + self._machine.handle(named, now)
            case MessageArrived(peer, Credit()):
                alive = self._membership.handle(event, now)
                known = self._membership.stage_of(peer) is not None
                return alive + (self._machine.handle(event, now) if known else [])
            case MessageArrived():
                return self._membership.handle(event, now)
            case Tick():
                return self._membership.handle(event, now) + self._machine.handle(event, now)
            case _:
                return self._machine.handle(event, now)

    def deadline(self) -> float | None:
        """The earlier of both machines'."""
        both = (self._membership.deadline(), self._machine.deadline())
        return min((d for d in both if d is not None), default=None)

    def on_broken(self, now: float) -> list[Effect]:
        """All stages may live: they begin another ring."""
        return self._membership.handle(RingBroke(), now)

    def carry_out(self, effect: Effect, now: float) -> None:
        """Sockets, and what one machine tells the other."""
        match effect:
            case SendRing(segment):
                self.transport.send_ring(segment)
            case SendStages(message):
                stages = self._membership.stage_peers
                self.perform_all([SendPeer(peer, message) for peer in stages], now)
            case SendPeer(peer, message):
                self._send_peer(peer, message, now)
            case OpenRing(key):
                self.transport.ring_key = key.encode()
            case ConnectRing(host, port):
                self.transport.connect_ring(ring_address(host, port, "127.0.0.1"))
                self.transport.ring_broke = None  # that was the ring before
            case Tell(event):
                self.perform_all(self._machine.handle(event, now), now)
            case _:
                raise TypeError(f"a coordinator carries out no {type(effect).__name__}")

    def _send_peer(self, peer: bytes, message: object, now: float) -> None:
        try:
            self.transport.send_control(peer, message)  # type: ignore[arg-type]
        except PeerLost:
            if not isinstance(message, Tokens):
                raise
            # A client that can no longer be reached wants no more tokens.
            self.perform_all(self._machine.handle(PeerGone(peer), now), now)

    def farewell(self, reason: str, now: float) -> None:
        """End every request with a message, and let the stages go."""
        self.perform_all(self._machine.handle(RingEnded(f"the ring ended: {reason}"), now), now)
        goodbyes = [SendPeer(p, Goodbye(reason)) for p in self._membership.daemon_peers]
        self.perform_all(goodbyes, now)
