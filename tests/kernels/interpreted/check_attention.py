"""Attention for GPUs, interpreted: against float64, and each row alone and elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

from edgespec.kernels.gpu.attention import attention
from edgespec.kernels.gpu.places import places_of
from edgespec.model.quantised.kernels import relative_error

ROUNDING = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class Shape:
    """Heads, and what of AttentionForm is asked for."""

    heads: int
    kv_heads: int
    head_dim: int
    softcap: float | None = None
    window: int | None = None
    sinks: bool = False


class Tree:
    """Committed rows and a tree behind them; keys and values by node."""

    def __init__(
        self, shape: Shape, committed: int, parents: list[int], dtype: torch.dtype
    ) -> None:
        """`parents`: of each row the row before it in its path, -1 the last committed one."""
        generator = torch.Generator().manual_seed(len(parents))
        self.shape, self.committed, self.parents = shape, committed, parents
        self.nodes = committed + len(parents)
        self.paths: list[list[int]] = []
        for row, parent in enumerate(parents):
            before = list(range(committed)) if parent < 0 else self.paths[parent]
            self.paths.append([*before, committed + row])

        def by_chance(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator).to(dtype)

        self.keys = by_chance(shape.kv_heads, self.nodes, shape.head_dim)
        self.values = by_chance(shape.kv_heads, self.nodes, shape.head_dim)
        self.query = by_chance(len(parents), shape.heads, shape.head_dim)
        self.sinks = by_chance(shape.heads) if shape.sinks else None

    def run(
        self,
        rows: list[int],
        slots: list[int],
        capacity: int,
        cuts: tuple[int, ...] = (),
        first: int = 0,
    ) -> torch.Tensor:
        """Attention of some rows where node n lies in slot slots[n] of `capacity`, in pieces that
        begin at `cuts` too; positions count from `first` on."""
        shape = self.shape
        mask = torch.zeros(len(rows), capacity, dtype=torch.bool)
        held = torch.full((2, shape.kv_heads, capacity, shape.head_dim), 7.0, dtype=self.keys.dtype)
        places = torch.zeros(capacity, dtype=torch.int64)
        for node, slot in enumerate(slots):
            held[0, :, slot], held[1, :, slot] = self.keys[:, node], self.values[:, node]
        for row in range(len(self.parents)):
            for position, node in enumerate(self.paths[row]):
                places[slots[node]] = position
        for number, row in enumerate(rows):
            mask[number, [slots[node] for node in self.paths[row]]] = True
        positions = torch.tensor([len(self.paths[row]) - 1 for row in rows])
        found = places_of(mask, positions + first, places + first)
        bounds = [0, *cuts, capacity]
        keys, values = ([one[:, a:b].contiguous() for a, b in pairwise(bounds)] for one in held)
        form = shape.head_dim**-0.5, shape.softcap, shape.window, self.sinks
        return attention(self.query[rows], keys, values, found, *form)

    def expected(self, row: int) -> torch.Tensor:
        """In float64: [heads * head_dim]."""
        shape, path = self.shape, self.paths[row]
        near = path if shape.window is None else path[-shape.window :]
        query = self.query[row].double().view(shape.kv_heads, -1, shape.head_dim)
        scores = query @ self.keys[:, near].double().transpose(1, 2) * shape.head_dim**-0.5
        if shape.softcap is not None:
            scores = shape.softcap * torch.tanh(scores / shape.softcap)
        if self.sinks is not None:
            sinks = self.sinks.double().view(shape.kv_heads, -1, 1)
            weights = torch.softmax(torch.cat((scores, sinks), -1), -1)[..., :-1]
        else:
            weights = torch.softmax(scores, -1)
        return (weights @ self.values[:, near].double()).flatten()


SHAPES = [
    Shape(4, 2, 64),
    Shape(9, 3, 16, softcap=5.0),
    Shape(2, 2, 80, window=70),
    Shape(4, 1, 16, sinks=True, window=20),
    Shape(20, 1, 32, sinks=True),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def check_rows(shape: Shape) -> None:
    for dtype in ROUNDING if shape is SHAPES[0] else (torch.float16,):
        tree = Tree(shape, 130, [-1, 0, 0, 1, -1, 4, 3, 2], dtype)
        every = list(range(len(tree.parents)))
        plain = list(range(tree.nodes))
        whole = tree.run(every, plain, tree.nodes)
        expected = torch.stack([tree.expected(row) for row in every])
        assert relative_error(whole, expected) < ROUNDING[dtype], dtype
        for row in (0, 3, 7):  # alone, with what others wrote and nobody sees
            assert torch.equal(tree.run([row], plain, tree.nodes)[0], whole[row]), (dtype, row)


@pytest.mark.thorough
def check_places() -> None:
    """Rows in another order, a tree in other slots of a longer cache, and a cache in pieces."""
    tree = Tree(Shape(4, 2, 16), 600, [-1, 0, 0, 1, -1, 4, 3], torch.float16)
    every, plain = list(range(7)), list(range(tree.nodes))
    whole = tree.run(every, plain, tree.nodes)
    expected = torch.stack([tree.expected(row) for row in every])
    assert relative_error(whole, expected) < ROUNDING[torch.float16]
    moved = [*range(600), *(650 + slot for slot in (3, 5, 9, 11, 0, 1, 30))]
    some = [5, 2, 6]
    assert torch.equal(tree.run(some, moved, 700), whole[some])
    assert torch.equal(tree.run(every, plain, tree.nodes, cuts=(64, 300, 301)), whole)
    assert torch.equal(tree.run(every, plain, tree.nodes, first=1), whole)
    # The same rows with a shorter text that is theirs alone: the tree's rows as committed ones.
    chain = Tree(Shape(4, 2, 16), 40, [-1, *range(99)], torch.float16)
    slots = list(range(chain.nodes))
    at_once = chain.run(list(range(100)), slots, chain.nodes)
    for row in (0, 50, 99):
        assert torch.equal(chain.run([row], slots, chain.nodes)[0], at_once[row]), row
