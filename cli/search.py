"""Search: for the coordinator, where it is known to be and on the local network, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from ipaddress import ip_address
from typing import Protocol

from edgespec.config import Address
from edgespec.errors import AddressUnavailable, ConfigError, PeerLost
from edgespec.net.control import Seen, look, refused, stranger
from edgespec.net.discovery import Found, find_coordinators
from edgespec.net.discovery_interfaces import own_interfaces, to_look_on
from edgespec.net.keys import Identity, short

TURN_S = 1.5
"""Seconds to listen for announcements between two looks at the known address."""

PAUSE_S = 0.5
"""The same where nothing can be announced, or behind an announcement that leads nowhere."""

OTHER_S = 30.0
"""Seconds for which another program is left alone: its log tells of each look."""

SURE_TURNS = 2
"""Turns until what is seen is believed: an answer may come late."""

SOON_S = 1.2
"""Seconds in which a coordinator that starts together with its stages listens, on a desktop."""

PATIENT_S = 5.0
"""Seconds after which mistakes have been told, and the wait may be a long one."""


class Teller(Protocol):
    """Where remarks go; by itself nowhere."""

    def say(self, text: str) -> None:
        """Tell what has happened."""
        return

    def waiting(self, text: str) -> AbstractContextManager[object]:
        """Tell what goes on until the end of the block."""
        return nullcontext()


class Silent(Teller):
    """Tells nothing."""


class Search:
    """One search for the coordinator that has the key of `identity`."""

    def __init__(
        self,
        identity: Identity,
        known: Address | None = None,
        *,
        is_given: bool = False,
        is_member: bool = True,
        on_network: bool = True,
    ) -> None:
        """`known`: where it may be; `is_given`: the user says that it
        is there, and what is not so is an error. `is_member`: this machine has found it before, so
        that it may yet come. `on_network`: whether it may be announced there."""
        self._identity, self._cluster = identity, short(identity.coordinator)
        self.known = known
        self._is_given, self._is_member = is_given, is_member
        self._on_network = on_network and not (
            is_given and known is not None and is_loopback(known)
        )
        self._why = ""  # nothing was found at `known`
        self._busy = 0
        self._not_before = 0.0
        self._silent: list[Found] = []
        self._others: list[Found] = []
        self.is_proven = False
        """Whether what was found has the coordinator's key, and not only listens."""

    def run(
        self, wait: float, tell: Teller, meanwhile: Callable[[], None] | None = None
    ) -> Address:
        """The address, after `wait` seconds at most. `meanwhile` is called once if it takes long,
        or may do so: a member's coordinator may be starting, too.

        Raises ConfigError for another wait than there can be, PeerLost if none is found,
        AddressUnavailable for an unknown host, and AccessRefused if the key is not let in, or
        another program is where the user says.
        """
        if not 0.0 < wait <= 86400.0:
            raise ConfigError(f"wait is {wait}; it must be above 0 and at most 86400 seconds")
        began = time.monotonic()
        if (found := self._look()) is not None:
            return found
        if meanwhile is not None and self._is_member and wait >= SOON_S:
            meanwhile()
            meanwhile = None
            if (found := self._soon(began + SOON_S)) is not None:
                return found
        said, turns = "", 0
        with tell.waiting(self._doing):
            while (left := began + wait - time.monotonic()) > 0.0:
                if (remark := self._remark(turns)) != said:
                    said = remark
                    tell.say(f"{remark}, for {left:.0f} s at most")
                self._listen(left, tell)
                if (found := self._look()) is not None:
                    return found
                turns += 1
                if meanwhile is not None and time.monotonic() - began > PATIENT_S:
                    meanwhile()
                    meanwhile = None
        if self._busy and self.known is not None:
            return self.known  # its answer is waited for there
        raise PeerLost(self._not_found(wait))

    @property
    def _doing(self) -> str:
        there = f"trying {self.known} again" if self.known else ""
        here = "looking for a coordinator on the local network" if self._on_network else ""
        return " and ".join(filter(None, (there, here)))

    def _remark(self, turns: int) -> str:
        """What is the matter. Raises PeerLost if it is a mistake."""
        why = [self._why] if self._why else []
        if self._others and not self._silent and turns >= SURE_TURNS:
            if not (self._is_member or self._is_given):
                raise PeerLost(_only_others(self._others, self._cluster))
            why.append(_of_others(self._others))
        return "; ".join([*why, self._doing])

    # --- where it is known to be ------------------------------------------------------------------

    def _look(self) -> Address | None:
        known = self.known
        if known is None or time.monotonic() < self._not_before:
            return None
        try:
            seen = look(known, self._identity)
        except AddressUnavailable as problem:
            if self._is_given:
                raise
            self._why = str(problem)  # a name may be known later
            return None
        self._busy = self._busy + 1 if seen is Seen.BUSY else 0
        match seen:
            case Seen.OURS:
                self.is_proven = True
                return known
            case Seen.BUSY:
                return known if self._is_given or self._busy >= SURE_TURNS else None
            case Seen.REFUSES:
                raise refused(known)
            case Seen.OTHER if self._is_given:
                raise stranger(known)
            case Seen.OTHER:
                self._not_before = time.monotonic() + OTHER_S
                self._why = f"another program than the coordinator listens at {known}"
            case Seen.NOTHING:
                self._why = f"nothing listens at {known}"
        return None

    def _soon(self, until: float) -> Address | None:
        """Where it is known to be, if it comes there in time."""
        while self.known is not None and time.monotonic() < until:
            time.sleep(SOON_S / 8)
            if (found := self._look()) is not None:
                return found
        return None

    # --- on the local network ---------------------------------------------------------------------

    def _listen(self, left: float, tell: Teller) -> None:
        """Let what is found be the known address."""
        if not self._on_network:
            time.sleep(min(PAUSE_S, left))
            return
        heard = find_coordinators(min(TURN_S, left))
        ours = [one for one in heard if one.cluster == self._cluster]
        self._silent = ours or self._silent
        self._others = [one for one in heard if one not in ours] or self._others
        for one in ours:
            address = one.reachable(self._identity)
            if address is not None:
                if address != self.known:
                    tell.say(f"found the coordinator {one.description} at {address}")
                self.known, self._why, self._not_before = address, "", 0.0
                return
        if heard:
            time.sleep(min(PAUSE_S, left))

    # --- what is said -----------------------------------------------------------------------------

    def _not_found(self, wait: float) -> str:
        if self._silent:
            return _unreachable(self._silent[0])
        if self._others and self.known is None:
            return _only_others(self._others, self._cluster)
        network = _tried() if self._on_network else ""
        if self.known is not None:
            others = _of_others(self._others) if self._others else ""
            within = (
                f"within {wait:.0f} s ({'; '.join(filter(None, (self._why, network, others)))})"
            )
            return (
                f"no coordinator answered at {self.known} {within}; is `edgespec serve` running "
                "there, and is the port open?"
            )
        return (
            f"no coordinator was found within {wait:.0f} s ({network}). Does `edgespec serve` run, "
            "with --host 0.0.0.0 or an address of this network? If it does: multicast is kept back "
            "by many Wi-Fi access points, by firewalls (open UDP port 5353) and by every router. "
            "Then say where it is: --coordinator HOST[:PORT]"
        )


def is_loopback(address: Address) -> bool:
    """Whether it is on this machine alone; nothing is announced there."""
    try:
        return ip_address(address.host).is_loopback
    except ValueError:
        return address.host == "localhost"


def _unreachable(one: Found) -> str:
    return (
        f"the coordinator {one.description} is announced at {_places(one)}, but no connection can "
        f"be made; does a firewall close TCP port {one.port} there, or is it gone? An address that "
        "works can be given: --coordinator HOST[:PORT]"
    )


def _only_others(others: list[Found], cluster: str) -> str:
    return (
        f"no coordinator of cluster {cluster} was found, which this machine, or its token, belongs "
        f"to. Coordinators of other clusters are here: {_named(others)}. Start `edgespec serve` "
        "where the cluster was made, or say where it is: --coordinator HOST[:PORT]; to belong to "
        "another cluster takes a token of it: edgespec join TOKEN"
    )


def _of_others(others: list[Found]) -> str:
    return f"there are only coordinators of other clusters here: {_named(others)}"


def _named(others: list[Found]) -> str:
    return "; ".join(
        f"{one.description}, {f'cluster {one.cluster}' if one.cluster else 'of no cluster'}, at "
        f"{_places(one)}"
        for one in others
    )


def _places(one: Found) -> str:
    return ", ".join(str(Address(host, one.port)) for host in one.addresses)


def _tried() -> str:
    used = ", ".join(map(str, to_look_on(own_interfaces())))
    if used:
        return f"asked by multicast DNS on {used}"
    return "no network interface is up here that can multicast"
