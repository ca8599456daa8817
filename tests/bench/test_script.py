"""Script: looked up or computed, a play is the same, and stages that err are still found out."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec import structs
from support.checkpoints import write_family
from support.plays import play_all
from support.tiers import thorough, tiered
from support.torch_rings import BASE, DRAFT, generated

from edgespec.bench.report import Played, run_of
from edgespec.bench.script import ScriptedGuesser, plain_texts
from edgespec.bench.setup import Setup, load_base
from edgespec.bench.simulated import play, simulate
from edgespec.bench.together import Together
from edgespec.bench.workloads import default_prompts
from edgespec.daemon.bundled_models import bundled
from edgespec.daemon.profiles import profile_named
from edgespec.drafting.choice import parse_draft
from edgespec.drafting.independent import IndependentGuesser
from edgespec.machines.effects import RunBlock
from edgespec.model.loader import Checkpoint
from edgespec.planning.cost_model import cost_model_named
from edgespec.policy.registry import POLICIES
from edgespec.sim.links import LinkSpec
from edgespec.sim.toy_model import FakeBlock
from edgespec.tree.ledger import IntArray
from edgespec.types.tensor import Tensor
from edgespec.verify.sampling import Sampling

NANO = profile_named("jetson-orin-nano-8gb")
SETUP = Setup(
    model=BASE,
    draft=DRAFT,
    dtype="float64",
    profiles=(NANO,) * 4,
    cost_model=cost_model_named("llama-2-13b"),
    link=None,
    prompts=tuple(default_prompts(2)),
    max_new_tokens=24,
    sampling=Sampling(),
)
WAYS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=0.8, seed=3),
    "filtered": Sampling(temperature=1.2, top_k=50, top_p=0.9, seed=4),
}


def without_margins(played: Played) -> Played:
    answers = tuple(structs.replace(answer, smallest_margin=0.0) for answer in played.answers)
    return replace(played, answers=answers)


def assert_same(looked_up: Played, computed: Played) -> None:
    """To the last digit; margins but for the rounding of another order of sums."""
    assert without_margins(looked_up) == without_margins(computed)
    pairs = zip(looked_up.answers, computed.answers, strict=True)
    for one, other in pairs:
        assert one.smallest_margin == pytest.approx(other.smallest_margin, abs=1e-9)


@pytest.mark.parametrize("way", tiered(WAYS, {"sampled"}))
def test_what_is_looked_up_plays_as_what_is_computed(way: str) -> None:
    """Together, so that each policy finds guesses that others had made."""
    setup = replace(SETUP, sampling=WAYS[way], max_new_tokens=8)
    policies = ("naive_tree", "flowspec", "adaptive")
    together = play_all(setup, policies)
    for policy in policies:
        assert_same(together[policy], play(setup, policy))


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "source", ["independent", "ngram", "easyspec", "hybrid", "hybrid:ngram+easyspec"]
)
def test_every_source_and_policy_plays_as_what_is_computed(source: str, way: str) -> None:
    draft = str(parse_draft(source, bundled))
    setup = replace(SETUP, draft=draft, sampling=WAYS[way])
    assert setup.is_scripted
    for policy, played in play_all(setup, list(POLICIES)).items():
        assert_same(played, play(setup, policy))


@pytest.mark.parametrize(
    "source", ["eagle", "eagle3", "dspark", "ppd", "hybrid:ngram+eagle", "hybrid:ngram+dspark"]
)
def test_a_source_that_takes_rows_of_the_base_is_computed(source: str) -> None:
    assert not replace(SETUP, draft=str(parse_draft(source, bundled))).is_scripted


def test_where_rounding_may_decide_a_token_all_is_computed() -> None:
    assert not replace(SETUP, dtype="float32").is_scripted
    assert not replace(SETUP, dtype="bfloat16").is_scripted


@pytest.mark.parametrize("profiles", [(NANO,) * 3, thorough((NANO,) * 10)], ids=len)
def test_rings_of_any_size_share_what_the_models_say(profiles: tuple[object, ...]) -> None:
    """More stages than the model that computes has layers, too; and links with chance."""
    setup = replace(SETUP, max_new_tokens=8, profiles=profiles, link=LinkSpec(0.01, 1e7, 0.01, 0.1))
    together = Together(SETUP)
    plays = [together.add(one, "adaptive") for one in (replace(SETUP, max_new_tokens=8), setup)]
    together.run()
    assert plays[0].played.tokens == plays[1].played.tokens
    if setup.stages <= 8:
        assert_same(plays[1].played, play(setup, "adaptive"))


# --- texts ----------------------------------------------------------------------------------------


def test_texts_decoded_together_are_those_of_transformers() -> None:
    loaded = load_base(BASE, "float64", 1)
    asked = default_prompts(3)
    prompts = [tuple(loaded.tokenizer.encode(prompt.text)) for prompt in asked]
    texts = plain_texts(loaded.blocks[0], loaded.head, prompts, [12, 5, 9], Sampling())
    for prompt, read, text, limit in zip(asked, prompts, texts, (12, 5, 9), strict=True):
        assert text.tokens == (*read, *generated(prompt.text, limit))
        assert len(text.margins) == limit


# --- bookkeeping that errs ------------------------------------------------------------------------

# A stage that only reorders its committed rows does not err, and plays the same here: attention is
# a sum over keys, and their positions are rotated into them. Behind the committed rows the order
# counts, as rows see slots: there the toy's tokens change too.


class Forgetful(FakeBlock):
    """Keeps the first rows after the committed ones, not those that it was told to."""

    def gather(self, request: int, start: int, order: IntArray) -> None:
        super().gather(request, start, np.arange(len(order)))


class Unseeing(FakeBlock):
    """Its rows see their first ancestor only after the committed rows."""

    def run(self, job: RunBlock, stop: Callable[[], bool]) -> Tensor | None:
        parts = tuple(
            replace(part, sees=part.sees & np.eye(*part.sees.shape, dtype=np.bool_))
            for part in job.parts
        )
        return super().run(replace(job, parts=parts), stop)


@pytest.mark.parametrize("block", tiered([Forgetful, Unseeing], [Forgetful]))
def test_stages_that_err_are_found_out(
    block: type[FakeBlock], monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = replace(SETUP, prompts=SETUP.prompts[:1], max_new_tokens=16)
    (right,) = simulate(setup, ["flowspec"])
    assert right.exact
    plain = play_all(setup, ["autoregressive"])
    monkeypatch.setattr("edgespec.bench.together.FakeBlock", block)
    wrong = play_all(setup, ["flowspec"])
    assert not run_of("flowspec", {**plain, **wrong}, ["n"] * 4, "m").exact


def test_a_draft_that_folds_rows_is_run_itself(tmp_path: Path) -> None:
    """Rows that are looked up are put beside each other anew, which takes all of them."""
    vocab = {"vocab_size": Checkpoint(DRAFT).config.vocab_size}
    folder = write_family(tmp_path / "m", "granitemoehybrid-mamba", eos_token_id=None, **vocab)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(DRAFT) / name, folder)
    together = object.__new__(Together)
    loaded = SimpleNamespace(head=SimpleNamespace(**vocab))
    together.__dict__ |= {"_first": SETUP, "_loaded": loaded, "_known": {}}
    folding, other = map(together._independent, (str(folder), DRAFT))
    assert isinstance(folding, IndependentGuesser)
    assert isinstance(other, ScriptedGuesser)
