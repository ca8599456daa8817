"""What several tests of training share."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.checkpoints import write_texts


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of documents, which no test changes."""
    return write_texts(tmp_path_factory.mktemp("text") / "text.jsonl")
