"""edgespec join: run one stage of the ring."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Annotated

import typer

from edgespec.cli import options
from edgespec.cli.discover import discovered
from edgespec.config import LOOPBACK, Address, Emulation, StageConfig
from edgespec.daemon.process import end_with_parent, leave, start_logging
from edgespec.daemon.stage import run_stage


def join(
    stage: Annotated[
        int,
        typer.Option(
            help="Which stage to be, counted from 1. Default: the first place that is free, or "
            "else a spare, which takes the place of a stage that is lost.",
            show_default=False,
        ),
    ] = 0,
    coordinator: options.Coordinator = None,
    model: Annotated[
        str,
        typer.Option(
            help="The base model on this device: a folder, or one that `edgespec shard` made. "
            "Default: what is at hand; what is not, the coordinator sends."
        ),
    ] = "",
    wait: Annotated[
        float, typer.Option(help="Seconds to wait for a coordinator that has never answered.")
    ] = 60.0,
    cache: options.Cache = "",
    emulate: options.Emulate = "",
    cost_model: options.CostModel = "",
    trace: options.Trace = "",
) -> None:
    """Join the ring as one stage: load its layers and compute, until Ctrl-C or SIGTERM.

    When the ring or the coordinator is lost, it keeps its layers and joins again.
    """
    end_with_parent()
    start_logging()
    emulation = Emulation.parse(emulate, cost_model)
    config = StageConfig(
        stage,
        Address.parse(LOOPBACK if coordinator is None else coordinator),
        model,
        wait,
        emulation=emulation,
        trace=trace,
        cache=cache,
    )
    if coordinator is None:  # after all else has been checked: it takes time
        found = discovered(config.wait, logging.getLogger("edgespec").info)
        config = replace(config, coordinator=found)
    leave(run_stage(config))
