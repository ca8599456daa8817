"""What a coordinator guesses of many tokens: those that its answers had before."""

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
from edgespec.drafting.steps import alone
from edgespec.types.features import NO_FEATURES
from edgespec.verify.sampling import Sampling

MANY = 2048


def test_a_start_takes_up_the_counts_of_the_run_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocabulary, "DRAFT_VOCABULARY", 40)
    monkeypatch.setattr(vocabulary, "LAST", 8)
    monkeypatch.setattr(registry, "ENOUGH", 32)
    rare = np.arange(1000, 1032)
    for begins in (True, False):
        with ExitStack() as ends:
            config = CoordinatorConfig(
                bundled("base"), bundled("draft"), 1, "float32", Address("127.0.0.1", 0)
            )
            home: Any = SimpleNamespace(
                config=config, cluster=SimpleNamespace(path=tmp_path), ends=ends
            )
            loaded = Loaded.load(home)
            assert loaded.draft is not None
            assert loaded.answers is not None
            loaded.draft.open(1, Sampling())
            asked = loaded.draft.expanding(1, [5, 6, 7], [()], MANY, NO_FEATURES)
            first = range(MANY) if begins else rare.tolist()
            assert set(alone(asked).tokens.tolist()) == {*first, *range(MANY - 8, MANY)}
            loaded.answers.add(rare.tolist(), idle=True)
