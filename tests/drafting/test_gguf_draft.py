"""A draft model that is a GGUF file, for a base that is one: it guesses as its values would."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.checkpoints import write_checkpoint
from support.ggufs import all_as, tokenizer_values, write_gguf
from support.own_cache import own_cache

from edgespec.config import FILE
from edgespec.drafting.choice import parse_draft
from edgespec.drafting.registry import BaseParts, build_draft
from edgespec.errors import ModelError
from edgespec.model.ends import OutputHead
from edgespec.model.hub import local_folder
from edgespec.model.sources import open_source


def test_a_gguf_file_drafts_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_cache(tmp_path / "cache", monkeypatch)
    original = write_checkpoint(tmp_path / "original", vocab_size=400, intermediate_size=64)
    values = tokenizer_values(tmp_path)
    other = dict(values, **{"tokenizer.ggml.pre": "smollm"})
    base, draft, stranger = (tmp_path / f"{name}.gguf" for name in ("base", "draft", "stranger"))
    for file, keys in ((base, values), (draft, values), (stranger, other)):
        write_gguf(original, file, all_as("Q8_0"), keys)
    source = open_source(base)
    parts = BaseParts(
        local_folder(base), source, OutputHead(source, "float64"), "float64", "cpu", FILE
    )
    assert build_draft(parse_draft(f"independent:{draft}"), parts) is not None
    with pytest.raises(ModelError, match="their pre_tokenizer differs"):
        build_draft(parse_draft(f"independent:{stranger}"), parts)
