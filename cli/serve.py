"""edgespec serve: run the coordinator."""

from __future__ import annotations

from typing import Annotated

import typer

from edgespec.cli import options
from edgespec.config import DEFAULT_PORT, LOOPBACK, Address, CoordinatorConfig, Emulation
from edgespec.daemon.bundled import bundled
from edgespec.daemon.coordinator import run_coordinator
from edgespec.daemon.process import end_with_parent, leave, start_logging


def serve(
    stages: options.Stages,
    model: options.Model = "",
    draft: options.Draft = "",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = LOOPBACK,
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free.")] = DEFAULT_PORT,
    dtype: options.Dtype = "float32",
    emulate: options.Emulate = "",
    cost_model: options.CostModel = "",
    trace: options.Trace = "",
) -> None:
    """Run the coordinator: head, draft model, and the way in for prompts.

    Start it once, then `edgespec join --stage N` on every device. It runs until Ctrl-C, SIGTERM,
    or until a stage is lost.
    """
    end_with_parent()
    start_logging()
    emulation = Emulation.parse(emulate, cost_model)
    config = coordinator_config(model, draft, stages, dtype, Address(host, port), emulation, trace)
    leave(run_coordinator(config))


def coordinator_config(
    model: str,
    draft: str,
    stages: int,
    dtype: str,
    address: Address,
    emulation: Emulation | None = None,
    trace: str = "",
) -> CoordinatorConfig:
    """Settings with the bundled pair filled in where no model is named."""
    if not model:
        model, draft = bundled("base"), draft or bundled("draft")
    return CoordinatorConfig(model, draft, stages, dtype, address, emulation=emulation, trace=trace)
