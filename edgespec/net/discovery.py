"""Discovery: coordinators announce themselves on the local network, others find them there.

Multicast DNS (RFC 6762) and DNS-SD (RFC 6763), by the zeroconf library. What is found is only a
hint, as anyone on the network can announce anything: names and texts are cut to what may be shown,
and addresses to valid ones.
"""

from __future__ import annotations

import logging
import queue
import re
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING

from edgespec.config import Address
from edgespec.errors import AddressUnavailable
from edgespec.net.control import Seen, look
from edgespec.net.discovery_interfaces import Interface, best_first, own_interfaces, to_look_on
from edgespec.net.keys import Identity
from edgespec.net.sockets import is_link_local
from edgespec.wire.codec import VERSION

if TYPE_CHECKING:
    from zeroconf import ServiceInfo, Zeroconf

log = logging.getLogger(__name__)

SERVICE = "_edgespec._tcp.local."

SETTLE_S = 1.0
"""Seconds to hear of others after the first coordinator: the fastest is not the only choice."""

ROUND_S = 4.0
"""Seconds after which the question is asked again, on the interfaces that are up by then."""

_RESOLVE_S = 1.5
_PAUSE_S = 0.2
_MOST_FOUND = 16
_MOST_SAID = 16
_MOST_ADDRESSES = 8
_NAME_CHARS = 63
_MODEL_CHARS = 64
_CLUSTER = re.compile("[0-9a-f]{12}")


@dataclass(frozen=True)
class Found:
    """A coordinator that announces itself. Nothing of it is verified."""

    name: str
    addresses: tuple[str, ...]  # best first
    port: int
    version: str = ""
    model: str = ""
    stages: str = ""
    cluster: str = ""

    @property
    def description(self) -> str:
        """Its name and what it claims to run, for users."""
        count = f"{self.stages} stage{'' if self.stages == '1' else 's'}" if self.stages else ""
        old = "" if self.version == str(VERSION) else "another version of edgespec"
        said = ", ".join(filter(None, (self.model, count, old)))
        return f"{self.name} ({said})" if said else self.name

    def reachable(self, identity: Identity) -> Address | None:
        """The best of its addresses that takes a connection, and has no other key; None if none
        does."""
        for host in self.addresses:
            address = Address(host, self.port)
            with suppress(AddressUnavailable):  # its interface is just going
                if look(address, identity) not in (Seen.NOTHING, Seen.OTHER):
                    return address
        return None


class Announcement:
    """A coordinator's announcement, from when it is made until `close`."""

    def __init__(
        self, interfaces: Sequence[Interface], port: int, properties: Mapping[str, str]
    ) -> None:
        """Announce the TCP port on these interfaces and at their addresses. Takes some 2 seconds.

        Raises OSError if the network does not let it.
        """
        from zeroconf import Error, ServiceInfo

        host = _shown(socket.gethostname().partition(".")[0], 40) or "edgespec"
        addresses = [str(own.ip) for one in interfaces for own in one.addresses]
        info = ServiceInfo(
            SERVICE,
            f"{host}.{SERVICE}",
            port,
            properties={name: value[:_MODEL_CHARS] for name, value in properties.items()},
            # Boards copied from one card have the same host name; this name is unique.
            server=f"edgespec-{secrets.token_hex(8)}.local.",
            parsed_addresses=addresses,
        )
        self._zeroconf = _opened(interfaces)
        try:
            self._zeroconf.register_service(info, allow_name_change=True)
        except Error as problem:
            self._zeroconf.close()
            raise OSError(f"{type(problem).__name__} {problem}".strip()) from None
        self.name = info.name.removesuffix(f".{SERVICE}")

    def close(self) -> None:
        self._zeroconf.close()


def find_coordinators(timeout: float) -> list[Found]:
    """The coordinators on the local network, by name; empty if none is heard for `timeout` seconds.

    Returns SETTLE_S after the first one. Interfaces that come up meanwhile are used too.
    """
    deadline = time.monotonic() + timeout
    said = ""
    while (left := deadline - time.monotonic()) > 0.0:
        interfaces = own_interfaces()
        try:
            found = browse(interfaces, min(left, ROUND_S), SETTLE_S)
        except OSError as problem:  # an interface is just going, or UDP port 5353 is not to be had
            found = []
            if said != str(problem):
                said = str(problem)
                log.warning("cannot look for a coordinator just now: %s", problem)
        if found:
            return sorted(found, key=lambda one: (one.name, one.addresses, one.port))
        time.sleep(min(_PAUSE_S, max(0.0, deadline - time.monotonic())))
    return []


def browse(interfaces: Sequence[Interface], timeout: float, settle: float) -> list[Found]:
    """One question on these interfaces, and what is answered within `timeout` seconds, or within
    `settle` after the first answer.

    Raises OSError if multicast DNS is not to be had here.
    """
    from zeroconf import ServiceBrowser

    usable = to_look_on(interfaces)
    if not usable:
        return []
    names: queue.SimpleQueue[str] = queue.SimpleQueue()

    def on_change(name: str, **_: object) -> None:
        names.put(name)

    found: dict[str, Found] = {}
    unclear: list[str] = []
    end = time.monotonic() + timeout
    zeroconf = _opened(usable)
    browser = ServiceBrowser(zeroconf, SERVICE, handlers=[on_change])
    try:
        while (left := end - time.monotonic()) > 0.0 and len(found) < _MOST_FOUND:
            try:
                name, patience = names.get(timeout=min(left, _PAUSE_S)), 0.0
            except queue.Empty:  # resolve those whose details did not come along
                if not unclear:
                    continue
                name, patience = unclear.pop(), min(left, _RESOLVE_S)
            info = _resolved(zeroconf, name, patience)
            one = _found(name, info, interfaces)
            if one is not None:
                end = end if found else time.monotonic() + settle
                found[name] = one
            elif found.pop(name, None) is None and info is None and not patience:
                unclear.append(name)
    finally:
        browser.cancel()
        zeroconf.close()
    return list(found.values())


def found_from(
    name: str,
    port: int | None,
    addresses: Sequence[str],
    properties: Mapping[bytes, bytes | None],
    interfaces: Sequence[Interface],
) -> Found | None:
    """The usable parts of an announcement; None if there is no way to connect."""
    possible = best_first(filter(_is_host, addresses[:_MOST_SAID]), interfaces)
    if not possible or port is None or not 0 < port < 65536:
        return None

    def text(key: bytes, most: int) -> str:
        return _shown((properties.get(key) or b"").decode("utf-8", "replace"), most)

    cluster = text(b"cluster", _MODEL_CHARS)
    return Found(
        _shown(name.removesuffix(f".{SERVICE}"), _NAME_CHARS) or "unnamed",
        possible[:_MOST_ADDRESSES],
        port,
        text(b"version", 8),
        text(b"model", _MODEL_CHARS),
        text(b"stages", 4),
        cluster if _CLUSTER.fullmatch(cluster) else "",
    )


def _found(name: str, info: ServiceInfo | None, interfaces: Sequence[Interface]) -> Found | None:
    if info is None:
        return None
    addresses = sorted(map(_with_named_zone, info.parsed_scoped_addresses()), key=is_link_local)
    return found_from(name, info.port, addresses, info.properties, interfaces)


def _with_named_zone(address: str) -> str:
    """Replace the interface's index by its name; drop it if the interface is gone."""
    number, _, index = address.partition("%")
    try:
        return f"{number}%{socket.if_indextoname(int(index))}"
    except (ValueError, OSError):
        return number


def _resolved(zeroconf: Zeroconf, name: str, patience: float) -> ServiceInfo | None:
    """The details of an announced name; with patience (seconds), also by asking for them."""
    from zeroconf import Error, ServiceInfo

    try:
        info = ServiceInfo(SERVICE, name)
        if info.load_from_cache(zeroconf):
            return info
        return info if patience and info.request(zeroconf, patience * 1000) else None
    except Error:  # no name at all
        return None


def _opened(interfaces: Sequence[Interface]) -> Zeroconf:
    """Multicast DNS on these interfaces, over IPv4 and IPv6. Raises OSError if not possible."""
    from zeroconf import Zeroconf

    # Users need no log of malformed packets, and errors here are reported by this program.
    logging.getLogger("zeroconf").setLevel(logging.CRITICAL)
    places: list[str | int | tuple[tuple[str, int, int], int]] = []
    for one in interfaces:
        places += [str(own.ip) for own in one.addresses if own.version == 4]
        if one.has_ipv6:
            places.append(socket.if_nametoindex(one.name))
    try:
        return Zeroconf(places)
    except RuntimeError as problem:  # an interface went away meanwhile
        raise OSError(str(problem)) from None


def _is_host(address: str) -> bool:
    """Whether another machine may have this address."""
    try:
        number = ip_address(address)
    except ValueError:
        return False
    return not (
        number.is_loopback or number.is_multicast or number.is_unspecified or number.is_reserved
    )


def _shown(text: str, most: int) -> str:
    """An untrusted text, fit for a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text[:most]).strip()
