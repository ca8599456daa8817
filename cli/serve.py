"""edgespec serve: run the coordinator."""

from __future__ import annotations

from typing import Annotated

import typer

from edgespec.cli import options
from edgespec.config import DEFAULT_PORT, LOOPBACK, Address, Emulation, Timing
from edgespec.daemon.coordinator import run_coordinator
from edgespec.daemon.process import end_with_parent, leave, start_logging
from edgespec.daemon.settings import coordinator_config


def serve(
    stages: Annotated[
        int,
        typer.Option(
            help="Number of stages in the ring. Default: as --layers or the model's folder has.",
            show_default=False,
        ),
    ] = 0,
    model: options.Model = "",
    draft: options.Draft = "",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = LOOPBACK,
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free.")] = DEFAULT_PORT,
    quant: options.Quant = "",
    draft_quant: options.DraftQuant = "none",
    layers: options.Layers = "",
    context: options.Context = 0,
    dtype: options.Dtype = "float32",
    cache: options.Cache = "",
    emulate: options.Emulate = "",
    cost_model: options.CostModel = "",
    trace: options.Trace = "",
    recovery: Annotated[
        float,
        typer.Option(help="Seconds that a request waits for a stage that was lost; 0: not at all."),
    ] = 60.0,
) -> None:
    """Run the coordinator: head, draft model, and the way in for prompts.

    Start it once, then `edgespec join --stage N` on every device. It runs until Ctrl-C or SIGTERM.
    When a stage is lost, requests wait for it to come back and then go on.
    """
    end_with_parent()
    start_logging()
    emulation = Emulation.parse(emulate, cost_model)
    timing = Timing(recovery=recovery)
    config = coordinator_config(
        model,
        draft,
        stages,
        dtype,
        Address(host, port),
        emulation,
        trace,
        quant=quant,
        draft_quant=draft_quant,
        layers=layers,
        context=context,
        cache=cache,
        timing=timing,
    )
    leave(run_coordinator(config))
