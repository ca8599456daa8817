"""Interfaces: which of this machine's networks discovery uses, and which address is best to take.

A coordinator often has several addresses, and some of them lead nowhere for others: Docker's bridge
and a Jetson's USB port have the same address on every machine. Such interfaces are left out where
the user named none, and an address that is also one's own is the last to be tried.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface
from typing import Any

import psutil

from edgespec.config import Address
from edgespec.errors import ConfigError
from edgespec.net.sockets import own_address_towards

EVERY_ADDRESS = "0.0.0.0"

_VIRTUAL = (
    "docker",
    "br-",
    "veth",
    "virbr",
    "vmnet",
    "vboxnet",
    "lxcbr",
    "lxdbr",
    "podman",
    "cni",
    "flannel",
    "cali",
    "l4tbr",
    "dummy",
)
"""Names of bridges to containers, virtual machines and USB hosts begin with these."""


@dataclass(frozen=True)
class Interface:
    """A network interface that is up and can multicast."""

    name: str
    addresses: tuple[IPv4Interface, ...]
    has_ipv6: bool

    @property
    def is_virtual(self) -> bool:
        """Whether it leads to containers or virtual machines, by its name."""
        return self.name.startswith(_VIRTUAL)

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(str(one.ip) for one in self.addresses)})"


def own_interfaces() -> list[Interface]:
    """Interfaces of this machine that are up, have IPv4 and can multicast; no loopback."""
    return interfaces_from(psutil.net_if_stats(), psutil.net_if_addrs())


def interfaces_from(
    stats: Mapping[str, Any], addresses: Mapping[str, Sequence[Any]]
) -> list[Interface]:
    """The same, from what psutil's net_if_stats and net_if_addrs say."""
    found = []
    for name, state in sorted(stats.items()):
        flags = set(state.flags.split(","))
        if not state.isup or "multicast" not in flags or flags & {"loopback", "pointopoint"}:
            continue
        here = addresses.get(name, [])
        numbers = tuple(
            IPv4Interface(f"{one.address}/{one.netmask or 32}")
            for one in here
            if one.family == socket.AF_INET
        )
        if numbers:
            ipv6 = any(one.family == socket.AF_INET6 for one in here)
            found.append(Interface(name, numbers, ipv6))
    return found


def to_look_on(interfaces: Iterable[Interface]) -> list[Interface]:
    """Where others are looked for: on all but the virtual ones."""
    return [one for one in interfaces if not one.is_virtual]


def to_announce_on(host: str, interfaces: Iterable[Interface]) -> list[Interface]:
    """Where a coordinator that listens on `host`, an IPv4 address, can be reached by others.

    0.0.0.0: all but the virtual ones; any other address: the interface that has it, with that
    address alone; loopback: none.
    """
    if host == EVERY_ADDRESS:
        return to_look_on(interfaces)
    listening = IPv4Address(host)
    return [
        Interface(one.name, tuple(a for a in one.addresses if a.ip == listening), one.has_ipv6)
        for one in interfaces
        if any(a.ip == listening for a in one.addresses)
    ]


def best_first(addresses: Iterable[str], interfaces: Sequence[Interface]) -> tuple[str, ...]:
    """The addresses to which there is a route, best first.

    First those on a network that this machine is on, then those behind a router, and those that
    are this machine's own last: if the coordinator is here, all of its addresses are.
    """
    networks = [own.network for one in interfaces for own in one.addresses]
    ranked = []
    for address in dict.fromkeys(addresses):
        try:
            is_own = own_address_towards(Address(address, 9)) == address
        except ConfigError:
            continue  # no route
        is_near = any(IPv4Address(address) in network for network in networks)
        ranked.append((is_own, not is_near, address))
    return tuple(address for *_, address in sorted(ranked, key=lambda one: one[:2]))
