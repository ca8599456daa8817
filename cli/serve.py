"""edgespec serve: run the coordinator."""

from __future__ import annotations

from dataclasses import replace

import typer

from edgespec.cli import options
from edgespec.config import DEFAULT_LIVE, DEFAULT_PORT, Emulation, Timing
from edgespec.daemon.api_process import ApiOptions, served_http
from edgespec.daemon.cluster import ClusterFolder, folder_of
from edgespec.daemon.coordinator import run_coordinator
from edgespec.daemon.process import end_with_parent, leave, start_logging
from edgespec.daemon.settings import RingOptions, served_config
from edgespec.net.slowness import slowness


def serve(
    stages: int = typer.Option(
        0,
        help="Number of stages in the ring. Default: as --layers or the model's folder has.",
        show_default=False,
        callback=options.check_stages,
    ),
    model: str = options.MODEL,
    draft: str = options.DRAFT,
    policy: str = options.OWN_POLICY,
    host: str = typer.Option(
        "", help="Address to listen on. Default: as the cluster has it, or 127.0.0.1."
    ),
    port: int | None = typer.Option(
        None,
        help=f"Port to listen on; 0: any free. Default: as the cluster has it, or {DEFAULT_PORT}.",
        show_default=False,
    ),
    quant: options.Quant = "",
    head_quant: options.HeadQuant = "",
    draft_quant: options.DraftQuant = "",
    layers: str = options.LAYERS,
    with_stage: int | None = options.WITH_STAGE,
    context: int = options.CONTEXT,
    dtype: options.Dtype = "",
    cache_dtype: options.CacheDtype = "",
    head: options.Head = "",
    cluster: str = options.CLUSTER,
    cache: str = options.CACHE,
    emulate: str = options.EMULATE,
    cost_model: str = options.COST_MODEL,
    trace: str = options.TRACE,
    record: str = typer.Option(
        "",
        metavar="FILE",
        help="File to write every request and its answer into, for `edgespec replay`.",
    ),
    http: str = options.HTTP,
    alias: list[str] | None = options.ALIAS,
    ollama: str = options.OLLAMA,
    require_key: bool = options.REQUIRE_KEY,
    cors_origin: list[str] | None = options.CORS_ORIGIN,
    host_name: list[str] | None = options.HOST_NAME,
    recovery: float = typer.Option(
        60.0, help="Seconds that a request waits for a stage that was lost; 0: not at all."
    ),
    silence: float = typer.Option(
        1.5,
        min=0.5,
        max=60.0,
        help="Seconds without a message after which a stage and the coordinator count as lost to "
        "each other.",
    ),
    drain: float = typer.Option(
        0.0,
        min=0.0,
        max=86400.0,
        help="Seconds that requests have to end after SIGTERM or Ctrl-C; new ones are refused "
        "meanwhile, and a second signal ends it at once.",
    ),
    live: int = typer.Option(
        DEFAULT_LIVE,
        help="Requests that are answered at once, at most; fewer where the stages' caches have no "
        "room for them. The others wait.",
    ),
) -> None:
    """Run the coordinator: head, draft model, and the way in for prompts.

    It serves the ring that `edgespec init` described. Options that describe a ring (from --stages
    to --head, but for --with-stage) take the place of that description as a whole, for this start.
    It runs until Ctrl-C or SIGTERM. When a stage is lost, requests wait for it to come back and
    then go on.
    """
    end_with_parent()
    start_logging()
    emulation = Emulation.parse(emulate, cost_model)
    timing = Timing(recovery=recovery, silence=silence).slowed(slowness())
    folder = ClusterFolder.open(folder_of(cluster))
    asked = RingOptions(
        *(model, draft, stages, dtype, quant, head_quant, draft_quant, layers, context),
        *(host, port),
        with_stage=with_stage,
        head=head,
        cache_dtype=cache_dtype,
    )
    config = replace(
        served_config(folder.settings, asked, emulation),
        timing=timing,
        trace=trace,
        cache=cache,
        record=record,
        live=live,
    )
    told = ApiOptions.read(ollama, alias, require_key, cors_origin, host_name)
    with folder.served():
        leave(run_coordinator(config, folder, served_http(http, told, folder), told, drain))
