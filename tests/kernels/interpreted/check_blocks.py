"""Whole blocks with the kernels for GPUs, interpreted: against float64, and in any batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.block_texts import PROMPT, Text
from support.checkpoints import write_family
from support.interpreted_gpu import as_on_a_gpu
from support.recorded_graphs import Recording

from edgespec.model.block import Block
from edgespec.model.quantised.kernels import relative_error
from edgespec.model.sources import open_source


class Repeats:
    """A GraphMaker that does work again, and refuses what no graph can hold."""

    captured = 0

    def warm(self, work: Callable[[], None]) -> None:
        work()

    def capture(self, work: Callable[[], None]) -> Repeats:
        self.captured += 1
        self._work = work
        return self

    def replay(self) -> None:
        with Recording():
            self._work()


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def check_rows_do_not_know_their_batch(tmp_path: Path, family: str) -> None:
    source = open_source(write_family(tmp_path / "m", family))
    expected = Text(Block(source, 0, 2, "float64"), (PROMPT,)).tree()
    maker = Repeats()
    with as_on_a_gpu():
        block = Block(source, 0, 2, "bfloat16")
        captured = Block(source, 0, 2, "bfloat16", graphs=lambda _: maker)
    whole = Text(block, (PROMPT,)).tree()
    assert relative_error(whole, expected) < 0.05
    assert torch.equal(Text(block, (3, PROMPT - 4, 1)).path([0, 1, 3]), whole[3])
    assert torch.equal(Text(block, (PROMPT - 1, 1)).path([4]), whole[4])
    static = Text(captured, (PROMPT - 6, 3, 3))
    assert static.block.static is not None
    assert static.block.static.works
    assert torch.equal(static.tree(), whole)
    assert maker.captured
