"""The comparison with another reader of a file: a small one of the test's own, on both sides."""

from __future__ import annotations

import importlib
import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "peer_logprobs.py"
VOCABULARY = 40


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module(SCRIPT.stem)


def log_probs(last: int, sharper: float) -> dict[int, float]:
    """Of the token after that one."""
    logits = [sharper * math.sin(last + 3.0 * token) for token in range(VOCABULARY)]
    whole = math.log(sum(map(math.exp, logits)))
    return {token: value - whole for token, value in enumerate(logits)}


class Reader(BaseHTTPRequestHandler):
    """Speaks as llama-server does, and as ours: each character of a chat is a token."""

    sharper, shift, has_tools, within = 4.0, 0, True, -1
    """`within`: the place of a token that ends within a character, of which nothing is told."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        told = json.dumps(getattr(self, self.path[1:].replace("/", "_").replace("-", "_"))(body))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(told.encode())

    def apply_template(self, body: dict[str, Any]) -> dict[str, Any]:
        tools = body.get("tools") if self.has_tools else None
        return {"prompt": json.dumps([body["messages"], tools])}

    def tokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        text = body.get("content") or self.apply_template(body)["prompt"]
        return {"tokens": [(ord(one) + self.shift) % VOCABULARY for one in text]}

    def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        assert (body["temperature"], body["cache_prompt"]) == (0, False)
        last, told, tokens = body["prompt"][-1], [], []
        for place in range(body["n_predict"]):
            found = log_probs(last, self.sharper)
            best = sorted(found, key=lambda one: -found[one])[: body["n_probs"]]
            last = best[0]
            top = [{"id": one, "logprob": found[one]} for one in best]
            tokens.append(last)
            if place != self.within:
                told.append({"id": last, "logprob": found[last], "top_logprobs": top})
        assert body["return_tokens"]
        return {"completion_probabilities": told, "tokens": tokens}

    def v1_completions(self, body: dict[str, Any]) -> dict[str, Any]:
        assert body["max_tokens"] == 0
        told: list[dict[str, Any] | None] = [None]
        for last, token in zip(body["prompt"], body["prompt"][1:], strict=False):
            found = log_probs(last, self.sharper)
            best = sorted(found, key=lambda one: -found[one])[: body["prompt_logprobs"]]
            told.append({str(one): {"logprob": found[one]} for one in {*best, token}})
        return {"choices": [{"prompt_logprobs": told}]}

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def reader(**different: float) -> Iterator[str]:
    kind = type("OtherReader", (Reader,), different)
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("different", "code", "words"),
    [
        ({}, 0, "384 tokens: mean KL 0.00000, largest 0.00000"),
        ({"sharper": 3.0}, 1, "mean KL 0."),
        ({"shift": 1}, 1, "chat 11 with tools"),
        ({"within": 3}, 0, "372 tokens: mean KL 0.00000, largest 0.00000"),
        ({"has_tools": False}, 0, "with tools, which the peer leaves out"),
    ],
)
def test_two_readers_are_compared(
    script: ModuleType,
    capsys: pytest.CaptureFixture[str],
    different: dict[str, float],
    code: int,
    words: str,
) -> None:
    with reader(**different) as peer, reader() as ours:
        assert script.main(["--server", peer, "--ours", ours]) == code
    told = capsys.readouterr().out
    assert words in told
    assert told.count("KL") == 13, "twelve chats, and all together"


def test_chats_are_twelve_and_half_of_them_have_tools(script: ModuleType) -> None:
    chats = list(script.chats())
    assert [("tools" in chat) for chat in chats] == [False, True] * 6


def test_a_divergence_is_that_of_what_the_peer_tells_and_the_rest(script: ModuleType) -> None:
    even = {0: math.log(0.5), 1: math.log(0.25)}
    assert script.divergence(even, even) == pytest.approx(0.0, abs=1e-12)
    other = {0: math.log(0.25), 7: math.log(0.5)}
    wanted = 0.5 * math.log(0.5 / 0.25) + 0.25 * math.log(0.25 / 0.5)
    assert script.divergence(even, other) == pytest.approx(wanted), "7 is among the rest"
