"""edgespec join: become part of a cluster, and run one stage of its ring."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from functools import partial

import typer

from edgespec.cli import options
from edgespec.cli.reach import address_of, admitted, found_again, given_token
from edgespec.cli.search import is_loopback
from edgespec.config import LOOPBACK, Address, Emulation, StageConfig
from edgespec.daemon.access_list import clean_name
from edgespec.daemon.api_keys import ApiKeys
from edgespec.daemon.api_process import check_keys, needs_keys
from edgespec.daemon.cluster import ClusterFolder, folder_of
from edgespec.daemon.extras import require
from edgespec.daemon.process import (
    PARENT,
    Beside,
    Logged,
    end_with_parent,
    leave,
    start_logging,
)
from edgespec.daemon.stage import import_meanwhile, run_stage
from edgespec.net.discovery_interfaces import listens_everywhere
from edgespec.runtime.enrolment import require_stage
from edgespec.runtime.trace import Trace

ANSWER_S = 2.0
"""Seconds for the coordinator to say whether it has such a stage; one that loads says so later."""


def join(
    token: str = typer.Argument(
        "",
        help="What `edgespec init` or `edgespec token new` printed. Needed once: the device is "
        "remembered. -: read it from standard input.",
        show_default=False,
    ),
    stage: int = typer.Option(
        0,
        help="Which stage to be, counted from 1. Default: the place that the plan has for this "
        "device, or the first that is free, or else a spare, which takes the place of a stage "
        "that is lost.",
        show_default=False,
    ),
    coordinator: str | None = options.COORDINATOR,
    model: str = typer.Option(
        "",
        help="The base model on this device: as the coordinator's --model. Default: what is at "
        "hand; what is not, the coordinator sends.",
        callback=options.check_model,
    ),
    wait: float = typer.Option(
        600.0, help="Seconds to wait for a coordinator that has never answered."
    ),
    cluster: str = options.CLUSTER,
    cache: str = options.CACHE,
    emulate: str = options.EMULATE,
    cost_model: str = options.COST_MODEL,
    trace: str = options.TRACE,
    metrics: str = typer.Option(
        "",
        metavar="HOST:PORT",
        help="Where Prometheus may read this stage's figures, at /metrics; from other machines "
        "with a key that `edgespec key new NAME` made on this device. Default: nowhere.",
    ),
) -> None:
    """Join a cluster's ring as one stage: load its layers and compute, until Ctrl-C or SIGTERM.

    The first time it takes a token. When the ring or the coordinator is lost, it keeps its layers
    and joins again.
    """
    end_with_parent()
    start_logging()
    emulation = Emulation.parse(emulate, cost_model)
    served = Address.parse(metrics) if metrics else None

    beside = Beside.read()
    # Made before any search on the network, as it checks the options.
    config = StageConfig(
        stage,
        Address.parse(LOOPBACK if coordinator is None else coordinator),
        model,
        wait,
        emulation=emulation,
        cache=cache,
        metrics=served,
        listen=beside.listen,
        reserved=beside.reserved,
    )
    if emulation is not None:
        from edgespec.daemon.emulation import check_profiles

        check_profiles(emulation)
    written = Trace(trace) if trace else None
    path = folder_of(cluster)
    introduction = given_token(token)
    if introduction is not None:
        admitted(path, introduction, coordinator, wait, Logged(), import_meanwhile)
    folder = ClusterFolder.open(path)
    accepts = None
    if served is not None:
        require("coordinator", "--metrics")
        check_keys(served, folder, "--metrics")
        accepts = ApiKeys(folder.path).accepts if needs_keys(served) else None
    address = address_of(folder, coordinator, wait, Logged(), import_meanwhile)
    if stage and PARENT not in os.environ:  # who starts this process knows the ring
        require_stage(address, folder.identity, stage, ANSWER_S, import_meanwhile)
    config, name = replace(config, coordinator=address), folder.name
    if folder.is_coordinator:
        name = clean_name(socket.gethostname())
        host = folder.settings.host
        if listens_everywhere(host):  # others reach this stage as they reach the coordinator
            config = replace(config, listen=host)
    find = None if is_loopback(address) else partial(found_again, folder)
    leave(run_stage(config, folder.identity, name, accepts, find, written))
