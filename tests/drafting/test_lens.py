"""Lenses: what is written is read, what does not fit is refused, and blocks read rows by them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpoints import write_checkpoint

from edgespec.backends.torch_backend import HINTED, TorchBlock
from edgespec.drafting.lens import FILE, first_lens, read_lenses, write_lenses
from edgespec.errors import EdgespecError, ModelError, RemoteProtocolError
from edgespec.model.block import Block
from edgespec.model.loader import Checkpoint
from edgespec.model.tensors import from_torch
from edgespec.wire.hints import Lenses

WIDTH, TOKENS, LAYERS, RANK = 32, 50, 5, 3


@pytest.fixture
def base(tmp_path: Path) -> Checkpoint:
    return Checkpoint(write_checkpoint(tmp_path / "m", num_hidden_layers=LAYERS, vocab_size=TOKENS))


def written(folder: Path, **changes: torch.Tensor) -> Path:
    """A file for that base, but for what is to be otherwise."""
    torch.manual_seed(3)
    folder.mkdir(exist_ok=True)
    up = changes.get("up", torch.randn(TOKENS, RANK))
    bias = changes.get("bias", torch.randn(TOKENS))
    down = changes.get("down", torch.randn(RANK, WIDTH))
    write_lenses(folder, up, bias, {3: down, 4: down + 1})
    return folder


def read(folder: Path, base: Checkpoint) -> Lenses:
    return read_lenses(folder, base.layers, base.config)


def test_rows_are_read_after_three_fifths_of_the_way() -> None:
    assert [first_lens(layers) for layers in (1, 5, 8, 30, 40)] == [1, 3, 5, 18, 24]


def test_a_block_reads_its_rows_with_the_lens_of_its_end(base: Checkpoint, tmp_path: Path) -> None:
    lenses = read(written(tmp_path / "hints"), base)
    assert lenses.layers == (3, 4)
    block = TorchBlock(Block(base, 1, 4))
    rows = torch.randn(6, WIDTH)
    with pytest.raises(RemoteProtocolError, match="no lens"):
        block.expect(from_torch(rows))
    block.take_lenses(lenses)
    tokens, log_probs = block.expect(from_torch(rows))
    assert tokens.shape == log_probs.shape == (6, HINTED)
    torch.manual_seed(3)
    up, bias, down = torch.randn(TOKENS, RANK), torch.randn(TOKENS), torch.randn(RANK, WIDTH) + 1
    exact = rows.double() / rows.double().square().mean(-1, keepdim=True).add(1e-6).sqrt()
    wanted = (exact @ down.double().T @ up.double().T + bias).log_softmax(-1)
    best = wanted.topk(HINTED)
    assert (torch.from_numpy(log_probs) - best.values).abs().max() < 0.05, "float16 is rounded"
    assert (tokens[:, 0] == best.indices[:, 0].numpy()).all()
    assert (np.diff(log_probs) <= 0).all()
    with pytest.raises(RemoteProtocolError, match="no lens for such rows"):
        block.expect(from_torch(torch.randn(2, WIDTH + 1)))


def test_a_block_that_ends_elsewhere_has_no_lens(base: Checkpoint, tmp_path: Path) -> None:
    block = TorchBlock(Block(base, 0, 2))
    block.take_lenses(read(written(tmp_path / "hints"), base))
    with pytest.raises(RemoteProtocolError, match="no lens"):
        block.expect(from_torch(torch.randn(2, WIDTH)))


def test_lenses_of_another_model_are_refused_by_the_stage(base: Checkpoint, tmp_path: Path) -> None:
    other = Checkpoint(write_checkpoint(tmp_path / "o", num_hidden_layers=LAYERS, vocab_size=60))
    block = TorchBlock(Block(other, 1, 4))
    with pytest.raises(RemoteProtocolError, match=f"{TOKENS} tokens; this model has"):
        block.take_lenses(read(written(tmp_path / "hints"), base))


@pytest.mark.parametrize(
    "changes",
    [
        {"up": torch.zeros(TOKENS + 1, RANK), "bias": torch.zeros(TOKENS + 1)},
        {"bias": torch.zeros(TOKENS - 1)},
        {"down": torch.zeros(RANK, WIDTH + 1)},
        {"up": torch.zeros(TOKENS, RANK + 1)},
        {"up": torch.zeros(TOKENS, 65), "down": torch.zeros(65, WIDTH)},
        {"up": torch.full((TOKENS, RANK), torch.nan)},
        {"down": torch.full((RANK, WIDTH), 1e9)},
    ],
)
def test_what_does_not_fit_the_base_is_refused(
    base: Checkpoint, tmp_path: Path, changes: dict[str, torch.Tensor]
) -> None:
    folder = written(tmp_path / "hints", **changes)
    with pytest.raises(ModelError, match="use those that `edgespec train hints` made"):
        read(folder, base)


def test_a_folder_without_the_file_is_refused(base: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(EdgespecError, match=FILE):
        read(tmp_path, base)
