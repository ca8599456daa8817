"""A socket that stands where systemd's would, and hears what a daemon says of itself."""

from __future__ import annotations

import socket
import time


class Manager:
    """A service manager's end of the socket."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + name[1:] if name.startswith("@") else name)

    def heard(self, timeout: float = 0.0) -> list[str]:
        """Every datagram that has come; waits up to `timeout` seconds for the first."""
        found = []
        self._socket.settimeout(timeout)
        try:
            while True:
                found.append(self._socket.recv(4096).decode())
                self._socket.settimeout(0.0)
        except (BlockingIOError, TimeoutError):
            return found

    def close(self) -> None:
        """Gone."""
        self._socket.close()

    def until(self, start: str, timeout: float = 60.0) -> str:
        """Wait for a datagram that starts so; returns it."""
        limit = time.monotonic() + timeout
        passed = []
        while time.monotonic() < limit:
            for message in self.heard(timeout=0.1):
                passed.append(message)
                if message.startswith(start):
                    return message
        raise AssertionError(f"no {start!r} in {timeout} s, but {passed}")
