"""Real processes: prompts that cannot fit, beside an answer that runs."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
from support.real_apis import real_api

MIB = 1 << 20
STREAM = {"prompt": "Once upon a time", "max_tokens": 120, "temperature": 0, "stream": True}
BIG = {
    "/v1/completions": {"prompt": "9" * MIB, "max_tokens": 1},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "9" * (MIB - 100)}],
        "max_tokens": 1,
    },
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A ring of two stages and its API, all in processes of their own."""
    with real_api() as (base, _):
        yield base


@pytest.mark.slow
@pytest.mark.parametrize("path", BIG)
def test_an_answer_goes_on_beside_a_prompt_of_a_mebibyte(url: str, path: str) -> None:
    with httpx.Client(base_url=url, timeout=120.0) as http:
        before = answer(http)
        refused: list[httpx.Response] = []
        with http.stream("POST", "/v1/completions", json=STREAM) as stream:
            lines = []
            for line in stream.iter_lines():
                lines.append(line)
                if line.startswith("data:") and not refused:
                    refused.append(httpx.post(url + path, json=BIG[path], timeout=120.0))
        assert refused[0].status_code == 400
        problem = refused[0].json()["error"]
        assert "characters" in problem["message"]
        assert problem["code"] == "context_length_exceeded"
        assert pieces(lines) == before
        assert http.get("/readyz").status_code == 200


def answer(http: httpx.Client) -> list[str]:
    """The same answer, undisturbed."""
    with http.stream("POST", "/v1/completions", json=STREAM) as stream:
        return pieces(list(stream.iter_lines()))


def pieces(lines: list[str]) -> list[str]:
    """What was streamed: its text, and whether it ended well."""
    told = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert told[-1] == "[DONE]"
    read = [json.loads(one) for one in told[:-1]]
    assert not any("error" in one for one in read)
    choices = [one["choices"][0] for one in read if one["choices"]]
    return ["".join(one["text"] for one in choices), str(choices[-1]["finish_reason"])]
