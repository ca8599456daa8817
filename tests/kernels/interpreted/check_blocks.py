"""Whole blocks with the kernels for GPUs, interpreted: against float64, and in any batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.block_texts import PROMPT, Text
from support.checkpoints import write_family
from support.interpreted_gpu import as_on_a_gpu

from edgespec.model.block import Block
from edgespec.model.quantised.kernels import relative_error
from edgespec.model.sources import open_source


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of a gate, whose tanh is 1 then
@pytest.mark.parametrize(
    ("family", "end"),
    [
        *(("llama", 2), ("gemma2", 2), ("qwen3", 2), ("gemma4_text-shared", 5)),
        *(("lfm2", 2), ("granitemoehybrid-mamba", 2), ("qwen3_5_text", 1)),
    ],
)
def check_rows_do_not_know_their_batch(tmp_path: Path, family: str, end: int) -> None:
    source = open_source(write_family(tmp_path / "m", family))
    expected = Text(Block(source, 0, end, "float64"), (PROMPT,)).tree()
    with as_on_a_gpu():
        block = Block(source, 0, end, "bfloat16")
    whole = Text(block, (PROMPT,)).tree()
    assert relative_error(whole, expected) < 0.05
    assert torch.equal(Text(block, (3, PROMPT - 4, 1)).path([0, 1, 3]), whole[3])
    assert torch.equal(Text(block, (PROMPT - 1, 1)).path([4]), whole[4])
