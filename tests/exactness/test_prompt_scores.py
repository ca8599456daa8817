"""Log-probabilities of prompts by torch: the same bits on any ring, and transformers' own."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from support.tiers import tiered
from support.torch_rings import prompts, request, tokenizer, torch_ring, transformers_model

from edgespec.wire.client_messages import Echoed, Submit, Tokens

PROMPT = next(iter(prompts().values())) + " naïve 今日は"


def told(ask: Submit, *others: Submit, **ring: Any) -> list[dict[str, Any]]:
    """What a ring says of the prompt's tokens, as it answers these others too."""
    found = torch_ring(**ring)
    found.replies.clear()
    for one in (ask, *others):
        found.submit(one)
    found.run()
    mine = [m for m in found.replies if isinstance(m, Echoed) and m.tag == ask.tag]
    return [one for message in mine[1:] for one in json.loads(message.log_probs)]


def scored(tokens: int = 0, top: int = 2) -> Submit:
    ids = tuple(tokenizer().encode(PROMPT))
    ask = request("", "flowspec", tokens)
    return replace(ask, prompt_ids=ids, prompt_top=top)


def test_they_are_transformers_own() -> None:
    ids = tokenizer().encode(PROMPT)
    listed = told(scored(), stages=2)
    assert [one["id"] for one in listed] == ids
    assert b"".join(bytes(one["bytes"]) for one in listed[1:]).decode() == PROMPT
    with torch.inference_mode():
        logits = transformers_model()(torch.tensor([ids])).logits[0]
    own = torch.log_softmax(logits, -1)
    for place, one in enumerate(listed[1:], start=1):
        best = own[place - 1].topk(2)
        assert one["logprob"] == pytest.approx(float(own[place - 1, ids[place]]), abs=1e-9)
        assert [rival["id"] for rival in one["top_logprobs"]] == best.indices.tolist()


@pytest.mark.parametrize("dtype", tiered(["float32", "float64", "bfloat16"], ["float32"]))
def test_they_have_the_same_bits_on_any_ring(dtype: str) -> None:
    plain = told(scored(), stages=1, dtype=dtype)
    assert len(plain) == len(tokenizer().encode(PROMPT))
    for ring in (
        {"stages": 3, "chunk": 7},
        {"stages": 2, "chunk": 1},
        {"stages": 2, "chunk": 33, "head_last": True},
        {"stages": 3, "kept_rows": 4000, "draft_name": "ngram"},
    ):
        assert told(scored(), dtype=dtype, **ring) == plain, ring
    beside = [request(PROMPT[:n], "flowspec", 9, tag=n, temperature=1.0, seed=n) for n in (20, 30)]
    assert told(scored(5), *beside, stages=2, dtype=dtype, chunk=16) == plain


def test_those_of_an_answer_are_those_that_it_has_as_a_prompt() -> None:
    ring = torch_ring(2)
    ring.replies.clear()
    ring.ask(replace(scored(8), top=2, prompt_top=-1))
    made = [one for m in ring.replies if isinstance(m, Tokens) for one in json.loads(m.log_probs)]
    ids = (*scored().prompt_ids, *(one["id"] for one in made))
    again = told(replace(scored(), prompt_ids=ids), stages=2)
    assert again[-len(made) :] == made
