"""Promise 1 for every draft source: whoever guesses, the text is that of plain decoding."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache, reduce
from typing import Any, TypeVar

import pytest
from support.local_ring import LocalRing
from support.tiers import thorough, tiered
from support.torch_rings import BASE, generated, prompts, request, torch_ring

from edgespec.drafting.choice import HYBRID, SOURCES
from edgespec.policy.registry import POLICIES
from edgespec.wire.client_messages import Finished

Test = TypeVar("Test", bound=Callable[..., Any])

GROUPED = f"easyspec:{BASE}"  # the bundled draft has too few layers for groups
MIXED = ("hybrid:ngram+ppd", "hybrid:ngram+dspark")
DRAFTS = (*(name for name in SOURCES if name != "mtp"), HYBRID, *MIXED, GROUPED)
"""The bundled base has no head of its own: test_toy_hybrid.py has a base that does."""
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
FEW = [d for d in DRAFTS if d not in ("independent", "easyspec")]  # test_exactness.py has that one
few = [pytest.mark.parametrize("draft", tiered(FEW, set(FEW) - set(MIXED)))]


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


@pytest.mark.parametrize("draft", tiered(DRAFTS, ["dspark"]))
def test_a_cancel_and_lost_rings_change_no_token(draft: str) -> None:
    """Three live requests, of which the second is cancelled, and then the next turn of the first.
    The third is sampled."""
    rng = random.Random(draft)
    ring = torch_ring(3, draft_name=draft, kept_rows=4096)
    ring.replies.clear()
    first, second = list(prompts().values())[:2]
    ring.submit(request(first, "adaptive", NEW_TOKENS, tag=1))
    ring.submit(request(second, "flowspec", NEW_TOKENS, tag=2))
    ring.submit(request(prompts()["code-3"], "adaptive", 16, tag=3, temperature=1.0, seed=5))
    for happens in (lambda: ring.cancel(2), lambda: _lose(ring), lambda: _lose(ring)):
        for _ in range(rng.randint(20, 60)):
            steps = list(ring.steps())
            assert steps, "all was over before it happened"
            ring.take(rng.choice(steps))
        happens()
    ring.run()
    ends = {end.tag: end for end in ring.replies if isinstance(end, Finished)}
    assert ends[2].finish_reason == "cancelled"
    assert ends[1].recoveries > 0
    assert ends[1].token_ids == generated(first, NEW_TOKENS)
    assert ends[3].token_ids == _plainly_sampled("code-3", 1.0, 5)
    again = request(first + ends[1].text + " So", "adaptive", 8, tag=4)
    assert ring.ask(again).token_ids == generated(again.prompt, 8)


def _lose(ring: LocalRing) -> None:
    ring.lose("a stage is lost")
    ring.mend()
