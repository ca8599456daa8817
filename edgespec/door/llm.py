"""LLM: a model on a ring, which this program starts on its machine or which runs elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from edgespec.config import DEFAULT_LIVE, LOOPBACK, Address, CoordinatorConfig
from edgespec.daemon.local_ring import LOAD_S, LocalRing
from edgespec.daemon.model_names import resolved
from edgespec.daemon.precision import AUTO
from edgespec.daemon.settings import RingOptions, coordinator_config
from edgespec.door.asking import Completion, SamplingParams
from edgespec.door.clients import USUAL, WAIT_S, RingClient, Talk
from edgespec.errors import EdgespecError
from edgespec.model.hub import model_files
from edgespec.plugins import known_policies
from edgespec.policy.registry import policy_named
from edgespec.wire.client_messages import Status

DEFAULT_MODEL = "smollm2-135m"

USUAL_STAGES = 2

LOOK_S = 0.2
"""Seconds between two requests for the status while a ring starts."""


@contextmanager
def ready_ring(
    config: CoordinatorConfig,
    traces: Path | None = None,
    news: Callable[[Status], None] = lambda status: None,
) -> Iterator[tuple[LocalRing, RingClient]]:
    """A ring of processes on this machine, once it is ready, and a client of it.

    `traces`: see LocalRing. `news(status)`: how it gets ready.
    """
    model_files(config.model).file("config.json")  # no process need start for what is not there
    with (
        LocalRing(config, traces) as ring,
        RingClient(ring.address, identity=ring.identity, wait=LOAD_S, check=ring.check) as client,
    ):
        try:
            while not (status := client.status()).ready:
                news(status)
                time.sleep(LOOK_S)
            yield ring, client
        except EdgespecError:
            ring.check()  # the process that ended knows the cause better
            raise


class LLM:
    """A model that answers: `with LLM("smollm2-135m", draft="dspark") as llm: llm.generate([...])`.

    Without `coordinator` its ring consists of processes of this machine, which end with `close` and
    with this program. Methods raise what those of Client do.
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
        the layers are cut into. `policy`: of requests that name none; one of your own is
        "package.module:Class". `context`: tokens that prompt and answer may have, 0: what the model
        takes. `live`: requests that are answered at once. `coordinator`: HOST:PORT of a ring that
        runs; it has its own model, draft and stages. `cluster`, `wait`: see Client.

        Raises ConfigError or ModelError for what cannot run, PeerLost if a process ends.
        """
        self._policy = ""
        for self._policy in known_policies([policy] if policy else []):
            policy_named(self._policy)
        self._ends = ExitStack()
        if coordinator:
            client = RingClient(coordinator, cluster=cluster, wait=wait)
            self.client = self._ends.enter_context(client)
            return
        ring = RingOptions(resolved(model), draft, stages, dtype, quant, AUTO, AUTO, "", context)
        config = replace(coordinator_config(ring, Address(LOOPBACK, 0)), live=live)
        _, self.client = self._ends.enter_context(ready_ring(config))

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection, and the ring if it is this program's."""
        self._ends.close()

    def generate(
        self, prompts: str | Sequence[str], params: SamplingParams = USUAL
    ) -> list[Completion]:
        """What follows each of these texts; several are answered at once."""
        return self.client.generate(prompts, self._with_policy(params))

    def chat(self, messages: str | Talk, params: SamplingParams = USUAL) -> Completion:
        """The next message of a conversation, by the model's chat template; a text is one that the
        user begins."""
        return self.client.chat(messages, self._with_policy(params))

    def stream(self, messages: str | Talk, params: SamplingParams = USUAL) -> Iterator[str]:
        """The pieces of `chat`'s text as they come; left early, the rest is cancelled."""
        return self.client.stream(messages, self._with_policy(params))

    def _with_policy(self, params: SamplingParams) -> SamplingParams:
        return params if params.policy else replace(params, policy=self._policy)
