"""edgespec join: run one stage of the ring."""

from __future__ import annotations

from typing import Annotated

import typer

from edgespec.cli import options
from edgespec.config import Address, Emulation, StageConfig
from edgespec.daemon.process import end_with_parent, leave, start_logging
from edgespec.daemon.stage import run_stage


def join(
    stage: Annotated[int, typer.Option(help="Which stage to be, counted from 1.")],
    coordinator: options.Coordinator,
    model: Annotated[
        str,
        typer.Option(
            help="The base model on this device: a folder, or one that `edgespec shard` made. "
            "Default: what is at hand; what is not, the coordinator sends."
        ),
    ] = "",
    wait: Annotated[
        float, typer.Option(help="Seconds to wait for a coordinator that does not answer.")
    ] = 60.0,
    cache: options.Cache = "",
    emulate: options.Emulate = "",
    cost_model: options.CostModel = "",
    trace: options.Trace = "",
) -> None:
    """Join the ring as one stage: load its layers and compute until the ring ends."""
    end_with_parent()
    start_logging()
    emulation = Emulation.parse(emulate, cost_model)
    config = StageConfig(
        stage,
        Address.parse(coordinator),
        model,
        wait,
        emulation=emulation,
        trace=trace,
        cache=cache,
    )
    leave(run_stage(config))
