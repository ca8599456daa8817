"""Blocks against transformers' own model: every row must be what its path alone would give.

Everything runs in float64, yet the bound is 1e-5 and not 1e-13: transformers computes RMSNorm's
mean and scaling and the rotary angles in float32 whatever the model's dtype. Batches of another
shape differ in float64's last bits; the cast to float32 hides that nearly always (most differences
here are exactly 0), but a value on a rounding border jumps by 6e-8 of itself, and the layers behind
amplify the jump. A wrong mask, position or slot changes hidden values by more than 1e-3 (see
`test_the_tolerance_would_notice_a_wrong_mask`).
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import plain_hidden, plain_logits, reference, write_checkpoint
from support.pipelines import CUTS, TOLERANCE, Grower, Pipeline, difference, random_tokens
from support.tiers import examples

from edgespec.errors import CapacityError
from edgespec.model.block import Block
from edgespec.model.ends import OutputHead
from edgespec.model.inventory import block_parts
from edgespec.model.loader import Checkpoint
from edgespec.model.tree_attention import tree_mask
from edgespec.tree.ledger import Rows


@pytest.fixture(scope="module", params=sorted(CUTS))
def pipeline(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    torch.set_num_threads(1)
    stages: int = request.param
    # Tied and untied, one file and several, in turn.
    folder = write_checkpoint(
        tmp_path_factory.mktemp("model") / "m",
        tie_word_embeddings=stages % 2 == 0,
        shard_size=12_000 if stages > 2 else None,
    )
    return Pipeline(folder, CUTS[stages])


@pytest.mark.parametrize("chunks", [[30], [1] * 6, [7, 1, 20, 2], [16, 16]])
def test_prefill_in_chunks_is_one_plain_run(pipeline: Pipeline, chunks: list[int]) -> None:
    pipeline.reset()
    tokens = random_tokens(1, sum(chunks))
    parts, start = [], 0
    for size in chunks:
        parts.append(pipeline.prefill(tokens[start : start + size]))
        start += size
    assert difference(torch.cat(parts), plain_hidden(pipeline.model, tokens)) < TOLERANCE


def test_the_head_gives_the_models_logits(pipeline: Pipeline) -> None:
    pipeline.reset()
    tokens = random_tokens(2, 12)
    hidden = pipeline.prefill(tokens)
    checkpoint = Checkpoint(Path(pipeline.model.config._name_or_path))
    logits = OutputHead(checkpoint, "float64").logits(hidden[-1:])
    assert logits.dtype == torch.float64
    exact = plain_logits(pipeline.model, tokens)
    assert difference(logits[0], exact) < 20 * TOLERANCE


@pytest.mark.parametrize("size", [1, 2, 16])
def test_a_row_of_a_random_tree_is_what_its_path_gives(pipeline: Pipeline, size: int) -> None:
    grower = Grower(pipeline, seed=size)
    assert max(grower.grow(size) for _ in range(16 // size + 2)) < TOLERANCE


@given(seed=st.integers(0, 2**32 - 1), steps=st.lists(st.integers(-4, 6), min_size=3, max_size=9))
@examples(30)
def test_pruning_early_or_late_changes_no_row(
    pipeline: Pipeline, seed: int, steps: list[int]
) -> None:
    grower = Grower(pipeline, seed)
    for size in steps:
        found = grower.grow(size) if size > 0 else grower.prune(late=-size)
        assert found < TOLERANCE
    grower.prune()
    assert grower.grow(3) < TOLERANCE


def test_the_tolerance_would_notice_a_wrong_mask(pipeline: Pipeline) -> None:
    pipeline.reset()
    tokens = random_tokens(5, 9)
    pipeline.prefill(tokens[:-1])
    ledger = pipeline.stages[0].ledger
    rows = Rows(
        pipeline.take_ids(1),
        np.array([ledger.last_committed]),
        np.array(tokens[-1:]),
        np.array([8]),
    )
    flow = torch.tensor(tokens[-1:])
    for stage in pipeline.stages:
        stage.ledger.append(rows)
        mask = tree_mask(8, np.ones((1, 1), np.bool_))
        mask[..., 3] = False  # one slot too few
        hidden = stage.block.forward(flow, torch.tensor([8]), stage.cache, mask)
        assert hidden is not None
        flow = hidden
    assert difference(flow[-1], plain_hidden(pipeline.model, tokens)[-1]) > 1e-3


def test_a_stopped_segment_leaves_slots_that_a_retain_drops(pipeline: Pipeline) -> None:
    grower = Grower(pipeline, seed=3)
    grower.grow(4)
    stage = pipeline.stages[-1]
    if stage.block.first == 0:
        inputs = torch.tensor([1, 2])
    else:
        inputs = torch.zeros(2, 32, dtype=torch.float64)
    positions = torch.full((2,), len(grower.committed))
    layers = stage.block.end - stage.block.first
    for allowed in range(layers):
        length = stage.cache.length
        seen = tree_mask(length, np.eye(2, dtype=np.bool_))
        answers = iter([False] * allowed + [True])
        hidden = stage.block.forward(inputs, positions, stage.cache, seen, answers.__next__)
        assert hidden is None
        assert list(answers) == []  # asked before each layer, and no further
        assert stage.cache.length == length + 2
        stage.cache.gather(length, np.zeros(0, np.int64))
    never = stage.block.forward(inputs, positions, stage.cache, seen, lambda: False)
    assert never is not None
    stage.cache.gather(stage.cache.length - 2, np.zeros(0, np.int64))
    grower.prune()
    assert grower.grow(4) < TOLERANCE


def test_rows_behind_garbage_are_untouched_by_it(pipeline: Pipeline) -> None:
    """A stopped segment's slots stay until the next retained set; nobody sees them."""
    grower = Grower(pipeline, seed=8)
    rows = Rows(
        pipeline.take_ids(2),
        np.array([grower.root] * 2),
        np.array([5, 6]),
        np.array([len(grower.committed)] * 2),
    )
    for stage in pipeline.stages:
        stage.ledger.append(rows)
        stage.cache.advance(2)
    assert grower.grow(5) < TOLERANCE


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("mistral", {}),
        ("qwen2", {}),
        ("llama", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 5e5,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
        ),
    ],
    ids=["mistral", "qwen2", "llama-biases", "llama3-rope"],
)
def test_other_members_of_the_family(tmp_path: Path, kind: str, extra: dict[str, Any]) -> None:
    folder = write_checkpoint(tmp_path / "m", kind=kind, **extra)
    grower = Grower(Pipeline(folder, [0, 2, 4]), seed=4)
    assert grower.grow(10) < TOLERANCE
    grower.prune()
    assert grower.grow(6) < TOLERANCE


@pytest.mark.parametrize(("name", "bound"), [("float32", 1e-3), ("bfloat16", 0.5)])
def test_smaller_dtypes_stay_close(tmp_path: Path, name: str, bound: float) -> None:
    folder = write_checkpoint(tmp_path / "m", initializer_range=0.1)
    model, block = reference(folder), Block(Checkpoint(folder), 0, 4, name)
    tokens = random_tokens(9, 20)
    hidden = block.forward(
        torch.tensor(tokens),
        torch.arange(20),
        block.new_cache(20),
        tree_mask(0, np.tri(20, dtype=np.bool_)),
    )
    assert hidden is not None
    assert hidden.dtype == getattr(torch, name)
    assert difference(hidden.double(), plain_hidden(model, tokens)) < bound


def test_a_block_tells_its_bytes_before_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that what has no memory for it refuses it in time."""
    source = Checkpoint(write_checkpoint(tmp_path / "m"))
    read: list[str] = []
    tensor = source.tensor
    monkeypatch.setattr(source, "tensor", lambda name: read.append(name) or tensor(name))

    def admit(needed: int) -> None:
        told.append(needed)
        assert not read
        if len(told) == 1:
            raise CapacityError("no room")

    told: list[int] = []
    with pytest.raises(CapacityError, match="no room"):
        Block(source, 0, 2, "bfloat16", admit=admit)
    assert not read
    block = Block(source, 0, 2, "bfloat16", admit=admit)
    assert block.embedding is not None
    assert len(read) > 2
    assert told == [block_parts(source, 0, 2).held_bytes(torch.bfloat16)] * 2
    assert told[0] > block.embedding.numel() * 2
