"""The bundled hybrid by its name, in processes as people start them, with its own head guessing."""

from __future__ import annotations

import json
import signal

import httpx
import pytest
from support.commands import run
from support.nodes import until
from support.served import choices, events, served
from support.torch_rings import generated, prompts, tokenizer

from edgespec.daemon.bundled_models import HYBRID, bundled

PATIENCE_S = 300.0
NEW_TOKENS = 160
PROMPT = prompts()["gsm8k-test-3"]
DRAFT = ("--draft", "hybrid:ngram+mtp")

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]


def test_a_stage_is_killed_in_mid_answer_and_the_text_is_that_of_generate() -> None:
    """The states that it held are made again from the committed tokens."""
    right = str(tokenizer().decode(list(generated(PROMPT, NEW_TOKENS, base=bundled(HYBRID)))))
    body = {"prompt": PROMPT, "max_tokens": NEW_TOKENS, "temperature": 0, "stream": True}
    with served(2, init=("--model", HYBRID, "--dtype", "float64")) as ring:
        url = f"{ring.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=PATIENCE_S) as answered:
            pieces = (text for event in events(answered) for _, text in choices(event))
            text = next(piece for piece in pieces if piece)
            ring.stages[2].signal(signal.SIGKILL)
            ring.stages[2].process.wait()
            assert len(text) < len(right) / 2, "it was over before anything happened"
            ring.join(2)
            text += "".join(pieces)
        assert text == right
        assert ring.coordinator.err.count("the ring is up") == 2
        until(ring.is_quiet, PATIENCE_S)
        assert ring.end() == []


def test_a_demo_compares_itself_with_plain_decoding() -> None:
    how = ("--stages", "2", "--compare", "--json", "--max-new-tokens", "48")
    done = run("demo", "--model", HYBRID, *DRAFT, *how)
    assert done.code == 0, done.err
    assert f"starting {HYBRID} in 2 stage(s)" in done.err
    answer = json.loads(done.out)
    assert answer["same_text"]
    assert sum(one["accepted"] for one in answer["sources"] if one["name"] == "mtp") > 0


def test_a_simulation_has_the_text_of_plain_decoding() -> None:
    how = ("--stages", "3", "--limit", "2", "--max-new-tokens", "32", "--jobs", "1", "--json")
    done = run("simulate", "--model", HYBRID, *DRAFT, "--policy", "all", *how)
    assert done.code == 0, done.err
    runs = json.loads(done.out)["runs"]
    assert all(one["exact"] for one in runs), runs
