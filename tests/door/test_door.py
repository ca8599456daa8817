"""The door for programs: what importing it costs, its clients, and a ring of its own."""

from __future__ import annotations

import ast
import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.keys import identity
from support.nodes import PATIENCE_S, NodeRing

import edgespec
from edgespec import AsyncClient, Client, Completion, SamplingParams
from edgespec.daemon.bundled_models import bundled
from edgespec.errors import ConfigError, RequestFailed
from edgespec.runtime.access_policy import CLIENT

TEXTS = ["hello", "a ring of boards", "hello"]
PARAMS = SamplingParams(max_new_tokens=9)
ASKER = identity("client")


@pytest.fixture(scope="module")
def ring() -> Iterator[NodeRing]:
    """A coordinator and two stages in threads of this process."""
    with NodeRing(2, live=2) as ring:
        ring.keys.add("client", CLIENT)
        yield ring


def assert_right(ring: NodeRing, text: str, answer: Completion) -> None:
    """The answer is that of plain decoding."""
    right = ring.expected(PARAMS.complete(text))
    assert (answer.token_ids, answer.text) == (right.token_ids, right.text)
    assert answer.finish_reason == "length"
    assert answer.seconds >= answer.first_token_seconds > 0
    assert answer.tokens_per_second == pytest.approx(9 / answer.seconds)
    assert answer.tokens_per_trip == pytest.approx(9 / answer.figures.trips)


def test_importing_it_reads_no_model_library() -> None:
    heavy = "torch transformers safetensors tokenizers zmq numpy msgspec"
    light = f"import sys, edgespec; print([m for m in '{heavy}'.split() if m in sys.modules])"
    named = "import sys, edgespec; [getattr(edgespec, name) for name in dir(edgespec)]; "
    named += "print([m for m in ('torch', 'transformers', 'typer') if m in sys.modules])"
    for script in (light, named):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert (done.stdout, done.stderr) == ("[]\n", "")


def test_type_checkers_are_told_the_same_names() -> None:
    stub = Path(edgespec.__file__).with_suffix(".pyi")
    told = [
        (node.module, alias.name)
        for node in ast.parse(stub.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    homes = {f"edgespec.{room}": names for room, names in edgespec._ROOMS.items()}
    assert sorted(told) == sorted((home, name) for home, names in homes.items() for name in names)
    assert stub.with_name("py.typed").exists()
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        _ = edgespec.Engine  # type: ignore[attr-defined]


def test_several_texts_are_answered_at_once(ring: NodeRing) -> None:
    with Client(ring.address, identity=ASKER, wait=PATIENCE_S) as client:
        answers = client.generate(TEXTS, PARAMS)
        (alone,) = client.generate(TEXTS[1], PARAMS)
        assert client.generate([], PARAMS) == []
    for text, answer in zip(TEXTS, answers, strict=True):
        assert_right(ring, text, answer)
    assert alone.token_ids == answers[1].token_ids
    assert answers[0].logprobs == ()


def test_log_probabilities_come_with_each_token_if_they_are_wanted(ring: NodeRing) -> None:
    wanted = SamplingParams(max_new_tokens=3, logprobs=2)
    with Client(ring.address, identity=ASKER, wait=PATIENCE_S) as client:
        (answer,) = client.generate("hello", wanted)
    assert len(answer.logprobs) == len(answer.token_ids) == 3
    for token in answer.logprobs:
        assert token["logprob"] <= 0
        assert 1 <= len(token["top_logprobs"]) <= 2  # the toy's others are impossible


def test_a_chat_comes_whole_and_in_pieces(ring: NodeRing) -> None:
    with Client(ring.address, identity=ASKER, wait=PATIENCE_S) as client:
        whole = client.chat("hello", PARAMS)
        talk = [{"role": "user", "content": "hello"}]
        told = ring.ask(PARAMS.answer(talk))
        assert client.chat(talk, PARAMS).token_ids == told.token_ids
        assert "".join(client.stream("hello", PARAMS)) == whole.text
        for _ in client.stream("hello", SamplingParams(max_new_tokens=40)):
            break
        assert client.chat("hello", PARAMS).text == whole.text


def test_asyncio_programs_have_the_same(ring: NodeRing) -> None:
    async def work() -> None:
        async with AsyncClient(ring.address, identity=ASKER, wait=PATIENCE_S) as client:
            answers = await client.generate(TEXTS, PARAMS)
            for text, answer in zip(TEXTS, answers, strict=True):
                assert_right(ring, text, answer)
            whole = await client.chat("hello", PARAMS)
            pieces = [piece async for piece in client.stream("hello", PARAMS)]
            assert "".join(pieces) == whole.text
            with pytest.raises(RequestFailed):
                await client.generate("word " * 4_000, PARAMS)

    asyncio.run(work())


def test_what_cannot_be_asked_is_refused_here() -> None:
    for wrong in ({"temperature": -1.0}, {"max_new_tokens": 0}, {"policy": "magic"}):
        with pytest.raises(ConfigError):
            SamplingParams(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the prompt is empty"):
        SamplingParams().complete(" ")


@pytest.mark.thorough
def test_a_program_starts_a_ring_of_its_own() -> None:
    """The toy model, in two processes, asked from here and by another client."""
    with edgespec.LLM(bundled("base"), draft=bundled("draft")) as llm:
        guessed, plain = (
            llm.generate(TEXTS, SamplingParams(max_new_tokens=12, policy=policy))
            for policy in ("", "autoregressive")
        )
        assert llm.status().stages == 2
    assert [one.token_ids for one in guessed] == [one.token_ids for one in plain]
    assert guessed[0].figures.policy == "adaptive"
