"""Sockets: what every ZeroMQ socket of a node needs: addresses, waiting messages, notes."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator

import zmq

from edgespec.config import Address
from edgespec.errors import AddressUnavailable

log = logging.getLogger(__name__)

NOTE_S = 1.0
"""A stranger who sends rubbish all day shall not fill the log: seconds between two notes."""

BATCH = 64
"""Messages taken from one socket before the others get their turn."""


def waiting(source: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
    """Up to BATCH messages that are already here."""
    for _ in range(BATCH):
        try:
            yield source.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return


class Dropped:
    """Messages that were dropped, with a note in the log at most every NOTE_S."""

    def __init__(self) -> None:
        self._unsaid = 0
        self._said = float("-inf")

    def note(self, reason: str) -> None:
        """One more was dropped."""
        now = time.monotonic()
        if now - self._said < NOTE_S:
            self._unsaid += 1
            return
        more = f" ({self._unsaid} more since the last note)" if self._unsaid else ""
        log.warning("dropped a message: %s%s", reason, more)
        self._said, self._unsaid = now, 0


def bind(opened: zmq.Socket[bytes], address: Address) -> int:
    """Bind and return the port."""
    host = number_of(address.host)  # ZeroMQ binds to numbers alone
    try:
        opened.bind(f"tcp://{host}:{address.port or '*'}")
    except zmq.ZMQError as problem:
        raise AddressUnavailable(
            f"cannot listen on {address} ({problem.strerror}); choose another --host or --port, or "
            "stop the program that uses it"
        ) from None
    endpoint = opened.getsockopt_string(zmq.LAST_ENDPOINT)
    return int(endpoint.rpartition(":")[2])


def connect(opened: zmq.Socket[bytes], address: Address) -> None:
    host = number_of(address.host)  # ZeroMQ would go on asking for an unknown name, silently
    try:
        opened.connect(Address(host, address.port).endpoint)
    except zmq.ZMQError as problem:
        raise AddressUnavailable(f"cannot connect to {address} ({problem.strerror})") from None


def number_of(host: str) -> str:
    """The IPv4 address of a host name."""
    try:
        return socket.gethostbyname(host)
    except (OSError, UnicodeError) as problem:
        cause = getattr(problem, "strerror", None) or problem
        raise AddressUnavailable(
            f"the host {host!r} is unknown ({cause}); check its name"
        ) from None


def own_address_towards(address: Address) -> str:
    """The address of this machine on the route to `address`, as a peer there would see it.

    Raises AddressUnavailable if the host is unknown or there is no route.
    """
    target = (number_of(address.host), address.port)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # a datagram socket sends nothing here, it only picks a route
            return str(probe.getsockname()[0])
    except OSError as problem:
        raise AddressUnavailable(
            f"there is no route to {address} ({problem.strerror or problem}); check --coordinator"
        ) from None
