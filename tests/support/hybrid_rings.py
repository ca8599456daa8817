"""The bundled hybrid in rings of toy letters: its blocks and head, and its plain answers.

Letters become the tokens of ToyCodec, which are bytes of the model's vocabulary; what it says is
spelt by that codec again. In float32, where every way of computing has the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from edgespec.backends.base import Walk
from edgespec.backends.torch_backend import TorchBlock, TorchHead
from edgespec.daemon.bundled_models import HYBRID, bundled
from edgespec.machines.effects import BlockPart, RunBlock
from edgespec.model.block import Block
from edgespec.model.ends import OutputHead
from edgespec.model.loader import Checkpoint
from edgespec.planning.partition import blocks_of
from edgespec.tree.ledger import Rows
from edgespec.verify.sampling import Sampling

torch.set_num_threads(1)

LAYERS = 5
CONTEXT = 256
_DTYPE = "float32"


@lru_cache
def _source() -> Checkpoint:
    return Checkpoint(bundled(HYBRID))


@lru_cache
def _layers(first: int, end: int) -> Block:
    return Block(_source(), first, end, _DTYPE)


@lru_cache
def hybrid_head() -> TorchHead:
    """Its output head."""
    return TorchHead(OutputHead(_source(), _DTYPE))


def vocabulary() -> int:
    """How many tokens it has."""
    return int(_source().config.vocab_size)


def hybrid_block(stage: int, stages: int) -> TorchBlock:
    """The layers of a stage, counted from 0, with no cache open."""
    return TorchBlock(_layers(*blocks_of(LAYERS, stages)[stage]))


class PlainHybrid:
    """Plain decoding of one request: called with a context that grows, it says what follows."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling, self._read = sampling, 0
        self._block = hybrid_block(0, 1)
        self._block.open(0, CONTEXT)

    def __call__(self, context: Sequence[int]) -> int:
        first, count = self._read, len(context) - self._read
        places = np.arange(first, len(context), dtype=np.int64)
        rows = Rows(places, places - 1, np.asarray(context[first:], np.int64), places)
        part = BlockPart(0, rows, first, np.tri(count, dtype=bool))
        hidden = self._block.run(RunBlock(first, (part,), None), lambda request=None: False)
        assert hidden is not None
        last = np.array([count - 1])
        walk = Walk(hidden.take(last), rows.take(last), self._sampling)
        ((choice, _),) = hybrid_head().choose([walk])
        self._read = len(context)
        return int(choice.tokens[0])
