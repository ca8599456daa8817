"""One-pass heads: what they compute, packed as in training, against their arithmetic row by row."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.checkpoints import write_checkpoint
from support.dspark_heads import (
    FORMS,
    HIDDEN,
    LAYERS,
    TAPS,
    VOCAB,
    Reference,
    masked,
    write_dspark,
)

from edgespec.drafting.dspark.format import read_head, write_head
from edgespec.drafting.dspark.head import BlockPlaces, DSparkHead, packed_masks, rows_of
from edgespec.drafting.dspark.shape import DSparkShape

TEXT = [5, 9, 90, 33, 7, 61, 2, 40, 11, 12, 80, 3]
ANCHORS = [0, 4, 9]
REVEALED = [0, 2, 1]
"""Tokens of the text that stand in each anchor's block behind it."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("base"), seed=3, num_hidden_layers=LAYERS)


def loaded(folder: Path) -> tuple[DSparkHead, DSparkShape, torch.Tensor | None]:
    files = read_head(folder, HIDDEN, VOCAB, LAYERS)
    head = DSparkHead(files.shape)
    head.load_state_dict(files.weights)
    return head.double(), files.shape, files.tokens


@pytest.mark.parametrize("name", FORMS)
def test_packed_blocks_give_what_each_gives_alone(name: str, base: Path, tmp_path: Path) -> None:
    form = FORMS[name]
    tensors = write_dspark(tmp_path, form)
    head, shape, tokens = loaded(tmp_path)
    assert (shape.offset, shape.causal) == (form.offset, form.causal)
    reference = Reference(form, tensors, base)
    given = torch.randn((len(TEXT), len(TAPS) * HIDDEN), generator=torch.Generator().manual_seed(1))
    given = given.double()
    embedded = reference.mask.repeat(len(ANCHORS), form.block, 1)
    for number, (anchor, more) in enumerate(zip(ANCHORS, REVEALED, strict=True)):
        embedded[number, : 1 + more] = reference.embedding[TEXT[anchor : anchor + 1 + more]]
    slots = torch.tensor(ANCHORS)[:, None] + torch.arange(form.block)
    places = BlockPlaces(torch.arange(len(TEXT))[None], slots.reshape(1, -1))
    # A batch of two, the second without the first one's last row: rows do not mix.
    context = head.context(torch.stack([given, given.flip(0)]))
    block = embedded.reshape(1, -1, HIDDEN).expand(2, -1, -1)
    found = head(context, block, places, masked(packed_masks(shape, places)))
    out = found[0].unflatten(0, (len(ANCHORS), form.block))
    assert not torch.allclose(found[0], found[1])
    for number, (anchor, more) in enumerate(zip(ANCHORS, REVEALED, strict=True)):
        wanted = reference.block(given[:anchor], TEXT[anchor : anchor + 1 + more])
        torch.testing.assert_close(out[number], torch.stack(wanted), rtol=0, atol=1e-9)
        before = torch.tensor([TEXT[anchor]])
        rows = rows_of(before, shape, tokens)
        logits = out[number, shape.slot_of(0)] @ reference.matrix.T
        if shape.markov_rank:
            logits = logits + head.markov(rows)[0]
        expected = reference.log_probs(wanted, TEXT[: anchor + 1], [])
        torch.testing.assert_close(logits.log_softmax(0), expected, rtol=0, atol=1e-9)


def test_every_parameter_gets_a_gradient(tmp_path: Path) -> None:
    write_dspark(tmp_path, FORMS["own"])
    head, shape, tokens = loaded(tmp_path)
    slots = (torch.tensor([[2], [7]]) + torch.arange(shape.block)).reshape(1, -1)
    places = BlockPlaces(torch.arange(12)[None], slots)
    block = torch.randn(1, 2 * shape.block, HIDDEN, dtype=torch.float64)
    assert head.mask_embedding is not None
    block[:, 1 :: shape.block] = head.mask_embedding
    context = head.context(torch.randn(1, 12, len(TAPS) * HIDDEN, dtype=torch.float64))
    out = head(context, block, places, masked(packed_masks(shape, places)))
    rows = rows_of(torch.arange(2 * shape.block)[None] + 30, shape, tokens)
    assert int(rows.min()) == -1 < int(rows.max()), "some are known, and some are not"
    (out.sum() + head.markov(rows).square().sum()).backward()
    assert all(w.grad is not None and bool(w.grad.any()) for w in head.parameters())


@pytest.mark.parametrize("name", ["deepspec", "own", "z-lab-window"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_head_that_was_written_is_read_again(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    write_dspark(tmp_path, FORMS[name])
    files = read_head(tmp_path, HIDDEN, VOCAB, LAYERS)
    ends = {"embed_tokens.weight": files.embedding, "lm_head.weight": files.matrix}
    tensors = files.weights | {name: end for name, end in ends.items() if end is not None}
    again = tmp_path / "again"
    again.mkdir()
    write_head(again, files.shape, tensors, files.tokens, VOCAB, LAYERS, 4096, dtype)
    read = read_head(again, HIDDEN, VOCAB, LAYERS)
    assert read.shape == files.shape
    for name, weight in files.weights.items():
        torch.testing.assert_close(read.weights[name], weight.to(dtype), rtol=0, atol=0)
    for mine, old in ((read.embedding, files.embedding), (read.matrix, files.matrix)):
        assert (mine is None) == (old is None)
    assert (read.tokens is None) == (files.tokens is None)
    assert read.tokens is None or torch.equal(read.tokens, files.tokens)
