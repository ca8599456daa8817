"""Memory: what a share of a model takes of a device while it answers, and how many layers fit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from edgespec.config import Quantisation
from edgespec.planning.architecture import Architecture
from edgespec.planning.cost_model import (
    HEAD,
    NO_DRAFT,
    NO_FILE,
    CostModel,
    DraftCosts,
    FileBytes,
    cost_model_of,
    head_costs,
)
from edgespec.planning.profile import Profile

GIB = 2**30

RUNTIME_BYTES = 600 * 2**20
"""The process without a model: interpreter, torch, transformers, sockets (docs/memory.md)."""

SHARED_BYTES = 90 * 2**20
"""Of these, pages of libraries that a second process on the same board does not need once more."""

SPECULATIVE_ROWS = 256
"""Cache rows for guesses that are counted for each request beside its own."""

SPARE = 8
"""A cache that grows has room for at most an eighth more rows than it needs (model.kv_cache)."""

STEP = 64
"""Beside that its room is a multiple of so many rows."""

WIDEST_SEGMENT = 64
"""Rows of the widest segment: a chunk of a prompt, or the most guesses that a policy sends."""


@dataclass(frozen=True)
class PlannedModel:
    """A model to be planned: its sizes, how layers and head are held, and the draft beside it.

    `sources`: the names of the draft sources that were asked for, as `--draft` has them; "": none
    was. Their costs are `draft`. `file`: of the largest layer, where `quantisation` is "file".
    `head_file_bytes`: of the head, as held.
    """

    name: str
    of: Architecture
    quantisation: Quantisation
    draft: DraftCosts = NO_DRAFT
    sources: str = ""
    file: FileBytes = NO_FILE
    head: Quantisation = HEAD
    head_file_bytes: int = 0

    @cached_property
    def costs(self) -> CostModel:
        of = self.of
        head = head_costs(of.vocab, of.hidden, self.head, self.head_file_bytes)
        return cost_model_of(self.name, of, self.quantisation, head, self.draft, self.file)


@dataclass(frozen=True, slots=True)
class Device:
    """One device of those that may be used; its memory is `profile.memory_bytes`."""

    name: str
    profile: Profile

    @property
    def memory(self) -> int:
        """Bytes that models may use."""
        return int(self.profile.memory_bytes.value)


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that a device needs: weights, KV caches, and the process with its work space."""

    weights: int
    cache: int
    overhead: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.overhead


@dataclass(frozen=True, slots=True)
class Needs:
    """What devices need for a model, if `requests` are open with `context` tokens each.

    A stage holds its layers and their caches, and the last one the output head if that is there
    (`head_last`) and not on D0. The input embedding stays in its file, of which the system keeps
    what it has room for (see model.block). Rows are given as they are
    used: of all requests together as many as their tokens and SPECULATIVE_ROWS guesses each; rows
    that several share are there once, so that more requests may fit. A cache that grows may have
    some room to spare, and copies one layer at a time. The work space is that of the widest
    segment, of such a copy, or, while loading, the largest matrix as it comes from the checkpoint,
    whichever is most. The head is loaded before anything else, so that what is not taken yet holds
    its original.
    """

    model: PlannedModel
    context: int
    requests: int
    head_last: bool = False

    @property
    def rows(self) -> int:
        """Cache rows of each layer that there may be room for."""
        used = self.requests * (self.context + SPECULATIVE_ROWS)
        return used + used // SPARE + self.requests * STEP

    @property
    def layer(self) -> int:
        """Bytes of a layer and its cache."""
        costs = self.model.costs
        return costs.layer_bytes + self._cache(costs.kv_bytes)

    def _cache(self, row: int) -> int:
        """Bytes of what a layer holds of all requests; `row`: of one row."""
        return self.rows * row + self.requests * self.model.of.request_bytes

    def stage(self, layers: int, last: bool = False) -> Need:
        """A stage of so many layers; `last`: of the last ones, and the head, if that is on a
        stage."""
        head, original, logits = self._head(last)
        weights, cache = self._layers(layers, last)
        return Need(
            weights=weights + head,
            cache=cache,
            overhead=RUNTIME_BYTES + max(self._work_space(), logits, original - weights - cache),
        )

    def _layers(self, count: int, last: bool) -> tuple[int, int]:
        """Bytes of so many layers and of their caches; `last`: of the last ones."""
        of, costs = self.model.of, self.model.costs
        layer, kv = float(costs.layer_bytes), costs.kv_bytes
        if of.bound:  # which differ from those before them
            ends = (of.layers - count, of.layers) if last else (0, of.layers - of.bound)
            share, kv = of.part(*ends)
            layer *= share
        return int(count * layer), count * self._cache(kv)

    def _head(self, last: bool) -> tuple[int, int, int]:
        """Bytes of the head on a stage, of its original, and of its logits."""
        has_head = last and self.head_last
        held, original = self.model.costs.head.bytes, self.model.of.head_bytes
        return has_head * held, has_head * original, has_head * self._logits

    def coordinator(self, beside_stage: bool = False) -> Need:
        """D0: the output head, if it is here, and the draft with its cache. Logits, its own or the
        draft's, are held in 32 bit, thrice. `beside_stage`: what is left of it for as long as a
        stage is on the same board, which starts when D0 has loaded its models."""
        draft = self.model.draft
        here = not self.head_last
        head, original = here * self.model.costs.head.bytes, here * self.model.of.head_bytes
        of_requests = self.requests * draft.request_bytes
        cache = draft.layers * (self.rows * draft.kv_bytes + of_requests)
        work = self._logits - SHARED_BYTES if beside_stage else self._logits
        if not beside_stage:
            work = max(work, original - draft.held_bytes - cache)
        return Need(weights=head + draft.held_bytes, cache=cache, overhead=RUNTIME_BYTES + work)

    def most_layers(self, memory: int, last: bool = False) -> int:
        """How many layers fit a stage with this memory: 0 if none, never more than there are."""
        head, original, logits = self._head(last)
        if memory < RUNTIME_BYTES + head + original:
            return 0  # not even while it is loaded
        room = memory - RUNTIME_BYTES - head - max(self._work_space(), logits)
        of = self.model.of
        if of.bound:
            most = of.layers if last else of.layers - of.bound
            fitting = (n for n in range(most, 0, -1) if sum(self._layers(n, last)) <= room)
            found = next(fitting, 0)
            return found if not last or found >= of.bound else 0
        return max(0, min(of.layers, room // self.layer))

    @property
    def _logits(self) -> int:
        return 3 * 4 * WIDEST_SEGMENT * self.model.of.vocab

    def _work_space(self) -> int:
        """Bytes of one layer's pass beside weights and cache, or of the largest matrix.

        Hidden rows and the MLP's inner ones in 16 bit; scores and shares of the attention, in 32
        bit; and, where heads share keys, these once more for each head.
        """
        of = self.model.of
        attended = self.context + SPECULATIVE_ROWS
        inner = of.intermediate * max(1, of.active)
        hidden = 2 * WIDEST_SEGMENT * (6 * of.hidden + 3 * inner)
        scores = 2 * 4 * WIDEST_SEGMENT * of.heads * attended
        repeated = 2 * 2 * of.width * attended if of.kv_heads < of.heads else 0
        grown = (attended + attended // SPARE + STEP) * self.model.costs.kv_bytes
        return max(hidden + scores + repeated, grown, 2 * of.largest_matrix)


def gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.2f} GiB"
