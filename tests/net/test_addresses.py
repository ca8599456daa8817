"""Addresses: names, IPv4 and IPv6 numbers, link-local ones, and sockets that use them."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import zmq
from support.namespaces import lan

from edgespec.config import Address
from edgespec.errors import AddressUnavailable
from edgespec.net import sockets
from edgespec.net.sockets import (
    bind,
    connect,
    is_link_local,
    number_of,
    own_address_towards,
    with_zone,
    without_zone,
)

STREAM = socket.SOCK_STREAM


def named(
    monkeypatch: pytest.MonkeyPatch, *places: tuple[socket.AddressFamily, tuple[object, ...]]
) -> None:
    """Let every name have these addresses."""

    def found(_: str, port: object, family: int, *__: object) -> list[tuple[object, ...]]:
        known = [(one, STREAM, 6, "", place) for one, place in places if one == family]
        if not known:
            raise socket.gaierror(-5, "No address associated with hostname")
        return known

    monkeypatch.setattr(socket, "getaddrinfo", found)


def test_a_name_with_both_is_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    both = (socket.AF_INET6, ("fd00::1", 0, 0, 0)), (socket.AF_INET, ("10.0.0.1", 0))
    named(monkeypatch, *both)
    assert number_of("board") == "10.0.0.1"


def test_a_name_with_ipv6_alone_is_that_with_its_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    index = socket.if_nametoindex("lo")
    named(monkeypatch, (socket.AF_INET6, ("fd00::1", 0, 0, 0)))
    assert number_of("board") == "fd00::1"
    named(monkeypatch, (socket.AF_INET6, ("fe80::1", 0, 0, index)))
    assert number_of("board.local") == "fe80::1%lo"


@pytest.mark.parametrize(
    ("host", "number"), [("::1", "::1"), ("0:0::1", "::1"), ("10.0.0.1", "10.0.0.1")]
)
def test_a_number_is_itself(host: str, number: str) -> None:
    assert number_of(host) == number


def test_a_link_local_number_needs_its_interface() -> None:
    with pytest.raises(AddressUnavailable, match=r"say by which interface: fe80::1%eth0"):
        number_of("fe80::1")
    with pytest.raises(AddressUnavailable, match=r"'fe80::1%nosuch' is unknown"):
        number_of("fe80::1%nosuch")


def test_only_link_local_ipv6_numbers_are_link_local() -> None:
    assert is_link_local("fe80::1")
    assert is_link_local("fe80::1%eth0")
    for other in ("169.254.0.1", "fd00::1", "::1", "board", ""):
        assert not is_link_local(other)


def test_a_zone_is_told_to_nobody() -> None:
    assert without_zone("fe80::1%eth0") == "fe80::1"
    assert without_zone("10.0.0.1") == "10.0.0.1"


@pytest.mark.parametrize(
    ("own", "met", "coordinator", "full"),
    [
        ({}, [], "fe80::9%eth0", "fe80::1%eth0"),
        ({}, ["eth1"], "", "fe80::1%eth1"),
        ({}, ["eth1"], "fe80::9%eth0", "fe80::1%eth1"),  # not where the coordinator is
        ({}, ["eth1", "eth0"], "fe80::9%eth0", "fe80::1%eth0"),
        ({}, ["eth1", "eth0"], "10.0.0.1", "fe80::1%eth1"),
        ({"eth2": "fe80::1%eth2", "eth3": "fe80::1"}, [], "", "fe80::1%eth2"),  # its own
    ],
)
def test_a_neighbour_is_reached_by_the_interface_where_it_was_met(
    monkeypatch: pytest.MonkeyPatch,
    own: dict[str, str],
    met: list[str],
    coordinator: str,
    full: str,
) -> None:
    numbers = {name: [SimpleNamespace(address=address)] for name, address in own.items()}
    monkeypatch.setattr(sockets.psutil, "net_if_addrs", lambda: numbers)
    monkeypatch.setattr(sockets, "_neighbours", lambda _: met)
    assert with_zone("fe80::1", coordinator) == full


def test_other_addresses_need_no_interface() -> None:
    for host in ("10.0.0.1", "fd00::1", "fe80::1%eth0", "board"):
        assert with_zone(host) == host


def test_a_neighbour_that_nobody_has_met_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(AddressUnavailable, match="let all nodes reach the coordinator by IPv4"):
        with_zone("fe80::1234:5678", "10.0.0.1")


def test_a_kernel_that_tells_no_neighbours_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(sockets.subprocess, "run", refused)
    assert with_zone("fe80::1234:5678", "fe80::9%eth0") == "fe80::1234:5678%eth0"


# --- sockets ------------------------------------------------------------------------------------


@contextmanager
def pair(listen: Address, host: str) -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """A PULL that listens, and a PUSH that is connected to its port at `host`."""
    context = zmq.Context()
    context.linger = 0
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    try:
        port = bind(pull, listen)
        connect(push, Address(host, port))
        yield pull, push
    finally:
        pull.close()
        push.close()
        context.term()


@pytest.mark.parametrize(
    ("listen", "host"),
    [
        ("::1", "::1"),
        ("::", "::1"),
        ("::", "127.0.0.1"),
        ("::", "localhost"),
        ("0.0.0.0", "127.0.0.1"),
    ],
)
def test_sockets_meet_over_both(listen: str, host: str) -> None:
    with pair(Address(listen, 0), host) as (pull, push):
        push.send(b"x")
        assert pull.poll(60_000)
        assert pull.recv() == b"x"


def test_ipv4_stays_ipv4_where_only_that_is_listened_on() -> None:
    with pair(Address("0.0.0.0", 0), "::1") as (pull, push):
        push.send(b"x")
        assert not pull.poll(300)
        assert not pull.getsockopt(zmq.IPV6)


def test_ones_own_address_towards_loopback_is_loopback() -> None:
    assert own_address_towards(Address("::1", 7430)) == "::1"


def test_without_a_route_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_route(*_: object) -> None:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(sockets.socket.socket, "connect", no_route)
    with pytest.raises(AddressUnavailable, match=r"no route to \[2001:db8::1\]:7430"):
        own_address_towards(Address("2001:db8::1", 7430))


# --- on a LAN -----------------------------------------------------------------------------------

PULL = (
    "import sys, zmq; from edgespec.config import Address; from edgespec.net.sockets import bind\n"
    "pull = zmq.Context().socket(zmq.PULL); bind(pull, Address(sys.argv[1], 7777))\n"
    "print('listening', flush=True); print(pull.recv().decode(), flush=True)\n"
)
PUSH = (
    "import sys, zmq; from edgespec.config import Address\n"
    "from edgespec.net.sockets import connect, own_address_towards\n"
    "context = zmq.Context(); push = context.socket(zmq.PUSH)\n"
    "there = Address(sys.argv[1], 7777); connect(push, there)\n"
    "push.send(own_address_towards(there).encode()); push.close(); context.term()\n"
)
ZONE = (
    "import socket, sys; from edgespec.net.sockets import with_zone\n"
    "with socket.create_connection((sys.argv[1] + '%eth0', 7777)): print(with_zone(sys.argv[1]))\n"
)


@pytest.mark.parametrize("listen", ["::", "fe80::1%eth0"])
def test_link_local_addresses_carry_messages(listen: str) -> None:
    with lan("d0", "v1") as (d0, v1):
        v1.add_interface("wlan0")
        with (
            d0.program(sys.executable, "-c", PULL, listen) as pull,
            v1.program(sys.executable, "-c", PUSH, f"{d0.link_local}%eth0") as push,
        ):
            assert push.done().code == 0, push.err
            assert pull.done().out == f"listening\n{v1.link_local}%eth0\n"


def test_a_neighbour_is_known_by_its_connection() -> None:
    with lan("d0", "v1") as (d0, v1):
        for name in ("aaa0", "wlan0"):
            v1.add_interface(name)
        with d0.program(sys.executable, "-c", PULL, "::") as pull:
            pull.until_out("listening")
            with v1.program(sys.executable, "-c", ZONE, d0.link_local) as asking:
                assert asking.done().out == f"{d0.link_local}%eth0\n", asking.err
