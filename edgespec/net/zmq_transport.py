"""ZeroMQ transport: a node's data ring (PUSH/PULL) and its control channel (ROUTER/DEALER).

Control has its own sockets, so that a retained set overtakes the rows that it prunes. One thread
owns all sockets of a node. All are CURVE: traffic is encrypted, a listening socket admits known
keys only, and a connecting one knows the key of the other side.
"""

from __future__ import annotations

import hmac
import logging
import socket
import time
from collections import deque
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import TypeVar

import zmq
from zmq.utils.monitor import parse_monitor_message

from edgespec.config import Address
from edgespec.errors import ConfigError, PeerLost, RemoteProtocolError
from edgespec.net.access import Admits, Gate, prove
from edgespec.net.control import (
    CONTROL_BYTES,
    CONTROL_HWM,
    Handshakes,
    check_version,
    ping,
    set_up,
)
from edgespec.net.keys import Identity, KeyPair
from edgespec.net.sockets import (
    Content,
    Dropped,
    OtherVersions,
    Poller,
    bind,
    connect,
    only,
    proved,
    waiting,
)
from edgespec.wire.codec import MOST_BYTES, SegmentPacker, decode, encode
from edgespec.wire.messages import Message
from edgespec.wire.segment import Segment

log = logging.getLogger(__name__)

LINGER_MS = 500
"""Time for a closing socket to send its last messages (a Failed, a Goodbye): long enough for a LAN,
short enough that a dead peer does not delay the exit."""

RING_HWM = 1_024
"""Credits keep a few segments in flight; the mark only stops a runaway peer."""

CONTROL_WAITING = 4096
"""Control messages of one peer that are read ahead; the rest stays with the peer. A normal peer
sends fewer while a loop hangs for some seconds: libzmq 4.3.5 has been seen to abort when a peer at
this limit disconnects."""

CONTROL, DATA = "the control channel", "the data ring"


@dataclass(frozen=True, slots=True)
class Incoming:
    """A received message: on the ring (peer empty), or on control from `peer`.

    `key`: the public key that the peer of a coordinator has proved; "" elsewhere. `ring_key`: that
    of the ring over which a segment came.
    """

    on_ring: bool
    peer: bytes
    message: Message
    key: str = ""
    ring_key: str = ""


T = TypeVar("T", bound="ZmqTransport")


class ZmqTransport:
    """Sockets of one node, made by `coordinator`, `stage` or `client`."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self._context = zmq.Context()
        # For all sockets: none may keep the program alive.
        self._context.linger = LINGER_MS
        self._context.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
        self._gate: Gate | None = None
        self._other_versions: OtherVersions | None = None
        self._handshakes: Handshakes | None = None
        self._control_monitor: zmq.Socket[bytes] | None = None
        self._peer_name = ""
        self._poller = Poller()
        self.control: zmq.Socket[bytes] | None = None
        self.pull: zmq.Socket[bytes] | None = None
        self.push: zmq.Socket[bytes] | None = None
        self._wakers: dict[int, socket.socket] = {}
        self._early: deque[Segment] = deque(maxlen=RING_HWM)
        self._dropped = Dropped()
        self._segments = SegmentPacker()
        self._monitor: zmq.Socket[bytes] | None = None
        self._ring_pair: KeyPair | None = None
        self.ring_key = ""
        self.ring_broke: float | None = None
        """When the connection to the next node first broke. Segments may be lost, though ZeroMQ
        connects again."""
        self.ring_fault = ""
        """What a member of the ring sent that is no segment, as a clause whose subject is the
        member; the reader resets this."""
        self.ring_awaited: float | None = None
        """Since when this node tries to reach the next one; None if it does not try, or has."""
        self.ring_reached = False
        """Whether it has just reached it; the reader resets this."""
        self.next_node = ""
        self.control_ended = False
        """Whether a connection of the control channel has ended; the reader resets this."""
        self.control_port = 0
        self.data_port = 0

    @classmethod
    def coordinator(cls: type[T], address: Address, identity: Identity, admits: Admits) -> T:
        """Control bound at `address` (port 0: any free one), data on a free port beside it.

        `admits` says which keys may use control. Raises ConfigError if the address cannot be used.
        """
        transport = cls(identity)
        control = transport._open(zmq.ROUTER, CONTROL_HWM)
        control.setsockopt(zmq.RCVHWM, CONTROL_WAITING)
        control.setsockopt(zmq.MAXMSGSIZE, CONTROL_BYTES)
        # Report an unreachable peer as an error; by default the message would silently disappear.
        control.setsockopt(zmq.ROUTER_MANDATORY, 1)
        transport.control = control
        transport._other_versions = OtherVersions(admits)
        transport.control_port = transport._listen(control, CONTROL, admits, address)
        transport._open_data(address.host)
        return transport

    @classmethod
    def stage(cls: type[T], coordinator: Address, identity: Identity, host: str) -> T:
        """Control connected to the coordinator, data on a free port of `host`.

        Raises ConfigError for an address that cannot be used, like `client`.
        """
        transport = cls.client(coordinator, identity)
        transport._open_data(host)
        return transport

    @classmethod
    def client(cls: type[T], coordinator: Address, identity: Identity, lost_s: float = 3.0) -> T:
        """Control connected to the coordinator, no data. A connection that was silent for `lost_s`
        is made anew: the coordinator takes it for another client."""
        transport = cls(identity)
        control = transport.control = transport._open(zmq.DEALER, CONTROL_HWM)
        set_up(control, identity, round(1000 * lost_s))
        transport._peer_name = str(coordinator)
        transport._handshakes = Handshakes(coordinator)
        monitor = transport._control_monitor = control.get_monitor_socket(Handshakes.EVENTS)
        transport._poller.register(monitor)
        try:
            connect(control, coordinator)
        except ConfigError:
            transport.close()
            raise
        return transport

    def _open(self, kind: int, high_water_mark: int) -> zmq.Socket[bytes]:
        opened = self._context.socket(kind)
        opened.setsockopt(zmq.SNDHWM, high_water_mark)
        opened.setsockopt(zmq.RCVHWM, high_water_mark)
        if kind != zmq.PUSH:
            self._poller.register(opened)
        return opened

    def _listen(
        self, opened: zmq.Socket[bytes], channel: str, admits: Admits, address: Address
    ) -> int:
        """Guard the socket and bind it; returns the port."""
        if self._gate is None:
            self._gate = Gate(self._context)
        monitor = self._gate.guard(opened, channel, self.identity.own, admits)
        self._poller.register(monitor)
        try:
            return bind(opened, address)
        except ConfigError:
            self.close()
            raise

    def _open_data(self, host: str) -> None:
        self.pull = self._open(zmq.PULL, RING_HWM)
        self.data_port = self._listen(self.pull, DATA, self._admits_to_ring, Address(host, 0))

    def _admits_to_ring(self, key: str) -> str:
        pair = self._ring_pair
        is_member = pair is not None and hmac.compare_digest(key, pair.public)
        return "" if is_member else "it is not that of a member of this ring"

    def open_ring(self, key: str) -> None:
        """From now on, take segments only from nodes that prove the key pair made from this secret
        of the ring's members; send none to the next node before `connect_ring`."""
        self.close_ring()
        self._early.clear()
        self.ring_key = key
        self._ring_pair = KeyPair.from_words(key)

    def connect_ring(self, address: Address, key: str) -> None:
        """From now on, push segments to the holder of the public `key` at `address`; first those
        that were sent since `open_ring`.

        Raises ConfigError for an address that cannot be used, PeerLost if this process can have no
        more connections.
        """
        self.close_ring()
        assert self._ring_pair is not None, "a ring is opened before it is connected"
        try:
            self.push = self._open(zmq.PUSH, RING_HWM)
        except zmq.ZMQError as problem:
            raise PeerLost(f"no connection to the next node ({problem.strerror})") from None
        ping(self.push)
        prove(self.push, self._ring_pair, key)
        events = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        self._monitor = self.push.get_monitor_socket(events)
        self._poller.register(self._monitor)
        self.next_node, self.ring_awaited = str(address), time.monotonic()
        connect(self.push, address)
        while self._early:
            self.send_ring(self._early.popleft())

    @property
    def broke(self) -> bool:
        """Whether a client's connection has ended: what comes by another is not for it."""
        return self._handshakes is not None and self._handshakes.broke

    @property
    def is_let_in(self) -> bool:
        """Whether the coordinator has accepted this node's key."""
        return self._handshakes is not None and self._handshakes.is_let_in

    @property
    def is_in_ring(self) -> bool:
        """Whether segments are pushed to a next node."""
        return self.push is not None

    def close_ring(self) -> None:
        """Push no more segments: this node has no part in a ring."""
        self.ring_broke = self.ring_awaited = None
        self.ring_reached, self.ring_fault = False, ""
        if self._monitor is not None and self.push is not None:
            self._poller.unregister(self._monitor)
            self.push.disable_monitor()
            self._monitor.close()
            self._monitor = None
        if self.push is not None:
            self.push.close()
            self.push = None

    def wake_on(self, end: socket.socket) -> None:
        """Have `poll` return when `end` has something to read (and read it)."""
        self._wakers[end.fileno()] = end
        self._poller.register(end)

    # --- sending ------------------------------------------------------------------------------

    def send_ring(self, segment: Segment, *stamp: bytes) -> None:
        """Push a segment to the next node. Raises PeerLost if it takes no more."""
        if self.push is None:  # a segment may overtake the control message that connects
            self._early.append(segment)
            return
        try:
            with self._segments.frame(segment) as frame:
                self.push.send_multipart([frame, *stamp], flags=zmq.NOBLOCK)
        except zmq.Again:
            raise PeerLost("the next node of the data ring takes no more segments") from None

    def send_control(self, peer: bytes, message: Message, *stamp: bytes) -> None:
        """Send to `peer` (a node with one peer ignores it). Raises PeerLost if it is gone."""
        assert self.control is not None
        frames = [encode(message), *stamp]
        if self._handshakes is None:  # a coordinator, with many peers
            frames = [peer, *frames]
        try:
            self.control.send_multipart(frames, flags=zmq.NOBLOCK)
        except zmq.Again:
            if not self._peer_name:
                raise PeerLost("a peer is too far behind to take more messages") from None
            raise PeerLost(
                f"nobody at {self._peer_name} takes messages; is `edgespec serve` running there, "
                "or does another program listen at that port?"
            ) from None
        except zmq.ZMQError as problem:
            if problem.errno == zmq.EHOSTUNREACH:
                raise PeerLost("a peer is no longer connected") from None
            raise

    # --- receiving ----------------------------------------------------------------------------

    def poll(self, timeout: float) -> list[Incoming]:
        """The messages within `timeout` seconds; malformed ones are dropped with a note.

        Raises AccessRefused if the coordinator does not let this node in, or is another one, and
        OtherVersion if it is of another version.
        """
        if self._handshakes is not None:
            self._handshakes.check()
        began = time.monotonic()
        ready = self._poller.poll(timeout)
        for descriptor, waker in self._wakers.items():
            if descriptor in ready:
                waker.recv(4096)
        self._look_at_doors(ready, began)
        if self._monitor is not None and self._monitor in ready:
            self._look_at_ring(self._monitor)
        incoming: list[Incoming] = []
        if self.control is not None and self.control in ready:
            incoming += self._take_control(self.control)
        if self.pull is not None and self.pull in ready:
            incoming += self._take_ring(self.pull)
        return incoming

    def _look_at_ring(self, monitor: zmq.Socket[bytes]) -> None:
        for frames in waiting(monitor):
            if parse_monitor_message(frames)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.ring_reached = self.ring_awaited is not None
                self.ring_awaited = None
            else:
                self.ring_broke = self.ring_broke or time.monotonic()

    def _look_at_doors(self, ready: Container[object], began: float) -> None:
        if self._control_monitor is not None and self._control_monitor in ready:
            assert self._handshakes is not None
            for frames in waiting(self._control_monitor):
                self.control_ended |= self._handshakes.take(frames) == zmq.EVENT_DISCONNECTED
        if self._gate is not None and self._gate.look(ready, began) and self._handshakes is None:
            self.control_ended = True

    def _take_control(self, control: zmq.Socket[bytes]) -> Iterator[Incoming]:
        if self._handshakes is None:
            received = ((key, bytes(frames.pop(0)), frames) for key, frames in proved(control))
        else:
            received = (("", b"", [*frames]) for frames in waiting(control))
        others = self._other_versions
        for key, peer, frames in received:
            if self._handshakes is not None:
                self._handshakes.heard()
                check_version(frames[0], self._peer_name)
            elif others is not None and others.refuse(control, peer, key, frames[0]):
                continue
            try:
                message = self._read(frames)
            except RemoteProtocolError as problem:
                self._dropped.note(str(problem))
                continue
            if isinstance(message, Segment):
                self._dropped.note("it is a segment on the control channel")
            else:
                yield Incoming(False, peer, message, key)

    def _take_ring(self, pull: zmq.Socket[bytes]) -> Iterator[Incoming]:
        for key, frames in proved(pull):
            if self._admits_to_ring(key):  # a connection may outlive its ring
                log.debug("left a segment out that came over a connection of an earlier ring")
                continue
            try:
                message = self._read(frames)
            except RemoteProtocolError as problem:
                self.ring_fault = f"sent a segment that cannot be read ({problem})"
                continue
            if isinstance(message, Segment):
                yield Incoming(True, b"", message, ring_key=self.ring_key)
            else:
                self.ring_fault = f"sent a {type(message).__name__} for a segment"

    def _read(self, frames: list[Content]) -> Message:
        return decode(only(frames))

    def close(self) -> None:
        """Close all sockets; last messages have LINGER_MS to be sent."""
        self.close_ring()
        if self._control_monitor is not None and self.control is not None:
            self.control.disable_monitor()
            self._control_monitor.close()
        if self._gate is not None:
            self._gate.close()
        for opened in (self.control, self.pull):
            if opened is not None:
                opened.close()
        self._context.term()
