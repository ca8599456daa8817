"""Checks a device's surroundings: its clock, its cluster, and the way to the coordinator.

No check takes more than a few seconds, or needs special rights.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple, TypeVar

from edgespec.config import Address
from edgespec.daemon.cluster import ClusterFolder
from edgespec.daemon.device import ROOT, interface_of, interface_speed
from edgespec.daemon.doctor import BLOCKED, OK, WARNING, Finding, guarded
from edgespec.daemon.timing import round_trips
from edgespec.errors import AccessRefused, ConfigError, EdgespecError, OtherVersion
from edgespec.net.control import takes_connections
from edgespec.net.discovery import Found, browse
from edgespec.net.discovery_interfaces import own_interfaces, to_look_on
from edgespec.net.slowness import slowness
from edgespec.net.sockets import number_of, own_address_towards

HEAR_S = 2.0
"""Seconds to listen for coordinators."""

CONNECT_S = 3.0
ANSWER_S = 4.0
"""Seconds for a connection, and for an answer to it: five handshakes may fail, within half a
second, before a coordinator is called a stranger."""

TRIPS_S = 2.0
SPARE_S = 2.0
"""Seconds that a leg may take beyond its own limit before it is left to itself."""

TRIPS = 20
_LEAST_SPEED = 100e6  # bits a second
MOST_TRIP_S = 0.02
_EDGESPEC_BEGAN = datetime(2025, 1, 1, tzinfo=timezone.utc).timestamp()
_DAY_S = 86400.0
_MOST_ADDRESSES = 2  # each may cost CONNECT_S
_CHECK = (
    "; is that machine on and in this network, does its firewall let this TCP port in, and does "
    "`edgespec serve` listen on more than loopback there?"
)
_UNSYNCHRONISED = 5  # adjtimex(2): TIME_ERROR

Result = TypeVar("Result")


class _Route(NamedTuple):
    """An address where the coordinator may be, and how it is known."""

    address: Address
    source: str


def examine_network(
    cluster: Path, told: Address | None = None, root: Path = ROOT
) -> Iterator[Finding]:
    """`cluster`: the folder, which need not exist; `told`: the coordinator's address as given."""
    yield from guarded("clock", lambda: [check_clock([Path(__file__), cluster])])
    folder, finding = _cluster(cluster)
    yield finding
    heard: list[Found] = []
    yield from guarded("mDNS", lambda: _heard_by(folder, heard))
    way: list[_Route] = []
    yield from guarded("coordinator", lambda: _found_by(folder, told, heard, way))
    if way and folder is not None:
        yield from guarded("access", lambda: _access(way[0].address, folder, root))


def _heard_by(folder: ClusterFolder | None, heard: list[Found]) -> Iterator[Finding]:
    """Adds who is announced to `heard`."""
    finding, found = _multicast(folder)
    heard += found
    yield finding


def _found_by(
    folder: ClusterFolder | None, told: Address | None, heard: list[Found], way: list[_Route]
) -> Iterator[Finding]:
    """Adds the way to the coordinator, if there is one, to `way`."""
    found, finding = _coordinator(folder, told, heard)
    if found is not None:
        way.append(found)
    yield finding


# --- this machine -------------------------------------------------------------------------------


def check_clock(witnesses: Sequence[Path]) -> Finding:
    """Whether the time of day can be right: it may not be before these files were written.

    Only a warning: nodes do not compare their times.
    """
    now = time.time()
    there = [path for path in witnesses if os.path.exists(path)]  # Path.exists minds permissions
    least = max([_EDGESPEC_BEGAN, *(path.stat().st_mtime - _DAY_S for path in there)])
    said = f"{datetime.fromtimestamp(max(now, 0.0), timezone.utc):%Y-%m-%d %H:%M} UTC"
    if now < least:
        text = (
            f"it says {said}, which is in the past: downloads will fail, and on the coordinator "
            "tokens expire at the wrong time; sudo timedatectl set-ntp true, or without internet "
            "sudo date --set='YYYY-MM-DD HH:MM' after every start"
        )
        return Finding("clock", WARNING, text)
    synchronised = is_synchronised()
    if synchronised is None:
        return Finding("clock", OK, f"{said}; whether it is synchronised cannot be told here")
    if synchronised:
        return Finding("clock", OK, f"{said}, synchronised")
    text = (
        f"{said}, but not synchronised: if it is wrong, downloads fail, and on the coordinator "
        "tokens expire at the wrong time; sudo timedatectl set-ntp true (it takes internet)"
    )
    return Finding("clock", WARNING, text)


def is_synchronised() -> bool | None:
    """State of the kernel's clock; None if unknown."""
    request = ctypes.create_string_buffer(512)  # struct timex, modes 0: to be asked takes no rights
    try:
        state = ctypes.CDLL(None).adjtimex(request)
    except (AttributeError, OSError):
        return None
    return None if state < 0 else state != _UNSYNCHRONISED


def _cluster(path: Path) -> tuple[ClusterFolder | None, Finding]:
    try:
        folder = ClusterFolder.open(path)
        known = _known(folder)
    except (ConfigError, OSError) as problem:
        if not isinstance(problem, AccessRefused) or not _is_unused(path):
            return None, Finding("cluster", BLOCKED, str(problem))
        text = (
            f"none yet in {path}: on the coordinator `edgespec init --model ...` makes one, on "
            "a device `edgespec join TOKEN` enters one"
        )
        return None, Finding("cluster", OK, text)
    who = "its coordinator" if folder.is_coordinator else f"called {folder.name} there"
    where = f", the coordinator is expected at {known}" if known else ""
    text = f"{folder.cluster_id} ({path}): this machine is {who}{where}"
    return folder, Finding("cluster", OK, text)


def _is_unused(path: Path) -> bool:
    """Whether the folder holds no cluster, as far as we may read it."""
    if not os.path.lexists(path):
        return True
    kept = (path / "cluster.key", path / "membership.json")
    return os.access(path, os.R_OK | os.X_OK) and not any(map(os.path.lexists, kept))


def _known(folder: ClusterFolder) -> Address | None:
    """The stored address of the coordinator; None if there is none."""
    if folder.is_coordinator and folder.settings.port == 0:
        return None
    return Address.parse(folder.address) if folder.address else None


# --- the network --------------------------------------------------------------------------------


def _multicast(folder: ClusterFolder | None) -> tuple[Finding, list[Found]]:
    interfaces = own_interfaces()
    usable = to_look_on(interfaces)
    if not usable:
        text = (
            "no network is up here, so that others cannot be found; plug in a cable, or join a "
            "Wi-Fi (a ring on this machine alone needs none)"
        )
        return Finding("mDNS", WARNING, text), []
    where = ", ".join(map(str, usable))
    try:
        heard = within(HEAR_S, lambda: browse(interfaces, HEAR_S, HEAR_S / 2))
    except OSError as problem:
        text = (
            f"UDP port 5353 is not to be had on {where} ({problem}): does a program keep it for "
            "itself? Until then give --coordinator HOST[:PORT]"
        )
        return Finding("mDNS", WARNING, text), []
    if heard is None:
        return Finding("mDNS", WARNING, f"no end of asking on {where}; give --coordinator"), []
    return Finding("mDNS", OK, f"asked on {where}; {_who_was_heard(heard, folder)}"), heard


def _who_was_heard(heard: Sequence[Found], folder: ClusterFolder | None) -> str:
    ours, others = _sorted_out(heard, folder)
    said = [f"our coordinator {_described(one)} was heard" for one in ours]
    whose = " of another cluster" if folder else ""
    said += [f"{_described(one)}{whose} was heard" for one in others]
    return "; ".join(said) or "no coordinator was heard"


def _described(one: Found) -> str:
    cluster = f", cluster {one.cluster}" if one.cluster else ""
    return f"{one.description}{cluster} at {Address(one.addresses[0], one.port)}"


def _sorted_out(
    heard: Sequence[Found], folder: ClusterFolder | None
) -> tuple[list[Found], list[Found]]:
    """Announced coordinators: of our cluster, and others."""
    ours = [one for one in heard if folder and one.cluster == folder.cluster_id]
    return ours, [one for one in heard if one not in ours]


def _coordinator(
    folder: ClusterFolder | None, told: Address | None, heard: Sequence[Found]
) -> tuple[_Route | None, Finding]:
    """The first way to the coordinator that is open: the one that commands would take."""
    ways = list(_ways(folder, told, heard))
    if not ways:
        return None, _no_way(heard)
    problems = []
    for way in ways:
        problem, seconds = _connecting(way.address, folder)
        if not problem:
            text = f"{way.address} ({way.source}) takes connections, within {seconds * 1e3:.1f} ms"
            return way, Finding("coordinator", OK, text)
        problems.append(f"{way.address} ({way.source}): {problem}")
    state = BLOCKED if told else WARNING
    return None, Finding("coordinator", state, "; ".join(problems))


def _ways(
    folder: ClusterFolder | None, told: Address | None, heard: Sequence[Found]
) -> Iterator[_Route]:
    if told is not None:
        yield _Route(told, "--coordinator")
        return
    known = _known(folder) if folder else None
    if known is not None:
        yield _Route(known, "as remembered")
    ours, others = _sorted_out(heard, folder)
    usable = ours if folder else others
    if len(usable) == 1:
        for host in usable[0].addresses[:_MOST_ADDRESSES]:
            if Address(host, usable[0].port) != known:
                yield _Route(Address(host, usable[0].port), "by mDNS")


def _no_way(heard: Sequence[Found]) -> Finding:
    text = (
        "none is known yet; where one runs already and is not heard, try --coordinator HOST[:PORT]"
    )
    if heard:
        listed = ", or ".join(f"--coordinator {Address(h.addresses[0], h.port)}" for h in heard)
        text = f"which one is ours is not known yet; try {listed}"
    return Finding("coordinator", OK, text)


def _connecting(address: Address, folder: ClusterFolder | None) -> tuple[str, float]:
    """Why no connection can be made, "" if it can; and the seconds that it took."""

    def work() -> tuple[str, float]:
        place = Address(number_of(address.host), address.port)
        start = time.perf_counter()
        # With a key first: the coordinator would log a bare connection as a stranger's. But only a
        # bare one tells why it cannot be made.
        if folder is None or not takes_connections(place, folder.identity):
            socket.create_connection((place.host, place.port), CONNECT_S).close()
        return "", time.perf_counter() - start

    try:
        found = within(CONNECT_S, work)
    except ConnectionRefusedError:
        return "nothing listens there; start `edgespec serve` on that machine", 0.0
    except (ConfigError, OSError) as problem:
        return f"{problem}{'' if isinstance(problem, ConfigError) else _CHECK}", 0.0
    return found or (f"no answer within {CONNECT_S:.0f} s{_CHECK}", 0.0)


# --- the coordinator ----------------------------------------------------------------------------


def _access(address: Address, folder: ClusterFolder, root: Path) -> Iterator[Finding]:
    """Whether it accepts our key, and if so, the round-trip time."""
    try:
        answer_s = ANSWER_S * slowness()
        trips = within(
            answer_s + TRIPS_S,
            lambda: round_trips(address, folder.identity, answer_s, TRIPS, TRIPS_S),
        )
    except EdgespecError as problem:
        state = BLOCKED if isinstance(problem, AccessRefused | OtherVersion) else WARNING
        yield Finding("key", state, str(problem))
        return
    if trips is None:
        yield Finding("key", WARNING, f"no answer from {address} in time; try again")
        return
    yield Finding("key", OK, f"accepted, as that of {folder.name}")
    yield check_link(address, trips.median, root)


def check_link(address: Address, trip: float, root: Path) -> Finding:
    own = own_address_towards(address)
    text = f"{trip * 1e3:.1f} ms there and back"
    is_slow = trip > MOST_TRIP_S
    if own == number_of(address.host):
        busy = "; that is long: this machine is busy with other things" if is_slow else ""
        return Finding("link", WARNING if is_slow else OK, f"{text}, on this machine{busy}")
    name = interface_of(own)
    speed = interface_speed(name, root) if name else None
    if speed is None:
        text += f" by {name or own}, which does not tell its speed (Wi-Fi does not)"
    else:
        text += f" by {name}, {speed[1] / 1e6:.0f} Mbit/s"
    if is_slow:
        text += "; each token waits for several ways: a cable is better than Wi-Fi"
    elif speed is not None and speed[1] < _LEAST_SPEED:
        text += "; a cable or a port that does 1000 Mbit/s would make blocks and prompts faster"
    else:
        return Finding("link", OK, text)
    return Finding("link", WARNING, text)


def within(seconds: float, work: Callable[[], Result]) -> Result | None:
    """What work returns or raises; None if it takes SPARE_S longer than that (a name server that
    is silent), and then it is left to itself."""
    done: Future[Result] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as problem:
            done.set_exception(problem)

    threading.Thread(target=run, name="edgespec-doctor", daemon=True).start()
    wait([done], seconds + SPARE_S)
    return done.result() if done.done() else None
