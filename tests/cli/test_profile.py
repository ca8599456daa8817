"""edgespec profile: measures a tiny model's layer and writes a profile that others can read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.checkpoints import write_checkpoint
from support.commands import Done, run_here

from edgespec.config import QUANTISATIONS
from edgespec.daemon import bandwidths, kernels, measure
from edgespec.daemon.profiles import profile_named
from edgespec.planning.profile import ROWS

Here = Callable[..., Done]


@pytest.fixture
def here(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Here]:
    """Runs `edgespec profile` in this process on one thread, with little to copy."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bandwidths, "LEAST_BUFFER", 2**22)
    monkeypatch.setattr(bandwidths, "MOST_BUFFER", 2**22)
    usable = {name: "" if name in ("none", "int4") else "not tried" for name in QUANTISATIONS}
    monkeypatch.setattr(kernels, "usable_quantisations", lambda *_: usable)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield lambda *arguments: run_here(capfd, monkeypatch, *arguments)
    torch.set_num_threads(threads)


@pytest.fixture
def quick(tmp_path: Path) -> list[str]:
    """Options that make it take no time."""
    folder = write_checkpoint(tmp_path / "base", hidden_size=128, intermediate_size=128)
    return ["--model", str(folder), "--seconds", "0.02"]


@pytest.mark.thorough
def test_it_writes_a_profile_that_simulate_reads(
    here: Here, quick: list[str], tmp_path: Path
) -> None:
    done = here("profile", *quick, "--out", "mine.json")
    assert done.code == 0, done
    profile = profile_named("mine.json")
    assert (profile.name, profile.quantisation) == ("mine", "int4")
    assert profile.unusable["nf4"] == "not tried"
    heading, *rows = done.out.splitlines()
    assert heading.split() == ["rows", "16", "bit", "int4"]
    assert [line.split()[0] for line in rows[: len(ROWS)]] == [str(count) for count in ROWS]
    assert all(line.count("ms") == 2 and line.count("*") == 1 for line in rows[: len(ROWS)])
    assert "four_bit is int4" in done.out
    assert "nf4 is not measured: not tried" in done.err
    assert "the profile is in mine.json: edgespec simulate --profile mine.json" in done.err
    played = here("simulate", "--profile", "mine.json", "--cost-model", "llama-2-7b", "--json",
                  "--stages", "2", "--limit", "1", "--max-new-tokens", "2", "--jobs", "1",
                  "--policy", "naive_tree")  # fmt: skip
    assert played.code == 0, played


@pytest.mark.thorough
def test_programs_get_an_object(here: Here, quick: list[str], tmp_path: Path) -> None:
    done = here("profile", *quick, "--name", "board-7", "--json")
    assert done.code == 0, done
    result = json.loads(done.out)
    assert result["file"] == "board-7.json"
    assert result["profile"] == json.loads((tmp_path / "board-7.json").read_text("utf-8"))
    assert set(result["layer"]["seconds"]) == {"none", "int4"}
    assert list(result["layer"]["seconds"]["int4"]) == [str(count) for count in ROWS]
    assert result["layer"]["of"] == "base"


def test_without_a_four_bit_kernel_it_says_why_and_measures_nothing(
    here: Here, quick: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = {name: "its kernel failed" for name in QUANTISATIONS if "4" in name}
    monkeypatch.setattr(
        kernels, "usable_quantisations", lambda *_: dict.fromkeys(QUANTISATIONS, "") | broken
    )
    done = here("profile", *quick, "--out", "mine.json")
    done.assert_refused("int4 is not measured: its kernel failed", "no 4-bit quantisation runs",
                        "edgespec doctor", code=1)  # fmt: skip
    assert not (tmp_path / "mine.json").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--seconds", "0"], "--seconds goes from 0.01 to 3600"),
        (["--seconds", "nan"], "--seconds goes from 0.01 to 3600"),
        (["--out", "no/such/mine.json"], "there is no folder no/such; make it first"),
        (["--out", "."], "name another file"),
        (["--coordinator", "a:b"], "is no HOST:PORT"),
        (["--model", "none"], "none"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(
    here: Here, options: list[str], words: str
) -> None:
    here("profile", *options).assert_refused(words)


def test_a_coordinator_that_is_not_there_ends_it(
    here: Here, quick: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(measure, "COORDINATOR_WAIT_S", 0.6)
    done = here("profile", *quick, "--coordinator", "127.0.0.1:9")
    assert done.code == 1
    assert "no coordinator answered at 127.0.0.1:9" in done.err
    assert not list(tmp_path.glob("*.json"))
