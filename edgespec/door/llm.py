"""LLM: a model on a ring, which this program starts on its machine or which runs elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from edgespec.config import DEFAULT_LIVE, LOOPBACK, Address
from edgespec.daemon.local_ring import LOAD_S, LocalRing
from edgespec.daemon.model_names import resolved
from edgespec.daemon.precision import AUTO
from edgespec.daemon.settings import RingOptions, coordinator_config, look_at_models
from edgespec.door.asking import SamplingParams
from edgespec.door.clients import WAIT_S, RingClient
from edgespec.errors import EdgespecError
from edgespec.runtime.client import Client
from edgespec.wire.client_messages import Status

DEFAULT_MODEL = "smollm2-135m"

USUAL_STAGES = 2

LOOK_S = 0.2
"""Seconds between two requests for the status while a ring starts."""


def await_ready(
    client: Client, ring: LocalRing, news: Callable[[Status], None] = lambda status: None
) -> Status:
    """Wait until the ring that was started answers; `news(status)`: how it gets on."""
    try:
        while not (status := client.status()).ready:
            news(status)
            time.sleep(LOOK_S)
    except EdgespecError:
        ring.check()  # the process that ended knows the cause better
        raise
    return status


class LLM(RingClient):
    """A model that answers: `with LLM("smollm2-135m", draft="dspark") as llm: llm.generate([...])`.

    A Client, see there, of a ring of processes on this machine, which end with `close` and with
    this program; or, with `coordinator`, of a ring that runs.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        stages: int = USUAL_STAGES,
        draft: str = "",
        policy: str = "",
        dtype: str = AUTO,
        quant: str = AUTO,
        context: int = 0,
        live: int = DEFAULT_LIVE,
        coordinator: str = "",
        cluster: str = "",
        wait: float = WAIT_S,
    ) -> None:
        """Start the ring and wait until it is ready, or reach one that runs.

        `model`, `draft`, `quant`, `dtype`: as `edgespec serve` takes them. `stages`: processes that
        the layers are cut into. `policy`: of requests without parameters; one of your own,
        "package.module:Class", has to be named here. `context`: tokens that prompt and answer may
        have, 0: what the model takes. `live`: requests that are answered at once. `coordinator`:
        HOST:PORT of a ring that runs; it has its own model, draft and stages. `cluster`, `wait`:
        see Client. Raises ConfigError or ModelError for what cannot run, PeerLost if a process
        ends.
        """
        usual = SamplingParams(policy=policy)
        with ExitStack() as ends:
            if coordinator:
                super().__init__(coordinator, cluster=cluster, wait=wait)
                ends.callback(super().close)
            else:
                named = (resolved(model), draft, stages, dtype, quant, AUTO, AUTO, "", context)
                config = coordinator_config(RingOptions(*named), Address(LOOPBACK, 0))
                look_at_models(config)  # no process need start for what is not there
                ring = ends.enter_context(LocalRing(replace(config, live=live), interrupts=False))
                super().__init__(
                    ring.address, identity=ring.identity, wait=LOAD_S, check=ring.check
                )
                ends.callback(super().close)
                await_ready(self, ring)
            self._ends = ends.pop_all()
        self.usual = usual

    def close(self) -> None:
        """End the connection, and the ring if it is this program's."""
        self._ends.close()
