"""Promise 1 with layers of other kinds: rings of models with convolutions, states, experts beside
an MLP or latents give plain decoding's text.

The models are random and have the bundled pair's vocabulary. One that drafts for itself is right
often, so that deep trees are sent, walked and pruned. A trained hybrid: test_toy_hybrid.py.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Collection
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import FOLDING, write_family
from support.tiers import thorough, tiered
from support.torch_rings import BASE, CONTEXT, generated, prompts, request, torch_ring

from edgespec.model.loader import Checkpoint
from edgespec.policy.registry import POLICIES
from edgespec.wire.client_messages import Finished

LATENT = ("deepseek_v2", "glm4_moe_lite")
LIBRARY = ("ernie4_5_moe", "hunyuan_v1_moe")
FAMILIES = ("lfm2", "lfm2_moe", "qwen2_moe", "glm4_moe", *LIBRARY, *LATENT, *FOLDING)
QUICK = ["lfm2", "qwen3_5_text"]
DTYPES = ("bfloat16", "float16", "float32")
NEW_TOKENS = 12
TEXT = "Tell me of rings and of boards."
LONGER = 4 * f"{TEXT} "
"""Of models with states, which are folded behind 48 tokens."""


def cases(quick: Collection[str]) -> list[Any]:
    """Every family in every dtype, but those of transformers' layers, which are slow, in one; some
    of `quick` in `make test`."""
    of_all = [(one, dtype) for one in FAMILIES for dtype in DTYPES]
    every = [(one, dtype) for one, dtype in of_all if one not in LIBRARY or dtype == "bfloat16"]
    fast = [(one, "bfloat16") for one in quick]
    return [both if both in fast else thorough(*both) for both in every]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of each family, with the bundled pair's tokenizer."""
    root, vocab = tmp_path_factory.mktemp("hybrid"), Checkpoint(BASE).config.vocab_size
    sizes = {"vocab_size": vocab, "max_position_embeddings": 2048, "initializer_range": 0.3}
    found = {}
    for family in FAMILIES:
        found[family] = write_family(root / family, family, eos_token_id=None, **sizes)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(Path(BASE) / name, root / family)
    return found


def drafting(folders: dict[str, Path], family: str) -> str:
    """The model as its own draft, but one whose tokenizer transformers gives a token more by its
    type alone."""
    return f"independent:{folders[family.replace('qwen3_5_moe_text', 'qwen3_5_text')]}"


@pytest.mark.parametrize("family", tiered(FAMILIES, ["lfm2"]))
def test_tokens_are_those_of_generate(folders: dict[str, Path], family: str) -> None:
    text, guessed, folder = LONGER if family in FOLDING else TEXT, 0, folders[family]
    own = drafting(folders, family)
    for policy, stages, draft in zip(
        POLICIES, cycle((3, 1, 4)), cycle((own, "ngram")), strict=False
    ):
        ring = torch_ring(stages, draft_name=draft, base=folder)
        ring.replies.clear()
        answer = ring.ask(request(text, policy, NEW_TOKENS))
        wanted = generated(text, NEW_TOKENS, base=folder)
        assert answer.token_ids == wanted, (policy, stages, draft)
        guessed += sum(source.alone for source in answer.sources)
    assert guessed or str(folder) not in own


@cache
def plain(folder: Path, dtype: str, text: str, temperature: float) -> Finished:
    ring = torch_ring(1, dtype, base=folder, draft_name="ngram")
    ring.replies.clear()
    asked = request(text, "autoregressive", NEW_TOKENS, temperature=temperature, seed=5)
    return ring.ask(asked)


@pytest.mark.parametrize(("family", "dtype"), cases(QUICK))
def test_every_policy_gives_the_text_of_plain_decoding(
    folders: dict[str, Path], family: str, dtype: str
) -> None:
    folder, text = folders[family], LONGER if family in FOLDING else TEXT
    drafts = drafting(folders, family), "ngram"
    ways = zip(cycle((3, 1, 2, 4)), cycle((64, 5, 16)), cycle(drafts), strict=False)
    temperatures = cycle((0.0, 0.8))
    for policy, temperature, (stages, chunk, draft) in zip(
        POLICIES, temperatures, ways, strict=False
    ):
        ring = torch_ring(stages, dtype, draft_name=draft, chunk=chunk, base=folder)
        ring.replies.clear()
        asked = request(text, policy, NEW_TOKENS, temperature=temperature, seed=5)
        wanted = plain(folder, dtype, text, temperature)
        assert ring.ask(asked).token_ids == wanted.token_ids, (policy, stages, chunk, draft)


@pytest.mark.parametrize(("family", "dtype"), cases(["lfm2"]))
def test_live_requests_kept_rows_and_lost_rings_change_no_token(
    folders: dict[str, Path], family: str, dtype: str
) -> None:
    """Three requests at once that begin alike, in a ring that is lost twice; then the next turn of
    one of them."""
    folder = folders[family]
    preamble = "".join(prompts().values())[:200]
    texts = [preamble + end for end in (" So the first", " But", " And what of the")]
    draft = drafting(folders, family)
    ring = torch_ring(2, dtype, kept_rows=8 * CONTEXT, draft_name=draft, base=folder)
    ring.replies.clear()
    policies = ("flowspec", "adaptive", "specpipe")
    for tag, (text, policy) in enumerate(zip(texts, policies, strict=True), start=1):
        temperature = 0.8 * (tag == 2)
        ring.submit(request(text, policy, NEW_TOKENS, tag=tag, temperature=temperature, seed=5))
    chance = random.Random(3)
    for _ in range(2):
        for _ in range(chance.randint(30, 60)):
            steps = list(ring.steps())
            assert steps, "all was over before it happened"
            ring.take(chance.choice(steps))
        ring.lose("a stage is lost")
        ring.mend()
    ring.run()
    ends = {end.tag: end for end in ring.replies if isinstance(end, Finished)}
    assert max(end.recoveries for end in ends.values()) > 0
    for tag, text in enumerate(texts, start=1):
        assert ends[tag].token_ids == plain(folder, dtype, text, 0.8 * (tag == 2)).token_ids, tag
    again = texts[0] + ends[1].text + " Why?"
    answer = ring.ask(request(again, "flowspec", NEW_TOKENS, tag=9, seed=5))
    assert (answer.cached_tokens > 0) == (family not in FOLDING)
    assert answer.token_ids == plain(folder, dtype, again, 0.0).token_ids
