"""`edgespec bench` and `--emulate`: one run as processes, and options that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.commands import Done, run, run_here
from support.torch_rings import request, torch_ring

from edgespec.daemon.profiles import profile_named
from edgespec.planning.cost_model import cost_model_named
from edgespec.planning.costs import NodeCosts

PROFILE = "jetson-orin-nano-super-8gb"
PROMPTS = [
    {"question_id": 81, "category": "chat", "turns": ["Once upon a time", "And then?"]},
    {"question_id": 82, "category": "math", "turns": ["3 + 4 ="]},
]
TOKENS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the run of this module writes."""
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def done(folder: Path) -> Done:
    """A small run with emulation."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    options = ["--emulate", PROFILE, "--stages", "2", "--policy", "naive_tree,flowspec"]
    options += ["--prompts", str(prompts), "--max-new-tokens", str(TOKENS)]
    return run("bench", *options, "--out", str(folder / "out"), "--json")


@pytest.fixture(scope="module")
def content(done: Done) -> dict[str, Any]:
    """Its JSON object."""
    assert done.code == 0, done.err
    assert done.out.count("\n") == 1
    return json.loads(done.out)  # type: ignore[no-any-return]


@pytest.mark.thorough
def test_it_says_that_the_times_are_emulated(done: Done, content: dict[str, Any]) -> None:
    assert f"times are emulated: llama-2-13b on {PROFILE}" in done.err
    assert content["emulated"] is True


@pytest.mark.thorough
def test_every_policy_gives_the_tokens_of_a_plain_ring(
    folder: Path, content: dict[str, Any]
) -> None:
    assert [run["policy"] for run in content["runs"]] == [
        *("autoregressive", "naive_tree", "flowspec")
    ]
    assert content["differences"] == []
    ring = torch_ring(2, "float32")
    told = PROMPTS[0]["turns"][0]  # type: ignore[index]
    expected = ring.ask(request(told, "autoregressive", TOKENS)).token_ids
    for entry in content["runs"]:
        lines = (folder / "out" / f"answers-{entry['policy']}.jsonl").read_text().splitlines()
        answers = [json.loads(line) for line in lines]
        assert [answer["question_id"] for answer in answers] == [81, 82]
        assert answers[0]["choices"][0]["token_ids"][0] == list(expected)
        assert len(answers[0]["choices"][0]["turns"]) == 2
        assert entry["exact"] is True


@pytest.mark.thorough
def test_the_figures_are_those_of_the_emulated_devices(content: dict[str, Any]) -> None:
    plain, _, fast = content["runs"]
    # A token goes through all layers, one row at a time; a busy machine may only be slower.
    model = cost_model_named("llama-2-13b")
    device = NodeCosts(profile_named(PROFILE), model, model.layers)
    assert plain["decode_tokens_per_second"] < 1 / device.block_seconds(1, 0)
    assert fast["tokens_per_second"] > plain["tokens_per_second"]
    for entry in content["runs"]:
        assert entry["new_tokens"] == 3 * TOKENS
        assert len(entry["stage_busy"]) == len(entry["stage_wasted"]) == 2
        assert all(0 < busy < 1 for busy in entry["stage_busy"])
        assert 0 < entry["coordinator_busy"] < 1
        assert entry["bytes_per_token"] > 2 * 10240  # a row leaves both stages
        assert set(entry["categories"]) == {"chat", "math"}
    assert plain["stage_wasted"] == [0.0, 0.0]
    assert plain["rows_wasted"] == 0


@pytest.mark.thorough
def test_everything_is_written(folder: Path, content: dict[str, Any]) -> None:
    assert json.loads((folder / "out" / "results.json").read_text()) == content
    for name in ("timeline.png", "speedup.png"):
        assert (folder / "out" / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.thorough
def test_under_load_it_has_the_figures_of_simulate(tmp_path: Path) -> None:
    """And about their values, on a machine that has little else to do."""
    common = ["--stages", "2", "--policy", "adaptive", "--limit", "3", "--live", "2"]
    common += ["--max-new-tokens", str(TOKENS), "--json"]
    real = run("bench", *common, "--emulate", PROFILE, "--out", str(tmp_path))
    assert real.code == 0, real.err
    content = json.loads(real.out)
    assert content["settings"]["live"] == 2
    assert content["differences"] == []
    plain, *others = content["runs"]
    virtual = run("simulate", *common, "--profile", PROFILE, "--dtype", "float32")
    simulated = {entry["policy"]: entry for entry in json.loads(virtual.out)["runs"]}
    for entry in others:
        expected = simulated[entry["policy"]]
        assert set(expected) - set(entry) == {"virtual_seconds"}
        assert entry["exact"] is expected["exact"] is True
        # A busy machine may only be slower; the test's own noise is not of interest here.
        assert entry["tokens_per_second"] < 1.1 * expected["tokens_per_second"]
        assert entry["tokens_per_second"] > plain["tokens_per_second"]
        assert entry["ttft_mean"] > 0.9 * expected["ttft_mean"]
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    lines = (tmp_path / "answers-adaptive.jsonl").read_text().splitlines()
    assert [len(json.loads(line)["choices"][0]["turns"]) for line in lines] == [1] * 3


@pytest.mark.thorough
def test_the_manual_names_every_figure(content: dict[str, Any]) -> None:
    manual = (Path(__file__).parents[2] / "docs" / "figures.md").read_text(encoding="utf-8")
    missing = [name for name in content["runs"][0] if f"`{name}`" not in manual]
    assert not missing


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--emulate", PROFILE, "--with-stage"], "a device of its own for each node"),
        (["--emulate", "abacus"], "there is no profile 'abacus'"),
        (["--emulate", f"{PROFILE},{PROFILE}"], "2 profiles for a coordinator and 3 stage(s)"),
        (["--emulate", f"{PROFILE},,"], "names no profiles"),
        (["--emulate", PROFILE, "--cost-model", "gpt"], "there is no cost model 'gpt'"),
        (["--cost-model", "llama-2-7b"], "--cost-model needs --emulate"),
        (["--emulate", PROFILE, "--cost-model", "llama-3.1-70b"], "use more stages"),
        (["--policy", "telepathy"], "unknown policy 'telepathy'"),
        (["--policy", ""], "unknown policy ''"),
        (["--max-new-tokens", "0"], "max-new-tokens is 0"),
        (["--temperature", "-1"], "temperature"),
        (["--prompts", "/nowhere"], "cannot read the prompts"),
        (["--limit", "-1"], "limit is -1"),
        (["--stages", "-1"], "-1 stages"),
        (["--dtype", "int8"], "unknown dtype"),
        (["--live", "0"], "live is 0; it must be at least 1"),
        (["--out", "/dev/null/x"], "cannot make the folder"),
    ],
)
def test_a_wrong_option_is_refused(
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: str,
) -> None:
    run_here(capfd, monkeypatch, "bench", *arguments).assert_refused(words)


@pytest.mark.parametrize(
    "command",
    [
        ["demo"],
        ["serve", "--stages", "3", "--port", "0"],
        ["join", "--stage", "1", "--coordinator", "127.0.0.1:1"],
    ],
)
def test_other_commands_refuse_what_cannot_be_emulated(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    done = run_here(capfd, monkeypatch, *command, "--emulate", "abacus")
    done.assert_refused("there is no profile 'abacus'")
    done = run_here(capfd, monkeypatch, *command, "--cost-model", "llama-2-7b")
    done.assert_refused("--cost-model needs --emulate")


def test_a_trace_that_cannot_be_written_is_refused(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--stage", "1", "--coordinator", "127.0.0.1:1", "--trace", "/nowhere/x"]
    done = run_here(capfd, monkeypatch, "join", *options)
    done.assert_refused("cannot write the trace /nowhere/x")
