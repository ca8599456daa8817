"""The small draft model that the tests of this folder share."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.checkpoints import write_checkpoint

from edgespec.drafting.ranking import LearntSharpness


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two layers, 96 tokens and 48 positions."""
    return write_checkpoint(
        tmp_path_factory.mktemp("draft") / "m",
        num_hidden_layers=2,
        max_position_embeddings=48,
        tie_word_embeddings=True,
        initializer_range=0.15,
    )


@pytest.fixture
def usual_draft_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is learnt of draft_temperature: scores are those of guess_log_scores by default."""
    monkeypatch.setattr(LearntSharpness, "learn", lambda *arguments: None)
