"""Rows of several requests in one pass: each part's rows and cache are what they are alone.

To the bit, in every dtype: no sum of a row depends on the rows beside it (docs/arithmetic.md).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.caches import rows_of
from support.checkpoints import FAMILY_SETTINGS, WINDOW, write_checkpoint, write_family
from support.joint import Asker, Twice, never
from support.packed_forms import MixedSource
from support.segments import retain_message
from support.tiers import examples, tiered

from edgespec.backends.compute import COMPUTE, StageCompute
from edgespec.backends.torch_backend import TorchBlock
from edgespec.config import QUANTISATIONS
from edgespec.decoding.effects import AbortBlock, SendRing
from edgespec.decoding.events import SegmentArrived
from edgespec.decoding.stage import StageMachine
from edgespec.errors import LocalProtocolError
from edgespec.machines.effects import BlockPart, Effect, RunBlock
from edgespec.machines.events import BlockDone, MessageArrived
from edgespec.model.aux_hidden import unpacked
from edgespec.model.block import Block
from edgespec.model.layers import Layer
from edgespec.model.loader import Checkpoint
from edgespec.model.source import TensorSource
from edgespec.model.sources import QuantisingSource
from edgespec.model.tensors import from_torch, to_torch
from edgespec.types.tensor import Layers
from edgespec.wire.segment import Header, Part, Segment

VISIBLE = 1e-3  # what a wrong mask differs by, at least
REQUESTS = (1, 2, 3)
DTYPES = ("bfloat16", "float16", "float32", "float64")
NAMES = list(FAMILY_SETTINGS)
QUICK = ["llama", "mistral", "gemma2", "gemma3_text", "qwen3_moe", "gpt_oss", "smollm3-windows"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("joint")


def family(root: Path, name: str) -> TensorSource:
    folder = root / name
    return Checkpoint(folder if folder.is_dir() else write_family(folder, name))


def wide(root: Path) -> Checkpoint:
    """Matrices that can be packed in groups."""
    folder = root / "wide"
    if not folder.is_dir():
        write_checkpoint(folder, hidden_size=64, intermediate_size=128)
    return Checkpoint(folder)


def lives(twice: Twice) -> float:
    """Prompts of several lengths, trees, retained sets; the largest difference of anything."""
    askers = [Asker(request, seed=request) for request in REQUESTS]
    twice.open(*REQUESTS)
    one, two, three = askers
    found = []

    def run(*parts: BlockPart) -> None:
        joint, apart, _, _ = twice.run(parts)
        found.append(float((joint - apart).abs().max()))

    run(one.prompt(3), two.prompt(WINDOW + 6), three.prompt(1))
    run(three.guess(2), one.guess(4), two.guess(5))  # the order of the parts is free
    run(two.guess(1), one.guess(0), three.guess(3))  # a part may have no rows
    for asker in askers:
        start = asker.ledger.committed
        twice.gather(asker.request, start, asker.prune(1))
    run(*(asker.guess(WINDOW) for asker in askers))
    return max(*found, *(twice.off(request) for request in REQUESTS))


@pytest.mark.parametrize("dtype", tiered(DTYPES, ["bfloat16"]))
@pytest.mark.parametrize("name", tiered(NAMES, QUICK))
def test_every_family(root: Path, name: str, dtype: str) -> None:
    assert lives(Twice(family(root, name), [0, 1, 4], dtype)) == 0


@pytest.mark.parametrize("quant", ["int4-g32", "int8", "nf4", "mixed"])
def test_every_quantisation(root: Path, quant: str) -> None:
    checkpoint = wide(root)
    if quant == "nf4":
        pytest.importorskip("bitsandbytes")
    mixed = quant == "mixed"
    source = (
        MixedSource(checkpoint) if mixed else QuantisingSource(checkpoint, QUANTISATIONS[quant])
    )
    assert lives(Twice(source, [0, 2, 4])) == 0


def test_the_bound_would_notice_a_slot_too_few(root: Path) -> None:
    twice = Twice(family(root, "llama"), [0, 4])
    twice.open(1, 2)
    one, two = Asker(1, 1), Asker(2, 2)
    twice.run([one.prompt(6), two.prompt(4)])
    right, other = one.guess(2), two.guess(2)
    wrong = right.sees.copy()
    wrong[1, 0] = not wrong[1, 0]
    alone, _ = twice.apart.run(RunBlock(9, (right,), None))
    hidden, _ = twice.joint.run(RunBlock(9, (replace(right, sees=wrong), other), None))
    assert float((hidden[:2] - alone).abs().max()) > VISIBLE


@given(
    seed=st.integers(0, 2**32 - 1),
    steps=st.lists(
        st.lists(st.tuples(st.sampled_from(REQUESTS), st.integers(-1, 6)), min_size=1, max_size=3),
        min_size=1,
        max_size=5,
    ),
)
@examples(20)
@pytest.mark.parametrize("name", ["gemma2", "qwen3_moe"])
def test_random_parts(root: Path, name: str, seed: int, steps: list[list[tuple[int, int]]]) -> None:
    twice = _kept(root, name)
    twice.open(*REQUESTS)
    askers = {request: Asker(request, seed + request) for request in REQUESTS}
    twice.run([asker.prompt(1 + asker.seed % 7) for asker in askers.values()])
    for step in steps:
        parts = {}
        for request, rows in step:
            asker = askers[request]
            if rows < 0 and request not in parts:
                start = asker.ledger.committed
                twice.gather(request, start, asker.prune(seed % 2))
            elif request not in parts:
                parts[request] = asker.guess(rows)
        if parts:
            joint, apart, _, _ = twice.run(parts.values())
            assert joint.shape == apart.shape
            assert not len(joint) or float((joint - apart).abs().max()) == 0
    assert max(twice.off(request) for request in REQUESTS) == 0


_TWICE: dict[str, Twice] = {}


def _kept(root: Path, name: str) -> Twice:
    """Blocks are read once for all examples."""
    if name not in _TWICE:
        _TWICE[name] = Twice(family(root, name), [0, 1, 4])
    return _TWICE[name]


def test_taps_and_prompt_rows_of_several_requests(root: Path) -> None:
    twice = Twice(family(root, "llama"), [0, 2, 4])
    twice.open(1, 2)
    one, two = Asker(1, 1), Asker(2, 2)
    table = from_torch(torch.randn(2, 32, generator=torch.Generator().manual_seed(1)))
    twice.run([one.prompt(5), two.prompt(3)])
    parts = []
    for asker in (one, two):
        part = asker.guess(4)
        part.rows.tokens[1:3] = [-1, -2]
        parts.append(part)
    joint, apart, taps, alone = twice.run(parts, Layers((0, 1, 3)), table)
    assert float((joint - apart).abs().max()) == 0
    both = unpacked(taps[0].beside(taps[1]), 3, 32)
    each = torch.cat([unpacked(first.beside(second), 3, 32) for first, second in alone])
    assert float((both - each).abs().max()) <= float(each.abs().max()) / 127, "a step of int8"
    assert torch.equal(both[[1, 5], 0], both[[1, 1], 0]), "the same prompt token"
    assert not torch.equal(both[1, 0], both[2, 0])


class LayerRows:
    """How many rows each layer of a block was given."""

    def __init__(self, block: Block) -> None:
        self.rows: list[int] = []
        block._layers = [self._counted(layer) for layer in block._layers]

    def _counted(self, layer: Layer) -> Layer:
        def call(hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
            self.rows.append(len(hidden))
            return layer(hidden, *rest)

        return call


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "granitemoehybrid-nope"])
@pytest.mark.parametrize("layer", [0, 1, 3])
def test_a_part_that_is_no_longer_wanted_is_left_out(root: Path, name: str, layer: int) -> None:
    twice = Twice(family(root, name), [0, 4])
    twice.open(*REQUESTS)
    one, two, three = (Asker(request, request) for request in REQUESTS)
    twice.run([one.prompt(4), two.prompt(6), three.prompt(3)])
    counted = LayerRows(twice.joint.stages[0]._block)
    job = RunBlock(9, (one.guess(3), two.guess(4), three.guess(2)), None, Layers((0, 2)))
    asked = iter(range(4))
    at = 0

    def stop(request: int | None = None) -> bool:
        nonlocal at
        if request is None:  # once before each layer
            at = next(asked)
            return False
        return request == 2 and at >= layer

    hidden, taps = twice.joint.run(job, stop)
    assert counted.rows == [9] * layer + [5] * (4 - layer)
    left = [0, 1, 2, 7, 8]
    apart = [twice.apart.run(replace(job, parts=(part,))) for part in job.parts]
    alone = torch.cat([rows for rows, _ in apart])
    assert float((hidden[left] - alone[left]).abs().max()) == 0
    assert not hidden[3:7].any()
    tapped = unpacked(taps[0], 2, 32)
    known = torch.cat([unpacked(each[0], 2, 32) for _, each in apart])
    assert float((tapped[left] - known[left]).abs().max()) <= float(known.abs().max()) / 127
    assert bool(tapped[3:7, 1].any()) == (layer == 3), "of layer 2, if it was still wanted there"
    # The slots are taken, and what a retained set leaves is as it was.
    order = np.zeros(0, np.int64)
    twice.gather(2, 6, order)
    assert max(twice.off(request) for request in REQUESTS) == 0
    two.ledger.retain(_nothing(two))
    joint, apart_rows, _, _ = twice.run([three.guess(2), two.guess(3), one.guess(1)])
    assert float((joint - apart_rows).abs().max()) == 0


def _nothing(asker: Asker) -> Any:
    return retain_message(asker.request, 1, asker.next_id - 1, (), ()).keep


@pytest.mark.parametrize("at_once", [True, False])
def test_a_job_whose_parts_all_go_ends(root: Path, at_once: bool) -> None:
    twice = Twice(family(root, "llama"), [0, 4])
    twice.open(1, 2)
    job = RunBlock(1, (Asker(1, 1).prompt(3), Asker(2, 2).prompt(2)), None)
    layers = 0

    def stop(request: int | None = None) -> bool:
        nonlocal layers
        layers += request is None
        if request is None:  # the machine's last word, once the others were left out
            return not at_once and layers == 3
        return at_once or request == 1

    block = twice.joint.stages[0]
    assert block.run(job, stop) is None
    assert layers == (1 if at_once else 3)
    assert [block._caches[request].length for request in (1, 2)] == [3, 2]


def test_a_joint_job_that_does_not_fit_changes_nothing(root: Path) -> None:
    twice = Twice(family(root, "llama"), [0, 4])
    twice.open(1)
    parts = Asker(1, 1).prompt(3), Asker(2, 2).prompt(3)
    block = twice.joint.stages[0]
    with pytest.raises(LocalProtocolError, match="request 2 is not open"):
        block.run(RunBlock(1, parts, None), never)
    assert block._caches[1].length == 0


# --- with the stage machine -----------------------------------------------------------------------


class Alone:
    """A stage with its machine, whose work is carried out at once; `during` happens before the
    second layer of a block, like a retained set that comes meanwhile."""

    def __init__(self, block: Block) -> None:
        self.machine = StageMachine(is_first=True, is_last=False, row_limit=100)
        self.block = TorchBlock(block)
        self._compute = StageCompute(self.block)
        self.sent: list[Segment] = []
        self.aborted: list[AbortBlock] = []

    def tell(self, event: Any, during: tuple[Any, ...] = ()) -> None:
        work: list[Effect] = []
        self._take(self.machine.handle(event, 0.0), work)
        while work:
            effect = work.pop(0)
            asked = 0

            def stop(request: int | None = None, effect: Effect = effect) -> bool:
                nonlocal asked, during
                asked += request is None
                if asked == 2 and during:
                    first, during = during, ()
                    for one in first:
                        self._take(self.machine.handle(one, 0.0), work)
                whole = AbortBlock(effect.job) in self.aborted
                return whole or (
                    request is not None and AbortBlock(effect.job, request) in self.aborted
                )

            event = self._compute.perform(effect, stop if isinstance(effect, RunBlock) else never)
            if event is not None:
                assert isinstance(event, BlockDone)
                self._take(self.machine.handle(event, 0.0), work)

    def _take(self, effects: list[Effect], work: list[Effect]) -> None:
        self.sent += [effect.segment for effect in effects if isinstance(effect, SendRing)]
        self.aborted += [effect for effect in effects if isinstance(effect, AbortBlock)]
        work += [effect for effect in effects if isinstance(effect, COMPUTE)]

    def cache(self, request: int) -> torch.Tensor:
        return rows_of(self.block._caches[request])


def part_of(block: BlockPart, reserve: int = 0) -> Part:
    rows = block.rows
    columns = rows.ids, rows.parents, rows.positions, rows.tokens
    return Part(block.request, 0, bool(reserve), reserve, len(rows), *columns)


@pytest.mark.parametrize("pruned", [{1}, {2}, {1, 2}, set()])
def test_joined_segments_leave_what_separate_ones_leave(root: Path, pruned: set[int]) -> None:
    block = Block(family(root, "mistral"), 0, 3, "float64")
    joined, apart = Alone(block), {request: Alone(block) for request in (1, 2)}
    askers = [Asker(1, 1), Asker(2, 2)]
    retained = tuple(
        MessageArrived(b"", retain_message(one.request, 1, 99, (), ()))
        for one in askers
        if one.request in pruned
    )
    for seq, grown in enumerate(("prompt", "guess", "late")):
        if grown == "late":  # in a joint segment once more, with ids above the watermark
            for one in askers:
                if one.request in pruned:
                    one.ledger.retain(_nothing(one))
                    one.next_id = 100
        parts = [
            part_of(one.prompt(4 + seq + one.request), 50) if not seq else part_of(one.guess(4))
            for one in askers
        ]
        during = retained if grown == "guess" else ()
        joined.tell(SegmentArrived(Segment(Header(seq), tuple(parts))), during)
        for part in parts:
            own = tuple(one for one in during if one.message.request == part.request)
            apart[part.request].tell(SegmentArrived(Segment(Header(seq), (part,))), own)
    aborts = [(effect.job, effect.request) for effect in joined.aborted]
    assert aborts == {1: [(2, *pruned)], 2: [(2, 1), (2, None)], 0: []}[len(pruned)]
    for request, alone in apart.items():
        assert [effect.job for effect in alone.aborted] == [2] * (request in pruned)
        assert joined.cache(request).shape == alone.cache(request).shape
        assert float((joined.cache(request) - alone.cache(request)).abs().max()) == 0
        assert len(joined.machine.ledgers()[request]) == len(alone.machine.ledgers()[request])
    for seq, whole in enumerate(joined.sent):
        before = 0
        for number, part in enumerate(whole.parts):
            alone_segment = apart[part.request].sent[seq]
            assert part.ids.tolist() == alone_segment.parts[0].ids.tolist(), number
            rows = slice(before, before + len(part.ids))
            before = rows.stop
            if len(part.ids):
                assert whole.hidden is not None
                assert alone_segment.hidden is not None
                one, other = to_torch(whole.hidden)[rows], to_torch(alone_segment.hidden)
                assert float((one - other).abs().max()) == 0
    assert [len(part.ids) for part in joined.sent[1].parts] == [
        0 if request in pruned else 4 for request in (1, 2)
    ]
