"""Promise 1 for every draft source: whoever guesses, the text is that of plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, reduce
from typing import Any, TypeVar

import pytest
from support.tiers import thorough, tiered
from support.torch_rings import BASE, generated, prompts, request, torch_ring

from edgespec.drafting.choice import HYBRID, SOURCES
from edgespec.policy.registry import POLICIES

Test = TypeVar("Test", bound=Callable[..., Any])

GROUPED = f"easyspec:{BASE}"  # the bundled draft has too few layers for groups
DRAFTS = (*SOURCES, HYBRID, "hybrid:ngram+ppd+independent", GROUPED)
POLICIES_THAT_DRAFT = tuple(name for name, policy in POLICIES.items() if policy.drafts)
STAGES = (1, 3, 4)
SAMPLED = ("gsm8k-test-3", "code-3")
NEW_TOKENS = 24

matrix = [
    pytest.mark.slow,
    pytest.mark.parametrize("draft", DRAFTS),
    pytest.mark.parametrize("policy", POLICIES_THAT_DRAFT),
    pytest.mark.parametrize("stages", STAGES),
]
few = [  # test_exactness.py has the independent draft
    pytest.mark.parametrize("draft", [d for d in DRAFTS if d not in ("independent", "easyspec")]),
]


def marked(marks: list[pytest.MarkDecorator]) -> Callable[[Test], Test]:
    """A decorator of all these marks."""
    return lambda test: reduce(lambda done, mark: mark(done), marks, test)


@marked(few)
@pytest.mark.parametrize(
    ("policy", "count"), [("flowspec", 1), thorough("flowspec", 2), thorough("adaptive", 2)]
)
def test_greedy_is_what_transformers_generates(policy: str, draft: str, count: int) -> None:
    _greedy(3, policy, draft, count)


@marked(matrix)
def test_greedy_is_what_transformers_generates_everywhere(
    stages: int, policy: str, draft: str
) -> None:
    _greedy(stages, policy, draft, 4)


def _greedy(stages: int, policy: str, draft: str, count: int) -> None:
    ring = torch_ring(stages, draft_name=draft)
    guessed = 0
    for tag, (name, prompt) in enumerate(list(prompts().items())[:count]):
        ring.replies.clear()
        answer = ring.ask(request(prompt, policy, NEW_TOKENS, tag=tag))
        assert answer.token_ids == generated(prompt, NEW_TOKENS), name
        named = "independent" if draft == "easyspec" else draft.partition(":")[0]
        assert answer.draft.partition(":")[0] == named
        for source in answer.sources:
            assert 0 <= source.alone <= source.accepted <= answer.new_tokens
        guessed += sum(source.alone for source in answer.sources)
    assert guessed, "no guess was right"
    assert ring.coordinator.idle


@marked(few)
@pytest.mark.parametrize("policy", tiered(["adaptive", "flowspec"], ["flowspec"]))
def test_sampled_tokens_depend_on_seed_and_prompt_alone(policy: str, draft: str) -> None:
    _sampled(3, policy, draft, "code-3", 1.0, 5)


@pytest.mark.parametrize("seed", [0, 2**40 + 7])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@marked(matrix)
def test_sampled_tokens_depend_on_seed_and_prompt_alone_everywhere(
    stages: int, policy: str, draft: str, temperature: float, seed: int
) -> None:
    for name in SAMPLED:
        _sampled(stages, policy, draft, name, temperature, seed)


def _sampled(
    stages: int, policy: str, draft: str, name: str, temperature: float, seed: int
) -> None:
    ring = torch_ring(stages, draft_name=draft)
    ring.replies.clear()
    asked = request(prompts()[name], policy, 16, temperature=temperature, seed=seed)
    assert ring.ask(asked).token_ids == _plainly_sampled(name, temperature, seed)


@cache
def _plainly_sampled(name: str, temperature: float, seed: int) -> tuple[int, ...]:
    ring = torch_ring(1)
    ring.replies.clear()
    asked = request(prompts()[name], "autoregressive", 16, temperature=temperature, seed=seed)
    return ring.ask(asked).token_ids
