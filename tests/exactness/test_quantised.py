"""Promise 1 with quantised stages: the text of plain decoding with the same quantised weights.

The reference is transformers' own model, in one piece, whose matrices were replaced by what the
packed ones stand for; float64, so that no near-tie can flip. (A weight of the model is bfloat16,
so that packing it gives the same whether it is read as float64 or as stored.) Under "file" every
matrix has another form, int4 among them, and the reference's weights come from the definitions.
"""

from __future__ import annotations

import pytest
from support.torch_rings import generated, prompts, request, torch_ring

PROMPTS = 4
NEW_TOKENS = 24


def tier(quant: str, stages: int) -> pytest.MarkDecorator:
    """Of some kinds all policies are thorough."""
    by_default = (quant, stages) in {("int4", 3), ("nf4", 3), ("int8", 1), ("file", 3)}
    return pytest.mark.thorough if by_default else pytest.mark.slow


@pytest.mark.parametrize(
    ("quant", "stages", "policy", "count"),
    [
        ("file", 3, "adaptive", 1),
        *(
            pytest.param(quant, stages, policy, PROMPTS, marks=tier(quant, stages))
            for quant in ("int4", "int4-g32", "int8", "nf4", "nf4-dq", "file")
            for stages in (1, 3)
            for policy in ("autoregressive", "naive_tree", "flowspec", "adaptive")
        ),
    ],
)
def test_greedy_is_what_one_process_generates(
    quant: str, stages: int, policy: str, count: int
) -> None:
    ring = torch_ring(stages, quant=quant)
    for tag, (name, prompt) in enumerate(list(prompts().items())[::5][:count]):
        ring.replies.clear()
        answer = ring.ask(request(prompt, policy, NEW_TOKENS, tag=tag))
        assert answer.token_ids == generated(prompt, NEW_TOKENS, quant), name


@pytest.mark.parametrize(
    ("head", "policy", "count"),
    [
        ("int4-g32", "adaptive", 1),
        *(
            pytest.param(head, policy, PROMPTS, marks=pytest.mark.thorough)
            for head in ("int4", "int4-g32", "int8", "nf4")
            for policy in ("autoregressive", "naive_tree", "flowspec", "adaptive")
        ),
    ],
)
def test_a_head_in_few_bits_is_one_matrix_of_the_model(head: str, policy: str, count: int) -> None:
    ring = torch_ring(3, head_quant=head)
    for tag, (name, prompt) in enumerate(list(prompts().items())[::5][:count]):
        ring.replies.clear()
        answer = ring.ask(request(prompt, policy, NEW_TOKENS, tag=tag))
        assert answer.token_ids == generated(prompt, NEW_TOKENS, head_quant=head), name


def test_quantisation_changes_the_model_at_all() -> None:
    """Otherwise the tests above would pass with stages, or a head, that quantise nothing."""
    prompt = prompts()["gsm8k-test-3"]
    plain = generated(prompt, 4 * NEW_TOKENS)
    assert any(generated(prompt, 4 * NEW_TOKENS, quant) != plain for quant in ("int4", "nf4"))
    heads = ("int4-g32", "int4", "nf4")
    assert any(generated(prompt, 4 * NEW_TOKENS, head_quant=one) != plain for one in heads)
