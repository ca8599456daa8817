"""ZeroMQ transport: a node's data ring (PUSH/PULL) and its control channel (ROUTER/DEALER).

Control never waits behind data, so that a retained set overtakes the rows that it prunes. All
sockets of a node are owned by one thread.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import zmq

from edgespec.config import Address
from edgespec.errors import ConfigError, PeerLost, RemoteProtocolError
from edgespec.net.sockets import Dropped, bind, connect, waiting
from edgespec.wire.codec import DEFAULT_LIMITS, decode, encode
from edgespec.wire.messages import Message, Segment

log = logging.getLogger(__name__)

LINGER_MS = 500
"""A closing socket may take this long to hand over its last words (a Failed, a Goodbye): long
enough for a LAN, short enough that nobody's exit hangs on a dead peer."""

CONTROL_HWM = 10_000
"""Control messages are small and their rate is bounded by tokens; a peer that is this far behind
is as good as gone, and its messages are refused rather than kept."""

RING_HWM = 1_024
"""Credits keep a handful of segments in flight; the mark only stops a runaway peer."""

HEARTBEAT_MS = 1_000
"""ZMTP pings find half-open connections (a pulled cable) and make ZeroMQ reconnect. Whether a
peer lives is decided by the machines' own Heartbeat, which also shows that its loop runs."""

KEY_BYTES = 16
"""Of the key that opens every message on a data ring. It is no substitute for encryption, but
a stranger who only finds the port, or a node of an earlier ring, cannot put a segment into it."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """A message that came: on the ring (peer empty), or on control from `peer`."""

    on_ring: bool
    peer: bytes
    message: Message


class ZmqTransport:
    """Sockets of one node. Use `coordinator` or `stage` or `client` to make one."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        # A socket that nobody configured must not keep the program alive either.
        self._context.linger = LINGER_MS
        self._context.setsockopt(zmq.MAXMSGSIZE, DEFAULT_LIMITS.frame_bytes)
        self._context.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._context.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
        self._poller = zmq.Poller()
        self._control: zmq.Socket[bytes] | None = None
        self._pull: zmq.Socket[bytes] | None = None
        self._push: zmq.Socket[bytes] | None = None
        self._wakers: dict[int, socket.socket] = {}
        self._early: deque[Segment] = deque(maxlen=RING_HWM)
        self._dropped = Dropped()
        self._monitor: zmq.Socket[bytes] | None = None
        self.ring_key = b""
        self.ring_broke: float | None = None
        """When the connection to the next node broke first. Segments may have been lost with it,
        though ZeroMQ connects again."""
        self.control_port = 0
        self.data_port = 0

    @classmethod
    def coordinator(cls, address: Address) -> ZmqTransport:
        """Control bound at `address` (port 0: any free one), data on a free port beside it.

        Raises ConfigError if the address cannot be used.
        """
        transport = cls()
        transport.ring_key = secrets.token_hex(KEY_BYTES).encode()
        control = transport._open(zmq.ROUTER, CONTROL_HWM)
        # An unreachable peer shall be an error here, not a message that silently disappears.
        control.setsockopt(zmq.ROUTER_MANDATORY, 1)
        transport._control = control
        try:
            transport.control_port = bind(control, address)
        except ConfigError:
            transport.close()
            raise
        transport._open_data(address.host)
        return transport

    @classmethod
    def stage(cls, coordinator: Address, host: str) -> ZmqTransport:
        """Control connected to the coordinator, data on a free port of `host`.

        Raises ConfigError for an address that cannot be used, like `client`.
        """
        transport = cls.client(coordinator)
        transport._open_data(host)
        return transport

    @classmethod
    def client(cls, coordinator: Address) -> ZmqTransport:
        """Control connected to the coordinator, no data."""
        transport = cls()
        control = transport._open(zmq.DEALER, CONTROL_HWM)
        control.setsockopt(zmq.RECONNECT_IVL, 100)
        control.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
        transport._control = control
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
            self._poller.register(opened, zmq.POLLIN)
        return opened

    def _open_data(self, host: str) -> None:
        self._pull = self._open(zmq.PULL, RING_HWM)
        try:
            self.data_port = bind(self._pull, Address(host, 0))
        except ConfigError:
            self.close()
            raise

    def connect_ring(self, address: Address) -> None:
        """From now on, push segments to `address`; first those that were sent before.

        Raises ConfigError for an address that cannot be used.
        """
        self._close_push()
        self._push = self._open(zmq.PUSH, RING_HWM)
        self._monitor = self._push.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._poller.register(self._monitor, zmq.POLLIN)
        connect(self._push, address)
        while self._early:
            self.send_ring(self._early.popleft())

    def _close_push(self) -> None:
        if self._monitor is not None and self._push is not None:
            self._poller.unregister(self._monitor)
            self._push.disable_monitor()
            self._monitor.close()
            self._monitor = None
        if self._push is not None:
            self._push.close()
            self._push = None

    def wake_on(self, end: socket.socket) -> None:
        """Let `poll` return when `end` has something to read (it is emptied)."""
        self._wakers[end.fileno()] = end
        self._poller.register(end, zmq.POLLIN)

    # --- sending ------------------------------------------------------------------------------

    def send_ring(self, segment: Segment) -> None:
        """Push a segment to the next node. Raises PeerLost if it takes no more."""
        if self._push is None:  # a segment may overtake the control message that connects
            self._early.append(segment)
            return
        frames = [self.ring_key, *encode(segment)]
        try:
            self._push.send_multipart(frames, flags=zmq.NOBLOCK, copy=False)
        except zmq.Again:
            raise PeerLost("the next node of the data ring takes no more segments") from None

    def send_control(self, peer: bytes, message: Message) -> None:
        """Send to `peer` (a node with one peer ignores it). Raises PeerLost if it is gone."""
        assert self._control is not None
        frames = encode(message)
        if self._control.type == zmq.ROUTER:
            frames = [peer, *frames]
        try:
            self._control.send_multipart(frames, flags=zmq.NOBLOCK)
        except zmq.Again:
            raise PeerLost("a peer is too far behind to take more messages") from None
        except zmq.ZMQError as problem:
            if problem.errno == zmq.EHOSTUNREACH:
                raise PeerLost("a peer is no longer connected") from None
            raise

    # --- receiving ----------------------------------------------------------------------------

    def poll(self, timeout: float) -> list[Incoming]:
        """Whatever came within `timeout` seconds; malformed messages are dropped with a note."""
        ready = dict(self._poller.poll(max(0, round(timeout * 1000))))
        for waker in self._wakers.values():
            if ready.get(waker.fileno()):
                waker.recv(4096)
        if self._monitor is not None and self._monitor in ready:
            self._monitor.recv_multipart()
            self.ring_broke = self.ring_broke or time.monotonic()
        incoming: list[Incoming] = []
        if self._control is not None and self._control in ready:
            incoming += self._take_control(self._control)
        if self._pull is not None and self._pull in ready:
            incoming += self._take_ring(self._pull)
        return incoming

    def _take_control(self, control: zmq.Socket[bytes]) -> Iterator[Incoming]:
        has_peer = control.type == zmq.ROUTER
        for frames in waiting(control):
            peer = frames.pop(0) if has_peer else b""
            message = self._read(frames)
            if isinstance(message, Segment):
                self._dropped.note("it is a segment on the control channel")
            elif message is not None:
                yield Incoming(False, peer, message)

    def _take_ring(self, pull: zmq.Socket[bytes]) -> Iterator[Incoming]:
        for frames in waiting(pull):
            if not self.ring_key or not hmac.compare_digest(frames.pop(0), self.ring_key):
                self._dropped.note("it came on the data ring from outside of it")
                continue
            message = self._read(frames)
            if isinstance(message, Segment):
                yield Incoming(True, b"", message)
            elif message is not None:
                self._dropped.note(f"it is a {type(message).__name__} on the data ring")

    def _read(self, frames: list[bytes]) -> Message | None:
        try:
            return decode(frames)
        except RemoteProtocolError as problem:
            self._dropped.note(str(problem))
            return None

    def close(self) -> None:
        """Close all sockets; last messages get LINGER_MS to leave."""
        self._close_push()
        for opened in (self._control, self._pull):
            if opened is not None:
                opened.close()
        self._context.term()
