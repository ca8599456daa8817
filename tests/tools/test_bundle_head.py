"""The tool that bundles a head: what a run has written gets a folder with a card, or is refused."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path

import pytest
import torch
from support.checkpoints import write_checkpoint, write_texts, write_tokenizer

from edgespec.drafting.dspark.format import read_head
from edgespec.training.loop import TrainingSettings
from edgespec.training.run import DSparkPlan, train_dspark

TOOL = runpy.run_path(str(Path(__file__).resolve().parents[2] / "tools" / "bundle_head.py"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of eight steps for a small model that is called as the tool's is."""
    base = tmp_path / "SmolLM2-135M-Instruct"
    write_checkpoint(base, num_hidden_layers=6, vocab_size=420, initializer_range=0.1)
    write_tokenizer(base)
    text, out = write_texts(tmp_path / "text.jsonl"), tmp_path / "run"
    out.mkdir()
    settings = TrainingSettings(8, 2, 4, 2e-3, low=False)
    plan = DSparkPlan(base, text, out, settings, 64, 12, 4, 1, 4, 8, 48, 60, 6)
    train_dspark(plan, lambda line: None, torch.float32)
    return out


def test_a_finished_run_becomes_a_folder_with_a_card(run: Path, tmp_path: Path) -> None:
    bundled = tmp_path / "bundled"
    card = TOOL["bundle"]([run], bundled)
    figures = json.loads((bundled / "training.json").read_text())
    assert (bundled / "MODEL_CARD.md").read_text() == card
    assert "It guesses 4 tokens in one pass" in card
    assert "8 steps of 2 answers with 6 blocks each" in card
    assert "began with the head of an earlier run" not in card
    for temperature, of_it in (("0", figures), ("1", figures["at_temperature_1"])):
        for behind, found in (("masks", of_it), ("shown", of_it["shown"])):
            begins = f"| {temperature} | {behind} | 8 |"
            (row,) = (line for line in card.splitlines() if line.startswith(begins))
            shares = [f"{found['agreement_by_level']['top8'][level]:.3f}" for level in (0, 1, 3)]
            assert row.removesuffix(" |").split(" | ")[3:] == shares
    assert (bundled / "growth.png").read_bytes().startswith(b"\x89PNG")
    assert torch.equal(
        read_head(bundled, 32, 420, 6).weights["fc.weight"],
        read_head(run, 32, 420, 6).weights["fc.weight"],
    )


def test_a_head_that_is_not_shown_guesses_has_other_parts(run: Path, tmp_path: Path) -> None:
    figures = json.loads((run / "training.json").read_text())
    for found in (figures, figures["at_temperature_1"]):
        del found["shown"]
    (run / "training.json").write_text(json.dumps({**figures, "rank": 5}))
    card = TOOL["bundle"]([run], tmp_path / "bundled", "a GPU")
    assert "hours of a GPU." in card
    assert "and a Markov head of rank 5." in card
    assert "masks" not in card
    assert sum(line.startswith("| 1 | 8 |") for line in card.splitlines()) == 1


def test_several_runs_are_told_as_one_after_the_other(run: Path, tmp_path: Path) -> None:
    second = tmp_path / "second"
    shutil.copytree(run, second)
    figures = json.loads((run / "training.json").read_text())
    figures["agreement_by_level"]["top1"][0] = 0.75
    (second / "training.json").write_text(json.dumps({**figures, "started": True, "seconds": 3600}))
    card = TOOL["bundle"]([run, second], tmp_path / "bundled")
    assert "8 and 8 steps of 2 answers" in card
    assert f"{(3600 + figures['seconds']) / 3600:.2f}\nhours" in card
    assert "earlier run, whose steps" not in card
    drawn = figures["at_temperature_1"]["agreement_by_level"]["top1"][0]
    assert f", 0.750 (at temperature 1 {drawn:.3f})." in card
    hours = [step["seconds"] for step in TOOL["steps_of"]([run, second])]
    assert hours == sorted(hours)
    assert hours[-1] == 2 * hours[7]


def test_what_is_no_such_run_is_refused(tmp_path: Path) -> None:
    file, folder = tmp_path / "training.json", tmp_path / "bundled"
    with pytest.raises(SystemExit, match=r"no .*training.json: the run has not ended"):
        TOOL["bundle"]([tmp_path], folder)
    for kind, base in (("dspark", "demo"), ("eagle", "SmolLM2-135M-Instruct.gguf")):
        file.write_text(json.dumps({"kind": kind, "base": base}))
        with pytest.raises(SystemExit, match=f"is a run of kind {kind} for {base}; it takes"):
            TOOL["bundle"]([tmp_path], folder)
    file.write_text(json.dumps({"kind": "dspark", "base": "SmolLM2-135M-Instruct.gguf"}))
    (tmp_path / "model.safetensors").write_bytes(bytes(12_000_001))
    with pytest.raises(SystemExit, match="has 12000001 bytes; at most 12000000"):
        TOOL["bundle"]([tmp_path], folder)
    assert not folder.exists()
