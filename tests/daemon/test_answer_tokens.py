"""What a coordinator's heads guess of many tokens: those that its answers had before."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgespec.config import Address, CoordinatorConfig
from edgespec.daemon.bundled_models import bundled
from edgespec.daemon.coordinator import Loaded
from edgespec.drafting import registry, vocabulary
from edgespec.drafting.registry import BaseParts

MANY = 2048


def loaded_with(draft: str, folder: Path, ends: ExitStack) -> Loaded:
    """What a coordinator in that folder starts with."""
    config = CoordinatorConfig(bundled("base"), draft, 1, "float32", Address("127.0.0.1", 0))
    home: Any = SimpleNamespace(config=config, cluster=SimpleNamespace(path=folder), ends=ends)
    return Loaded.load(home)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[BaseParts]:
    """What drafts are built of, over a vocabulary that is a large one."""
    monkeypatch.setattr(vocabulary, "DRAFT_VOCABULARY", 40)
    monkeypatch.setattr(vocabulary, "LAST", 8)
    told: list[BaseParts] = []
    monkeypatch.setattr(registry, "build_draft", lambda choice, base: told.append(base))
    return told


def test_a_start_takes_up_the_counts_of_the_run_before(
    tmp_path: Path, told: list[BaseParts]
) -> None:
    rare = np.arange(1000, 1032)
    for first in (range(32), rare.tolist()):
        with ExitStack() as ends:
            loaded = loaded_with("eagle:" + bundled("eagle"), tmp_path, ends)
            guessed = told.pop().guessed
            assert guessed is not None
            assert guessed.tolist() == [*first, *range(MANY - 8, MANY)]
            assert loaded.answers is not None
            loaded.answers.add(rare.tolist(), idle=True)


def test_nothing_is_counted_for_drafts_that_guess_all(
    tmp_path: Path, told: list[BaseParts]
) -> None:
    for draft in ("ngram", bundled("draft"), "hybrid:ngram+independent:" + bundled("draft")):
        with ExitStack() as ends:
            assert loaded_with(draft, tmp_path, ends).answers is None
    assert len(told) == 3
    assert not list(tmp_path.iterdir())
