"""Reaching the coordinator: this machine's keys in its cluster, and the coordinator's address."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from getpass import getpass
from pathlib import Path

from edgespec.cli.discover import discovered
from edgespec.config import LOOPBACK, Address
from edgespec.daemon.cluster import ClusterFolder, folder_of, own_key
from edgespec.errors import AccessRefused, PeerLost
from edgespec.net.control import takes_connections
from edgespec.net.keys import Identity, Token, short
from edgespec.runtime.enrolment import enrol

_MOST_TOKEN_BYTES = 1024

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
    try:
        name = enrol(address, token, own, socket.gethostname(), wait)
    except AccessRefused:
        if not is_member:
            raise
        return
    ClusterFolder.remember(path, own, token.coordinator, name, str(address))
    say(f"this machine is {name} of the cluster {short(token.coordinator)} from now on")


def _membership(path: Path) -> ClusterFolder | None:
    try:
        return ClusterFolder.open(path)
    except AccessRefused:
        return None
