"""Advertising: announces a running coordinator on the local network (mDNS)."""

from __future__ import annotations

import logging
import threading
from ipaddress import ip_address
from pathlib import PurePath

from edgespec.config import CoordinatorConfig
from edgespec.net.discovery import Announcement
from edgespec.net.discovery_interfaces import Interface, own_interfaces, to_announce_on
from edgespec.net.sockets import number_of
from edgespec.wire.codec import VERSION

log = logging.getLogger(__name__)

LOOK_S = 3.0
"""Seconds between two looks at the interfaces: at boot they come up one by one."""


class Advertising:
    """Announces a coordinator, from `start` to `stop`, wherever its address can be reached."""

    def __init__(self, config: CoordinatorConfig, port: int, cluster: str = "") -> None:
        """`port`: of the coordinator; `cluster`: its id."""
        self._host = number_of(config.address.host)
        self._port = port
        self._properties = {
            "version": str(VERSION),
            "model": PurePath(config.model).name,  # its folder stays private
            "stages": str(config.stages),
            "cluster": cluster,
        }
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="edgespec-advertising", daemon=True)
        self._announcement: Announcement | None = None
        self._said = ""

    def start(self) -> None:
        """Begin to announce it; nothing is sent for a coordinator on loopback."""
        if not ip_address(self._host).is_loopback:
            self._thread.start()

    def stop(self) -> None:
        """Withdraw it; takes half a second, or two if it has only just been announced."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        announced: list[Interface] | None = None
        while not self._ended.is_set():
            now = to_announce_on(self._host, own_interfaces())
            if now != announced:
                announced = now if self._announce(now) else None
            self._ended.wait(LOOK_S)
        self._withdraw()

    def _announce(self, interfaces: list[Interface]) -> bool:
        """Announce it on these interfaces instead; returns whether that worked."""
        self._withdraw()
        if not interfaces:
            self._say(logging.INFO, "not announced: no network is up")
            return True
        where = ", ".join(map(str, interfaces))
        try:
            self._announcement = Announcement(interfaces, self._port, self._properties)
        except OSError as problem:
            self._say(
                logging.WARNING,
                f"cannot be announced on {where} ({problem}); others have to give --coordinator",
            )
            return False
        self._say(logging.INFO, f"announced as {self._announcement.name} on {where}")
        return True

    def _say(self, level: int, text: str) -> None:
        """Log it unless the last log line was the same: failures are retried for ever."""
        if text != self._said:
            log.log(level, text)
        self._said = text

    def _withdraw(self) -> None:
        if self._announcement is not None:
            self._announcement.close()
            self._announcement = None
