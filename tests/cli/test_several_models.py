"""Several models of one ring of real processes, which its API switches between."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import httpx
import pytest
from support.nodes import until
from support.served import Served, served
from support.smollm2 import smollm2_file
from support.torch_rings import generated, prompts, tokenizer

PATIENCE_S = 300.0
NEW_TOKENS = 16
EACH = 3
"""Questions of each client, one after the other."""

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]

ASKED = [prompts()[name] for name in ("gsm8k-test-0", "code-4")]


def right(prompt: str, form: str) -> str:
    """What transformers generates with the weights of that form."""
    return str(tokenizer().decode(list(generated(prompt, NEW_TOKENS, form))))


def asked(url: str, model: str, prompt: str, **more: Any) -> httpx.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, **more}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)


def text_of(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def loaded(ring: Served) -> list[str]:
    told = httpx.get(f"{ring.url}/api/ps", timeout=PATIENCE_S).json()
    return [one["model"] for one in told["models"]]


def wrong_of_eight(ring: Served, forms: dict[str, dict[str, str]]) -> list[str]:
    """Eight clients ask for both models, one question after the other: the answers that are not
    as told, `forms`: by model and prompt."""
    wrong: list[str] = []

    def ask(number: int) -> None:
        for turn in range(EACH):
            model = [*forms][(number + turn) % len(forms)]
            prompt = [*forms[model]][number % len(forms[model])]
            got = text_of(asked(ring.url, model, prompt))
            if got != forms[model][prompt]:
                wrong.append(f"{model}: {got!r}, not {forms[model][prompt]!r}")
        ended.append(number)

    ended: list[int] = []
    clients = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for client in clients:
        client.start()
    for client in clients:
        client.join(PATIENCE_S)
    assert sorted(ended) == [*range(8)], "a client had to wait for too long"
    return wrong


def test_eight_clients_ask_for_two_forms_and_none_starves() -> None:
    """And then: what is loaded is told, and what nobody asks for is given up on every board, until
    it is asked for again."""
    added = {"small": ("--quant", "int4", "--head-quant", "none", "--dtype", "float64")}
    serve = ("--turn", "5", "--idle", "20")
    with served(3, serve=serve, added=added) as ring:
        forms = {
            name: {prompt: right(prompt, form) for prompt in ASKED}
            for name, form in (("base", "none"), ("small", "int4"))
        }
        assert forms["base"] != forms["small"], "each answer tells which form gave it"
        assert wrong_of_eight(ring, forms) == []
        loads = Counter(
            name for name in forms for _ in range(ring.coordinator.err.count(f"the model {name}"))
        )
        assert min(loads.values()) >= 2, loads

        listed = httpx.get(f"{ring.url}/v1/models", timeout=PATIENCE_S).json()["data"]
        assert [one["id"] for one in listed] == ["base", "small"]
        assert all(one["context_length"] for one in listed), "each was loaded"
        told = asked(ring.url, "large", "x")
        assert told.status_code == 404
        assert "'base' and 'small'" in told.json()["error"]["message"]

        until(lambda: loaded(ring) == [], PATIENCE_S)
        given_up = "its layers are given up"
        until(lambda: all(given_up in one.err for one in ring.stages.values()), PATIENCE_S)
        assert ring.is_up(), "it loads what the next request asks for"
        streamed = asked(ring.url, "small", ASKED[0], stream=True).text
        assert streamed.endswith("data: [DONE]\n\n")
        assert loaded(ring) == ["small"]
        assert ring.end() == []


@pytest.mark.slow
def test_two_forms_of_smollm2() -> None:
    """As above, with a real model from its file and in int4; each form's own answers are those
    that it gives alone."""
    file = smollm2_file()
    forms: dict[str, dict[str, str]] = {}
    packed = ("--model", file, "--quant", "int4")
    for name, init in (("file", ("--model", file)), ("packed", packed)):
        with served(3, init=init) as ring:
            forms[name] = {prompt: text_of(asked(ring.url, "", prompt)) for prompt in ASKED}
            assert ring.end() == []
    with served(3, init=("--model", file), added={"packed": packed}) as ring:
        own = httpx.get(f"{ring.url}/v1/models", timeout=PATIENCE_S).json()["data"][0]["id"]
        assert wrong_of_eight(ring, {own: forms["file"], "packed": forms["packed"]}) == []
        assert ring.end() == []
