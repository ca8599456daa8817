"""edgespec api: the HTTP API of a running coordinator."""

from __future__ import annotations

import typer

from edgespec.cli import options
from edgespec.cli.notes import Notes
from edgespec.cli.reach import address_of
from edgespec.daemon.api_process import ApiOptions, http_address
from edgespec.daemon.cluster import ClusterFolder, folder_of
from edgespec.daemon.extras import require
from edgespec.daemon.process import end_with_parent, leave, start_logging
from edgespec.errors import ConfigError


def api(
    coordinator: str | None = options.COORDINATOR,
    http: str = options.HTTP,
    alias: list[str] | None = options.ALIAS,
    ollama: str = options.OLLAMA,
    require_key: bool = options.REQUIRE_KEY,
    cors_origin: list[str] | None = options.CORS_ORIGIN,
    host_name: list[str] | None = options.HOST_NAME,
    policy: str = options.OWN_POLICY,
    wait: float = typer.Option(
        10.0, help="Seconds to look for the coordinator on the local network."
    ),
    cluster: str = options.CLUSTER,
) -> None:
    """Serve the HTTP API of a running coordinator, until Ctrl-C or SIGTERM.

    `edgespec serve` starts it by itself on the coordinator's own machine; on another machine of the
    cluster it is started by hand.
    """
    require("coordinator", "the HTTP API")
    # Imported late, as uvicorn and starlette are slow to import.
    from edgespec.daemon.api import ApiConfig, run_api

    end_with_parent()
    start_logging()
    address = http_address(http)
    if address is None:
        raise ConfigError("--http none leaves nothing to serve; give HOST:PORT")
    folder = ClusterFolder.open(folder_of(cluster))
    told = ApiOptions.read(ollama, alias, require_key, cors_origin, host_name)
    told.check_keys(address, folder)
    reached = address_of(folder, coordinator, wait, Notes(), or_known=True)
    leave(run_api(ApiConfig(address, reached, told), folder))
