"""The API process as `edgespec serve` sees it: where it listens, its start, and its end."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading

from edgespec.config import LOOPBACK, Address
from edgespec.daemon.api_keys import ApiKeys
from edgespec.daemon.cluster import VARIABLE, ClusterFolder
from edgespec.daemon.process import PARENT
from edgespec.errors import ConfigError
from edgespec.net.discovery_interfaces import listens_everywhere

HTTP_PORT = 8000
NONE = "none"
LOOPBACK_HOSTS = frozenset({LOOPBACK, "localhost", "::1"})

AGAIN_S = 2.0
"""Seconds until an API process that was killed is started again."""

END_S = 5.0
"""Seconds that it gets to end by itself."""

log = logging.getLogger(__name__)


def http_address(text: str) -> Address | None:
    """HOST or HOST:PORT of the option --http; None for "none". Port 0: any free one.

    Raises ConfigError for anything else.
    """
    text = text.strip()
    if text == NONE:
        return None
    if text.endswith(":0"):
        return Address(text.removesuffix(":0").strip("[]"), 0)
    address = Address.parse(text)
    has_port = text.endswith(f":{address.port}") and text != address.host
    return address if has_port else Address(address.host, HTTP_PORT)


def needs_keys(http: Address) -> bool:
    """Whether others than this machine's own programs can reach that address."""
    return http.host not in LOOPBACK_HOSTS


def check_keys(http: Address, folder: ClusterFolder, option: str = "--http") -> None:
    """Raise ConfigError if other machines could use that address without a key.

    `option`: the option that gave the address."""
    if needs_keys(http) and not ApiKeys(folder.path).all():
        raise ConfigError(
            f"{option} {http} can be reached from other machines, and there is no API key; make "
            f"one with `edgespec key new NAME`, or listen on {LOOPBACK}"
        )


def served_http(text: str, folder: ClusterFolder) -> Address | None:
    """What --http of `edgespec serve` asks for. Raises ConfigError as `edgespec api` would."""
    http = http_address(text)
    if http is not None:
        check_keys(http, folder)
    return http


class ApiProcess:
    """The API as a child of `edgespec serve`. Use as a context manager.

    It is restarted if it was killed. If it ended by itself, its log says why, and the ring goes on
    without it.
    """

    def __init__(self, http: Address, coordinator: Address, folder: ClusterFolder) -> None:
        """`coordinator`: its address."""
        host = LOOPBACK if listens_everywhere(coordinator.host) else coordinator.host
        self._command = [sys.executable, "-m", "edgespec.cli.main", "api"]
        self._command += ["--coordinator", str(Address(host, coordinator.port))]
        self._command += ["--http", str(http)]
        self._environment = {**os.environ, PARENT: str(os.getpid()), VARIABLE: str(folder.path)}
        self._over = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        # The kernel ends a child with the thread that started it: this one lives to the end.
        self._thread = threading.Thread(target=self._run, name="edgespec-http", daemon=True)

    def __enter__(self) -> ApiProcess:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._over.set()
            child = self._child
        if child is not None:
            child.terminate()
            try:
                child.wait(END_S)
            except subprocess.TimeoutExpired:
                child.kill()
        self._thread.join(END_S)

    def _run(self) -> None:
        while True:
            child = self._start()
            if child is None:
                return
            code = child.wait()
            if self._over.is_set():
                return
            if code >= 0:
                log.warning("the HTTP API has ended; the ring serves without it")
                return
            log.warning("the HTTP API was killed by signal %d; it is started again", -code)
            if self._over.wait(AGAIN_S):
                return

    def _start(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._over.is_set():
                return None
            self._child = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # the coordinator's says where that one listens
                env=self._environment,
                start_new_session=True,  # a Ctrl-C is for the parent, which then ends it
            )
            return self._child
