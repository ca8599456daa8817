"""Compiled layers are to the bit what the layers are one by one, in every family and form."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cases import case
from support.checkpoints import FAMILY_SETTINGS, WINDOW, write_checkpoint, write_family
from support.joint import Asker, Twice
from support.packed_forms import MixedSource
from support.tiers import tiered

from edgespec.config import QUANTISATIONS
from edgespec.errors import ModelError
from edgespec.kernels.layers import CompiledPass, compiles
from edgespec.machines.effects import BlockPart
from edgespec.model import block as block_module
from edgespec.model.block import Block
from edgespec.model.kv_cache import TwoRegionCache
from edgespec.model.layer_plan import LOOK, LayerPlan, PlannedPass
from edgespec.model.loader import Checkpoint
from edgespec.model.row_codes import as_held
from edgespec.model.source import TensorSource
from edgespec.model.sources import QuantisingSource
from edgespec.model.tree_attention import tree_mask
from edgespec.planning.text_part import LATENT
from edgespec.tree.stems import Fork
from edgespec.types.tensor import NO_LAYERS, Layers

UNPLANNED = {*LATENT, "gemma4_text", "qwen3_next"}
"""Families with layers of a kind of their own; in Qwen3-Next projections have their own order."""
PLANNED = [name for name in FAMILY_SETTINGS if name.partition("-")[0] not in UNPLANNED]
ALIKE = ("olmo3", "ernie4_5", "hunyuan_v1_dense", "gemma", "seed_oss", "mixtral", "qwen2_moe")
"""What is new in them others have, too."""
CUTS = [0, 1, 4]

pytestmark = pytest.mark.skipif(not compiles(), reason="there is no C compiler")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("plan")


def family(root: Path, name: str) -> Checkpoint:
    folder = root / name
    return Checkpoint(folder if folder.is_dir() else write_family(folder, name))


def sides(source: TensorSource, dtype: str, monkeypatch: pytest.MonkeyPatch, **more: str) -> Twice:
    """Layers in calls of several, and, on the side apart, one by one, request by request."""
    with monkeypatch.context() as patched:
        patched.setattr(block_module, "layer_plan", lambda *_: None)
        plain = [Block(source, first, end, dtype, **more) for first, end in pairwise(CUTS)]
    twice = Twice(source, CUTS, dtype, plain, **more)
    assert all(isinstance(stage._block._plan, LayerPlan) for stage in twice.joint.stages)
    assert not any(stage._block._plan for stage in twice.apart.stages)
    return twice


def differ(twice: Twice) -> float:
    """Prompts, trees, stems, pruning and taps; the largest difference of anything."""
    one, two, three = (Asker(request, seed=request) for request in (1, 2, 3))
    twice.open(1, 2, 3)
    found = []

    def run(*parts: BlockPart, aux_layers: Layers = NO_LAYERS) -> None:
        joint, apart, taps, alone = twice.run(parts, aux_layers)
        found.append(float((joint - apart).abs().max()))
        if aux_layers and len(parts) == 1:
            assert [bytes(t.data) for t in taps] == [bytes(t.data) for t in alone[0]]

    run(one.prompt(3), two.prompt(WINDOW + 30), three.prompt(1))
    run(three.guess(20), one.guess(4), two.guess(5))
    for request, frozen in ((2, 5), (3, 1)):
        for side in (twice.joint, twice.apart):
            for stage in side.stages:
                stage.fork(request + 10, request, Fork(0, frozen, 1, 0, 0))
    four = Asker(12, seed=4)
    four.ledger, four.next_id = type(four.ledger)(5), 5
    run(two.guess(1), four.prompt(2), one.guess(1), three.guess(3))
    for asker in (one, two, three):
        twice.gather(asker.request, asker.ledger.committed, asker.prune(1))
    run(one.guess(WINDOW), four.guess(70))  # its cache grows
    run(two.guess(3), aux_layers=Layers((0, 2, 3)))
    return max(*found, *(twice.off(request) for request in (1, 2, 3, 12)))


@pytest.mark.parametrize("dtype", tiered(("bfloat16", "float16", "float32"), ["bfloat16"]))
def test_every_family(root: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PLANNED:
        if name in ALIKE and dtype == "bfloat16":
            continue
        source = family(root, name)
        with case(name):
            assert differ(sides(source, dtype, monkeypatch)) == 0


def assert_same_states(mine: TwoRegionCache, theirs: TwoRegionCache) -> None:
    assert (mine.folded is None) == (theirs.folded is None)
    if mine.folded is None or theirs.folded is None:
        return
    for layer, states in mine.folded.states.items():
        others = theirs.folded.states[layer]
        assert states.keys() == others.keys()
        assert all(torch.equal(state, others[at]) for at, state in states.items())


@pytest.mark.parametrize("dtype", tiered(("bfloat16", "float16", "float32"), ["bfloat16"]))
def test_states_are_made_in_the_call_that_needs_them(
    root: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of rows in the same chunk, and where a pass was stopped between two stages' layers."""
    original = LayerPlan.given
    for name in ("granitemoehybrid-mamba", "falcon_h1", "nemotron_h", "qwen3_5_text"):
        with case(name):
            twice = sides(family(root, name), dtype, monkeypatch)
            planned = []

            def given(*what: Any, planned: list[bool] = planned) -> PlannedPass | None:
                found = original(*what)
                planned.append(found is not None)
                return found

            monkeypatch.setattr(LayerPlan, "given", given)
            one, two = Asker(1, seed=1), Asker(2, seed=2)
            twice.open(1, 2)
            found = []

            def run(*parts: BlockPart, twice: Twice = twice, found: list[float] = found) -> None:
                joint, apart, *_ = twice.run(parts)
                found.append(float((joint - apart).abs().max()))

            run(one.prompt(130), two.prompt(50))
            run(one.prompt(3), two.prompt(20))
            for _ in range(6):
                run(two.guess(9), one.guess(6))
                run(one.guess(5))
                for asker in (one, two):
                    twice.gather(asker.request, asker.ledger.committed, asker.prune(1))
            assert max(*found, twice.off(1), twice.off(2)) == 0
            for request in (1, 2):
                sides_of = zip(twice.joint.held(request), twice.apart.held(request), strict=True)
                for mine, theirs in sides_of:
                    assert_same_states(mine, theirs)
            assert planned
            assert all(planned)


def test_layers_that_were_stopped_between_their_states_go_on_one_by_one(root: Path) -> None:
    source = family(root, "granitemoehybrid-mamba")
    block = Block(source, 0, 4, "float32")
    tokens = torch.arange(90) % 96
    wanted, found = block.new_cache(8), block.new_cache(8)

    def step(cache: TwoRegionCache, first: int, end: int, **more: Any) -> torch.Tensor | None:
        sees = tree_mask(first, np.tri(end - first, dtype=np.bool_))
        return block.forward(tokens[first:end], torch.arange(first, end), cache, sees, **more)

    step(wanted, 0, 70)
    step(found, 0, 70)
    looks = iter([False, True])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LayerPlan, "steps", lambda *_: iter([(0, 2), (2, 4)]))
        assert step(found, 70, 83, stop=lambda: next(looks)) is None
    found.length = 70
    assert found.folded is not None
    found.folded.follow(70, 70)
    for first, end in ((70, 83), (83, 90)):
        one, other = step(wanted, first, end), step(found, first, end)
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


@pytest.mark.parametrize("quant", ["mixed", *tiered(["int4-g32", "int8", "nf4"], [])])
@pytest.mark.parametrize("dtype", tiered(("bfloat16", "float16", "float32"), ["float32"]))
def test_every_form(root: Path, quant: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if quant == "nf4":
        pytest.importorskip("bitsandbytes")
    folder = root / "wide"
    if not folder.is_dir():
        write_checkpoint(folder, hidden_size=64, intermediate_size=128)
    checkpoint = Checkpoint(folder)
    source = (
        MixedSource(checkpoint)
        if quant == "mixed"
        else QuantisingSource(checkpoint, QUANTISATIONS[quant])
    )
    assert differ(sides(source, dtype, monkeypatch)) == 0


@pytest.mark.parametrize("cache_dtype", ["float16", "int8", *tiered(["bfloat16"], [])])
def test_narrow_caches(root: Path, cache_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is what it is alone with them too, rounded by compiled code as by torch."""
    for name in ("gemma2", "qwen3", "lfm2"):
        source = family(root, name)
        with case(name):
            twice = sides(source, "float32", monkeypatch, cache_dtype=cache_dtype)
            assert differ(twice) == 0
            whole = Twice(source, CUTS, "float32")
            whole.open(2)
            whole.run([Asker(2, seed=2).prompt(WINDOW + 30)])
            held, first = (
                torch.cat([*(stem.layers[0] for stem in cache.stems), cache.layer(0)], 2)
                for cache in (side.joint.stages[0]._caches[2] for side in (twice, whole))
            )
            assert held.dtype == getattr(torch, cache_dtype)
            rows = first[:, :, : WINDOW + 30]
            once = as_held(rows, held.dtype).to(held.dtype)
            assert torch.equal(held[:, :, : WINDOW + 30], once), "rounded once"


def test_caches_that_compiled_code_would_misread(root: Path) -> None:
    source = family(root, "llama")
    for dtype, caches in (
        *(("float32", wrong) for wrong in ("float64", "float32", "int64", "half", "\0")),
        *((other, "float16") for other in ("float64", "bfloat16", "float16", "int64")),
        *((other, "int8") for other in ("float64", "int64")),
    ):
        with case(dtype, caches), pytest.raises(ModelError, match="which may have them in"):
            Block(source, 0, 1, dtype, cache_dtype=caches)
    narrow, wide = (
        Block(source, 0, 1, "float32", cache_dtype=caches).new_cache(1).memory(1)
        for caches in ("float16", "")
    )
    assert CompiledPass([narrow, narrow], [], []).count == 2
    with pytest.raises(ValueError, match="too many"):
        CompiledPass([narrow, wide], [], [])


def test_what_is_cancelled_is_looked_at_between_calls_of_so_much_work(root: Path) -> None:
    plan = Block(family(root, "llama"), 0, 4, "float32")._plan
    assert plan is not None
    most = LOOK // plan._layers.weights
    assert list(plan.steps(1, ())) == [(0, 4)]
    assert list(plan.steps(1, (0, 1, 3, 9))) == [(0, 1), (1, 3), (3, 4)]
    assert list(plan.steps(most // 3, ())) == [(0, 3), (3, 4)]
    assert list(plan.steps(most + 1, ())) == [(n, n + 1) for n in range(4)]
