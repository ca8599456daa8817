"""The output head in few bits: it is its dequantised matrix, and stays mapped where its file is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from support.checkpoints import write_checkpoint
from support.packed_forms import MixedSource
from torch.nn.functional import linear

from edgespec.config import FILE, QUANTISATIONS
from edgespec.errors import ModelError
from edgespec.model.block import Block
from edgespec.model.block_file import BlockFile, write_head
from edgespec.model.ends import InputEmbedding, OutputHead
from edgespec.model.loader import Checkpoint
from edgespec.model.quantised.linear import dequantised, pack
from edgespec.model.source import EMBEDDING, LM_HEAD
from edgespec.model.sources import QuantisingSource

SHAPE = {"hidden_size": 64, "vocab_size": 211}
FEW = [name for name in QUANTISATIONS if name not in ("none", "int4-g128")]
"""What 64 columns can be rounded to."""


@pytest.fixture(params=[False, True], ids=["lm_head", "tied"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Checkpoint:
    return Checkpoint(write_checkpoint(tmp_path / "m", tie_word_embeddings=request.param, **SHAPE))


def rows_of(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(count)).to(dtype)


def matrix(model: Checkpoint) -> torch.Tensor:
    return model.tensor(EMBEDDING if model.config.tie_word_embeddings else LM_HEAD)


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("bfloat16", 0.02)])
def test_logits_are_those_of_the_dequantised_matrix(
    model: Checkpoint, name: str, dtype: str, tolerance: float
) -> None:
    form = QUANTISATIONS[name]
    head = OutputHead(QuantisingSource(model, form), dtype)
    assert head.weight is None
    plain = matrix(model)
    weight = dequantised(pack(plain, form), plain.shape, form, torch.float64)
    assert not torch.equal(weight, plain.double())
    for count in (1, 16, 64):
        rows = rows_of(count, head.dtype)
        logits = head.logits(rows)
        assert logits.dtype == (torch.float64 if dtype == "float64" else torch.float32)
        expected = linear(rows.double(), weight)
        assert (logits.double() - expected).abs().max() <= tolerance * expected.abs().max()


def test_codes_of_a_file_are_not_rounded_again(model: Checkpoint) -> None:
    source = MixedSource(model)
    name = EMBEDDING if model.config.tie_word_embeddings else LM_HEAD
    assert source.form(name).kind != "none"
    logits = OutputHead(source, "float64").logits(rows_of(5, torch.float64))
    expected = linear(rows_of(5, torch.float64), source.weight(name).double())
    assert (logits - expected).abs().max() < 1e-12 * expected.abs().max()


@pytest.mark.parametrize("name", ["none", "int8", "int4"])
def test_a_head_file_says_its_form_and_stays_mapped(
    model: Checkpoint, name: str, tmp_path: Path
) -> None:
    """Also one of the time before heads had forms, which is plain and says nothing."""
    source = QuantisingSource(model, QUANTISATIONS[name]) if name != "none" else model
    write_head(source, tmp_path / "head")
    opened = BlockFile(tmp_path / "head", model.config, FILE)
    tied = EMBEDDING if model.config.tie_word_embeddings else LM_HEAD
    assert opened.form(tied) == QUANTISATIONS[name]
    assert opened.names == {tied}
    rows = rows_of(3, torch.float32)
    mapped, made = OutputHead(opened), OutputHead(source)
    assert torch.equal(mapped.logits(rows), made.logits(rows))
    with safe_open(tmp_path / "head", "pt") as file:
        parts = {key for key in file.keys() if key.startswith(tied)}  # noqa: SIM118
    wanted = {"none": {""}, "int8": {".codes", ".scales"}, "int4": {".tiles", ".scales"}}[name]
    assert parts == {tied + part for part in wanted}


def test_a_tied_embedding_stays_plain_beside_a_packed_head(tmp_path: Path) -> None:
    model = Checkpoint(write_checkpoint(tmp_path / "m", tie_word_embeddings=True, **SHAPE))
    block = Block(model, 0, model.layers)
    plain, packed = (
        OutputHead(source, share=block)
        for source in (model, QuantisingSource(model, QUANTISATIONS["int8"]))
    )
    assert plain.weight is block.embedding
    tokens = torch.tensor([3, 200, 3])
    own = [InputEmbedding(model, share=head).rows(tokens) for head in (plain, packed)]
    assert torch.equal(own[0], own[1])
    assert torch.equal(own[0], block.embedded(tokens))


def test_a_head_that_cannot_be_held_so(tmp_path: Path) -> None:
    model = Checkpoint(write_checkpoint(tmp_path / "m", **SHAPE))
    with pytest.raises(ModelError, match=r"cannot hold .* as int4-g128: .*64 columns"):
        OutputHead(QuantisingSource(model, QUANTISATIONS["int4-g128"]))
