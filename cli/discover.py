"""Discovery of the coordinator on the local network, for commands without --coordinator."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from edgespec.config import Address
from edgespec.errors import ConfigError, PeerLost
from edgespec.net.discovery import Found, find_coordinators
from edgespec.net.discovery_interfaces import own_interfaces, to_look_on
from edgespec.net.keys import Identity

_LOOK_AGAIN_S = 1.0
"""Seconds before an announced coordinator that does not answer is tried again."""


def discovered(
    wait: float, say: Callable[[str], None], identity: Identity, cluster: str = ""
) -> Address:
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
