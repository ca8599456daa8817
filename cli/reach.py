"""Reaching the coordinator: this machine's keys in its cluster, and the coordinator's address."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from getpass import getpass
from pathlib import Path

from edgespec.config import LOOPBACK, Address
from edgespec.daemon.cluster import ClusterFolder, folder_of, own_key
from edgespec.errors import AccessRefused, ConfigError, PeerLost
from edgespec.net.control import takes_connections
from edgespec.net.discovery import Found, find_coordinators
from edgespec.net.discovery_interfaces import own_interfaces, to_look_on
from edgespec.net.keys import Identity, Token, short
from edgespec.runtime.enrolment import enrol

_MOST_TOKEN_BYTES = 1024
_LOOK_AGAIN_S = 1.0
"""Seconds before an announced coordinator that does not answer is tried again."""

Say = Callable[[str], None]


def reach(coordinator: str | None, cluster: str, wait: float, say: Say) -> tuple[Address, Identity]:
    """The coordinator's address, and this machine's keys in its cluster.

    `coordinator`: HOST[:PORT] or None; `cluster`: the folder, "" for the default; `wait`: seconds
    to search the local network. Raises AccessRefused without a cluster, ConfigError for a wrong
    address, PeerLost if it is not found.
    """
    folder = ClusterFolder.open(folder_of(cluster))
    return address_of(folder, coordinator, wait, say), folder.identity


def address_of(folder: ClusterFolder, coordinator: str | None, wait: float, say: Say) -> Address:
    """The coordinator's address: as given, as last known, or as discovered."""
    if coordinator is not None:
        return Address.parse(coordinator)
    known = _known(folder)
    if known is not None and (_is_local(folder) or takes_connections(known, folder.identity)):
        return known
    try:
        return discovered(wait, say, folder.identity, folder.cluster_id)
    except PeerLost:
        if known is None or folder.is_coordinator:
            raise
        return known  # it may return there, on a network without multicast


def _is_local(folder: ClusterFolder) -> bool:
    """Whether the coordinator listens on loopback alone, where it is not announced."""
    return folder.is_coordinator and folder.settings.host in (LOOPBACK, "localhost", "::1")


def _known(folder: ClusterFolder) -> Address | None:
    """The last address; None if its port was chosen by the system."""
    return None if folder.address.endswith(":0") else Address.parse(folder.address)


def given_token(word: str) -> Token | None:
    """The token in an option ("": none); "-" reads a line of standard input, without echo.

    All users of a machine can read command lines. Raises AccessRefused for a broken token.
    """
    if not word:
        return None
    return Token.parse(_next_line() if word == "-" else word)


def _next_line() -> str:
    if sys.stdin is None:
        return ""
    if not sys.stdin.isatty():
        return sys.stdin.buffer.readline(_MOST_TOKEN_BYTES).decode("ascii", "replace")
    try:
        return getpass("token: ")
    except EOFError:
        return ""


def introduced(
    token: Token | None, coordinator: str | None, cluster: str, wait: float, say: Say
) -> None:
    """Enrol this machine first if a client's token was given."""
    if token is not None:
        admitted(folder_of(cluster), token, coordinator, wait, say)


def admitted(path: Path, token: Token, coordinator: str | None, wait: float, say: Say) -> None:
    """Enrol this machine's key with a token, and store the membership.

    A member may give a used token again: a service starts with the same words at every boot. Raises
    AccessRefused if the token is not valid.
    """
    before = _membership(path)
    is_member = before is not None and before.identity.coordinator == token.coordinator
    if before is not None and is_member and before.is_coordinator:
        return
    own = own_key(path)  # raises for an unusable folder before any search
    if coordinator is not None:
        address = Address.parse(coordinator)
    elif before is not None and is_member:
        address = address_of(before, None, wait, say)
    else:
        address = discovered(
            wait, say, Identity(token.pair, token.coordinator), short(token.coordinator)
        )
    say(f"asking the coordinator at {address} to admit this machine")
    try:
        name = enrol(address, token, own, socket.gethostname(), wait, say)
    except AccessRefused:
        if not is_member:
            raise
        return
    ClusterFolder.remember(path, own, token.coordinator, name, str(address))
    say(f"this machine is {name} of the cluster {short(token.coordinator)} from now on")


def _membership(path: Path) -> ClusterFolder | None:
    try:
        return ClusterFolder.open(path)
    except ConfigError:  # none, or one that is damaged and is written again
        return None


# --- discovery -----------------------------------------------------------------------------------


def discovered(wait: float, say: Say, identity: Identity, cluster: str = "") -> Address:
    """The address of the only coordinator on the local network, or of that of `cluster`.

    `wait`: seconds to search. `say` gets a remark at the start and one at success. `identity`: the
    keys to connect with. Raises ConfigError if several answer, PeerLost if none does.
    """
    if not 0.0 < wait <= 86400.0:
        raise ConfigError(f"wait is {wait}; it must be above 0 and at most 86400 seconds")
    say(f"looking for a coordinator on the local network, for {wait:.0f} s at most")
    deadline = time.monotonic() + wait
    silent: list[Found] = []
    others: list[Found] = []
    while (left := deadline - time.monotonic()) > 0.0:
        heard = find_coordinators(left)
        others = [one for one in heard if cluster and one.cluster != cluster]
        found = [one for one in heard if one not in others]
        with ThreadPoolExecutor() as pool:
            places: list[Address | None] = list(
                pool.map(lambda one: one.reachable(identity), found)
            )
        answering = [(one, at) for one, at in zip(found, places, strict=True) if at is not None]
        if len(answering) > 1:
            raise ConfigError(_which(answering))
        for one, address in answering:
            say(f"found the coordinator {one.description} at {address}")
            return address
        silent = found
        time.sleep(min(_LOOK_AGAIN_S, max(0.0, deadline - time.monotonic())))
    if silent:
        raise PeerLost(_unreachable(silent))
    raise PeerLost(_only_others(others, cluster) if others else _none(wait))


def _which(answering: list[tuple[Found, Address]]) -> str:
    options = ", or ".join(f"--coordinator {at} for {one.description}" for one, at in answering)
    return f"{len(answering)} coordinators are on this network; say which: {options}"


def _unreachable(silent: list[Found]) -> str:
    one = silent[0]
    places = _places(one)
    return (
        f"the coordinator {one.description} is announced at {places}, but no connection can be "
        f"made; does a firewall close TCP port {one.port} there, or is it gone? An address that "
        "works can be given: --coordinator HOST[:PORT]"
    )


def _only_others(others: list[Found], cluster: str) -> str:
    known = "; ".join(
        f"{one.description}, {f'cluster {one.cluster}' if one.cluster else 'of no cluster'}, at "
        f"{_places(one)}"
        for one in others
    )
    return (
        f"no coordinator of cluster {cluster} was found, which this machine, or its token, belongs "
        "to. "
        f"Coordinators of other clusters are here: {known}. Start `edgespec serve` where the "
        "cluster was made, or say where it is: --coordinator HOST[:PORT]; to belong to another "
        "cluster takes a token of it: edgespec join TOKEN"
    )


def _places(one: Found) -> str:
    return ", ".join(str(Address(host, one.port)) for host in one.addresses)


def _none(wait: float) -> str:
    used = ", ".join(map(str, to_look_on(own_interfaces())))
    tried = (
        f"asked by multicast DNS on {used}"
        if used
        else "no network interface is up here that can multicast"
    )
    return (
        f"no coordinator was found within {wait:.0f} s ({tried}). Does `edgespec serve` run, with "
        "--host 0.0.0.0 or an address of this network? If it does: multicast is kept back by many "
        "Wi-Fi access points, by firewalls (open UDP port 5353) and by every router. Then say "
        "where it is: --coordinator HOST[:PORT]"
    )
