"""GGUF files of every architecture and type against transformers' models of the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.cases import case
from support.checkpoints import plain_hidden, plain_logits, reference
from support.ggufs import all_as, write_gguf_family
from support.pipelines import CUTS, TOLERANCE, Pipeline, difference, random_tokens
from support.tiers import tiered

from edgespec.model.ends import OutputHead
from edgespec.model.loader import Checkpoint
from edgespec.model.sources import open_source

TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]
K_TYPES = ["Q4_K", "Q5_K", "Q6_K"]
FAMILIES = ["llama", "llama-rope", "llama-biases", "mistral", "qwen2", "qwen3", "qwen3_moe"]
FAMILIES += ["phi3", "gemma2", "gemma3_text"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def assert_same(file: Path, twin: Path) -> None:
    """The same tensors bit by bit, and rows and logits as transformers computes them."""
    ours, theirs = open_source(file), Checkpoint(twin)
    assert ours.names == theirs.names
    shifted = {name for name in ours.names if "norm" in name and "gemma" in file.name}
    for name in sorted(ours.names):
        with case(name):
            got, meant = ours.tensor(name).float(), theirs.tensor(name)
            assert got.shape == meant.shape
            assert torch.equal(got, (meant + 1) - 1 if name in shifted else meant)
    model = reference(twin)
    pipeline = Pipeline(file, CUTS[2], model=model)
    tokens = random_tokens(3, 14)
    rows = pipeline.prefill(tokens)
    assert difference(rows, plain_hidden(model, tokens)) < TOLERANCE
    logits = OutputHead(ours, "float64").logits(rows[-1:])
    exact = plain_logits(model, tokens)
    assert difference(torch.from_numpy(logits)[0], exact) < 20 * TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_every_architecture(tmp_path: Path, name: str) -> None:
    assert_same(*write_gguf_family(tmp_path, name, all_as("Q8_0")))


@pytest.mark.parametrize("kind", tiered([*TYPES, "mixed"], ["mixed"]))
def test_every_type(tmp_path: Path, kind: str) -> None:
    def mixed(name: str, shape: tuple[int, ...]) -> str:
        return TYPES[len(name) * 7 % len(TYPES)] if len(shape) > 1 else "F32"

    assert_same(*write_gguf_family(tmp_path, "llama", mixed if kind == "mixed" else all_as(kind)))


def test_the_k_types(tmp_path: Path) -> None:
    def mixed(name: str, shape: tuple[int, ...]) -> str:
        return K_TYPES[sum(map(ord, name)) % 3] if len(shape) > 1 else "F32"

    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4}
    assert_same(*write_gguf_family(tmp_path, "llama", mixed, **sizes))
