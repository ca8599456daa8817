"""Live trees: several requests on stages in a row, whose rows must be those of plain decoding.

Requests begin with prompts in chunks, or with rows of one another; their trees grow in joint
passes; each stage prunes before the segment that is on its way, or behind it; answers go on with
another turn. Every row that comes out of the last stage must be to the bit what it is where its
path is run one row at a time, in one block (OneByOne).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from support.checkpoints import FAMILY_SETTINGS, write_family
from support.joint import Side, never
from support.one_by_one import OneByOne

from edgespec.backends.torch_backend import TorchBlock
from edgespec.machines.effects import BlockPart, RunBlock
from edgespec.model.block import Block
from edgespec.model.sources import open_source
from edgespec.model.tensors import from_torch, to_torch
from edgespec.tree.ledger import RetainSet, RowLedger, Rows
from edgespec.tree.stems import Stems
from edgespec.types.boundaries import AHEAD

LAYERS = 5
LONGEST = 100
"""Tokens of a prompt, at most: behind the fourth boundary at which states are held."""
VOCABULARY = 96
_KINDS = ("layer_types", "layers_block_type")


@dataclass(frozen=True)
class Step:
    """One joint segment, of so many `rows` of each request, and a retained set of each of those
    whose bit is in `pruned`: made before the segment's rows were (`known`), or while these were on
    their way. Stages whose bit is in `early` apply it before they see the segment."""

    rows: tuple[int, ...]
    pruned: int
    known: bool
    early: int


@dataclass(frozen=True)
class Play:
    """Borders between stages, lengths of prompts, and what follows. `chunk`: rows of a prompt at
    once. `chain`: of ten rows so many hang below the newest. `forks`: a request that begins with
    rows of the one before it, by how many tokens less than all; None: with a prompt of its own.
    `turn`: tokens of a second turn behind the first answer."""

    seed: int
    cuts: frozenset[int]
    prompts: tuple[int, ...]
    forks: tuple[int | None, ...]
    chunk: int
    chain: int
    steps: tuple[Step, ...]
    turn: int


def plays() -> st.SearchStrategy[Play]:
    """All that may happen to two or three requests."""
    steps = st.builds(
        Step,
        rows=st.tuples(*[st.integers(1, 6) | st.integers(0, 9)] * 3),
        pruned=st.sampled_from((7, 6, 5, 3, 1, 0)),
        known=st.booleans(),
        early=st.integers(0, 31),
    )
    return st.builds(
        Play,
        seed=st.integers(0, 2**32 - 1),
        cuts=st.frozensets(st.integers(1, LAYERS - 1)),
        prompts=st.lists(st.integers(1, LONGEST), min_size=2, max_size=3).map(tuple),
        forks=st.tuples(st.none(), *[st.none() | st.integers(0, 15) | st.integers(0, 90)] * 2),
        chunk=st.sampled_from((64, 33, 16, 7)),
        chain=st.integers(0, 10),
        steps=st.lists(steps, min_size=2, max_size=9).map(tuple),
        turn=st.integers(0, 20),
    )


@dataclass
class Counts:
    """What was compared: rows, of trees, each of which is what a request's guesses are until a
    retained set leaves another; and what happened to them."""

    requests: int = 0
    trees: int = 0
    rows: int = 0
    pruned: int = 0
    forked: int = 0
    turns: int = 0

    def add(self, other: Counts) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass
class _Request:
    """What the coordinator knows of one, and its ledger on each stage."""

    number: int
    committed: list[int]
    ledgers: list[RowLedger]
    next_id: int = 0
    root: int = -1
    epoch: int = 0
    tokens: dict[int, int] = field(default_factory=dict)
    parent: dict[int, int] = field(default_factory=dict)
    live: list[int] = field(default_factory=list)
    counted: bool = False

    def path(self, row: int) -> list[int]:
        """All tokens up to a live row."""
        found: list[int] = []
        while row != self.root:
            found.append(self.tokens[row])
            row = self.parent[row]
        return self.committed + found[::-1]


class Model:
    """A small random model of a family in one dtype: blocks of any layers of it, read once, and its
    rows one by one. Prompts are beginnings of one `trunk`."""

    def __init__(self, folder: Path, name: str, dtype: str) -> None:
        """In `folder`, where it is written if it is not there yet."""
        settings: dict[str, Any] = {"num_hidden_layers": LAYERS}
        for kind in _KINDS:
            listed = FAMILY_SETTINGS[name].get(kind)
            if listed is not None:
                settings[kind] = (listed + listed)[:LAYERS]
        if not folder.is_dir():
            write_family(folder, name, **settings)
        self.source, self.dtype = open_source(folder), dtype
        self.alone = OneByOne(self.source, dtype)
        trunk = np.random.default_rng(1).integers(0, VOCABULARY, LONGEST)
        self.trunk: list[int] = trunk.tolist()
        self._blocks: dict[tuple[int, int], Block] = {}

    def side(self, cuts: frozenset[int]) -> Side:
        """Stages with these borders."""
        parts = list(pairwise([0, *sorted(cuts), LAYERS]))
        for part in set(parts).difference(self._blocks):
            self._blocks[part] = Block(self.source, *part, self.dtype)
        return Side([self._blocks[part] for part in parts])

    def check_trunk(self) -> None:
        """Rows that are compared with are those of a cache that was never forked."""
        straight = self.alone.straight(self.trunk)
        for end, row in enumerate(straight, 1):
            assert torch.equal(row, self.alone.row(self.trunk[:end])), f"row {end} of the trunk"


class LiveTrees:
    """One play on a model's stages."""

    def __init__(self, model: Model, play: Play) -> None:
        self.counts = Counts()
        self._model, self._play = model, play
        self._random = np.random.default_rng(play.seed)
        self._side = model.side(play.cuts)
        self._stems = Stems()
        self._jobs = 0
        self._requests: list[_Request] = []

    def run(self) -> Counts:
        """Raises AssertionError for a row whose bits are others."""
        play = self._play
        for number, length in enumerate(play.prompts):
            fork = play.forks[number]
            if fork is None or not self._fork(number, fork):
                self._open(number)
                self._read(self._requests[number], self._model.trunk[:length])
        for step in play.steps:
            self._step(step)
        if play.turn:
            self._turn(self._requests[0])
        self.counts.requests = len(self._requests)
        self._model.alone.forget(self._model.trunk)
        return self.counts

    def _open(self, number: int) -> None:
        for stage in self._side.stages:
            stage.open(number, 4)
        self._stems.open(number)
        self._requests.append(_Request(number, [], [RowLedger() for _ in self._side.stages]))

    def _read(self, request: _Request, tokens: list[int]) -> None:
        """Committed rows, in chunks."""
        for first in range(0, len(tokens), self._play.chunk):
            some = tokens[first : first + self._play.chunk]
            before = len(request.committed)
            ids = np.arange(request.next_id, request.next_id + len(some))
            parents = np.concatenate(([request.root], ids[:-1]))
            rows = Rows(ids, parents, np.array(some), np.arange(before, before + len(some)))
            part = BlockPart(request.number, rows, before, np.tri(len(some), dtype=np.bool_))
            hidden = None
            for stage, ledger in zip(self._side.stages, request.ledgers, strict=True):
                ledger.commit(rows)
                hidden = self._run(stage, [part], hidden)
            assert hidden is not None
            request.committed += some
            request.next_id, request.root = int(ids[-1]) + 1, int(ids[-1])
            ends = range(before + 1, before + len(some) + 1)
            self._compare(hidden, [request.committed[:end] for end in ends])

    def _fork(self, number: int, less: int) -> bool:
        """A request that begins with all but `less` committed rows of the one before it, and then
        differs; whether all stages can go on from there."""
        base = self._requests[-1]
        rows = len(base.committed) - less
        if rows < 1 or not all(cache.goes_on(rows) for cache in self._side.held(base.number)):
            return False
        shared = self._stems.shareable(base.number, rows)
        how = self._stems.fork(number, base.number, rows, shared, len(base.ledgers[0]))
        for stage in self._side.stages:
            stage.fork(number, base.number, how)
        ledgers = [RowLedger(rows) for _ in self._side.stages]
        own = _Request(number, base.committed[:rows], ledgers, rows, rows - 1)
        self._requests.append(own)
        self._read(own, self._random.integers(0, VOCABULARY, 3).tolist())
        self.counts.forked += 1
        return True

    def _step(self, step: Step) -> None:
        requests, sets = self._requests, dict[int, RetainSet]()
        pruned = [one for one in requests if step.pruned >> one.number & 1]
        most = {one.number: len(one.committed) + AHEAD for one in requests}
        if step.known:
            sets = {one.number: self._prune(one) for one in pruned}
        rows = {
            one.number: self._grown(one, count, most[one.number])
            for one, count in zip(requests, step.rows, strict=False)
            if count
        }
        paths = {own: [requests[own].path(row) for row in some.ids] for own, some in rows.items()}
        if not step.known:
            sets = {one.number: self._prune(one, rows.get(one.number)) for one in pruned}
        hidden: torch.Tensor | None = None
        for number, stage in enumerate(self._side.stages):
            ledgers = {one.number: one.ledgers[number] for one in requests}
            early = step.early >> number & 1
            if early:
                stays = {
                    own: sets[own].keeps(some.ids) for own, some in rows.items() if own in sets
                }
                stays = {own: stays.get(own, np.ones(len(rows[own]), np.bool_)) for own in rows}
                self._retain(stage, ledgers, sets)
                if hidden is not None:
                    hidden = hidden[torch.from_numpy(np.concatenate([*stays.values(), []]) > 0)]
                rows = {own: some.take(np.flatnonzero(stays[own])) for own, some in rows.items()}
                paths = {
                    own: [path for path, stay in zip(every, stays[own], strict=True) if stay]
                    for own, every in paths.items()
                }
            parts = [
                BlockPart(own, some, ledgers[own].committed, ledgers[own].append(some))
                for own, some in rows.items()
                if len(some)
            ]
            hidden = self._run(stage, parts, hidden) if parts else None
            if not early:
                self._retain(stage, ledgers, sets)
        if hidden is not None:
            self._compare(hidden, [path for every in paths.values() for path in every])

    def _retain(
        self, stage: TorchBlock, ledgers: Mapping[int, RowLedger], sets: Mapping[int, RetainSet]
    ) -> None:
        for own, keep in sets.items():
            start = ledgers[own].committed
            order = ledgers[own].retain(keep)
            if order is not None:
                stage.gather(own, start, order)

    def _grown(self, request: _Request, count: int, most: int) -> Rows:
        """Random rows of its tree, none at a position above `most`."""
        ids = np.arange(request.next_id, request.next_id + count)
        request.next_id += count
        depths = {request.root: len(request.committed) - 1}
        for row in request.live:
            depths[row] = depths[request.parent[row]] + 1
        self.counts.trees += not request.counted
        request.counted = True
        for row in ids.tolist():
            newest = request.live[-1] if request.live else request.root
            deeper = self._random.integers(0, 10) < self._play.chain
            above = newest if deeper else int(self._random.choice([request.root, *request.live]))
            above = above if depths[above] < most else request.root
            depths[row] = depths[above] + 1
            request.parent[row] = above
            request.tokens[row] = int(self._random.integers(0, VOCABULARY))
            request.live.append(row)
        every = ids.tolist()
        return Rows(
            ids,
            np.array([request.parent[row] for row in every]),
            np.array([request.tokens[row] for row in every]),
            np.array([depths[row] for row in every]),
        )

    def _prune(self, request: _Request, sent: Rows | None = None) -> RetainSet:
        """Accept some path from the root, of rows before those that were `sent` just now, and
        retain some of what hangs below it."""
        known = request.live[: len(request.live) - (0 if sent is None else len(sent))]
        watermark, accepted = request.next_id - 1, list[int]()
        while self._random.random() < 0.7:
            children = [row for row in known if request.parent[row] == request.root]
            if not children:
                break
            request.root = int(self._random.choice(children))
            accepted.append(request.root)
        request.committed += [request.tokens[row] for row in accepted]
        kept = {request.root}
        for row in request.live:  # parents come first
            if request.parent[row] in kept and self._random.random() < 0.8:
                kept.add(row)
        kept.discard(request.root)
        request.live = [row for row in request.live if row in kept]
        request.epoch += 1
        request.counted = False
        self.counts.pruned += 1
        return RetainSet(request.epoch, watermark, tuple(accepted), frozenset(kept))

    def _turn(self, request: _Request) -> None:
        """No guess is left, more of a prompt comes behind what was answered, and guesses again."""
        request.live, request.counted = [], False
        request.epoch += 1
        last = RetainSet(request.epoch, request.next_id - 1, (), frozenset())
        for stage, ledger in zip(self._side.stages, request.ledgers, strict=True):
            self._retain(stage, {request.number: ledger}, {request.number: last})
        self._read(request, self._random.integers(0, VOCABULARY, self._play.turn).tolist())
        self._step(Step((5,), 0, known=False, early=0))
        self.counts.turns += 1

    def _run(
        self, stage: TorchBlock, parts: Sequence[BlockPart], hidden: torch.Tensor | None
    ) -> torch.Tensor:
        self._jobs += 1
        given = None if hidden is None else from_torch(hidden)
        found = stage.run(RunBlock(self._jobs, tuple(parts), given), never)
        assert found is not None
        return to_torch(found)

    def _compare(self, hidden: torch.Tensor, paths: Sequence[list[int]]) -> None:
        for row, path in zip(hidden, paths, strict=True):
            if not torch.equal(row, self._model.alone.row(path)):
                raise AssertionError(f"another row at position {len(path) - 1}")
        self.counts.rows += len(paths)
