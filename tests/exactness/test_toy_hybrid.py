"""Promise 1 with the bundled hybrid, its own head among those that guess: whatever the policy, the
stages, the source, the temperature and the dtype, the text is that of plain decoding.

A stage is lost in each answer, so that its states are read again.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import product
from typing import Any

import pytest
from support.cases import case
from support.covering import covering
from support.torch_rings import generated, prompts, request, torch_ring

from edgespec.daemon.bundled_models import HYBRID, bundled
from edgespec.policy.registry import POLICIES
from edgespec.wire.client_messages import Finished

BASE = bundled(HYBRID)
NEW_TOKENS = 24
FACTORS: Mapping[str, tuple[Any, ...]] = {
    "policy": tuple(POLICIES),
    "stages": (1, 2, 3, 5),
    "draft": ("mtp", "hybrid:ngram+mtp", "ngram", "independent"),
    "temperature": (0.0, 0.8),
    "dtype": ("float32", "bfloat16", "float16"),
}
QUICK = [
    {"policy": "adaptive", "stages": 3, "draft": "hybrid:ngram+mtp", "temperature": 0.8},
    {"policy": "flowspec", "stages": 2, "draft": "mtp", "temperature": 0.0},
    {"policy": "specpipe", "stages": 5, "draft": "mtp", "temperature": 0.0},
]
CHUNKS = {1: 64, 2: 5, 3: 16, 5: 64}


@cache
def plain(dtype: str, temperature: float) -> Finished:
    ring = torch_ring(1, dtype, base=BASE, draft_name="ngram")
    ring.replies.clear()
    return ring.ask(asked("autoregressive", temperature))


def asked(policy: str, temperature: float) -> Any:
    prompt = prompts()["gsm8k-test-3"]
    return request(prompt, policy, NEW_TOKENS, temperature=temperature, seed=5)


def right_guesses(
    policy: str, stages: int, draft: str, temperature: float, dtype: str = "float32"
) -> int:
    """How many tokens of an answer only guesses by a head had, if the answer is the plain one."""
    chunk = CHUNKS[stages]
    ring = torch_ring(stages, dtype, draft_name=draft, chunk=chunk, base=BASE)
    ring.replies.clear()
    with case(policy, stages, draft, temperature, dtype):
        ring.submit(asked(policy, temperature))
        for _ in range(40 * stages):
            ring.take(next(iter(ring.steps())))
        ring.lose("a stage is lost")
        ring.mend()
        ring.run()
        (answer,) = (end for end in ring.replies if isinstance(end, Finished))
        assert answer.recoveries == 1
        assert answer.token_ids == plain(dtype, temperature).token_ids
        assert not any(stage.ledgers() for stage in ring.stages)
    return sum(one.alone for one in answer.sources if one.name == "mtp")


def test_a_few_of_each_give_the_text_of_plain_decoding() -> None:
    assert sum(right_guesses(**one) for one in QUICK), "no guess was right"


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", FACTORS["dtype"])
def test_every_two_of_them_together_give_the_text_of_plain_decoding(dtype: str) -> None:
    cases = [one for one in covering(FACTORS) if one["dtype"] == dtype]
    assert sum(right_guesses(**one) for one in cases), "no guess was right"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FACTORS["dtype"])
@pytest.mark.parametrize("policy", FACTORS["policy"])
def test_all_of_them_give_the_text_of_plain_decoding(policy: str, dtype: str) -> None:
    others = (FACTORS[name] for name in ("stages", "draft", "temperature"))
    for stages, draft, temperature in product(*others):
        right_guesses(policy, stages, draft, temperature, dtype)


@pytest.mark.parametrize(
    ("policy", "stages"),
    [("adaptive", 3), *(pytest.param(p, 5, marks=pytest.mark.thorough) for p in POLICIES)],
)
def test_in_float64_it_says_what_transformers_generates(policy: str, stages: int) -> None:
    ring = torch_ring(stages, draft_name="mtp", base=BASE)
    ring.replies.clear()
    answer = ring.ask(asked(policy, 0.0))
    assert answer.token_ids == generated(prompts()["gsm8k-test-3"], NEW_TOKENS, base=BASE)
