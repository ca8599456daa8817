"""Promise 1 in the dtypes that models are run in: to the token, whatever decodes and however.

Plain decoding on one stage says what is right, in each dtype its own: no kernel's result depends on
what a row is computed with (docs/arithmetic.md). Nothing is compared by margins.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import cycle, product
from typing import Any

import pytest
from support.covering import covering
from support.local_ring import LocalRing
from support.smollm2 import prompts as smollm2_prompts
from support.smollm2 import smollm2_ring
from support.tiers import tiered
from support.torch_rings import CONTEXT, prompts, request, torch_ring

from edgespec.policy.registry import POLICIES
from edgespec.wire.client_messages import Finished

DTYPES = ("bfloat16", "float16", "float32")
NARROW = ("float32+int8", "float32+float16", "bfloat16+int8")
"""With caches in other dtypes."""
TEMPERATURES = (0.0, 0.8)
NEW_TOKENS = 24
TEXTS = ("gsm8k-test-3", "code-3", "help-1")


@cache
def plain(dtype: str, text: str, temperature: float, new_tokens: int = NEW_TOKENS) -> Finished:
    """What plain decoding on one stage gives."""
    ring = torch_ring(1, dtype)
    ring.replies.clear()
    asked = request(text, "autoregressive", new_tokens, temperature=temperature, seed=5)
    return ring.ask(asked)


def ways() -> Iterator[tuple[int, int, str]]:
    """Stages, rows of a chunk and draft sources, in turn."""
    hybrid = "hybrid:ngram+ppd"
    drafts = cycle(("independent", "ngram", "eagle", hybrid, "eagle3", "dspark"))
    return zip(cycle((3, 1, 2, 5)), cycle((64, 5, 16)), drafts, strict=False)


@pytest.mark.parametrize("dtype", tiered((*DTYPES, *NARROW), ["bfloat16"]))
def test_every_policy_gives_the_text_of_plain_decoding(dtype: str) -> None:
    guessed = 0
    matrix = zip(POLICIES, ways(), cycle(TEMPERATURES), cycle(TEXTS), strict=False)
    for policy, (stages, chunk, draft), temperature, name in matrix:
        ring = torch_ring(stages, dtype, draft_name=draft, chunk=chunk)
        ring.replies.clear()
        text = prompts()[name]
        asked = request(text, policy, NEW_TOKENS, temperature=temperature, seed=5)
        answer = ring.ask(asked)
        wanted = plain(dtype, text, temperature)
        assert answer.token_ids == wanted.token_ids, (policy, stages, chunk, draft)
        guessed += sum(source.alone for source in answer.sources)
    assert guessed, "no guess was right"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_policy_gives_the_text_of_plain_decoding_everywhere(dtype: str) -> None:
    for stages, chunk, policy in product((1, 2, 3, 5), (64, 5), POLICIES):
        ring = torch_ring(stages, dtype, chunk=chunk)
        for name, temperature in product(TEXTS, TEMPERATURES):
            ring.replies.clear()
            text = prompts()[name]
            asked = request(text, policy, NEW_TOKENS, temperature=temperature, seed=5)
            wanted = plain(dtype, text, temperature)
            assert ring.ask(asked).token_ids == wanted.token_ids, (stages, chunk, policy, name)


@pytest.mark.parametrize("dtype", tiered((*DTYPES, *NARROW), ["bfloat16"]))
def test_live_requests_and_kept_rows_change_no_token(dtype: str) -> None:
    """Three requests at once that begin alike, and then the next turn of one of them."""
    preamble = "".join(prompts().values())[:300]
    texts = [preamble + end for end in (" So the first", " But", " And what of the")]
    ring = torch_ring(2, dtype, kept_rows=8 * CONTEXT)
    ring.replies.clear()
    policies = ("flowspec", "adaptive", "specpipe")
    for tag, (text, policy) in enumerate(zip(texts, policies, strict=True), start=1):
        asked = request(text, policy, NEW_TOKENS, tag=tag, temperature=0.8 * (tag == 2), seed=5)
        ring.submit(asked)
    ring.run()
    ends = {end.tag: end for end in ring.replies if isinstance(end, Finished)}
    for tag, text in enumerate(texts, start=1):
        assert ends[tag].token_ids == plain(dtype, text, 0.8 * (tag == 2)).token_ids, tag
    again = texts[0] + ends[1].text + " Why?"
    answer = ring.ask(request(again, "flowspec", NEW_TOKENS, tag=9, seed=5))
    assert answer.cached_tokens > 0
    assert answer.token_ids == plain(dtype, again, 0.0).token_ids


SMOLLM2_STAGES = (1, 2, 3, 5)
SMOLLM2_TOKENS = 128
BEGIN, END = "\n\nLet us think step by step.", " First,"
LONG = BEGIN + END
"""After most of the prompts the model would say nothing."""


@cache
def _smollm2_plain(dtype: str, text: str, temperature: float) -> tuple[int, ...]:
    return _smollm2(smollm2_ring(1, dtype=dtype), text, "autoregressive", temperature).token_ids


def _smollm2(
    ring: LocalRing, text: str, policy: str, temperature: float, new_tokens: int = SMOLLM2_TOKENS
) -> Finished:
    ring.replies.clear()
    return ring.ask(request(text, policy, new_tokens, temperature=temperature, seed=5))


FACTORS = {
    "policy": tuple(POLICIES),
    "prompt": tuple(range(12)),
    "stages": SMOLLM2_STAGES,
    "draft": ("ngram", "dspark", "easyspec:smollm2-135m", "hybrid:ngram+dspark"),
    "dtype": DTYPES,
    "chunk": (64, 7),
    "temperature": TEMPERATURES,
    "kept_rows": (0, 2048),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", covering(FACTORS), ids=lambda case: "-".join(map(str, case.values()))
)
def test_smollm2_gives_the_text_of_plain_decoding_in_pairs(case: dict[str, Any]) -> None:
    """Any two values of two factors occur in some case. Where rows are kept, those of the prompt's
    beginning are there, from a request of a policy that drafts (others' rows are not kept for a
    draft source that has to read them)."""
    dtype, policy, temperature = case["dtype"], case["policy"], case["temperature"]
    begins = smollm2_prompts()[case["prompt"]] + BEGIN
    ring = smollm2_ring(
        case["stages"],
        dtype=dtype,
        draft_name=case["draft"],
        chunk=case["chunk"],
        kept_rows=case["kept_rows"],
    )
    if case["kept_rows"]:
        _smollm2(ring, begins, "adaptive", temperature, 8)
    answer = _smollm2(ring, begins + END, policy, temperature)
    assert bool(answer.cached_tokens) == bool(case["kept_rows"])
    assert answer.token_ids == _smollm2_plain(dtype, begins + END, temperature)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_smollm2_answers_are_long(dtype: str) -> None:
    """So that those that are compared are: most are as long as they may be."""
    asked = product(smollm2_prompts(), TEMPERATURES)
    lengths = [len(_smollm2_plain(dtype, text + LONG, t)) for text, t in asked]
    assert sum(lengths) > 12 * SMOLLM2_TOKENS, lengths


@pytest.mark.slow
@pytest.mark.parametrize("stages", SMOLLM2_STAGES)
@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("dtype", DTYPES)
def test_smollm2_gives_the_text_of_plain_decoding(dtype: str, policy: str, stages: int) -> None:
    """Twelve prompts; half of them read in small chunks."""
    rings = [smollm2_ring(stages, dtype=dtype, chunk=chunk) for chunk in (64, 7)]
    for number, (text, temperature) in enumerate(product(smollm2_prompts(), TEMPERATURES)):
        asked = text + LONG
        wanted = _smollm2_plain(dtype, asked, temperature)
        answer = _smollm2(rings[number // 2 % 2], asked, policy, temperature)
        assert answer.token_ids == wanted, text
