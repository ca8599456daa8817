"""Reaching the coordinator: this machine's keys in its cluster, and the coordinator's address."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from getpass import getpass
from pathlib import Path

from edgespec.cli.search import TURN_S, Search, Silent, Teller
from edgespec.config import LOOPBACK, Address
from edgespec.daemon.cluster import ClusterFolder, folder_of, own_key
from edgespec.errors import AccessRefused, ConfigError, EdgespecError, PeerLost
from edgespec.net.keys import Identity, Token, short
from edgespec.runtime.enrolment import enrol

_MOST_TOKEN_BYTES = 1024

ONE_LOOK_S = 2 * TURN_S


def reach(
    coordinator: str | None, cluster: str, wait: float, tell: Teller
) -> tuple[Address, Identity]:
    """The coordinator's address, and this machine's keys in its cluster.

    `coordinator`: HOST[:PORT] or None; `cluster`: the folder, "" for the default; `wait`: seconds
    to search. Raises AccessRefused without a cluster, ConfigError for a wrong address, and like
    Search.run.
    """
    folder = ClusterFolder.open(folder_of(cluster))
    return address_of(folder, coordinator, wait, tell), folder.identity


def address_of(
    folder: ClusterFolder,
    coordinator: str | None,
    wait: float,
    tell: Teller,
    meanwhile: Callable[[], None] | None = None,
    *,
    or_known: bool = False,
) -> Address:
    """Where the coordinator is: as given, as last known or as discovered; it is remembered.

    `meanwhile`: called once if the search takes long. `or_known`: what is known counts if nothing
    answers, for those that can wait there. Raises like Search.run.
    """
    search = _search(folder, coordinator, folder.identity)
    try:
        address = search.run(wait, tell, meanwhile)
    except PeerLost as lost:
        if not or_known or search.known is None:
            raise
        tell.say(str(lost))
        return search.known
    if search.is_proven:
        try:
            folder.with_address(str(address))
        except ConfigError as problem:  # the address only makes the next start faster
            tell.say(f"where the coordinator is cannot be remembered: {problem}")
    return address


def found_again(folder: ClusterFolder, before: Address) -> Address | None:
    """Where the coordinator is that was at this address before, by one look; None: nowhere."""
    search = Search(folder.identity, before)
    try:
        address = search.run(ONE_LOOK_S, Silent())
        if not search.is_proven:
            return None
        folder.with_address(str(address))
    except EdgespecError:
        return None
    return address


def _search(folder: ClusterFolder | None, coordinator: str | None, identity: Identity) -> Search:
    """`folder`: of the membership, None if there is none yet."""
    known = _known(folder) if folder is not None else None
    if coordinator is None:
        on_network = folder is None or not _is_local(folder)
        return Search(identity, known, is_member=folder is not None, on_network=on_network)
    given = Address.parse(coordinator)
    # Where it was once, it may be again: its name, or its network, may come up later.
    return Search(identity, given, is_given=given != known, is_member=folder is not None)


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
    token: Token | None, coordinator: str | None, cluster: str, wait: float, tell: Teller
) -> None:
    """Enrol this machine first if a client's token was given."""
    if token is not None:
        admitted(folder_of(cluster), token, coordinator, wait, tell)


def admitted(
    path: Path,
    token: Token,
    coordinator: str | None,
    wait: float,
    tell: Teller,
    meanwhile: Callable[[], None] | None = None,
) -> None:
    """Enrol this machine's key with a token, and store the membership; `meanwhile` is called if the
    search or the answer takes long.

    A member may give a used token again: a service starts with the same words at every boot. Raises
    AccessRefused if the token is not valid.
    """
    before = _membership(path)
    is_member = before is not None and before.identity.coordinator == token.coordinator
    if before is not None and is_member and before.is_coordinator:
        return
    own = own_key(path)  # raises for an unusable folder before any search
    identity = Identity(token.pair, token.coordinator)
    try:
        search = _search(before if is_member else None, coordinator, identity)
        address = search.run(wait, tell, meanwhile)
        tell.say(f"asking the coordinator at {address} to admit this machine")
        with tell.waiting(
            "waiting for the coordinator, which answers once it has loaded its models"
        ):
            host, meanwhile = socket.gethostname(), meanwhile or (lambda: None)
            name = enrol(address, token, own, host, wait, meanwhile)
    except AccessRefused:
        if not is_member:
            raise
        return
    ClusterFolder.remember(path, own, token.coordinator, name, str(address))
    tell.say(f"this machine is {name} of the cluster {short(token.coordinator)} from now on")


def _membership(path: Path) -> ClusterFolder | None:
    try:
        return ClusterFolder.open(path)
    except ConfigError:  # none, or one that is damaged and is written again
        return None
