"""Reports this daemon's state to systemd: ready, status, alive, stopping (sd_notify)."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping

from edgespec.runtime.node import Supervisor

log = logging.getLogger(__name__)

STOP_S = 15.0
"""Seconds that a unit gets to end (its TimeoutStopSec)."""

_LONGEST_STATUS = 500
"""Characters of a status: a datagram has to pass whole, and it is one line of `systemctl`."""


class Notifier(Supervisor):
    """The connection to the service manager that started this process; without one, a no-op.

    No method raises or blocks: a service manager that is gone or busy must not end the ring.
    Only the I/O loop calls `beat`, so that the watchdog notices a stuck loop.
    """

    def __init__(
        self,
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
        slow: float = 1.0,
    ) -> None:
        """`slow`: how many times as long as usual things take here; the watchdog waits longer."""
        self._clock = clock
        self._socket = _connected(environment.get("NOTIFY_SOCKET", ""))
        watchdog_s = slow * _watchdog_seconds(environment) if self._socket else 0.0
        self._pause_s = watchdog_s / 2
        self._patience = (
            f"\nWATCHDOG_USEC={watchdog_s * 1e6:.0f}" if watchdog_s and slow > 1 else ""
        )
        self._next_beat = 0.0
        self._said = ""

    def ready(self, status: str) -> None:
        """The daemon is up; `status` says what it does now. Calling it again changes that only."""
        self._send(f"READY=1\nSTATUS={_line(status)}{self._patience}")
        self._said = status

    def status(self, text: str) -> None:
        if text != self._said:
            self._send(f"STATUS={_line(text)}")
            self._said = text

    def beat(self) -> None:
        """Called in each turn of the loop; sends at half the watchdog's interval."""
        if self._pause_s and self._clock() >= self._next_beat and self._send("WATCHDOG=1"):
            self._next_beat = self._clock() + self._pause_s

    def leaving(self, seconds: float) -> None:
        """`stopping` takes some seconds, too, for which the unit has time."""
        self._send(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={(seconds + STOP_S) * 1e6:.0f}")

    def stopping(self, reason: str) -> None:
        self._send(f"STOPPING=1\nSTATUS={_line(reason)}")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, message: str) -> bool:
        if self._socket is None:
            return False
        try:
            self._socket.send(message.encode(errors="replace"))
        except OSError as problem:  # full or gone
            log.debug("systemd was not told: %s", problem)
            return False
        return True


def _connected(path: str) -> socket.socket | None:
    """A socket towards `path`, where "@" opens an abstract name; None if there is none."""
    if not path.startswith(("/", "@")):
        return None
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    try:
        opened.setblocking(False)
        opened.connect("\0" + path[1:] if path[0] == "@" else path)
    except OSError as problem:
        log.warning("cannot tell systemd how this daemon is, at %s: %s", path, problem)
        opened.close()
        return None
    return opened


def _watchdog_seconds(environment: Mapping[str, str]) -> float:
    """Seconds after which systemd gives up on this process; 0 without a watchdog for it."""
    wanted, process = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
    if not wanted.isdecimal() or (process and process != str(os.getpid())):
        return 0.0
    return int(wanted) / 1e6


def _line(text: str) -> str:
    """One line, as a status is; a second one would be read as another message."""
    return " ".join(text.split())[:_LONGEST_STATUS]
