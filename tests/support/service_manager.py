"""A socket that stands where systemd's would, and hears what a daemon says of itself."""

from __future__ import annotations

import select
import socket
import threading
import time


class Manager:
    """A service manager's end of the socket.

    As systemd does, it reads all the time: a kernel keeps as few as ten datagrams that nobody read
    (net.unix.max_dgram_qlen), and what comes then is lost.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + name[1:] if name.startswith("@") else name)
        self._socket.setblocking(False)
        self._lock = threading.Lock()
        self._unheard: list[str] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.is_set():
            select.select([self._socket], [], [], 0.1)
            with self._lock:
                self._read()

    def _read(self) -> None:
        try:
            while True:
                self._unheard.append(self._socket.recv(4096).decode())
        except BlockingIOError:
            return

    def heard(self, timeout: float = 0.0) -> list[str]:
        """Every datagram that has come; waits up to `timeout` seconds for the first."""
        limit = time.monotonic() + timeout
        while True:
            with self._lock:
                self._read()
                found, self._unheard = self._unheard, []
            if found or time.monotonic() >= limit:
                return found
            time.sleep(0.005)

    def close(self) -> None:
        """Gone."""
        self._is_over.set()
        self._thread.join()
        self._socket.close()

    def until(self, start: str, timeout: float = 300.0) -> str:
        """Wait for a datagram that starts so; returns it, and forgets those before it."""
        limit = time.monotonic() + timeout
        passed: list[str] = []
        while time.monotonic() < limit:
            came = self.heard(timeout=0.1)
            for number, message in enumerate(came, 1):
                passed.append(message)
                if message.startswith(start):
                    with self._lock:
                        self._unheard[:0] = came[number:]
                    return message
        raise AssertionError(f"no {start!r} in {timeout} s, but {passed}")
