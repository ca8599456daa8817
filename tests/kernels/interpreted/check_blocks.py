"""Whole blocks with the kernels for GPUs, interpreted: against float64, and in any batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpoints import write_family
from support.recorded_graphs import Recording

from edgespec.kernels.gpu import products
from edgespec.model import block as blocks
from edgespec.model import matrices
from edgespec.model.block import Block
from edgespec.model.quantised.kernels import relative_error
from edgespec.model.sources import open_source
from edgespec.model.tree_attention import tree_mask
from edgespec.model.triton_rows import TritonRows

PROMPT = 12
TREE = np.array(
    [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [0, 0, 0, 0, 1]], np.bool_
)


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


class Text:
    """A prompt and a tree behind it, through one block; rows of the prompt in chunks."""

    def __init__(self, block: Block, chunks: tuple[int, ...]) -> None:
        self.block, self.cache = block, block.new_cache(16)
        self.tokens = torch.arange(PROMPT + len(TREE)) * 7 % block.vocab_size
        for count in chunks:
            first = self.cache.length
            self.run(np.tri(count, dtype=np.bool_), list(range(first, first + count)), first)

    def run(self, sees: np.ndarray, rows: list[int], first: int) -> torch.Tensor:
        """Rows of the text, each after the `first` ones and what `sees` says."""
        positions = first + torch.from_numpy(sees.sum(1) - 1)
        mask = tree_mask(first, sees)
        out = self.block.forward(self.tokens[rows], positions, self.cache, mask)
        assert out is not None
        return out

    def tree(self) -> torch.Tensor:
        return self.run(TREE, list(range(PROMPT, PROMPT + len(TREE))), PROMPT)

    def path(self, nodes: list[int]) -> torch.Tensor:
        """The last row of a path of the tree, its rows one by one."""
        for number, node in enumerate(nodes):
            seen = np.ones((1, number + 1), np.bool_)
            row = self.run(seen, [PROMPT + node], PROMPT)
        return row[0]


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def check_rows_do_not_know_their_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    source = open_source(write_family(tmp_path / "m", family))
    expected = Text(Block(source, 0, 2, "float64"), (PROMPT,)).tree()
    monkeypatch.setattr(blocks, "row_math", lambda *_: TritonRows())
    monkeypatch.setattr(
        matrices,
        "plain_product",
        lambda weight, bias=None: lambda rows: products.plain_product(rows, weight, bias),
    )
    block = Block(source, 0, 2, "bfloat16")
    whole = Text(block, (PROMPT,)).tree()
    assert relative_error(whole, expected) < 0.05
    assert torch.equal(Text(block, (3, PROMPT - 4, 1)).path([0, 1, 3]), whole[3])
    assert torch.equal(Text(block, (PROMPT - 1, 1)).path([4]), whole[4])
    maker = Repeats()
    static = Text(Block(source, 0, 2, "bfloat16", graphs=lambda _: maker), (PROMPT - 6, 3, 3))
    assert static.block.static is not None
    assert static.block.static.works
    assert torch.equal(static.tree(), whole)
    assert maker.captured
