"""The API process as `edgespec serve` sees it: where it listens, its start, and its end."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from edgespec.config import LOOPBACK, Address
from edgespec.daemon.api_keys import ApiKeys
from edgespec.daemon.child_process import ChildProcess
from edgespec.daemon.cluster import VARIABLE, ClusterFolder
from edgespec.daemon.extras import require
from edgespec.errors import ConfigError
from edgespec.net.discovery_interfaces import listens_everywhere

HTTP_PORT, OLLAMA_PORT = 8000, 11434
NONE = "none"
LOOPBACK_HOSTS = frozenset({LOOPBACK, "localhost", "::1"})

AGAIN_S = 2.0
"""Seconds until an API process that was killed is started again."""

log = logging.getLogger(__name__)


def http_address(text: str, port: int = HTTP_PORT) -> Address | None:
    """HOST or HOST:PORT of an option like --http; None for "none". Port 0: any free one.

    `port`: the usual one. Raises ConfigError for anything else.
    """
    text = text.strip()
    if text == NONE:
        return None
    if text.endswith(":0"):
        return Address(text.removesuffix(":0").strip("[]"), 0)
    address = Address.parse(text)
    has_port = text.endswith(f":{address.port}") and text != address.host
    return address if has_port else Address(address.host, port)


def ollama_address(text: str, folder: ClusterFolder) -> Address | None:
    """That of the option --ollama; None for "". Raises ConfigError, also if it needs a key."""
    address = http_address(text, OLLAMA_PORT) if text else None
    if address is not None:
        check_keys(address, folder, "--ollama")
    return address


def options_of(ollama: Address | None, aliases: Sequence[str]) -> tuple[str, ...]:
    """What `edgespec serve` passes on to `edgespec api`."""
    doors = ("--ollama", str(ollama)) if ollama is not None else ()
    return (*doors, *(part for name in aliases for part in ("--alias", name)))


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
        require("coordinator", "the HTTP API (--http none: without)")
        check_keys(http, folder)
    return http


class ApiProcess(ChildProcess):
    """The API as a child of `edgespec serve`.

    It is restarted if it was killed. If it ended by itself, its log says why, and the ring goes on
    without it.
    """

    def __init__(
        self,
        http: Address,
        coordinator: Address,
        folder: ClusterFolder,
        options: Sequence[str] = (),
    ) -> None:
        """`coordinator`: its address. `options`: further ones, see options_of."""
        from edgespec.plugins import own_policy_options  # and all policies, which no stage needs

        host = LOOPBACK if listens_everywhere(coordinator.host) else coordinator.host
        command = [sys.executable, "-m", "edgespec.cli.main", "api"]
        command += ["--coordinator", str(Address(host, coordinator.port)), "--http", str(http)]
        command += [*options, *own_policy_options()]
        super().__init__("the HTTP API", command, {VARIABLE: str(folder.path)})

    def again_after(self, code: int, lived: float) -> float | None:
        if code >= 0:
            log.warning("the HTTP API has ended; the ring serves without it")
            return None
        log.warning("the HTTP API was killed by signal %d; it is started again", -code)
        return AGAIN_S
