"""Sockets: addresses, waiting messages and log notes, for every ZeroMQ socket of a node."""

from __future__ import annotations

import logging
import re
import select
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from ipaddress import IPv6Address
from typing import Any

import psutil
import zmq

from edgespec.config import Address
from edgespec.errors import AddressUnavailable, RemoteProtocolError
from edgespec.net.keys import short
from edgespec.wire.refusal import other_version, refusal

log = logging.getLogger(__name__)

NOTE_S = 1.0
"""Seconds between two notes: a stranger that keeps sending rubbish must not fill the log."""

AGAIN_S = 60.0
"""The same about the holder of one key, which connects again and again."""

MOST_TOLD = 256
"""Peers of other versions that are remembered."""

_EVENTS, _POLLIN, _NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)
"""As plain numbers: to reckon with zmq's own costs as much as the question."""

BATCH = 64
"""Messages read from one socket before the others are read."""


Content = bytes | memoryview


class Poller:
    """Waits until one of several sockets has something to read, ZeroMQ's or plain ones.

    zmq.Poller asks every socket for its events before and after it waits, and the system twice;
    this asks the system once, and afterwards only those that it woke for.
    """

    def __init__(self) -> None:
        self._poll = select.poll()
        self._sockets: dict[int, zmq.Socket[bytes]] = {}

    def register(self, source: zmq.Socket[bytes] | socket.socket) -> None:
        descriptor = source.fileno()
        self._poll.register(descriptor, select.POLLIN)
        if isinstance(source, zmq.Socket):
            self._sockets[descriptor] = source

    def unregister(self, source: zmq.Socket[bytes]) -> None:
        self._poll.unregister(source.fileno())
        del self._sockets[source.fileno()]

    def poll(self, timeout: float) -> set[object]:
        """ZeroMQ's sockets that have something, and the descriptors of plain ones; now and then
        none of them before `timeout` seconds are over."""
        # A ZeroMQ socket's descriptor tells of changes alone, and sending may have noticed one.
        ready: set[object] = {one for one in self._sockets.values() if has_more(one)}
        woken = self._poll.poll(0 if ready else max(0, round(1000 * timeout)))
        for descriptor, _ in woken:
            one = self._sockets.get(descriptor)
            if one is None:
                ready.add(descriptor)
            elif has_more(one):
                ready.add(one)
        return ready


def waiting(source: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
    """Up to BATCH messages that are already here."""
    for _ in range(BATCH):
        try:
            yield source.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        if not has_more(source):
            return


def proved(source: zmq.Socket[bytes]) -> Iterator[tuple[str, list[Content]]]:
    """The same of a socket that listens, each with the public key that its sender proved."""
    for _ in range(BATCH):
        try:
            frame = source.recv(_NOBLOCK, copy=False)
            contents: list[Content] = []
            while frame.more:
                contents.append(frame.bytes)
                frame = source.recv(copy=False)
        except zmq.Again:
            return
        # What may be long is not copied.
        contents.append(frame.buffer)
        yield _key_of(frame), contents
        if not has_more(source):
            return


def only(frames: Sequence[Content]) -> Content:
    """The one frame of a message. Raises RemoteProtocolError if there is another number of them."""
    if len(frames) != 1:
        raise RemoteProtocolError("malformed message: wrong number of frames")
    return frames[0]


def has_more(source: zmq.Socket[bytes]) -> bool:
    """Whether a message is here already; asking costs less than an exception."""
    return bool(int(source.getsockopt(_EVENTS)) & _POLLIN)


def _key_of(frame: zmq.Frame) -> str:
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""


class Dropped:
    """Counts dropped messages, with a note in the log at most every NOTE_S."""

    def __init__(self, what: str = "dropped a message") -> None:
        self._what = what
        self._unsaid = 0
        self._said = float("-inf")

    def note(self, reason: str) -> None:
        now = time.monotonic()
        if now - self._said < NOTE_S:
            self._unsaid += 1
            return
        more = f" ({self._unsaid} more since the last note)" if self._unsaid else ""
        log.warning("%s: %s%s", self._what, reason, more)
        self._said, self._unsaid = now, 0


class OtherVersions:
    """Refuses, on a socket that listens, peers that speak another version of the protocol."""

    def __init__(self, admits: Callable[[str], str]) -> None:
        """`admits`: as access.Admits; a key that counts no more is told nothing."""
        self._admits = admits
        self._told: dict[bytes | str, float] = {}  # when a peer was, and the log of a key

    def refuse(self, router: zmq.Socket[bytes], peer: bytes, key: str, frame: Content) -> bool:
        """Whether the frame is of another version; its sender is told so, at most every NOTE_S, and
        the log, once a minute."""
        problem = other_version(frame)
        if problem is None:
            return False
        if not self._is_due(peer, NOTE_S) or self._admits(key):
            return True
        if self._is_due(key, AGAIN_S):
            log.warning("refused a message: the sender has the key %s, and %s", short(key), problem)
        if problem.version:
            with suppress(zmq.ZMQError):  # it is gone, or does not read
                router.send_multipart([peer, refusal(problem.version)], zmq.NOBLOCK)
        return True

    def _is_due(self, who: bytes | str, pause: float) -> bool:
        now = time.monotonic()
        if now - self._told.get(who, float("-inf")) < pause:
            return False
        if len(self._told) >= MOST_TOLD:
            self._told.clear()
        self._told[who] = now
        return True


def unavailable(address: Address, why: str) -> AddressUnavailable:
    """A coordinator cannot listen there."""
    return AddressUnavailable(
        f"cannot listen on {address} ({why}); choose another --host or --port, or stop the program "
        "that uses it"
    )


def bind(opened: zmq.Socket[bytes], address: Address) -> int:
    """Bind and return the port. `::` takes IPv4 too, `0.0.0.0` IPv4 alone."""
    host = number_of(address.host)  # ZeroMQ binds to numbers alone
    opened.setsockopt(zmq.IPV6, ":" in host)
    try:
        opened.bind(f"{Address(host, 0).endpoint.removesuffix('0')}{address.port or '*'}")
    except zmq.ZMQError as problem:
        raise unavailable(address, problem.strerror) from None
    endpoint = opened.getsockopt_string(zmq.LAST_ENDPOINT)
    return int(endpoint.rpartition(":")[2])


def connect(opened: zmq.Socket[bytes], address: Address) -> None:
    host = number_of(address.host)  # ZeroMQ would look up an unknown name again and again
    opened.setsockopt(zmq.IPV6, ":" in host)
    try:
        opened.connect(Address(host, address.port).endpoint)
    except zmq.ZMQError as problem:
        raise AddressUnavailable(f"cannot connect to {address} ({problem.strerror})") from None


def number_of(host: str) -> str:
    """The address of a host name: IPv4 if it has one, or else IPv6, with a zone if link-local.

    Raises AddressUnavailable for an unknown name, and for a link-local number without its zone.
    """
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            places = socket.getaddrinfo(host, None, family, socket.SOCK_STREAM)
        except (OSError, UnicodeError) as problem:
            cause = getattr(problem, "strerror", None) or problem
            continue
        number = _number(places[0][4])
        if is_link_local(number) and "%" not in number:
            raise AddressUnavailable(
                f"{host} is an address on one network only; say by which interface: {number}%eth0"
            )
        return number
    raise AddressUnavailable(f"the host {host!r} is unknown ({cause}); check its name")


def _number(place: tuple[Any, ...]) -> str:
    """The host of a socket's address, which has the zone's index as its fourth part."""
    host = str(place[0]).partition("%")[0]
    if len(place) < 4 or not place[3] or not is_link_local(host):
        return host
    return f"{host}%{socket.if_indextoname(place[3])}"


def own_address_towards(address: Address) -> str:
    """The address of this machine on the route to `address`, as a peer there would see it."""
    target = number_of(address.host)
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # A datagram socket sends nothing here, it only picks a route.
            probe.connect(socket.getaddrinfo(target, address.port, family)[0][4])
            return _number(probe.getsockname())
    except OSError as problem:
        raise AddressUnavailable(
            f"there is no route to {address} ({problem.strerror or problem}); check --coordinator"
        ) from None


# --- zones of link-local addresses --------------------------------------------------------------

# `fe80::2` means another machine on each network, and only this machine knows its interfaces'
# names: a node sends its address without a zone, and a node that connects to it adds its own.

_INTERFACE = re.compile(r"\bdev (\S+)")
_UNUSABLE = ("INCOMPLETE", "FAILED")  # no machine answered there
_WAIT_S = 1.0


def is_link_local(host: str) -> bool:
    try:
        return IPv6Address(host).is_link_local
    except ValueError:
        return False


def without_zone(host: str) -> str:
    """An address of this machine as other nodes get it."""
    return host.partition("%")[0]


def with_zone(host: str, coordinator: str = "") -> str:
    """Another node's address, so that this machine can connect to it.

    A link-local one gets the interface on which this machine knows that neighbour, or else the one
    of the `coordinator`, a link-local address with its zone. Raises AddressUnavailable if neither
    is known.
    """
    if not is_link_local(host) or "%" in host:
        return host
    _, _, usual = coordinator.partition("%")
    known = [*_own(host), *_neighbours(host)]
    zone = usual if usual in known or not known else known[0]
    if not zone:
        raise AddressUnavailable(
            f"{host} is an address on one network only, and on no network of this machine a "
            "neighbour has it; let all nodes reach the coordinator by IPv4, or by an IPv6 address "
            "that is not link-local"
        )
    return f"{host}%{zone}"


def _own(host: str) -> Iterator[str]:
    """Interfaces of this machine that have the address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == f"{host}%{name}" for address in addresses):
            yield name


def _neighbours(host: str) -> list[str]:
    """Interfaces on which the kernel knows this neighbour, as it does while a connection lasts."""
    try:
        done = subprocess.run(
            ["ip", "-6", "neighbour", "show", "to", host],
            capture_output=True,
            text=True,
            timeout=_WAIT_S,
        )
    except (OSError, subprocess.TimeoutExpired):  # there is no such program, or none is let
        return []
    known = (line for line in done.stdout.splitlines() if not line.endswith(_UNUSABLE))
    return [found[1] for line in known if (found := _INTERFACE.search(line))]
