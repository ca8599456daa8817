"""Training of lenses: they learn what the base says, runs go on, and files are read."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from support.checkpoints import write_checkpoint, write_texts, write_tokenizer

from edgespec.drafting.lens import read_lenses
from edgespec.errors import ConfigError
from edgespec.model.loader import Checkpoint
from edgespec.training.hints import HintPlan, train_hints
from edgespec.training.loop import TrainingSettings


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> HintPlan:
    folder = tmp_path_factory.mktemp("hints")
    write_checkpoint(folder, num_hidden_layers=5, vocab_size=420, initializer_range=0.1)
    base, text = write_tokenizer(folder), write_texts(folder / "text.jsonl")
    out = folder / "out"
    out.mkdir()
    settings = TrainingSettings(60, 4, 1, 1e-2, False)
    return HintPlan(base, text, out, settings, 64, 60, 8, 16)


def test_they_learn_and_are_read(plan: HintPlan) -> None:
    said: list[str] = []
    figures = train_hints(plan, said.append, torch.float32)
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in said if "loss" in line]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert list(figures["agreement_by_layer"]) == ["3", "4"]
    assert json.loads((plan.out / "training.json").read_text()) == figures
    source = Checkpoint(plan.base)
    lenses = read_lenses(plan.out, source.layers, source.config)
    assert lenses.layers == (3, 4)
    assert lenses.downs.shape == (2, 16, 32)
    again: list[str] = []
    train_hints(plan, again.append, torch.float32)
    assert any(line.startswith("going on behind step") for line in again)


def test_a_rank_that_is_none_is_refused(plan: HintPlan) -> None:
    for rank in (0, 65):
        with pytest.raises(ConfigError, match=f"rank {rank}"):
            train_hints(replace(plan, rank=rank), lambda text: None, torch.float32)
