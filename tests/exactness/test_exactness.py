"""Promise 1 on the real models: every policy and stage count gives the text of plain decoding.

In float64, against transformers; the demo's float32 is compared with that by the margin at the
first difference, and test_dtypes.py compares each dtype with its own plain decoding. The rings are
lock-step rings of this process (every message through the codec); tests/daemon shows the same for
processes.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import reference, write_family
from support.tiers import thorough
from support.torch_rings import (
    CONTEXT,
    generated,
    prompts,
    request,
    tokenizer,
    torch_ring,
    transformers_model,
)

from edgespec.policy.registry import POLICIES as ALL

STAGES = (1, 2, 3, 4, 8)
POLICIES = tuple(sorted(ALL))
PROMPTS = {"flowspec": 20, "autoregressive": 8, "naive_tree": 6, "adaptive": 6}
"""How many prompts each policy answers in `make test-all`, others a few; `adaptive` at every stage
count, the others at some. All of it is marked slow."""
FEW_PROMPTS = 4
NEW_TOKENS, FEW_TOKENS = 24, 16
SMALLEST_CLEAR_MARGIN = 1e-3  # in logits; float32 rounding through eight layers is some 1e-5


def cases(stages: tuple[int, ...], everywhere: Collection[str]) -> list[Any]:
    """Every policy and stage count: thorough where `stages` or `everywhere` has it, else slow."""
    tiers = {True: pytest.mark.thorough, False: pytest.mark.slow}
    return [
        pytest.param(count, policy, marks=tiers[policy in everywhere or count in stages])
        for policy in POLICIES
        for count in STAGES
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_three_stages_give_what_transformers_generates(policy: str) -> None:
    _greedy(3, policy, 2 if policy == "flowspec" else 1, FEW_TOKENS)


@pytest.mark.parametrize(("stages", "policy"), cases((1, 3, 8), ("adaptive",)))
def test_greedy_is_what_transformers_generates(stages: int, policy: str) -> None:
    _greedy(stages, policy, PROMPTS.get(policy, FEW_PROMPTS))


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("stages", STAGES)
def test_greedy_is_what_transformers_generates_for_every_prompt(stages: int, policy: str) -> None:
    _greedy(stages, policy, len(prompts()))


def _greedy(stages: int, policy: str, count: int, new_tokens: int = NEW_TOKENS) -> None:
    ring = torch_ring(stages)
    for tag, (name, prompt) in enumerate(list(prompts().items())[:count]):
        ring.replies.clear()
        answer = ring.ask(request(prompt, policy, new_tokens, tag=tag))
        assert answer.token_ids == generated(prompt, new_tokens), name
    assert ring.coordinator.idle
    assert not any(stage.ledgers() for stage in ring.stages)


@pytest.mark.parametrize(
    ("name", "head_last"),
    [
        ("gemma4_text-shared", False),
        thorough("gemma4_text-shared", True),
        thorough("gemma4_text-experts", False),
    ],
)
def test_gemma_4_gives_what_transformers_generates(
    tmp_path: Path, name: str, head_last: bool
) -> None:
    """Tokens travel to both stages, the second of which has all layers that share keys."""
    vocab = int(transformers_model().config.vocab_size)
    tables = {"vocab_size_per_layer_input": vocab, "max_position_embeddings": CONTEXT}
    base = write_family(tmp_path / "m", name, vocab_size=vocab, **tables)
    prompt = next(iter(prompts().values()))
    ids = torch.tensor([tokenizer().encode(prompt)])
    model = reference(base)
    with torch.inference_mode():
        out = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    ring = torch_ring(2, base=base, draft_name="ngram", head_last=head_last)
    answer = ring.ask(request(prompt, "flowspec", NEW_TOKENS))
    assert list(answer.token_ids) == out[0, ids.shape[1] :].tolist()


SAMPLED = ("gsm8k-test-3", "help-1", "code-3")


@pytest.mark.parametrize("policy", POLICIES)
def test_three_stages_sample_what_one_does(policy: str) -> None:
    _sampled(3, policy, (2**40 + 7,), SAMPLED[:1])


@pytest.mark.parametrize(("stages", "policy"), cases((3,), ("flowspec",)))
def test_sampled_tokens_depend_on_seed_and_prompt_alone(stages: int, policy: str) -> None:
    answers = _sampled(stages, policy, (0, 1, 2**40 + 7), SAMPLED)
    assert len(answers) > len(SAMPLED), "different seeds gave the same text everywhere"


def _sampled(
    stages: int, policy: str, seeds: tuple[int, ...], names: tuple[str, ...]
) -> set[tuple[str, tuple[int, ...]]]:
    """Compare the answers with plain decoding's; what came out."""
    ring = torch_ring(stages)
    answers = set()
    for seed in seeds:
        for name in names:
            expected = _plainly_sampled(name, seed)
            ring.replies.clear()
            asked = request(prompts()[name], policy, 16, temperature=0.8, seed=seed)
            assert ring.ask(asked).token_ids == expected, (name, seed)
            answers.add((name, expected))
    return answers


@cache
def _plainly_sampled(name: str, seed: int) -> tuple[int, ...]:
    ring = torch_ring(1)
    ring.replies.clear()
    asked = request(prompts()[name], "autoregressive", 16, temperature=0.8, seed=seed)
    return ring.ask(asked).token_ids


@pytest.mark.parametrize(
    ("stages", "policy"),
    [(3, "adaptive"), *(thorough(stages, policy) for policy in POLICIES for stages in (1, 2, 8))],
)
def test_the_head_on_the_last_stage_gives_the_same_tokens(stages: int, policy: str) -> None:
    ring = torch_ring(stages, head_last=True)
    name = SAMPLED[0]
    plain = {0.0: generated(prompts()[name], 16), 0.8: _plainly_sampled(name, 7)}
    for temperature, expected in plain.items():
        ring.replies.clear()
        asked = request(prompts()[name], policy, 16, temperature=temperature, seed=7)
        assert ring.ask(asked).token_ids == expected, temperature
    assert not any(stage.ledgers() for stage in ring.stages)


FEW_OR_ALL = [3, pytest.param(20, marks=pytest.mark.thorough)]


@pytest.mark.parametrize("count", FEW_OR_ALL)
def test_default_dtype_differs_at_near_ties_only(count: int) -> None:
    ring = torch_ring(3, "float32")
    for tag, (name, prompt) in enumerate(list(prompts().items())[:count]):
        ring.replies.clear()
        got = ring.ask(request(prompt, "flowspec", NEW_TOKENS, tag=tag)).token_ids
        wanted = generated(prompt, NEW_TOKENS)
        first = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), None)
        if first is not None:
            margin = _margin(prompt, wanted[:first])
            print(f"{name}: token {first} differs in float32, float64 margin {margin:.2g}")
            assert margin < SMALLEST_CLEAR_MARGIN, name


def _margin(prompt: str, answer: tuple[int, ...]) -> float:
    ids = torch.tensor([[*tokenizer().encode(prompt), *answer]])
    with torch.inference_mode():
        best = transformers_model()(ids).logits[0, -1].topk(2).values
    return float(best[0] - best[1])


ONE_OR_EACH = [
    pytest.param(policy, marks=() if policy == "flowspec" else pytest.mark.thorough)
    for policy in PROMPTS
]


@pytest.mark.thorough
@pytest.mark.parametrize("policy", PROMPTS)
def test_an_answer_may_fill_the_context(policy: str) -> None:
    filler = tokenizer().decode([300] * (CONTEXT - 12))
    room = CONTEXT - len(tokenizer().encode(filler))
    assert 0 < room < 64
    expected = generated(filler, room)
    ring = torch_ring(2)
    ring.replies.clear()
    answer = ring.ask(request(filler, policy, 4 * room))
    assert answer.token_ids == expected[: len(answer.token_ids)]
    assert answer.new_tokens == room or answer.finish_reason == "stop"


@pytest.mark.parametrize("policy", ONE_OR_EACH)
def test_an_end_token_ends_the_answer_at_once(policy: str) -> None:
    prompt = "Question: Tom has 3 boxes with 12 pencils each. He gives away 9 pencils. How many "
    prompt += "pencils does he have left?\nAnswer: He gives away 9 pencils because 3 x 9 = 9\nHe "
    prompt += "gives away 12 pencils because 9 x 9 = 12\nHe gives away 9 pencils"  # so it ends soon
    wanted = generated(prompt, 128)
    assert 8 < len(wanted) < 32
    assert wanted[-1] in tokenizer().eos_ids, "the example no longer ends by itself"
    ring = torch_ring(3)
    ring.replies.clear()
    answer = ring.ask(request(prompt, policy, 128))
    assert answer.token_ids == wanted
    assert answer.finish_reason == "stop"
    assert answer.text == tokenizer().decode(wanted)


@pytest.mark.thorough
def test_stop_string_ends_at_once_whatever_the_policy() -> None:
    prompt = prompts()["gsm8k-test-7"]
    text = tokenizer().decode(generated(prompt, NEW_TOKENS))
    stop = text[len(text) // 2 :][:3]
    ends = []
    for policy in POLICIES:
        ring = torch_ring(3)
        ring.replies.clear()
        answer = ring.ask(request(prompt, policy, NEW_TOKENS, stop=(stop,)))
        assert answer.finish_reason == "stop"
        assert answer.text == text[: text.find(stop)]
        ends.append(answer.token_ids)
    assert len(set(ends)) == 1
    assert ends[0] == generated(prompt, NEW_TOKENS)[: len(ends[0])]


@pytest.mark.thorough
@pytest.mark.parametrize("count", FEW_OR_ALL)
def test_flowspec_needs_fewer_trips_than_naive_tree_than_autoregressive(count: int) -> None:
    trips = {}
    for policy in ("autoregressive", "naive_tree", "flowspec"):
        ring = torch_ring(3)
        total = tokens = 0.0
        for tag, prompt in enumerate(list(prompts().values())[:count]):
            ring.replies.clear()
            answer = ring.ask(request(prompt, policy, NEW_TOKENS, tag=tag))
            total += answer.trips
            tokens += answer.new_tokens
        trips[policy] = total / tokens
    print(f"trips per token at 3 stages: {trips}")
    assert trips["flowspec"] < trips["naive_tree"] < 0.8 * trips["autoregressive"]
