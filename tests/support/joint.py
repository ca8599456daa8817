"""Several requests on one block: their rows in joint jobs, and the same rows in jobs alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch
from support.caches import rows_of

from edgespec.backends.torch_backend import TorchBlock
from edgespec.machines.effects import BlockPart, RunBlock
from edgespec.model.block import Block
from edgespec.model.kv_cache import TwoRegionCache
from edgespec.model.source import TensorSource
from edgespec.model.tensors import to_torch
from edgespec.tree.ledger import IntArray, RetainSet, RowLedger, Rows
from edgespec.types.stop_check import StopCheck
from edgespec.types.tensor import NO_LAYERS, Layers, Tensor


def never(request: int | None = None) -> bool:
    """Nothing is stopped."""
    return False


@dataclass
class Asker:
    """One request's tree, grown and pruned at random."""

    request: int
    seed: int
    vocabulary: int = 96
    ledger: RowLedger = field(default_factory=RowLedger)
    next_id: int = 0
    epoch: int = 0

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.position: dict[int, int] = {}

    def _new(self, count: int) -> tuple[IntArray, IntArray]:
        ids = np.arange(self.next_id, self.next_id + count)
        self.next_id += count
        return ids, self.random.integers(0, self.vocabulary, count)

    def prompt(self, count: int) -> BlockPart:
        """Committed rows."""
        before = self.ledger.committed
        ids, tokens = self._new(count)
        parents = np.concatenate(([self.ledger.last_committed], ids[:-1]))
        rows = Rows(ids, parents, tokens, np.arange(before, before + count))
        self.ledger.commit(rows)
        return BlockPart(self.request, rows, before, np.tri(count, dtype=np.bool_))

    def guess(self, count: int) -> BlockPart:
        """Rows below the live ones, deep as often as wide."""
        ids, tokens = self._new(count)
        root = self.ledger.last_committed
        live, parents = [root, *self.ledger.speculative], []
        self.position[root] = self.ledger.committed - 1
        for row_id in ids.tolist():
            parent = live[-1] if self.random.random() < 0.6 else int(self.random.choice(live))
            parents.append(parent)
            self.position[row_id] = self.position[parent] + 1
            live.append(row_id)
        places = np.array([self.position[i] for i in ids.tolist()], np.int64)
        rows = Rows(ids, np.array(parents, np.int64), tokens, places)
        sees = self.ledger.append(rows)
        return BlockPart(self.request, rows, self.ledger.committed, sees)

    def prune(self, stays: int) -> IntArray | None:
        """Accept the oldest row's path so far and keep what hangs from it; the gather."""
        live = self.ledger.speculative
        if not live:
            return None
        accepted = [live[0]] if stays else []
        kept = self._below(live[0]) if stays else []
        self.epoch += 1
        watermark = self.next_id - 1
        return self.ledger.retain(
            RetainSet(self.epoch, watermark, tuple(accepted), frozenset(kept))
        )

    def _below(self, row_id: int) -> list[int]:
        sees, live = self.ledger._sees, self.ledger.speculative
        slot = live.index(row_id)
        return [i for n, i in enumerate(live) if sees[n, slot] and i != row_id]


class Side:
    """Stages of one model, each with caches of its own for every request."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.stages = [TorchBlock(block) for block in blocks]

    def run(self, job: RunBlock, stop: StopCheck = never) -> tuple[torch.Tensor, list[Tensor]]:
        """Through all stages: hidden rows, and what each tapped; `stop` is asked by the first."""
        taps = []
        for number, stage in enumerate(self.stages):
            hidden = stage.run(job, never if number else stop)
            assert hidden is not None
            tapped = stage.take_aux_hidden()
            taps += [tapped] if tapped is not None else []
            job = replace(job, hidden=hidden)
        assert job.hidden is not None
        return to_torch(job.hidden), taps

    def caches(self, request: int) -> torch.Tensor:
        """What all layers hold of its rows, one behind the other: [numbers, rows]."""
        return torch.cat([rows_of(cache) for cache in self.held(request)])

    def held(self, request: int) -> list[TwoRegionCache]:
        """Its caches, of one stage after the other."""
        return [stage._caches[request] for stage in self.stages]


class Twice:
    """The same rows joint and apart."""

    def __init__(
        self,
        source: TensorSource,
        cuts: list[int],
        dtype: str = "float64",
        apart: Sequence[Block] | None = None,
        **more: str,
    ) -> None:
        """`apart`: the blocks of that side, if they are others; `more`: of a Block."""
        blocks = [Block(source, first, end, dtype, **more) for first, end in pairwise(cuts)]
        self.joint, self.apart = Side(blocks), Side(blocks if apart is None else apart)
        self.jobs = 0

    def open(self, *requests: int) -> None:
        for side in (self.joint, self.apart):
            for stage in side.stages:
                for request in requests:
                    stage.open(request, 4)

    def close(self, *requests: int) -> None:
        for side in (self.joint, self.apart):
            for stage in side.stages:
                for request in requests:
                    stage.close(request)

    def run(
        self,
        parts: Iterable[BlockPart],
        aux_layers: Layers = NO_LAYERS,
        ppd_tokens: Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, list[Tensor], list[list[Tensor]]]:
        """Hidden rows of the joint job, of the jobs apart, and what either tapped."""
        whole = self.job(parts, aux_layers, ppd_tokens)
        hidden, taps = self.joint.run(whole)
        alone = [self.apart.run(replace(whole, parts=(part,))) for part in whole.parts]
        return hidden, torch.cat([rows for rows, _ in alone]), taps, [each for _, each in alone]

    def job(
        self,
        parts: Iterable[BlockPart],
        aux_layers: Layers = NO_LAYERS,
        ppd_tokens: Tensor | None = None,
    ) -> RunBlock:
        """The next job."""
        self.jobs += 1
        return RunBlock(self.jobs, tuple(parts), None, aux_layers, ppd_tokens)

    def gather(self, request: int, start: int, order: IntArray | None) -> None:
        if order is None:
            return
        for side in (self.joint, self.apart):
            for stage in side.stages:
                stage.gather(request, start, order)

    def off(self, request: int) -> float:
        """The largest difference of what both sides hold of a request."""
        one, other = self.joint.caches(request), self.apart.caches(request)
        assert one.shape == other.shape
        # Some numbers may be halves of others, so no numbers at all.
        same = torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        return 0.0 if same else float((one - other).abs().nan_to_num(1.0).max())
