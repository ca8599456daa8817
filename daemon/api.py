"""The process of the HTTP API: from its settings to uvicorn; no model is loaded here."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from edgespec.config import Address
from edgespec.daemon.api_keys import ApiKeys
from edgespec.daemon.api_process import ApiOptions, needs_keys
from edgespec.daemon.cluster import ClusterFolder
from edgespec.daemon.process import take_file_descriptors
from edgespec.errors import EXIT_OK, AddressUnavailable, EdgespecError
from edgespec.net.discovery_interfaces import reached_at
from edgespec.net.slowness import slowness
from edgespec.runtime.async_client import AsyncClient
from edgespec.serving.app import Service, application
from edgespec.serving.events import routes
from edgespec.serving.guard import Door
from edgespec.serving.limits import CONNECT_S, HttpLimits
from edgespec.serving.protocol import ApiServer, opened, settings_of
from edgespec.serving.turns import ModelTurns

BACKLOG = 512

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ApiConfig:
    """What `edgespec api` runs: where it listens, and which coordinator it asks."""

    http: Address
    coordinator: Address
    options: ApiOptions = field(default_factory=ApiOptions)
    limits: HttpLimits = field(default_factory=HttpLimits)


@dataclass(frozen=True, slots=True)
class Several:
    """Of an API whose process loads several models by turns: how they are made, and what is called
    every few seconds while its loop turns."""

    turns: Callable[[AsyncClient], ModelTurns]
    beat: Callable[[], None]


def run_api(config: ApiConfig, folder: ClusterFolder, several: Several | None = None) -> int:
    """Serve HTTP until a signal ends it; returns the exit code.

    Prints where it listens, unless there are several models. Raises AddressUnavailable for an
    address that cannot be used.
    """
    take_file_descriptors()
    options = config.options
    doors = {"--http": config.http, **({"--ollama": options.ollama} if options.ollama else {})}
    with ExitStack() as ends:
        listeners = [ends.enter_context(listening(at, name)) for name, at in doors.items()]
        ports = [listener.getsockname()[1] for listener in listeners]
        keyed = {p for p, at in zip(ports, doors.values(), strict=True) if needs_keys(at)}
        is_open = frozenset() if options.require_key else frozenset(ports) - keyed
        door = Door(is_open, frozenset(options.origins), frozenset(options.names))
        http = Address(config.http.host, ports[0])
        client = AsyncClient(config.coordinator, folder.identity, CONNECT_S * slowness())
        urls = [f"http://{one}" for one in reached_at(http)]
        if several is None:
            print(f"API at {urls[0]}", flush=True)
        log.info("the page and the HTTP API at %s", " or ".join(urls))
        if options.ollama is not None:
            log.info("for clients of Ollama at http://%s", Address(options.ollama.host, ports[-1]))
        turns = several.turns(client) if several is not None else None
        service = Service(client, config.limits, frozenset(options.aliases), turns)
        keys = ApiKeys(folder.path)
        try:
            keys.all()
        except EdgespecError as problem:  # on loopback it may be asked without keys
            log.warning("no API key is accepted: %s", problem)
        server = server_of(service, keys.accepts, door, keys.exchanged)
        if several is not None:
            server.beat = several.beat
        server.run(sockets=listeners)
    return EXIT_OK


def server_of(
    service: Service,
    accepts: Callable[[str], bool],
    door: Door,
    exchanged: Callable[[str], str | None] = lambda key: None,
) -> ApiServer:
    """The uvicorn server of an API; its sockets are passed to `run`. `accepts`, `door`: see Guard;
    `exchanged`: see events.routes."""
    turns = service.turns
    pages = routes(service.client, exchanged, lambda: turns.absence if turns is not None else "")
    app = application(service, accepts, door, pages)
    return ApiServer(settings_of(app, service.limits, BACKLOG), service)


def listening(http: Address, option: str = "--http") -> socket.socket:
    """A listening socket; `option`: the one that gave its address. Raises AddressUnavailable."""
    try:
        return opened(http, BACKLOG)
    except OSError as problem:
        raise AddressUnavailable(
            f"the HTTP API cannot listen on {http} ({problem.strerror or problem}); stop the "
            f"program that uses it, or choose another address with {option} (none: no API)"
        ) from None
