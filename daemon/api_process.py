"""The API process as `edgespec serve` sees it: where it listens, its start, and its end."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.config import LOOPBACK, Address
from edgespec.daemon.api_keys import ApiKeys
from edgespec.daemon.child_process import ChildProcess
from edgespec.daemon.cluster import VARIABLE, ClusterFolder
from edgespec.daemon.extras import require
from edgespec.errors import ConfigError
from edgespec.net.discovery_interfaces import listens_everywhere
from edgespec.types.own_module import own_command

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


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s*]+")
_NAME = re.compile(r"[a-z0-9_.-]+")


@dataclass(frozen=True, slots=True)
class ApiOptions:
    """What `edgespec serve` passes on to `edgespec api`, which has the same options.

    `ollama`: where it listens too, for clients of Ollama. `aliases`: see serving.app.Service.
    `require_key`: also on loopback. `origins`, `names`: see serving.guard.Door.
    """

    ollama: Address | None = None
    aliases: tuple[str, ...] = ()
    require_key: bool = False
    origins: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    @staticmethod
    def read(
        ollama: str,
        aliases: Sequence[str] | None,
        require_key: bool,
        origins: Sequence[str] | None,
        names: Sequence[str] | None,
    ) -> ApiOptions:
        """As they are given on a command line. Raises ConfigError for what is none."""
        return ApiOptions(
            http_address(ollama, OLLAMA_PORT) if ollama else None,
            tuple(aliases or ()),
            require_key,
            tuple(map(_origin, origins or ())),
            tuple(map(_host_name, names or ())),
        )

    def check_keys(self, http: Address, folder: ClusterFolder) -> None:
        """Raise ConfigError if one of the API's addresses needs keys, and there is none."""
        check_keys(http, folder, always=self.require_key)
        if self.ollama is not None:
            check_keys(self.ollama, folder, "--ollama")

    @property
    def words(self) -> list[str]:
        """The same on a command line."""
        given = [("--ollama", str(self.ollama))] if self.ollama else []
        given += [("--alias", name) for name in self.aliases]
        given += [("--cors-origin", origin) for origin in self.origins]
        given += [("--host-name", name) for name in self.names]
        return [word for both in given for word in both] + ["--require-key"] * self.require_key


def _origin(text: str) -> str:
    origin = text.strip().lower().removesuffix("/")
    if not _ORIGIN.fullmatch(origin):
        raise ConfigError(
            f"--cors-origin {text!r} is no origin; give each site as its scheme, name and port, as "
            "http://localhost:3000 (there is no * for all)"
        )
    return origin


def _host_name(text: str) -> str:
    name = text.strip().lower()
    if not _NAME.fullmatch(name):
        raise ConfigError(f"--host-name {text!r} is no name; give it as board.local, without port")
    return name


def needs_keys(http: Address) -> bool:
    """Whether others than this machine's own programs can reach that address."""
    return http.host not in LOOPBACK_HOSTS


def check_keys(
    http: Address, folder: ClusterFolder, option: str = "--http", *, always: bool = False
) -> None:
    """Raise ConfigError if that address needs keys, and there is none.

    `option`: the one that gave the address. `always`: it needs them on loopback, too."""
    if not (always or needs_keys(http)) or ApiKeys(folder.path).all():
        return
    remedy = "make one with `edgespec key new NAME`"
    if not needs_keys(http):
        raise ConfigError(f"--require-key, and there is no API key; {remedy}, or leave it out")
    raise ConfigError(
        f"{option} {http} can be reached from other machines, and there is no API key; "
        f"{remedy}, or listen on {LOOPBACK}"
    )


def served_http(text: str, options: ApiOptions, folder: ClusterFolder) -> Address | None:
    """What --http of `edgespec serve` asks for. Raises ConfigError as `edgespec api` would."""
    http = http_address(text)
    if http is not None:
        require("coordinator", "the HTTP API (--http none: without)")
        options.check_keys(http, folder)
    elif options != ApiOptions():
        raise ConfigError(
            f"{options.words[0]} is for the HTTP API: leave it out, or leave out --http none"
        )
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
        options: ApiOptions | None = None,
    ) -> None:
        """`coordinator`: its address."""
        from edgespec.plugins import own_policy_options  # and all policies, which no stage needs

        host = LOOPBACK if listens_everywhere(coordinator.host) else coordinator.host
        command = [*own_command("edgespec.cli.main"), "api"]
        command += ["--coordinator", str(Address(host, coordinator.port)), "--http", str(http)]
        command += [*(options or ApiOptions()).words, *own_policy_options()]
        super().__init__("the HTTP API", command, {VARIABLE: str(folder.path)})

    def again_after(self, code: int, lived: float) -> float | None:
        if code >= 0:
            log.warning("the HTTP API has ended; the ring serves without it")
            return None
        log.warning("the HTTP API was killed by signal %d; it is started again", -code)
        return AGAIN_S
