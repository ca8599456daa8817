"""Clients of a running coordinator, for programs, and LLM, which starts a ring for one."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from typing import Any

from edgespec.config import DEFAULT_LIVE, LOOPBACK, Address
from edgespec.daemon.cluster import ClusterFolder, folder_of
from edgespec.daemon.local_ring import LOAD_S, LocalRing
from edgespec.daemon.model_names import resolved
from edgespec.daemon.precision import AUTO
from edgespec.daemon.settings import RingOptions, coordinator_config, look_at_models
from edgespec.door.asking import TAG, USUAL, Completion, SamplingParams
from edgespec.errors import EdgespecError
from edgespec.net.keys import Identity
from edgespec.runtime import async_client, client
from edgespec.wire.client_messages import Failed, Finished, Status, Submit, Tokens

DEFAULT_MODEL = "smollm2-135m"

USUAL_STAGES = 2

LOOK_S = 0.2
"""Seconds between two requests for the status while a ring starts."""

WAIT_S = 10.0
"""Seconds until a coordinator that does not answer is given up."""

Talk = Sequence[Mapping[str, str]]
"""A conversation: {"role", "content"} of each message."""


def _reached(
    coordinator: str | Address, cluster: str, identity: Identity | None
) -> tuple[Address, Identity]:
    """Where the coordinator of a cluster is, and this machine's keys there.

    `coordinator`: HOST:PORT, "": where it was the last time. `cluster`: the folder with the keys on
    this machine, "": the usual one (see `edgespec join`); not read if `identity` has them. Raises
    AccessRefused or ConfigError where there are none.
    """
    if identity is None:
        folder = ClusterFolder.open(folder_of(cluster))
        coordinator, identity = coordinator or folder.address, folder.identity
    return Address.parse(str(coordinator)), identity


class RingClient(client.Client):
    """Asks a running coordinator: `with Client("HOST:PORT") as client: client.generate([...])`.

    One thread's. `usual`: the parameters of requests that are given none. All methods raise
    PeerLost if the coordinator is gone, AccessRefused if it does not take this machine's key, and
    RequestFailed with its reason for a request that it refuses.
    """

    def __init__(
        self,
        coordinator: str | Address = "",
        *,
        cluster: str = "",
        identity: Identity | None = None,
        wait: float = WAIT_S,
        check: Callable[[], None] | None = None,
    ) -> None:
        """`coordinator`, `cluster`, `identity`: see _reached; `wait`, `check`: see the base."""
        super().__init__(*_reached(coordinator, cluster, identity), wait, check=check)
        self.usual = USUAL
        self._tags = count(1)  # what comes of a request that was left may come later

    def generate(
        self, prompts: str | Sequence[str], params: SamplingParams | None = None
    ) -> list[Completion]:
        """What follows each of these texts; several are answered at once."""
        texts = [prompts] if isinstance(prompts, str) else prompts
        params = params or self.usual
        return self._answers([params.complete(text, next(self._tags)) for text in texts])

    def chat(self, messages: str | Talk, params: SamplingParams | None = None) -> Completion:
        """The next message of a conversation, by the model's chat template; a text is one that the
        user begins."""
        (answer,) = self._answers([_talk(messages, params or self.usual, next(self._tags))])
        return answer

    def stream(self, messages: str | Talk, params: SamplingParams | None = None) -> Iterator[str]:
        """The pieces of `chat`'s text as they come; left early, the rest is cancelled."""
        for message in self.ask(_talk(messages, params or self.usual, next(self._tags))):
            if isinstance(message, Tokens) and message.text:
                yield message.text

    def _answers(self, submits: Sequence[Submit]) -> list[Completion]:
        heard: dict[int, list[dict[str, Any]]] = {submit.tag: [] for submit in submits}
        answers: dict[int, Completion] = {}
        for message in self.ask_at_once(submits, DEFAULT_LIVE):
            answer = _told(message, heard[message.tag])
            if answer is not None:
                answers[message.tag] = answer
        return [answers[submit.tag] for submit in submits]


class AsyncRingClient(async_client.AsyncClient):
    """The same for asyncio programs; many tasks may ask at once.

    A coordinator that is lost is asked again as soon as it is back; what was asked meanwhile fails.
    """

    def __init__(
        self,
        coordinator: str | Address = "",
        *,
        cluster: str = "",
        identity: Identity | None = None,
        wait: float = WAIT_S,
    ) -> None:
        """See RingClient."""
        super().__init__(*_reached(coordinator, cluster, identity), wait)

    async def generate(
        self, prompts: str | Sequence[str], params: SamplingParams | None = None
    ) -> list[Completion]:
        """What follows each of these texts; several are answered at once."""
        texts = [prompts] if isinstance(prompts, str) else prompts
        return await asyncio.gather(
            *(self._answer((params or USUAL).complete(text)) for text in texts)
        )

    async def chat(self, messages: str | Talk, params: SamplingParams | None = None) -> Completion:
        """The next message of a conversation, by the model's chat template."""
        return await self._answer(_talk(messages, params or USUAL))

    async def stream(
        self, messages: str | Talk, params: SamplingParams | None = None
    ) -> AsyncGenerator[str, None]:
        """The pieces of `chat`'s text as they come; closed early, the rest is cancelled."""
        async for message in self.ask(_talk(messages, params or USUAL)):
            if isinstance(message, Tokens) and message.text:
                yield message.text

    async def _answer(self, submit: Submit) -> Completion:
        heard: list[dict[str, Any]] = []
        answer = None
        async for message in self.ask(submit):
            answer = _told(message, heard)
        assert answer is not None, "Finished comes last"
        return answer


Client, AsyncClient = RingClient, AsyncRingClient


def await_ready(
    asker: client.Client, ring: LocalRing, news: Callable[[Status], None] = lambda status: None
) -> Status:
    """Wait until the ring that was started answers; `news(status)`: how it gets on."""
    try:
        while not (status := asker.status()).ready:
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


def _talk(messages: str | Talk, params: SamplingParams, tag: int = TAG) -> Submit:
    return params.ask(messages, tag) if isinstance(messages, str) else params.answer(messages, tag)


def _told(message: client.Answer | Failed, heard: list[dict[str, Any]]) -> Completion | None:
    """The answer if that was its end; `heard`: its tokens' log-probabilities so far. Raises
    RequestFailed."""
    message = client.answer_of(message)
    if isinstance(message, Tokens) and message.log_probs:
        heard += json.loads(message.log_probs)
    return Completion.of(message, heard) if isinstance(message, Finished) else None
