"""Zones: by which interface this machine reaches a link-local IPv6 address.

`fe80::2` means another machine on each network, and only this machine knows its interfaces' names:
a node sends its address without a zone, and a node that connects to it adds its own.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from ipaddress import IPv6Address

import psutil

from edgespec.errors import AddressUnavailable

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
