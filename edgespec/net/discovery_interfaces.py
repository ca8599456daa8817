"""Interfaces: which of this machine's networks discovery uses, and which address is best.

A coordinator often has several addresses, some of which are useless to others: Docker's bridge and
a Jetson's USB port have the same address on every machine. Such interfaces are left out unless the
user names them, and an address that this machine has too is tried last.
"""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Interface, IPv6Address, IPv6Interface, ip_address
from pathlib import Path
from typing import Any

import psutil

from edgespec.config import LOOPBACK, Address
from edgespec.errors import ConfigError
from edgespec.net.sockets import is_link_local, number_of, own_address_towards

log = logging.getLogger(__name__)

EVERY_ADDRESS = "0.0.0.0"
EVERY_ADDRESS_6 = "::"

RESPONDER = Path("/run/avahi-daemon/socket")
"""There where the system answers for NAME.local, NAME being this machine's."""

_VIRTUAL = re.compile(
    "docker|br-|veth|virbr|vmnet|vboxnet|lxcbr|lxdbr|podman|cni|flannel|cali|l4tbr|dummy"
)
"""Names of bridges to containers, virtual machines and USB hosts begin with these."""


@dataclass(frozen=True)
class Interface:
    """A network interface that is up and can multicast."""

    name: str
    addresses: tuple[IPv4Interface | IPv6Interface, ...]  # without zones
    has_ipv6: bool

    @property
    def is_virtual(self) -> bool:
        """Whether it leads to containers or virtual machines, by its name."""
        return _VIRTUAL.match(self.name) is not None

    def __str__(self) -> str:
        numbers = [one.ip for one in self.addresses]
        known = [one for one in numbers if one.version == 4] or numbers
        return f"{self.name} ({', '.join(map(str, known))})"


def own_interfaces() -> list[Interface]:
    """Interfaces of this machine that are up, have an address and can multicast; no loopback. None
    where the kernel does not let them be read (gVisor, some emulations)."""
    try:
        stats, addresses = psutil.net_if_stats(), psutil.net_if_addrs()
    except OSError as problem:
        log.warning("the network's interfaces cannot be read (%s): give --coordinator", problem)
        return []
    return interfaces_from(stats, addresses)


def interfaces_from(
    stats: Mapping[str, Any], addresses: Mapping[str, Sequence[Any]]
) -> list[Interface]:
    """The same, from psutil's net_if_stats and net_if_addrs."""
    found = []
    for name, state in sorted(stats.items()):
        flags = set(state.flags.split(","))
        if not state.isup or "multicast" not in flags or flags & {"loopback", "pointopoint"}:
            continue
        here = addresses.get(name, [])
        numbers: list[IPv4Interface | IPv6Interface] = [
            *(
                IPv4Interface(f"{one.address}/{one.netmask or 32}")
                for one in here
                if one.family == socket.AF_INET
            ),
            *(_ipv6(one) for one in here if one.family == socket.AF_INET6),
        ]
        if numbers:
            ipv6 = any(one.version == 6 for one in numbers)
            found.append(Interface(name, tuple(numbers), ipv6))
    return found


def _ipv6(found: Any) -> IPv6Interface:
    bits = int(IPv6Address(found.netmask)).bit_count() if found.netmask else 128
    return IPv6Interface(f"{found.address.partition('%')[0]}/{bits}")


def to_look_on(interfaces: Iterable[Interface]) -> list[Interface]:
    """The interfaces to search on: all but the virtual ones."""
    return [one for one in interfaces if not one.is_virtual]


def listens_everywhere(host: str) -> bool:
    """Whether `host`, a number, means every interface."""
    return host in (EVERY_ADDRESS, EVERY_ADDRESS_6)


def to_announce_on(host: str, interfaces: Iterable[Interface]) -> list[Interface]:
    """The interfaces and addresses at which others reach a coordinator that listens on `host`.

    0.0.0.0: all but the virtual ones, at their IPv4 addresses; ::, at all addresses; any other
    number: the interface that has it, with that address alone; loopback: none.
    """
    if listens_everywhere(host):
        versions = (4,) if host == EVERY_ADDRESS else (4, 6)
        return _with_addresses(to_look_on(interfaces), lambda a: a.version in versions)
    number, _, zone = host.partition("%")
    at = [one for one in interfaces if zone in ("", one.name)]
    return _with_addresses(at, lambda a: a.ip == ip_address(number))


def reached_at(address: Address) -> list[str]:
    """HOST:PORT to which others connect for what listens at an address, best first.

    The address itself, or where it means every interface, those of this machine and its name in
    multicast DNS; loopback without a network.
    """
    host, port = number_of(address.host), address.port
    if not listens_everywhere(host):
        return [str(address)]
    numbers = [own.ip for one in to_announce_on(host, own_interfaces()) for own in one.addresses]
    # An IPv6 address of one link needs a zone, which is another one on each machine.
    usable = [one for one in numbers if one.version == 4 or not one.is_link_local]
    usable.sort(key=lambda one: (one.is_link_local, one.version))
    hosts = [*map(str, usable)] or [LOOPBACK]
    if usable and RESPONDER.exists():
        hosts.append(f"{socket.gethostname().partition('.')[0]}.local")
    return [str(Address(one, port)) for one in hosts]


def _with_addresses(
    interfaces: Iterable[Interface], takes: Callable[[IPv4Interface | IPv6Interface], bool]
) -> list[Interface]:
    """The interfaces that have such addresses, with these alone."""
    left = [replace(one, addresses=tuple(filter(takes, one.addresses))) for one in interfaces]
    return [one for one in left if one.addresses]


def best_first(addresses: Iterable[str], interfaces: Sequence[Interface]) -> tuple[str, ...]:
    """The addresses to which there is a route, best first.

    First those on a network of this machine, then those behind a router, IPv4 before IPv6 in both;
    then link-local ones, on every interface if they have no zone; last this machine's own, as all
    addresses of a coordinator on this machine are.
    """
    networks = [own.network for one in interfaces for own in one.addresses]
    ranked = []
    for address in dict.fromkeys(_with_every_zone(addresses, interfaces)):
        try:
            is_own = own_address_towards(Address(address, 9)) == address
        except ConfigError:
            continue  # no route
        number = ip_address(address)
        is_far = not any(number in net for net in networks if net.version == number.version)
        ranked.append((is_own, is_link_local(address), is_far, number.version, address))
    return tuple(address for *_, address in sorted(ranked, key=lambda one: one[:-1]))


def _with_every_zone(addresses: Iterable[str], interfaces: Sequence[Interface]) -> Iterator[str]:
    """Give a link-local address without a zone the zone of each interface."""
    for address in addresses:
        if is_link_local(address) and "%" not in address:
            yield from (f"{address}%{one.name}" for one in to_look_on(interfaces) if one.has_ipv6)
        else:
            yield address
