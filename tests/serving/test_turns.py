"""Turns of several models: who is let through when, with a time and a loader of the test's own."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any, cast

import httpx
import pytest
import uvicorn
from support.apis import api
from support.nodes import PATIENCE_S, NodeRing, until

from edgespec.errors import EdgespecError, PeerLost
from edgespec.runtime.access_policy import CLIENT
from edgespec.runtime.async_client import AsyncClient
from edgespec.serving.app import Service
from edgespec.serving.limits import HttpLimits
from edgespec.serving.problems import ApiProblem
from edgespec.serving.protocol import ApiServer
from edgespec.serving.turns import MOST_WAIT_S, ModelTurn, ModelTurns
from edgespec.wire.client_messages import Status

LONGEST = 30.0


class Here:
    """A loader that is done when the test says so; and the time."""

    def __init__(self, *names: str, idle: float = 1e9, drain: float = 0.0) -> None:
        self.now, self.loads, self.runs = 0.0, ["nothing"], True
        self.gate: asyncio.Future[None] | None = None
        self.left: list[float] = []
        known = [Status(False, (), model=name, names=(name.upper(),)) for name in names]
        self.turns = ModelTurns(
            self, known, LONGEST, idle, drain, self.left.append, lambda: self.now
        )

    async def load(self, name: str, is_wanted: Callable[[], bool]) -> Status:
        self.loads.append(name)
        self.gate = asyncio.get_running_loop().create_future()
        await self.gate
        return Status(True, (), model=name, context_length=len(name))

    async def unload(self) -> None:
        self.loads.append("nothing")

    async def done(self, problem: Exception | None = None) -> None:
        """The load that is on its way ends."""
        await asyncio.sleep(0)
        assert self.gate is not None
        if problem is None:
            self.gate.set_result(None)
        else:
            self.gate.set_exception(problem)
        self.gate = None
        await settled()

    async def loaded(self, name: str) -> ModelTurn:
        """The model is there, and one request for it runs."""
        turn = self.turns.take(name)
        await self.done()
        assert turn.given.done()
        return turn


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def played(play: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(play())


def test_another_model_is_loaded_when_nothing_runs() -> None:
    async def play() -> None:
        here = Here("a", "b")
        first = await here.loaded("a")
        other = here.turns.take("b")
        assert "the model a answers 1 request(s)" in other.words
        assert not other.given.done()
        first.end()
        await settled()
        assert other.words == "loading the model b"
        behind = here.turns.take("a")
        assert behind.words == "loading the model b; a comes after it"
        await here.done()
        assert other.given.done()
        assert here.turns.loaded == "b"
        told = [one.context_length for one in here.turns.models]
        assert told == [1, 1], "what was told of each is kept"
        assert here.loads == ["nothing", "a", "b"]

    played(play)


def test_the_loaded_one_keeps_the_ring_for_a_turn_at_most() -> None:
    async def play() -> None:
        here = Here("a", "b")
        running = [await here.loaded("a")]
        here.now = 100.0
        other = here.turns.take("b")
        here.now += LONGEST - 1
        running.append(here.turns.take("a"))
        assert running[-1].given.done(), "within the turn"
        here.now += 1
        late = here.turns.take("a")
        assert not late.given.done(), "its turn is over"
        for one in running:
            one.end()
        await here.done()
        assert other.given.done()
        assert not late.given.done()
        here.now += LONGEST - 1
        more = here.turns.take("b")
        assert more.given.done(), "b has a turn of its own, however long others have waited"
        other.end()
        more.end()
        await here.done()
        assert late.given.done()

    played(play)


def test_three_models_are_loaded_in_the_order_in_which_they_were_asked_for() -> None:
    async def play() -> None:
        here = Here("a", "b", "c")
        turns = [await here.loaded("a"), *map(here.turns.take, ("c", "b"))]
        here.now = LONGEST
        turns.append(here.turns.take("a"))
        for one in turns:
            if not one.given.done():
                await here.done()
            assert one.given.done()
            one.end()
        assert here.loads == ["nothing", "a", "c", "b", "a"]

    played(play)


def test_who_leaves_is_waited_for_no_more() -> None:
    async def play() -> None:
        here = Here("a", "b")
        first = await here.loaded("a")
        here.turns.take("b").end()
        here.now = LONGEST
        assert here.turns.take("a").given.done()
        assert here.turns.waiting == 0
        first.end()

    played(play)


def test_a_model_that_cannot_be_loaded_fails_its_requests_alone() -> None:
    async def play() -> None:
        here = Here("a", "b")
        bad, good = here.turns.take("b"), here.turns.take("a")
        await here.done(EdgespecError("the model b cannot be loaded"))
        with pytest.raises(ApiProblem, match="the model b cannot be loaded"):
            bad.given.result()
        await here.done()
        assert good.given.done()

    played(play)


def test_a_bug_of_the_loader_ends_the_requests_that_wait_for_it() -> None:
    async def play() -> None:
        here = Here("a", "b")
        bad, good = here.turns.take("b"), here.turns.take("a")
        await here.done(OSError(24, "Too many open files"))
        with pytest.raises(ApiProblem, match=r"the model b cannot be loaded: .* open files"):
            bad.given.result()
        await here.done()
        assert good.given.done()

    played(play)


def test_a_coordinator_that_has_ended_is_started_again() -> None:
    async def play() -> None:
        here = Here("a")
        (await here.loaded("a")).end()
        here.runs = False
        assert here.turns.loaded == "", "so that lists and /readyz do not say that it is there"
        again = here.turns.take("a")
        assert not again.given.done()
        here.runs = True
        await here.done()
        assert again.given.done()

    played(play)


def test_nobody_waits_without_end() -> None:
    async def play() -> None:
        here = Here("a", "b")
        await here.loaded("a")
        other = here.turns.take("b")
        here.now = MOST_WAIT_S
        with pytest.raises(ApiProblem, match="b was not there within 600 s: the model a answers"):
            other.check_wait()

    played(play)


def test_what_nobody_asks_for_is_given_up() -> None:
    async def play() -> None:
        here = Here("a", idle=0.0)
        turn = await here.loaded("a")
        await asyncio.sleep(0.01)
        assert here.turns.loaded == "a", "a request runs"
        turn.end()
        while here.loads[-1] != "nothing":
            await asyncio.sleep(0.001)
        await settled()
        assert here.turns.loaded == ""
        assert not here.turns.is_loading
        assert here.turns.waited_for("a") == "the model a is not loaded"
        (await here.loaded("a")).end()
        here.turns.give_up("a")
        assert here.turns.loaded == ""
        assert not here.turns.is_loading, "it is ready to load what the next one asks for"

    played(play)


def test_at_the_end_what_runs_has_its_time_and_nothing_more_is_taken() -> None:
    async def play() -> None:
        here, told = Here("a", "b"), []
        running = await here.loaded("a")
        assert here.left == []
        waiting = here.turns.take("b")
        here.turns.close("stopped by SIGTERM", lambda: told.append("end"))
        with pytest.raises(ApiProblem, match="stopped by SIGTERM"):
            waiting.given.result()
        with pytest.raises(ApiProblem, match="stopped by SIGTERM"):
            here.turns.take("a")
        assert told == []
        waiting.end()
        running.end()
        await asyncio.sleep(0.001)  # nor when the time is over
        assert told == ["end"], "once: a second Ctrl-C has uvicorn drop all"

    played(play)


def test_the_end_does_not_wait_for_a_load() -> None:
    async def play() -> None:
        here, told = Here("a", drain=1e6), []
        waiting = here.turns.take("a")
        here.turns.close("stopped by SIGTERM", lambda: told.append("end"))
        assert told == ["end"]
        assert here.left == [1e6], "the service manager has to know for how long"
        with pytest.raises(ApiProblem, match="stopped by SIGTERM"):
            waiting.given.result()

    played(play)


def test_a_model_is_found_by_each_of_its_names() -> None:
    async def play() -> None:
        here = Here("a", "b")
        names = ["", "b", "B", "c"]
        assert [here.turns.named(name) for name in names] == ["a", "b", "b", ""]
        here.turns.take("b")
        assert here.turns.named("") == "b", "it is on its way"
        await here.done()
        assert here.turns.named("") == "b"

    played(play)


# --- over HTTP ----------------------------------------------------------------------------------


class Coordinator:
    """A client of one that answers when the test says so."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Status] = asyncio.get_running_loop().create_future()

    async def status(self, age: float) -> Status:
        return await self.answer


def test_lists_have_each_model_once_and_ready_is_what_its_ring_says() -> None:
    async def play() -> None:
        here, client = Here("a", "b"), Coordinator()
        service = Service(cast("AsyncClient", client), turns=here.turns)
        turn = await here.loaded("a")
        listed = asyncio.ensure_future(service.statuses())
        await settled()
        turn.end()
        here.turns.take("b")
        client.answer.set_result(Status(True, (), model="a"))
        assert [one.model for one in await listed] == ["a", "b"]
        await here.done()
        client.answer = asyncio.get_running_loop().create_future()
        client.answer.set_exception(PeerLost("the coordinator was killed"))
        assert [(one.model, one.ready) for one in await service.statuses()] == [
            ("a", False),
            ("b", False),
        ]

    played(play)


def test_a_second_signal_ends_the_answers_and_then_the_model() -> None:
    async def play() -> None:
        here = Here("a", drain=1e6)
        service = Service(cast("AsyncClient", Coordinator()), turns=here.turns)
        server = ApiServer(uvicorn.Config(""), service)
        server.loop = asyncio.get_running_loop()
        running = await here.loaded("a")
        server.handle_exit(signal.SIGINT, None)
        await settled()
        assert not server.should_exit
        server.handle_exit(signal.SIGINT, None)
        running.end()
        assert server.should_exit
        assert not server.force_exit, "it would leave the coordinator to the kernel"

    played(play)


class Ring:
    """A loader for the one model of a ring, `toy`, which it has once the gate is open."""

    runs = True

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.turns = ModelTurns(
            self, [Status(False, (), model=one) for one in ("toy", "other")], 0.0
        )

    async def load(self, name: str, is_wanted: Callable[[], bool]) -> Status:
        while not self.gate.is_set():
            await asyncio.sleep(0.01)
        if name == "other":
            raise EdgespecError("the model other cannot be loaded")
        return Status(True, (), model=name, context_length=7)

    async def unload(self) -> None:
        pass


def test_clients_of_several_models_wait_and_are_told_for_what() -> None:
    ring = Ring()
    body = {"model": "toy:latest", "prompt": "hello", "max_tokens": 3, "temperature": 0}
    limits = HttpLimits(pause_seconds=0.05)
    with NodeRing(2) as nodes:
        nodes.await_up()
        identity = nodes.keys.add("the API", CLIENT)
        more: dict[str, Any] = {"timing": nodes.timing, "turns": ring.turns, "limits": limits}
        with api(nodes.address, identity, **more) as url, httpx.Client(base_url=url) as client:

            def ask(path: str = "/v1/completions", **more: Any) -> httpx.Response:
                return client.post(path, json={**body, **more}, timeout=PATIENCE_S)

            listed = client.get("/v1/models").json()["data"]
            assert [one["id"] for one in listed] == ["toy", "other"]
            assert client.get("/api/ps").json() == {"models": []}
            assert client.get("/health").status_code == 200
            assert client.get("/readyz").status_code == 503
            at_once = ask(wait=False)
            assert (at_once.status_code, at_once.json()["error"]["code"]) == (
                503,
                "model_not_loaded",
            )
            with pytest.raises(httpx.ReadTimeout):
                client.post("/tokenize", json={"model": "other", "prompt": "x"}, timeout=0.5)
            until(lambda: not ring.turns.waiting)
            with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
                parts = reply.iter_text()
                assert next(parts).startswith(": loading the model toy\n\n")
                ring.gate.set()
                assert "".join(parts).endswith("data: [DONE]\n\n")
            whole = ask()
            assert (whole.status_code, whole.json()["model"]) == (200, "toy")
            assert client.get("/readyz").status_code == 200
            assert [one["model"] for one in client.get("/api/ps").json()["models"]] == ["toy"]
            tokens = client.post("/tokenize", json={"prompt": "hello"}).json()
            assert tokens["count"] == 5, tokens
            at_once = ask(model="other", wait=False)
            assert at_once.json()["error"]["message"] == "the model other is not loaded"
            assert ring.turns.loaded == "toy", "it was not given up for what was not waited for"
            other = ask(model="other")
            assert other.status_code == 503
            assert "other cannot be loaded" in other.json()["error"]["message"]
            streamed = ask(model="other", stream=True)
            assert streamed.status_code == 503
            none = ask(model="third")
            assert none.status_code == 404
            assert "those that are served are 'toy' and 'other'" in none.json()["error"]["message"]
            assert client.get("/readyz").json() == {"status": "ready", "stages": 0}
            with client.stream("GET", "/events") as page:
                first = next(page.iter_text())
            assert '"reachable":false,"text":"no model is loaded; the next question' in first
            loaded = client.post("/api/generate", json={"model": "toy"}, timeout=PATIENCE_S).json()
            assert (loaded["model"], loaded["done_reason"]) == ("toy", "load")
            gone = client.post("/api/generate", json={"model": "toy", "keep_alive": 0}).json()
            assert gone["done_reason"] == "unload"
            until(lambda: client.get("/api/ps").json() == {"models": []})
