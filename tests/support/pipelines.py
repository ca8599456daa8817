"""Blocks in a row without machines, and random trees that grow and are pruned on them."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from support.checkpoints import plain_hidden, reference
from transformers import PreTrainedModel

from edgespec.model.block import Block
from edgespec.model.families import key_owners
from edgespec.model.kv_cache import TwoRegionCache
from edgespec.model.source import TensorSource
from edgespec.model.sources import open_source
from edgespec.model.tree_attention import tree_mask
from edgespec.tree.ledger import BoolArray, RetainSet, RowLedger, Rows

TOLERANCE = 1e-5
CUTS = {1: [0, 4], 2: [0, 1, 4], 3: [0, 1, 3, 4], 4: [0, 1, 2, 3, 4]}
"""Borders between the stages of models of four layers, by the number of stages."""


@dataclass
class Stage:
    """A block with its cache and ledger."""

    block: Block
    cache: TwoRegionCache = field(init=False)
    ledger: RowLedger = field(init=False)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.cache, self.ledger = self.block.new_cache(reserve=8), RowLedger()

    def run(
        self, inputs: torch.Tensor, rows: Rows, committed: int, sees: BoolArray
    ) -> torch.Tensor:
        positions, tokens = torch.from_numpy(rows.positions), torch.from_numpy(rows.tokens)
        mask = tree_mask(committed, sees)
        hidden = self.block.forward(inputs, positions, self.cache, mask, tokens=tokens)
        assert hidden is not None
        return hidden


class Pipeline:
    """Stages one after the other, all fed the same rows and retained sets."""

    def __init__(
        self,
        folder: Path,
        cuts: list[int],
        dtype: str = "float64",
        model: PreTrainedModel | None = None,
        source: TensorSource | None = None,
    ) -> None:
        """`model` is what to compare with, if not transformers' own form of the same folder, and
        `source` where tensors come from, if not from the model's own files. `dtype` may name that
        of caches behind a "+"."""
        dtype, _, held = dtype.partition("+")
        source = source or open_source(folder)
        owners = key_owners(source.config)
        last = min(owners.values(), default=source.layers)
        blocks = pairwise([*(cut for cut in cuts[:-1] if cut <= last), source.layers])
        self.stages = [Stage(Block(source, *one, dtype, cache_dtype=held)) for one in blocks]
        self.model = model or reference(folder, getattr(torch, dtype))
        self.reset()

    def reset(self) -> None:
        for stage in self.stages:
            stage.reset()
        self.next_id = 0

    def take_ids(self, count: int) -> np.ndarray:
        self.next_id += count
        return np.arange(self.next_id - count, self.next_id)

    def prefill(self, tokens: list[int]) -> torch.Tensor:
        """Certain rows behind the committed ones; hidden rows [n, H]."""
        ids, start = self.take_ids(len(tokens)), self.stages[0].ledger.committed
        parents = np.concatenate(([self.stages[0].ledger.last_committed], ids[:-1]))
        rows = Rows(ids, parents, np.array(tokens), np.arange(start, start + len(tokens)))
        flow = torch.tensor(tokens)
        for stage in self.stages:
            stage.ledger.commit(rows)
            flow = stage.run(flow, rows, start, np.tri(len(tokens), dtype=np.bool_))
        return flow

    def guess(self, rows: Rows) -> torch.Tensor:
        """Speculative rows; hidden rows [n, H]."""
        flow = torch.from_numpy(rows.tokens)
        for stage in self.stages:
            sees = stage.ledger.append(rows)
            flow = stage.run(flow, rows, stage.ledger.committed, sees)
        return flow

    def retain(self, keep: RetainSet) -> None:
        for stage in self.stages:
            start = stage.ledger.committed
            order = stage.ledger.retain(keep)
            if order is not None:
                stage.cache.gather(start, order)
            assert stage.cache.length == len(stage.ledger)


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    assert one.shape == other.shape
    assert one.dtype == other.dtype
    return float((one - other).abs().max())


def random_tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 96, count).tolist()


class Grower:
    """Random trees: remembers what every row's path is."""

    def __init__(
        self, pipeline: Pipeline, seed: int, chain: float = 0.0, longest: int = 12
    ) -> None:
        """`chain`: the share of rows that hang below the newest one, which makes trees deep.
        Behind less than `longest` tokens."""
        self.random = np.random.default_rng(seed)
        self.pipeline = pipeline
        self.chain = chain
        pipeline.reset()
        self.committed: list[int] = random_tokens(seed, int(self.random.integers(1, longest)))
        pipeline.prefill(self.committed)
        self.root = pipeline.next_id - 1
        self.tokens: dict[int, int] = {}
        self.parent: dict[int, int] = {}
        self.live: list[int] = []
        self.epoch = 0

    def path(self, row: int) -> list[int]:
        """All tokens up to a live row."""
        tokens: list[int] = []
        while row != self.root:
            tokens.append(self.tokens[row])
            row = self.parent[row]
        return self.committed + tokens[::-1]

    def grow(self, count: int) -> float:
        """Add a segment of random rows; the largest difference from the plain model."""
        ids = self.pipeline.take_ids(count).tolist()
        for row in ids:
            places = [self.root, *self.live]
            deeper = self.random.random() < self.chain
            self.parent[row] = places[-1] if deeper else int(self.random.choice(places))
            self.tokens[row] = int(self.random.integers(0, 96))
            self.live.append(row)
        paths = [self.path(row) for row in ids]
        rows = Rows(
            np.array(ids),
            np.array([self.parent[row] for row in ids]),
            np.array([self.tokens[row] for row in ids]),
            np.array([len(path) - 1 for path in paths]),
        )
        return self.compared(self.pipeline.guess(rows), paths)

    def compared(self, hidden: torch.Tensor, paths: list[list[int]]) -> float:
        """How far hidden rows are from those at the ends of their paths in the plain model."""
        exact = torch.stack([plain_hidden(self.pipeline.model, path)[-1] for path in paths])
        return difference(hidden, exact)

    def prune(self, late: int = 0) -> float:
        """Accept some path from the root, retain some of what hangs below it.

        The stages learn of it only after `late` more rows went out, which know of it already;
        returns what `grow` says of these.
        """
        mark = self.pipeline.next_id - 1
        accepted: list[int] = []
        while self.random.random() < 0.6:
            children = [row for row in self.live if self.parent[row] == self.root]
            if not children:
                break
            self.root = int(self.random.choice(children))
            accepted.append(self.root)
        self.committed += [self.tokens[row] for row in accepted]
        kept: set[int] = {self.root}
        for row in self.live:  # parents come first
            if self.parent[row] in kept and self.random.random() < 0.8:
                kept.add(row)
        kept.discard(self.root)
        self.live = [row for row in self.live if row in kept]
        worst = self.grow(late) if late else 0.0
        self.epoch += 1
        self.pipeline.retain(RetainSet(self.epoch, mark, tuple(accepted), frozenset(kept)))
        return worst
