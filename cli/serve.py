"""edgespec serve: run the coordinator."""

from __future__ import annotations

import math
import os
from contextlib import nullcontext
from dataclasses import replace

import typer

from edgespec.cli import options
from edgespec.config import DEFAULT_LIVE, DEFAULT_PORT, MOST_LIVE, Address, Emulation, Timing
from edgespec.daemon.api_process import ApiOptions, http_address, served_http
from edgespec.daemon.cluster import ClusterFolder, folder_of
from edgespec.daemon.coordinator import run_coordinator
from edgespec.daemon.process import PARENT, end_with_parent, leave, start_logging
from edgespec.daemon.settings import RingOptions, served_config
from edgespec.daemon.shelf import ShelfOptions, models_of, run_shelf
from edgespec.errors import ConfigError
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
    only: str = typer.Option(
        "", metavar="NAME", help="Of a cluster with several models: serve this one alone."
    ),
    turn: float = typer.Option(
        30.0,
        min=0.0,
        max=86400.0,
        help="Seconds for which the model that is loaded takes new requests while others wait for "
        "another one of the cluster.",
    ),
    idle: float = typer.Option(
        0.0,
        min=0.0,
        max=1e9,
        help="Seconds without a request after which the model is unloaded everywhere, until the "
        "next one comes; 0: never.",
    ),
    live: int = typer.Option(
        DEFAULT_LIVE,
        min=1,
        max=MOST_LIVE,
        help="Requests that are answered at once, at most; fewer where the stages' caches have no "
        "room for them. The others wait.",
    ),
) -> None:
    """Run the coordinator: head, draft model, and the way in for prompts.

    It serves the ring that `edgespec init` described. Options that describe a ring (from --stages
    to --head, but for --with-stage) take the place of that description as a whole, for this start.
    It runs until Ctrl-C or SIGTERM. When a stage is lost, requests wait for it to come back and
    then go on. Of a cluster with several models (`edgespec init --add`) it loads the one that a
    request names, when nothing runs.
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
    told = ApiOptions.read(ollama, alias, require_key, cors_origin, host_name)
    models = models_of(folder)
    if only:
        if only not in models:
            raise ConfigError(f"the cluster has no model {only}; it has {', '.join(models)}")
        models = {only: models[only]}
    if idle and asked.describes:
        raise ConfigError(
            "--idle is for the cluster's models, without options that describe a ring"
        )
    if idle or (len(models) > 1 and not asked.describes):
        if emulate or trace or record or http_address(http) is None:
            raise ConfigError(
                "--emulate, --trace, --record and --http none are for one model that stays: name "
                f"it with --only ({', '.join(models)}), and leave --idle out"
            )
        http_at = served_http(http, told, folder)
        assert http_at is not None, "as was just looked at"
        own = Address(host or folder.settings.host, folder.settings.port if port is None else port)
        words = ["--recovery", str(recovery), "--silence", str(silence), "--live", str(live)]
        words += ["--cache", cache] if cache else []
        words += [f"--with-stage={with_stage}"] if with_stage is not None else []
        sharing = ShelfOptions(turn, idle or math.inf, drain, tuple(words))
        with folder.served():
            leave(run_shelf(folder, models, http_at, told, sharing, own))
    config = replace(
        served_config(models[only] if only else folder.settings, asked, emulation),
        name=only,
        timing=timing,
        trace=trace,
        cache=cache,
        record=record,
        live=live,
    )
    # Of the process that serves several models this is one of them: it has the folder already.
    is_turn = bool(only) and PARENT in os.environ
    with nullcontext() if is_turn else folder.served():
        api = served_http(http, told, folder)
        leave(run_coordinator(config, folder, api, told, drain, unloads=is_turn))
