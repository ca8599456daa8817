"""Several choices of one call: each is a request of its own; one body or stream has them all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.apis import api, leave_when
from support.nodes import NodeRing, until
from support.rings import submit

from edgespec.runtime.access_policy import CLIENT
from edgespec.serving.limits import HttpLimits

GREEDY = {"temperature": 0, "max_tokens": 12, "policy": "flowspec", "seed": 0}
SAMPLED = {**GREEDY, "temperature": 1.0, "seed": 5}
MESSAGES = [{"role": "user", "content": "hello"}]


def plain(ring: NodeRing, prompt: str = "hello", seed: int = 0, **more: Any) -> str:
    """The text of the request alone."""
    return ring.expected(submit(prompt=prompt, seed=seed, **more)).text


def pieces_of(told: str) -> list[dict[str, Any]]:
    """The objects of a stream."""
    lines = (line for line in told.split("\n\n") if line.startswith("data: {"))
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def texts_of(pieces: list[dict[str, Any]]) -> dict[int, str]:
    """The text of each choice of a stream."""
    texts: dict[int, str] = {}
    for piece in pieces:
        for choice in piece["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            texts[choice["index"]] = texts.get(choice["index"], "") + text
    return texts


@pytest.fixture(scope="module")
def toy_ring() -> Iterator[NodeRing]:
    """A ring that answers two requests at once."""
    with NodeRing(2, live=2) as ring:
        ring.await_up()
        yield ring


# --- whole answers --------------------------------------------------------------------------------


def test_choices_of_a_prompt_have_the_next_seeds(http: httpx.Client, toy_ring: NodeRing) -> None:
    body = {"messages": MESSAGES, **SAMPLED, "n": 3}
    told = http.post("/v1/chat/completions", json=body).json()
    assert [choice["index"] for choice in told["choices"]] == [0, 1, 2]
    texts = [choice["message"]["content"] for choice in told["choices"]]
    alone = [
        http.post("/v1/chat/completions", json={**body, "n": 1, "seed": 5 + choice}).json()
        for choice in range(3)
    ]
    assert texts == [one["choices"][0]["message"]["content"] for one in alone]
    usage = told["usage"]
    assert usage["prompt_tokens"] == alone[0]["usage"]["prompt_tokens"], "it is read once"
    assert usage["completion_tokens"] == sum(one["usage"]["completion_tokens"] for one in alone)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_several_prompts_are_answered_in_their_order(
    http: httpx.Client, toy_ring: NodeRing
) -> None:
    prompts = ["hello", "abc", "hi"]
    told = http.post("/v1/completions", json={"prompt": prompts, **GREEDY, "n": 2}).json()
    assert [choice["index"] for choice in told["choices"]] == list(range(6))
    right = [plain(toy_ring, prompt, seed) for prompt in prompts for seed in (0, 1)]
    assert [choice["text"] for choice in told["choices"]] == right
    usage = told["usage"]
    assert usage["prompt_tokens"] == sum(map(len, prompts))
    assert usage["completion_tokens"] == 6 * 12
    assert usage["edgespec"]["rows_sent"] > 6


def test_a_list_of_one_prompt_is_that_prompt(http: httpx.Client) -> None:
    one, other = (
        http.post("/v1/completions", json={"prompt": prompt, **GREEDY}).json()["choices"]
        for prompt in ("hello", ["hello"])
    )
    assert one == other


def test_log_probs_are_each_choices_own(http: httpx.Client) -> None:
    body = {"prompt": ["hello", "abc"], **GREEDY, "logprobs": 1}
    whole = http.post("/v1/completions", json=body).json()["choices"]
    for choice in whole:
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
        assert choice["logprobs"]["text_offset"] == list(range(12))
    pieces = pieces_of(http.post("/v1/completions", json={**body, "stream": True}).text)
    for choice in whole:
        mine = [
            one["logprobs"]
            for piece in pieces
            for one in piece["choices"]
            if one["index"] == choice["index"] and one["logprobs"]
        ]
        assert [o for one in mine for o in one["text_offset"]] == list(range(12))
        assert [t for one in mine for t in one["tokens"]] == choice["logprobs"]["tokens"]


# --- streams --------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_usage", [False, True])
def test_a_stream_has_the_pieces_of_all_choices_by_index(
    http: httpx.Client, toy_ring: NodeRing, with_usage: bool
) -> None:
    body = {"messages": MESSAGES, **GREEDY, "n": 2, "stream": True}
    body["stream_options"] = {"include_usage": with_usage}
    told = http.post("/v1/chat/completions", json=body).text
    assert told.endswith("data: [DONE]\n\n")
    assert told.count("[DONE]") == 1
    pieces = pieces_of(told)
    usage = pieces.pop() if with_usage else None
    opening = [piece["choices"][0] for piece in pieces[:2]]
    assert [(c["index"], c["delta"]["role"]) for c in opening] == [
        (0, "assistant"), (1, "assistant")
    ]  # fmt: skip
    assert texts_of(pieces) == {0: plain(toy_ring), 1: plain(toy_ring, seed=1)}
    choices = [piece["choices"][0] for piece in pieces]
    for index in (0, 1):
        reasons = [c["finish_reason"] for c in choices if c["index"] == index]
        assert reasons == [None] * (len(reasons) - 1) + ["length"], "it ends once, and then no more"
    assert len({piece["id"] for piece in pieces}) == 1
    if usage is not None:
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 24


@pytest.fixture
def slow_ring() -> Iterator[NodeRing]:
    """A ring of two live requests, whose stages take their time."""
    with NodeRing(2, live=2) as ring:
        ring.await_up()
        for block in ring.blocks:
            block.delay = 0.02
        yield ring


@pytest.fixture
def slow_url(slow_ring: NodeRing) -> Iterator[str]:
    who = slow_ring.keys.add("the API", CLIENT)
    limits = HttpLimits(answers=5)
    with api(slow_ring.address, who, limits=limits, timing=slow_ring.timing) as base:
        yield base


def test_choices_come_at_once_and_the_end_of_one_leaves_the_others(
    slow_ring: NodeRing, slow_url: str
) -> None:
    """The text of one has a stop string in its middle, that of the other none."""
    first, second = plain(slow_ring, "hello"), plain(slow_ring, "abc")
    stop = next(first[at : at + 2] for at in range(4, 10) if first[at : at + 2] not in second)
    body = {"prompt": ["hello", "abc"], **GREEDY, "stop": [stop], "stream": True}
    body["policy"] = "autoregressive"  # a token at a time
    pieces = pieces_of(httpx.post(f"{slow_url}/v1/completions", json=body, timeout=60).text)
    order = [choice["index"] for piece in pieces for choice in piece["choices"]]
    assert order != sorted(order), "the one does not wait for the other"
    ends = {c["index"]: c["finish_reason"] for p in pieces for c in p["choices"]}
    assert ends == {0: "stop", 1: "length"}
    assert texts_of(pieces) == {0: first[: first.index(stop)], 1: second}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_all_choices(
    slow_ring: NodeRing, slow_url: str, stream: bool
) -> None:
    """Those that run, and the one that waits."""
    body = {"prompt": "hello", **GREEDY, "max_tokens": 300, "policy": "autoregressive", "n": 3}
    asked = f"{slow_url}/v1/completions"
    if stream:
        with httpx.stream("POST", asked, json={**body, "stream": True}) as reply:
            assert any("data: " in piece for piece in reply.iter_text())
    else:
        leave_when(asked, body, lambda: sum(slow_ring.machine.load()) == 3)
    for block in slow_ring.blocks:
        block.delay = 0.5  # the whole answers would take minutes
    slow_ring.assert_free()
    left = 'edgespec_requests_total{outcome="client_left"} 3.0'
    until(lambda: left in httpx.get(f"{slow_url}/metrics").text)
    assert "edgespec_http_answers 0.0" in httpx.get(f"{slow_url}/metrics").text


def test_the_stream_of_events_shows_the_request_that_is_chosen(
    slow_ring: NodeRing, slow_url: str
) -> None:
    """Beside the oldest one, which is shown to all."""
    body = {"prompt": "hello", **GREEDY, "max_tokens": 300, "policy": "autoregressive", "n": 2}
    asked = f"{slow_url}/v1/completions"
    with httpx.stream("POST", asked, json={**body, "stream": True}, timeout=60):
        live: list[dict[str, Any]] = []
        with httpx.stream("GET", f"{slow_url}/events", timeout=60) as events:
            for name, told in events_of(events):
                if name == "status" and len(told["live"]) == 2:
                    live = told["live"]
                    break
        older, newer = (one["number"] for one in live)
        shown: set[tuple[int, int]] = set()
        with httpx.stream("GET", f"{slow_url}/events?request={newer}", timeout=60) as events:
            for name, told in events_of(events):
                if name == "scene":
                    shown.add((told["request"], told["place"]))
                if len(shown) == 2:
                    break
        assert shown == {(older, 0), (newer, 1)}
    assert httpx.get(f"{slow_url}/events?request=x").status_code == 400
    slow_ring.assert_free()


def events_of(reply: httpx.Response) -> Iterator[tuple[str, Any]]:
    """Name and value of each event of a stream."""
    name = ""
    for line in reply.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


# --- limits ---------------------------------------------------------------------------------------


def test_each_choice_counts_as_an_answer(slow_url: str) -> None:
    body = {"prompt": ["a", "b"], **GREEDY, "max_tokens": 2, "n": 3}
    reply = httpx.post(f"{slow_url}/v1/completions", json=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (429, "too_many_requests")
    assert httpx.post(f"{slow_url}/v1/completions", json={**body, "n": 2}).status_code == 200


def test_choices_that_the_queue_does_not_take_fail_the_call(
    http: httpx.Client, toy_ring: NodeRing
) -> None:
    """And those that it took are cancelled."""
    body = {"prompt": "hello", **GREEDY, "n": 100}
    reply = http.post("/v1/completions", json=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (429, "queue_full")
    toy_ring.assert_free()
    assert http.post("/v1/completions", json={**body, "n": 8}).status_code == 200


def test_one_bad_prompt_refuses_the_call(http: httpx.Client, toy_ring: NodeRing) -> None:
    reply = http.post("/v1/completions", json={"prompt": ["hello", "   "], **GREEDY})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_request")
    toy_ring.assert_free()
