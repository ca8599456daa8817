"""A prompt and a tree behind it through one block, in any batches."""

from __future__ import annotations

import numpy as np
import torch

from edgespec.model.block import Block
from edgespec.model.joint import CachedPart
from edgespec.model.kv_cache import TwoRegionCache
from edgespec.model.tree_attention import tree_mask

PROMPT = 12
TREE = np.array(
    [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [0, 0, 0, 0, 1]], np.bool_
)


class Text:
    """A prompt and a tree behind it, through one block; rows of the prompt in chunks."""

    def __init__(self, block: Block, chunks: tuple[int, ...]) -> None:
        self.block, self.cache = block, block.new_cache(16)
        self.prompt = sum(chunks)
        self.tokens = torch.arange(self.prompt + len(TREE)) * 7 % block.vocab_size
        for count in chunks:
            first = self.cache.length
            self.run(np.tri(count, dtype=np.bool_), list(range(first, first + count)), first)

    def run(self, sees: np.ndarray, rows: list[int], first: int) -> torch.Tensor:
        """Rows of the text, each after the `first` ones and what `sees` says."""
        out = self.block.forward(*self.of(sees, rows, first))
        assert out is not None
        return out

    def of(
        self, sees: np.ndarray, rows: list[int], first: int
    ) -> tuple[torch.Tensor, torch.Tensor, TwoRegionCache, torch.Tensor]:
        """What Block.forward takes for them."""
        device = self.block.device
        positions = (first + torch.from_numpy(sees.sum(1) - 1)).to(device)
        mask = tree_mask(first, sees).to(device)
        return self.tokens[rows].to(device), positions, self.cache, mask

    def tree(self) -> torch.Tensor:
        return self.run(*self.of_tree())

    def of_tree(self) -> tuple[np.ndarray, list[int], int]:
        """What `run` takes for the tree."""
        return TREE, list(range(self.prompt, self.prompt + len(TREE))), self.prompt

    def path(self, nodes: list[int]) -> torch.Tensor:
        """The last row of a path of the tree, its rows one by one."""
        for number, node in enumerate(nodes):
            seen = np.ones((1, number + 1), np.bool_)
            row = self.run(seen, [self.prompt + node], self.prompt)
        return row[0]


def jointly(texts: list[Text]) -> list[torch.Tensor]:
    """The trees of several texts, in one pass of the block that all have."""
    every = [one.of(*one.of_tree()) for one in texts]
    tokens, positions = (torch.cat([one[number] for one in every]) for number in range(2))
    parts = [CachedPart(number, one[2], one[3]) for number, one in enumerate(every)]
    out = texts[0].block.forward_joint(tokens, positions, parts)
    assert out is not None
    return list(out.split(len(TREE)))
