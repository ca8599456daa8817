"""The API over a ring of fake stages: answers, events, refusals, leaving, losing the ring."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from support.apis import api, leave_when
from support.nodes import CONTEXT, PATIENCE_S, NodeRing, until
from support.rings import submit

from edgespec.runtime.access_policy import CLIENT
from edgespec.runtime.coordinator_node import CoordinatorNode
from edgespec.serving import protocol
from edgespec.serving.limits import HttpLimits
from edgespec.wire.client_messages import Submit

GREEDY = {"temperature": 0, "max_tokens": 12, "policy": "flowspec", "seed": 0}
MESSAGES = [{"role": "user", "content": "hello"}]


def events(text: str) -> list[Any]:
    """What a stream said: objects, and comments as they are."""
    told: list[Any] = []
    for part in text.split("\n\n"):
        if part.startswith("data: {"):
            told.append(json.loads(part.removeprefix("data: ")))
        elif part:
            told.append(part)
    return told


def plain(ring: NodeRing, **more: Any) -> str:
    """The text that plain decoding gives."""
    return ring.expected(submit(**more)).text


def ask(prompt: str = "hello", **more: Any) -> dict[str, Any]:
    """A greedy completion."""
    return {"prompt": prompt, **GREEDY, **more}


def test_the_model_has_the_names_that_it_is_given(toy_ring: NodeRing) -> None:
    identity = toy_ring.keys.add("an API with aliases", CLIENT)
    with api(toy_ring.address, identity, aliases=frozenset({"gpt-4o"})) as url:
        told = httpx.post(f"{url}/v1/completions", json={**ask(), "model": "gpt-4o"}).json()
        assert told["model"] == "toy"
        assert httpx.get(f"{url}/v1/models/gpt-4o").json()["id"] == "toy"
        for name in ("org/Toy-1B", "ORG/toy:1b", "toys", "toys:latest"):
            assert httpx.get(f"{url}/v1/models/{name}").json()["id"] == "toy", name
        other = httpx.post(f"{url}/v1/completions", json={**ask(), "model": "gpt-5"})
        known = httpx.post(f"{url}/api/chat", json={"model": "qwen3:8b", "messages": MESSAGES})
    assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")
    assert "--alias 'gpt-5'" in other.json()["error"]["message"]
    assert "edgespec init" not in other.json()["error"]["message"]
    assert "`edgespec init --model qwen3-8b`" in known.json()["error"]


def test_a_completion_is_the_rings_answer(http: httpx.Client, toy_ring: NodeRing) -> None:
    told = http.post("/v1/completions", json=ask()).json()
    assert told["object"] == "text_completion"
    assert told["model"] == "toy"
    (choice,) = told["choices"]
    assert choice == {
        "index": 0,
        "text": plain(toy_ring),
        "logprobs": None,
        "finish_reason": "length",
    }
    usage = told["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (
        5,
        12,
        17,
    )


def test_a_chat_is_the_rings_answer(http: httpx.Client, toy_ring: NodeRing) -> None:
    told = http.post("/v1/chat/completions", json={"messages": MESSAGES, **GREEDY}).json()
    assert told["object"] == "chat.completion"
    message = told["choices"][0]["message"]
    assert message == {"role": "assistant", "content": plain(toy_ring), "refusal": None}


@pytest.mark.parametrize("with_usage", [False, True])
def test_a_stream_is_the_same_answer_in_pieces(
    http: httpx.Client, toy_ring: NodeRing, with_usage: bool
) -> None:
    body = {"messages": MESSAGES, **GREEDY, "stream": True}
    reply = http.post(
        "/v1/chat/completions", json={**body, "stream_options": {"include_usage": with_usage}}
    )
    assert reply.headers["content-type"].startswith("text/event-stream")
    *pieces, done = events(reply.text)
    assert done == "data: [DONE]"
    usage = pieces.pop() if with_usage else None
    deltas = [piece["choices"][0]["delta"] for piece in pieces]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == plain(toy_ring)
    reasons = [piece["choices"][0]["finish_reason"] for piece in pieces]
    assert reasons == [None] * (len(pieces) - 1) + ["length"]
    assert len({piece["id"] for piece in pieces}) == 1
    if usage is not None:
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 12
        assert all(piece["usage"] is None for piece in pieces)


def test_a_stop_string_across_tokens_ends_the_answer(
    http: httpx.Client, toy_ring: NodeRing
) -> None:
    whole = plain(toy_ring)
    stop = whole[4:7]
    told = http.post("/v1/completions", json=ask(stop=[stop])).json()["choices"][0]
    assert told["finish_reason"] == "stop"
    assert told["text"] == whole[: whole.index(stop)]


def test_log_probs_come_with_every_token_once(http: httpx.Client, toy_ring: NodeRing) -> None:
    body = {"messages": MESSAGES, **GREEDY, "logprobs": True, "top_logprobs": 2}
    whole = http.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]
    assert len(whole["content"]) == 12
    first = whole["content"][0]
    assert first["token"] == plain(toy_ring)[0]
    assert first["bytes"] == list(first["token"].encode())
    assert first["top_logprobs"][0] == {k: first[k] for k in ("token", "logprob", "bytes")}
    streamed = events(http.post("/v1/chat/completions", json={**body, "stream": True}).text)
    pieces = [e["choices"][0]["logprobs"] for e in streamed if isinstance(e, dict)]
    assert [one for piece in pieces if piece for one in piece["content"]] == whole["content"]

    text = http.post("/v1/completions", json=ask(logprobs=2)).json()["choices"][0]
    told = text["logprobs"]
    assert "".join(told["tokens"]) == text["text"]
    assert told["text_offset"] == list(range(12))
    assert all(0 < len(top) <= 3 for top in told["top_logprobs"])


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/completions", {**ask(), "model": "gpt-4o"}, 404, "model_not_found"),
        ("/v1/completions", ask("x" * (CONTEXT + 1)), 400, "context_length_exceeded"),
        ("/v1/completions", {**ask(), "max_tokens": 10**30}, 400, "invalid_value"),
        ("/v1/completions", ask("   "), 400, "invalid_request"),
        ("/v1/completions", {}, 400, "missing_required_parameter"),
        ("/v1/chat/completions", {}, 400, "missing_required_parameter"),
        ("/v1/chat/completions", {"messages": MESSAGES, "maxTokens": 1}, 400, "unknown_parameter"),
        ("/v1/embeddings", {}, 404, "unknown_url"),
        ("/v1/models", {}, 405, "unknown_url"),
        ("/chat/completions", {}, 404, "unknown_url"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_have_openais_shape(
    http: httpx.Client, path: str, body: dict[str, Any], status: int, code: str, stream: bool
) -> None:
    reply = http.post(path, json={**body, "stream": stream})
    assert reply.status_code == status
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("invalid_request_error", code)


def test_the_model_is_listed_and_described(http: httpx.Client) -> None:
    (listed,) = http.get("/v1/models").json()["data"]
    assert (listed["id"], listed["object"], listed["context_length"]) == ("toy", "model", CONTEXT)
    assert http.get("/v1/models/toy").json() == listed
    missing = http.get("/v1/models/org/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    assert http.post("/v1/completions", json={**ask(), "model": "toy"}).status_code == 200


def test_a_form_is_no_json(http: httpx.Client) -> None:
    reply = http.post("/v1/completions", data={"prompt": "x"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (415, "unsupported_media_type")


def test_health_and_readiness_of_a_ring_that_is_up(http: httpx.Client) -> None:
    assert http.get("/healthz").json() == {"status": "ok"}
    assert http.get("/readyz").json() == {"status": "ready", "stages": 2}


# --- who may ask --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"host": "evil.example:8000"}, "wrong_host"),
        ({"host": ""}, "wrong_host"),
        ({"host": "[::1].evil.example"}, "wrong_host"),
        ({"host": "[::1]x:8000"}, "wrong_host"),
        ({"host": "localhost:80@evil.example"}, "wrong_host"),
        ({"sec-fetch-site": "cross-site"}, "wrong_origin"),
        ({"origin": "http://evil.example"}, "wrong_origin"),
        ({"origin": "null"}, "wrong_origin"),
        ({"origin": "http://127.0.0.1:1"}, "wrong_origin"),
    ],
)
def test_pages_of_other_sites_get_nothing(
    http: httpx.Client, headers: dict[str, str], code: str
) -> None:
    reply = http.post("/v1/completions", json=ask(), headers=headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, code)
    assert "access-control-allow-origin" not in reply.headers


def test_the_own_page_may_ask(http: httpx.Client, url: str) -> None:
    assert http.post("/v1/completions", json=ask(), headers={"origin": url}).status_code == 200
    port = url.rpartition(":")[2]
    for name in (f"localhost:{port}", f"[::1]:{port}", "LOCALHOST"):
        assert http.get("/healthz", headers={"host": name}).status_code == 200


def test_with_keys_nothing_is_told_without_one(toy_ring: NodeRing) -> None:
    who = toy_ring.keys.add("keyed", CLIENT)
    with (
        api(toy_ring.address, who, accepts="right".__eq__, timing=toy_ring.timing) as base,
        httpx.Client(base_url=base) as http,
    ):
        for authorization in ("", "Bearer wrong", "Basic right", "right", "Bearer"):
            for path in ("/v1/models", "/metrics", "/events", "/nope"):
                reply = http.get(path, headers={"authorization": authorization})
                assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer")
                assert reply.json()["error"]["code"] == "invalid_api_key"
        good = {"authorization": "Bearer right", "host": "anything.example"}
        assert http.get("/v1/models", headers=good).status_code == 200
        for path in ("/healthz", "/readyz", "/openapi.json"):
            assert http.get(path).status_code == 200


# --- leaving, waiting, losing -------------------------------------------------------------------


@pytest.fixture
def slow_ring() -> Iterator[NodeRing]:
    """A ring whose stages take their time."""
    with NodeRing(2) as ring:
        ring.await_up()
        for block in ring.blocks:
            block.delay = 0.05
        yield ring


@pytest.fixture
def slow_url(slow_ring: NodeRing) -> Iterator[str]:
    """Its API."""
    who = slow_ring.keys.add("the API", CLIENT)
    limits = HttpLimits(pause_seconds=0.2, answers=2)
    with api(slow_ring.address, who, limits=limits, timing=slow_ring.timing) as base:
        yield base


LONG = {**GREEDY, "max_tokens": 300, "policy": "autoregressive"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_through_the_ring(
    slow_ring: NodeRing, slow_url: str, stream: bool
) -> None:
    body = {"prompt": "hello", **LONG, "stream": stream}
    asked = f"{slow_url}/v1/completions"
    if stream:
        with httpx.stream("POST", asked, json=body) as reply:
            assert any("data: " in piece for piece in reply.iter_text())  # behind comments
    else:
        leave_when(asked, body, lambda: sum(slow_ring.machine.load()) == 1)
    for block in slow_ring.blocks:
        block.delay = 0.5  # the whole answer would take minutes: nobody computes it
    slow_ring.assert_free()
    left = 'edgespec_requests_total{outcome="client_left"} 1.0'
    until(lambda: left in httpx.get(f"{slow_url}/metrics").text)
    assert "edgespec_http_answers 0.0" in httpx.get(f"{slow_url}/metrics").text


def test_who_waits_behind_others_is_told_so(slow_url: str) -> None:
    body = {"prompt": "hello", **LONG, "stream": True}
    with (
        httpx.stream("POST", f"{slow_url}/v1/completions", json=body) as first,
        httpx.stream("POST", f"{slow_url}/v1/completions", json=body) as second,
    ):
        assert first.status_code == second.status_code == 200
        lines = second.iter_lines()
        assert next(lines) == ": waiting behind 1 other request(s)"
        assert [line for line, _ in zip(lines, range(4), strict=False) if line][:1] == [
            ": waiting behind 1 other request(s)"
        ]
        third = httpx.post(f"{slow_url}/v1/completions", json=body)
        assert (third.status_code, third.json()["error"]["code"]) == (429, "too_many_requests")
        assert int(third.headers["retry-after"]) > 0


@pytest.mark.thorough
def test_a_stage_lost_in_mid_answer_leaves_the_text_whole(
    slow_ring: NodeRing, slow_url: str
) -> None:
    body = {"messages": MESSAGES, **LONG, "max_tokens": 40, "stream": True}
    told, was_lost, stage = "", False, slow_ring.threads[2]
    with httpx.stream("POST", f"{slow_url}/v1/chat/completions", json=body, timeout=60) as reply:
        for part in reply.iter_text():
            told += part
            if told.count("data: ") == 5 and not was_lost:
                stage.freeze()
                slow_ring.outwait(2)
            if ": stage 2" in told and not was_lost:
                was_lost = True
                asked = httpx.get(f"{slow_url}/readyz")
                assert asked.status_code == 503
                assert "V2 is missing" in asked.json()["missing"]
                refused = httpx.post(f"{slow_url}/v1/completions", json=ask(wait=False))
                assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
                assert refused.json()["error"]["code"] == "ring_not_ready"
                stage.thaw()
    assert was_lost
    pieces = [e["choices"][0]["delta"] for e in events(told) if isinstance(e, dict)]
    text = "".join(delta.get("content", "") for delta in pieces)
    assert text == plain(slow_ring, max_new_tokens=40, policy="autoregressive")
    assert told.endswith("data: [DONE]\n\n")


@pytest.mark.thorough
def test_a_ring_that_stays_lost_ends_the_stream_with_one_error(
    slow_ring: NodeRing, slow_url: str
) -> None:
    slow_ring.machine._state._limit = 0.5  # no stage comes back
    body = {"prompt": "hello", **LONG, "stream": True}
    told = ""
    with httpx.stream("POST", f"{slow_url}/v1/completions", json=body, timeout=60) as reply:
        for part in reply.iter_text():
            told += part
            if told.count("data: ") == 3 and 2 in slow_ring.threads:
                slow_ring.threads.pop(2).vanish()
                slow_ring.outwait(2)
    *_, last = [e for e in events(told) if isinstance(e, dict)]
    assert last["error"]["code"] == "ring_lost"
    assert told.count('"error"') == 1
    assert "[DONE]" not in told


@pytest.mark.thorough
def test_a_coordinator_that_is_gone_is_503(slow_ring: NodeRing, slow_url: str) -> None:
    assert httpx.get(f"{slow_url}/healthz").status_code == 200
    slow_ring.threads.pop(0).vanish()
    until(lambda: httpx.get(f"{slow_url}/healthz").status_code == 503)
    for reply in (
        httpx.get(f"{slow_url}/readyz"),
        httpx.get(f"{slow_url}/v1/models"),
        httpx.post(f"{slow_url}/v1/completions", json=ask()),
    ):
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "coordinator_unreachable"
        assert int(reply.headers["retry-after"]) > 0
    assert "edgespec_coordinator_up 0.0" in httpx.get(f"{slow_url}/metrics").text
    slow_ring.restart_coordinator()
    until(lambda: httpx.get(f"{slow_url}/healthz").status_code == 200)


def test_a_full_queue_is_429(
    toy_ring: NodeRing, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(peer: bytes, asked: Submit) -> Any:
        from edgespec.errors import QueueFull

        raise QueueFull("64 requests are waiting already; try again later")

    with monkeypatch.context() as patch:
        patch.setattr(toy_ring.machine, "_check_room", full)
        reply = http.post("/v1/completions", json=ask())
        streamed = http.post("/v1/completions", json=ask(stream=True))
    for one in (reply, streamed):
        assert (one.status_code, one.json()["error"]["code"]) == (429, "queue_full")
        assert int(one.headers["retry-after"]) > 0


def test_who_asks_whether_a_ring_is_ready_hears_that_it_drains() -> None:
    with NodeRing(2) as ring, ExitStack() as stack:
        ring.await_up()
        node, gate = ring.threads[0].node, threading.Semaphore(4)
        assert isinstance(node, CoordinatorNode)
        node.drain, ring.blocks[0].passes = 600.0, gate
        identity = ring.keys.add("the API", CLIENT)
        url = stack.enter_context(api(ring.address, identity, timing=ring.timing))
        assert httpx.get(f"{url}/readyz").status_code == 200
        body = {"prompt": "hello", "max_tokens": 20, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S) as reply:
            parts = reply.iter_text()
            next(parts)
            node.leave("stopped by SIGTERM")
            until(lambda: httpx.get(f"{url}/readyz").status_code == 503)
            told = httpx.get(f"{url}/readyz").json()
            gate.release(1000)
            assert "".join(parts).endswith("data: [DONE]\n\n")
    assert "the coordinator is ending, and takes no more requests" in told["error"]["message"]


def test_an_answer_may_end_while_the_api_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the end of `--drain`: the coordinator has told the rest, which is on its way."""
    monkeypatch.setattr(protocol, "LAST_S", PATIENCE_S)
    monkeypatch.setattr(protocol, "GRACE_S", 2 * PATIENCE_S)
    gate, handle_exit = threading.Semaphore(4), protocol.ApiServer.handle_exit

    def told_to_end(server: protocol.ApiServer, sig: int, frame: None) -> None:
        handle_exit(server, sig, frame)
        gate.release(1000)

    monkeypatch.setattr(protocol.ApiServer, "handle_exit", told_to_end)
    with NodeRing(2) as ring, ExitStack() as stack:
        ring.await_up()
        ring.blocks[0].passes = gate
        identity = ring.keys.add("the API", CLIENT)
        url = stack.enter_context(api(ring.address, identity, timing=ring.timing))
        body = {"prompt": "hello", "max_tokens": 20, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S) as reply:
            parts = reply.iter_text()
            told = next(parts)
            stack.close()
            told += "".join(parts)
    assert told.endswith("data: [DONE]\n\n")
