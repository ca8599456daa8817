"""Zones: by which interface this machine reaches a link-local IPv6 address.

`fe80::2` means another machine on each network, and only this machine knows its interfaces' names:
a node sends its address without a zone, and a node that connects to it adds its own.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from ipaddress import IPv6Address

import psutil

from edgespec.errors import AddressUnavailable

_MESSAGE = struct.Struct("=IHHII")  # length, type, flags, number, port (netlink(7))
_NEIGHBOUR = struct.Struct("=BxxxiHBB")  # family, interface, state, flags, type (rtnetlink(7))
_ATTRIBUTE = struct.Struct("=HH")
_DONE, _ERROR, _NEW_NEIGHBOUR, _GET_NEIGHBOURS = 3, 2, 28, 30
_REQUEST_ALL = 0x301
_DESTINATION = 1
_UNUSABLE = 0x21  # incomplete, failed: no machine answered there
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
    known = [*_own(host), *_neighbours(IPv6Address(host))]
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


def _neighbours(address: IPv6Address) -> list[str]:
    """Interfaces on which the kernel knows this neighbour, as it does while a connection lasts."""
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
            kernel.settimeout(_WAIT_S)
            ask = _NEIGHBOUR.pack(socket.AF_INET6, 0, 0, 0, 0)
            size = _MESSAGE.size + len(ask)
            kernel.send(_MESSAGE.pack(size, _GET_NEIGHBOURS, _REQUEST_ALL, 1, 0) + ask)
            return [
                socket.if_indextoname(interface)
                for interface, state, found in _answers(kernel)
                if found == address.packed and not state & _UNUSABLE
            ]
    except OSError:  # the kernel or a sandbox refuses, or an interface has just gone
        return []


def _answers(kernel: socket.socket) -> Iterator[tuple[int, int, bytes]]:
    """(interface's index, state, address) of each neighbour."""
    while True:
        data = kernel.recv(1 << 16)
        while data:
            size, kind, *_ = _MESSAGE.unpack_from(data)
            if kind in (_DONE, _ERROR):
                return
            if kind == _NEW_NEIGHBOUR:
                _, interface, state, *_ = _NEIGHBOUR.unpack_from(data, _MESSAGE.size)
                rest = data[_MESSAGE.size + _NEIGHBOUR.size : size]
                yield interface, state, _attribute(rest, _DESTINATION)
            data = data[_aligned(size) :]


def _attribute(data: bytes, wanted: int) -> bytes:
    while len(data) >= _ATTRIBUTE.size:
        size, kind = _ATTRIBUTE.unpack_from(data)
        if kind == wanted:
            return data[_ATTRIBUTE.size : size]
        data = data[max(_aligned(size), _ATTRIBUTE.size) :]
    return b""


def _aligned(size: int) -> int:
    return (size + 3) & ~3
