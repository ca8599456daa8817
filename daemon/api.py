"""The process of the HTTP API: from its settings to uvicorn; no model is loaded here."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

import uvicorn

from edgespec.config import Address
from edgespec.daemon.api_keys import ApiKeys
from edgespec.daemon.api_process import check_keys, needs_keys
from edgespec.daemon.cluster import ClusterFolder
from edgespec.daemon.process import EXIT_OK, take_file_descriptors
from edgespec.errors import AddressUnavailable
from edgespec.net.discovery_interfaces import listens_everywhere
from edgespec.net.sockets import number_of
from edgespec.runtime.async_client import AsyncClient
from edgespec.serving.app import Service, application
from edgespec.serving.events import routes
from edgespec.serving.limits import CONNECT_S, Limits
from edgespec.serving.protocol import ApiServer, protocol_of

BACKLOG = 512

GRACE_S = 2
"""Seconds that open answers get for their last word when the process ends."""

log = logging.getLogger("edgespec")


@dataclass(frozen=True, slots=True)
class ApiConfig:
    """What `edgespec api` runs: where it listens, and which coordinator it asks."""

    http: Address
    coordinator: Address
    limits: Limits = field(default_factory=Limits)


def run_api(config: ApiConfig, folder: ClusterFolder) -> int:
    """Serve HTTP until a signal ends it; returns the exit code.

    Prints where it listens as the one line on standard output. Raises ConfigError for settings,
    AddressUnavailable for an address that cannot be used.
    """
    check_keys(config.http, folder)
    take_file_descriptors()
    keys = ApiKeys(folder.path)
    accepts: Callable[[str], bool] | None = keys.accepts if needs_keys(config.http) else None
    with listening(config.http) as listener:
        http = Address(config.http.host, listener.getsockname()[1])
        client = AsyncClient(config.coordinator, folder.identity, CONNECT_S)
        print(f"API at http://{http}", flush=True)
        log.info("HTTP API at http://%s, of the coordinator at %s", http, config.coordinator)
        server_of(Service(client, config.limits), accepts).run(sockets=[listener])
    return EXIT_OK


def server_of(service: Service, accepts: Callable[[str], bool] | None) -> ApiServer:
    """The server of an API, which listens where it is told when it is run."""
    # Whoever misspells a request shall not fill the log; our own bugs shall be in it.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    limits = service.limits
    settings = uvicorn.Config(
        application(service, accepts, routes(service.client)),
        http=protocol_of(limits),
        ws="none",
        lifespan="on",
        loop="asyncio",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=limits.idle_seconds,
        timeout_graceful_shutdown=GRACE_S,
        h11_max_incomplete_event_size=limits.header,
        backlog=BACKLOG,
    )
    return ApiServer(settings, service)


def listening(http: Address) -> socket.socket:
    """A socket that listens there. Raises AddressUnavailable."""
    host = number_of(http.host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and listens_everywhere(host):
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        opened.bind(socket.getaddrinfo(host, http.port, family, socket.SOCK_STREAM)[0][4])
        opened.listen(BACKLOG)
    except OSError as problem:
        opened.close()
        raise AddressUnavailable(
            f"the HTTP API cannot listen on {http} ({problem.strerror or problem}); stop the "
            "program that uses it, or choose another address with --http (none: no API)"
        ) from None
    return opened
