"""What evaluation harnesses and load generators ask: scores of prompts, tokens as ids, echoes."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import numpy as np
import pytest
from msgspec import to_builtins
from support.nodes import CONTEXT, NodeRing

from edgespec.serving import formats
from edgespec.serving.formats import ChatFormat, CompletionFormat, Served
from edgespec.serving.request_bodies import ChatRequest, TextRequest
from edgespec.serving.requests import checked, submits_of
from edgespec.serving.token_details import TextPlaces, for_completions
from edgespec.sim.toy import VOCABULARY
from edgespec.sim.toy_model import FakeHead, toy_hidden
from edgespec.types.tensor import Tensor
from edgespec.types.tool_forms import HERMES
from edgespec.wire.client_messages import Echoed, Finished, Tokens

PROMPT = "hello ring"
END = Finished(0, "x", (2,), "length", "p", "", 1, 1, 2, 1.0, 0.5, 1.0, (1,), 1, 0, 0, 0.1)


def scores(ring: NodeRing, prompt: str) -> list[float | None]:
    """The toy's log-probabilities of a prompt's tokens."""
    tokens = list(ring.codec.encode(prompt))
    hidden = toy_hidden(tokens, ring.stages)[:-1]
    rows = Tensor("uint64", (len(hidden), 1), hidden.tobytes())
    told = FakeHead(VOCABULARY).score(rows, np.array(tokens[1:], np.int64), 1)
    return [None, *told.log_probs.tolist()]


def ids(ring: NodeRing, prompt: str) -> list[int]:
    return list(ring.codec.encode(prompt))


def asked(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    """A good answer."""
    told = http.post(path, json={"temperature": 0, "seed": 0, **body})
    assert told.status_code == 200, told.text
    return told.json()


def test_lm_evals_question(http: httpx.Client, toy_ring: NodeRing) -> None:
    # lm_eval/models/openai_completions.py: LocalCompletionsAPI._create_payload, of a batch of
    # token ids; parse_logprobs leaves out what is behind the last token that it asked of.
    prompts = [PROMPT, "another one", "hi"]
    body = {"model": "toy", "prompt": [ids(toy_ring, one) for one in prompts]}
    told = asked(http, "/v1/completions", **body, max_tokens=1, logprobs=1, seed=1234, echo=True)
    assert [one["index"] for one in told["choices"]] == [0, 1, 2]
    for one, prompt in zip(told["choices"], prompts, strict=True):
        listed, own = one["logprobs"], scores(toy_ring, prompt)
        assert listed["token_logprobs"][:-1] == own
        assert listed["top_logprobs"][0] is None
        for value, top in zip(own[1:], listed["top_logprobs"][1:-1], strict=True):
            assert value == max(top.values())
        assert "".join(listed["tokens"]) == one["text"]
        assert listed["text_offset"] == list(range(len(one["text"])))
    assert told["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_echoed_with_or_without_an_answer(
    http: httpx.Client, toy_ring: NodeRing, stream: bool
) -> None:
    for tokens in (0, 5):
        alone = asked(http, "/v1/completions", prompt=PROMPT, max_tokens=tokens)["choices"][0]
        body = {"prompt": PROMPT, "max_tokens": tokens, "echo": True, "logprobs": 0}
        if not stream:
            (one,) = asked(http, "/v1/completions", **body)["choices"]
            text, told = one["text"], one["logprobs"]["token_logprobs"]
            assert [*map(len, one["logprobs"].values())] == [len(told)] * 4
        else:
            sent = http.post(
                "/v1/completions", json={**body, "temperature": 0, "seed": 0, "stream": True}
            ).text
            parts = [p for p in sent.split("\n\n") if p.startswith("data: {")]
            choices = [json.loads(p.removeprefix("data: "))["choices"][0] for p in parts]
            text = "".join(choice["text"] for choice in choices)
            listed = [choice["logprobs"] for choice in choices if choice["logprobs"]]
            told = [value for one in listed for value in one["token_logprobs"]]
            assert choices[-1]["finish_reason"] == "length"
        assert text == PROMPT + alone["text"]
        own = scores(toy_ring, PROMPT)
        assert told[: len(own)] == own
        assert len(told) == len(own) + tokens


def test_prompt_logprobs_as_vllm_has_them(http: httpx.Client, toy_ring: NodeRing) -> None:
    more = {"max_tokens": 1, "prompt_logprobs": 1}
    told = asked(http, "/v1/completions", prompt=PROMPT, **more)["choices"][0]["prompt_logprobs"]
    chat = asked(
        http, "/v1/chat/completions", messages=[{"role": "user", "content": PROMPT}], **more
    )
    assert told == chat["prompt_logprobs"]
    own = scores(toy_ring, PROMPT)
    for place, (token, value) in enumerate(zip(ids(toy_ring, PROMPT), own, strict=True)):
        if place == 0:
            assert told[0] is None
        else:
            text = toy_ring.codec.spelt([token])
            wanted = {"logprob": value, "rank": 1, "decoded_token": text}
            assert told[place] == {str(token): wanted}


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_told_to_who_asks(
    http: httpx.Client, toy_ring: NodeRing, stream: bool
) -> None:
    prompt = ids(toy_ring, PROMPT)
    alone = asked(http, "/v1/completions", prompt=prompt, max_tokens=6, logprobs=0)["choices"][0]
    more = {"max_tokens": 6, "return_token_ids": True, "temperature": 0, "seed": 0}
    for path, body in (
        ("/v1/completions", {"prompt": prompt}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}),
    ):
        sent = http.post(path, json={**body, **more, "stream": stream}).text
        parts = [p for p in sent.split("\n\n") if p.startswith("data: {")] or [f"data: {sent}"]
        told = [json.loads(part.removeprefix("data: ")) for part in parts]
        choices = [choice for one in told for choice in one["choices"]]
        seen = [one["prompt_token_ids"] for one in (*told, *choices) if "prompt_token_ids" in one]
        assert seen == [prompt]
        made = [token for choice in choices for token in choice.get("token_ids", ())]
        assert "".join(toy_ring.codec.spelt([token]) for token in made) == alone["text"]


def test_texts_become_tokens_and_tokens_texts(http: httpx.Client, toy_ring: NodeRing) -> None:
    tokens, text = ids(toy_ring, PROMPT), toy_ring.codec.spelt(ids(toy_ring, PROMPT))
    whole = {"tokens": tokens, "count": len(tokens), "max_model_len": CONTEXT}
    messages = [{"role": "user", "content": PROMPT}]
    for body in (
        {"model": "toy", "prompt": PROMPT, "add_special_tokens": True},
        {"content": PROMPT},
        {"messages": messages, "add_generation_prompt": True},
    ):
        assert http.post("/tokenize", json=body).json() == whole
    back = {"prompt": text, "content": text}
    assert http.post("/detokenize", json={"tokens": tokens}).json() == back
    assert http.post("/apply-template", json={"messages": messages}).json() == back
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/apply-template", {"prompt": "a"}, "messages"),
        ("/tokenize", {"prompt": "a", "with_pieces": True}, "with_pieces"),
        ("/detokenize", {"tokens": []}, "tokens"),
        ("/tokenize", {"model": "gpt", "prompt": "a"}, "model"),
    ):
        refused = http.post(path, json=body)
        assert refused.status_code in (400, 404), body
        assert refused.json()["error"]["param"] == param


VLLM_BENCH = {  # vllm/benchmarks/lib/endpoint_request_func.py, async_request_openai_completions
    "model": "toy",
    "prompt": PROMPT,
    "repetition_penalty": 1.0,
    "temperature": 0.0,
    "max_tokens": 7,
    "logprobs": None,
    "stream": True,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
}
GUIDELLM = {  # guidellm's text_completions request, streamed with a fixed length
    "model": "toy",
    "prompt": PROMPT,
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "max_tokens": 7,
    "max_completion_tokens": 7,
    "stop": None,
    "ignore_eos": True,
}


@pytest.mark.parametrize("body", [VLLM_BENCH, GUIDELLM])
def test_load_generators_get_as_many_tokens_as_they_ask_for(
    http: httpx.Client, body: dict[str, Any]
) -> None:
    sent = http.post("/v1/completions", json=body).text
    parts = [p for p in sent.split("\n\n") if p.startswith("data: {")]
    assert json.loads(parts[-1].removeprefix("data: "))["usage"]["completion_tokens"] == 7
    assert sent.endswith("data: [DONE]\n\n")


def entry(raw: bytes, value: float | None = -1.0) -> dict[str, Any]:
    """A token of these bytes, as a coordinator tells of it."""
    text = raw.decode("utf-8", "replace")
    return {"id": 0, "token": text, "bytes": list(raw), "logprob": value, "top_logprobs": []}


@pytest.mark.parametrize("text", ["naïve", "今日は мир", "a👩‍👩‍👧b", "नमस्ते", "مرحبا"])
def test_places_and_bytes_are_right_for_every_script(text: str) -> None:
    raw = text.encode()
    for size in (1, 2, 3, 5):
        pieces = [raw[at : at + size] for at in range(0, len(raw), size)]
        rows = [entry(piece) for piece in pieces]
        told = for_completions(rows, 0, TextPlaces())
        assert told is not None
        begun = [raw[: at * size] for at in range(len(pieces))]
        places = [len(before.decode("utf-8", "ignore")) for before in begun]
        assert told["text_offset"] == places
        for shown, piece in zip(told["tokens"], pieces, strict=True):
            spelt = "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
            assert shown in (spelt, piece.decode("utf-8", "ignore"))
        assert not any("\ufffd" in shown for shown in told["tokens"])


def test_a_broken_character_moves_no_place_behind_it() -> None:
    told = for_completions([entry(b"a\xe4"), entry(b"b"), entry(b"c")], 0, TextPlaces())
    assert told is not None
    assert told["text_offset"] == [0, 2, 3]
    assert "a\ufffdbc"[2] == "b"


def test_a_token_that_cannot_come_has_a_number_that_json_has() -> None:
    told = for_completions([entry(b"a", None), entry(b"b", -math.inf)], 0, TextPlaces())
    assert told is not None
    assert told["token_logprobs"] == [None, -9999.0]


def test_every_answer_has_an_id_which_may_be_the_clients(http: httpx.Client) -> None:
    own = http.get("/healthz", headers={"x-request-id": "mine-1"})
    assert own.headers["x-request-id"] == "mine-1"
    made = [
        http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}),
        http.post("/v1/completions", json={}),
        http.get("/nowhere", headers={"x-request-id": "two words"}),
    ]
    found = {one.headers["x-request-id"] for one in made}
    assert len(found) == 3
    assert all(one.startswith("req_") for one in found)
    prints = [made[0].json()["system_fingerprint"]]
    prints.append(
        asked(
            http, "/v1/chat/completions", messages=[{"role": "user", "content": "a"}], max_tokens=1
        )["system_fingerprint"]
    )
    assert prints[0] == prints[1]
    assert prints[0].startswith("fp_")


def test_a_blank_that_the_decoder_drops_moves_no_place() -> None:
    request = checked(TextRequest, {"prompt": "a", "logprobs": 0})
    form = CompletionFormat(request, Served(HERMES, "", "toy", 0))
    (piece,) = form.piece_choices(0, Tokens(0, (1, 2), "It is"), [entry(b" It"), entry(b" is")])
    assert piece.logprobs is not None
    assert piece.logprobs["text_offset"] == [0, 2]


def test_a_text_that_is_a_part_of_what_stands_before_it_has_its_own_place() -> None:
    request = checked(TextRequest, {"prompt": "s", "echo": True, "logprobs": 0})
    form = CompletionFormat(request, Served(HERMES, "", "toy", 0))
    told = json.dumps([entry(b"<s>", None), entry(b"s")])
    form.take_prompt(0, Echoed(0, (0, 1), "<s>s"))
    form.take_prompt(0, Echoed(0, log_probs=told))
    choice = form.choice(0, END, [entry(b"x")])
    assert choice.logprobs is not None
    assert choice.logprobs["text_offset"] == [0, 0, 1]


def test_scores_that_no_memory_may_hold_are_refused_before_any_is_made(
    http: httpx.Client, toy_ring: NodeRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few bytes may ask for millions of them; what is streamed is not held."""
    body = {"prompt": PROMPT, "max_tokens": 0, "n": 3, "echo": True, "logprobs": 1}
    told = 3 * 2 * len(ids(toy_ring, PROMPT))
    monkeypatch.setattr(formats, "MOST_SCORES", told)
    assert len(asked(http, "/v1/completions", **body)["choices"]) == 3
    monkeypatch.setattr(formats, "MOST_SCORES", told - 1)
    refused = http.post("/v1/completions", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "too_many_scores"
    assert "[DONE]" in http.post("/v1/completions", json={**body, "stream": True}).text
    toy_ring.assert_free()


@pytest.mark.parametrize(("stream", "each"), [(False, [1, -1, -1] * 2), (True, [1] * 6)])
def test_a_prompt_is_scored_once_for_all_its_choices(stream: bool, each: list[int]) -> None:
    """But in a stream, whose choices come as they do."""
    body = {"prompt": ["a", "b"], "n": 3, "echo": True, "logprobs": 1, "stream": stream}
    told = submits_of(checked(TextRequest, body), 100)
    assert [one.prompt_top for one in told] == each
    assert all(one.echo for one in told)


def test_all_choices_have_the_scores_of_their_prompt(
    http: httpx.Client, toy_ring: NodeRing
) -> None:
    body = {"prompt": [PROMPT, "another one"], "n": 2, "max_tokens": 3, "temperature": 1.0}
    told = asked(http, "/v1/completions", **body, echo=True, logprobs=1)
    for one in told["choices"]:
        prompt = body["prompt"][one["index"] // 2]  # type: ignore[index]
        own = scores(toy_ring, prompt)
        assert one["text"].startswith(prompt)
        assert one["logprobs"]["token_logprobs"][: len(own)] == own
        assert len(one["logprobs"]["tokens"]) == len(own) + 3


def test_scores_of_a_stream_are_not_kept() -> None:
    request = checked(TextRequest, {"prompt": "a", "echo": True, "logprobs": 0, "stream": True})
    form = CompletionFormat(request, Served(HERMES, "", "toy", 0))
    form.take_prompt(0, Echoed(0, (1,), "a"))
    form.take_prompt(0, Echoed(0, log_probs=json.dumps([entry(b"a")])))
    (told,) = form._prompts
    assert told.token_ids == [1]
    assert not told.entries


def test_the_first_piece_has_the_prompt_whichever_choice_tells_of_it() -> None:
    messages = [{"role": "user", "content": "a"}]
    asked = {"messages": messages, "n": 2, "return_token_ids": True, "stream": True}
    form = ChatFormat(checked(ChatRequest, asked), Served(HERMES, "", "toy", 0))
    form.take_prompt(1, Echoed(0, (7, 8), "a"))
    assert to_builtins(form.opening(0)[0])["prompt_token_ids"] == [7, 8]
