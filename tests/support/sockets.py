"""Sockets for tests: transports of a ring of two, and bare ones that say what they like."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from weakref import WeakKeyDictionary

import zmq
from support.keys import OWN, OWNER_IDENTITY, everybody, identity

from edgespec.config import Address
from edgespec.net.access import Admits, prove
from edgespec.net.keys import KeyPair
from edgespec.net.zmq_transport import Incoming, ZmqTransport

HOST = "127.0.0.1"
PATIENCE_S = 60.0
DEVICE = identity("a device")
RING = "the secret of the ring"
MEMBER = KeyPair.from_words(RING)
"""What who knows the secret proves to a data socket."""


def listening(admits: Admits = everybody) -> ZmqTransport:
    """A coordinator's sockets, with the ring open."""
    made = ZmqTransport.coordinator(Address(HOST, 0), OWNER_IDENTITY, admits)
    made.open_ring(RING)
    return made


def staged(coordinator: ZmqTransport) -> ZmqTransport:
    """DEVICE's sockets, with the ring open."""
    made = ZmqTransport.stage(Address(HOST, coordinator.control_port), DEVICE, HOST)
    made.open_ring(RING)
    return made


_COMING: WeakKeyDictionary[ZmqTransport, deque[Incoming]] = WeakKeyDictionary()
"""What `next_of` has read and not told."""


def next_of(transport: ZmqTransport) -> Incoming:
    """The next message that is not dropped; those that come with it are the next ones."""
    limit, coming = time.monotonic() + PATIENCE_S, _COMING.setdefault(transport, deque())
    while not coming and time.monotonic() < limit:
        coming += transport.poll(0.1)
    assert coming, "nothing came"
    return coming.popleft()


def nothing_of(transport: ZmqTransport, seconds: float = 0.2) -> bool:
    """Whether no message comes for so long."""
    limit = time.monotonic() + seconds
    while (left := limit - time.monotonic()) > 0:
        if transport.poll(left):
            return False
    return True


def polled_until(transport: ZmqTransport, condition: Callable[[], object]) -> None:
    """Poll, for what is not wanted, until the condition holds."""
    limit = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < limit, "it did not come about in time"
        transport.poll(0.02)


class BareSockets:
    """Makes sockets of no node: a stranger's, or those of a member that breaks every rule.

    Use as a context manager.
    """

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._opened: list[zmq.Socket[bytes]] = []

    def __enter__(self) -> BareSockets:
        return self

    def __exit__(self, *_: object) -> None:
        for opened in self._opened:
            opened.close()
        self._context.term()

    def open(self, kind: int) -> zmq.Socket[bytes]:
        """One that is not connected yet."""
        opened = self._context.socket(kind)
        opened.linger = 0
        opened.rcvtimeo = int(1e3 * PATIENCE_S)
        self._opened.append(opened)
        return opened

    def connect(
        self,
        kind: int,
        port: int,
        own: KeyPair | None = None,
        server: str = OWN.public,
        takes: int = 1000,
    ) -> zmq.Socket[bytes]:
        """To a port of this machine; without a key unless there is `own`.

        `takes`: messages that it keeps unread.
        """
        opened = self.open(kind)
        opened.rcvhwm = takes
        if own is not None:
            prove(opened, own, server)
        opened.connect(f"tcp://{HOST}:{port}")
        return opened
