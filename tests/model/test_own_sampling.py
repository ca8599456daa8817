"""The sampling that a model publishes: from its folder, from a GGUF file, or by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import write_checkpoint
from support.ggufs import all_as, tokenizer_values, write_gguf
from support.own_cache import own_cache

from edgespec.daemon.model_names import published_sampling
from edgespec.model.hub import local_folder
from edgespec.model.own_sampling import own_sampling
from edgespec.types.usual_sampling import NOTHING_SAID, UsualSampling

QWEN3 = {"do_sample": True, "eos_token_id": 1, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
GEMMA3 = {"cache_implementation": "hybrid", "do_sample": True, "top_k": 64, "top_p": 0.95}
"""As these models' generation_config.json have it."""


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (QWEN3, UsualSampling(0.6, 20, 0.95)),
        (GEMMA3, UsualSampling(1.0, 64, 0.95)),
        ({"temperature": 0.7, "repetition_penalty": 1.05}, UsualSampling(0.7, 0, 1.0, 0.0, 1.05)),
        ({"do_sample": False, "temperature": 0.6}, NOTHING_SAID),
        ({"do_sample": True}, UsualSampling(1.0)),
        ({"do_sample": True, "temperature": None, "min_p": 0.1}, UsualSampling(1.0, min_p=0.1)),
        ({"eos_token_id": [1, 2]}, UsualSampling(0.2, 0, 0.9)),  # what is published elsewhere
    ],
)
def test_a_folder_says_how_to_sample(
    tmp_path: Path, said: dict[str, Any], meant: UsualSampling
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    assert own_sampling(tmp_path, {"temperature": 0.2, "top_p": 0.9}) == meant


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": "hot"},
        {"temperature": 9.0},
        {"top_p": 0.0},
        {"top_k": 2.5},
        {"temperature": float("nan")},
        {"temperature": 0.5, "repetition_penalty": -1.0},
    ],
)
def test_what_cannot_be_used_is_left_out_with_a_warning(
    tmp_path: Path, wrong: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(wrong))
    assert own_sampling(tmp_path, {}) == NOTHING_SAID
    assert "generation_config.json is left out: " in caplog.text


def test_a_torn_file_is_no_reason_not_to_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.')
    assert own_sampling(tmp_path, {}) == NOTHING_SAID
    assert "generation_config.json is left out: " in caplog.text


def test_without_a_file_the_catalogue_counts(tmp_path: Path) -> None:
    smollm2 = published_sampling("/somewhere/SmolLM2-135M-Instruct.Q4_1.gguf")
    assert own_sampling(tmp_path, smollm2) == UsualSampling(0.2, 0, 0.9, 0.0, 1.1)
    assert own_sampling(tmp_path, published_sampling("/somewhere/mine.gguf")) == NOTHING_SAID


def test_a_gguf_file_says_it_in_keys_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_cache(tmp_path / "cache", monkeypatch)
    folder = write_checkpoint(tmp_path / "model", num_hidden_layers=1)
    file = tmp_path / "made.gguf"
    said = {"temp": float(np.float32(0.6)), "top_k": 20, "top_p": 0.95, "penalty_repeat": 1.05}
    keys = {f"general.sampling.{name}": value for name, value in said.items()}
    write_gguf(folder, file, all_as("F16"), tokenizer_values(tmp_path) | keys)
    made = local_folder(file)
    content = json.loads((made / "generation_config.json").read_text())
    assert content["temperature"] == 0.6, "as it was before the file held it in 32 bits"
    assert own_sampling(made, {}) == UsualSampling(0.6, 20, 0.95, 0.0, 1.05)


def test_the_settings_that_count_are_told_in_words() -> None:
    own = UsualSampling(0.6, 20, 0.95, 0.0, 1.05)
    words = "temperature 0.6, top k 20, top p 0.95, repetition penalty 1.05 of the model's own"
    assert own.own_words() == words
    assert own.own_words(("temperature", "top_k", "repetition_penalty")) == (
        "top p 0.95 of the model's own"
    )
    greedy = UsualSampling(0.0, 20, 0.95, 0.0, 1.05)
    assert greedy.own_words() == "repetition penalty 1.05 of the model's own"
    assert NOTHING_SAID.own_words() == ""
