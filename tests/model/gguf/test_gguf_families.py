"""GGUF files of every architecture and type against transformers' models of the same numbers."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from support.cases import case
from support.checkpoints import plain_hidden, plain_logits, reference
from support.ggufs import all_as, write_gguf_family
from support.own_cache import own_cache
from support.pipelines import CUTS, TOLERANCE, Pipeline, difference, random_tokens
from support.tiers import tiered

from edgespec.config import FILE
from edgespec.model.ends import OutputHead
from edgespec.model.loader import Checkpoint
from edgespec.model.quantised.linear import dequantised
from edgespec.model.sources import open_source

TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]
K_TYPES = ["Q4_K", "Q5_K", "Q6_K"]
FAMILIES = ["llama", "llama-rope", "llama-biases", "mistral", "qwen2", "qwen3", "qwen3_moe"]
FAMILIES += ["granite", "smollm3", "phi3", "gemma2", "gemma3_text"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_cache(tmp_path / "cache", monkeypatch)


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
    assert difference(logits[0], exact) < 20 * TOLERANCE


@pytest.mark.parametrize("name", tiered(FAMILIES, ["llama-biases", "qwen3_moe", "gemma3_text"]))
def test_every_architecture(tmp_path: Path, name: str) -> None:
    assert_same(*write_gguf_family(tmp_path, name, all_as("Q8_0")))


@pytest.mark.parametrize("kind", tiered([*TYPES, "mixed"], ["mixed"]))
def test_every_type(tmp_path: Path, kind: str) -> None:
    def mixed(name: str, shape: tuple[int, ...]) -> str:
        return TYPES[len(name) * 7 % len(TYPES)] if len(shape) > 1 else "F32"

    assert_same(*write_gguf_family(tmp_path, "llama", mixed if kind == "mixed" else all_as(kind)))


def test_codes_are_copied(tmp_path: Path) -> None:
    """A file of all packed types: dequantised as gguf does it, and the same values by its codes."""
    types = [kind for kind in TYPES if kind.startswith("Q")] + K_TYPES
    chosen = itertools.cycle(types)
    sizes = {"hidden_size": 256, "intermediate_size": 256}
    file, twin = write_gguf_family(
        tmp_path, "llama", lambda name, shape: next(chosen) if len(shape) > 1 else "F32", **sizes
    )
    assert_same(file, twin)
    source, values = open_source(file, FILE), Checkpoint(twin)
    matrices = sorted(name for name in source.names if "proj" in name)
    seen = set()
    for name in matrices:
        with case(name):
            form, exact = source.form(name), values.tensor(name)
            seen.add(form)
            got = dequantised(source.packed(name, exact.shape), exact.shape, form, torch.float64)
            # gguf itself rounds to float32 at every step.
            assert torch.allclose(got, exact.double(), rtol=1e-6, atol=1e-8)
    assert len(seen) == len(types) - 1  # Q8_0 and Q5_0 are of one form
    pipeline = Pipeline(file, CUTS[2], model=reference(twin), source=source)
    rows = pipeline.prefill(random_tokens(1, 9))
    theirs = plain_hidden(pipeline.model, random_tokens(1, 9))
    assert difference(rows, theirs) < TOLERANCE
