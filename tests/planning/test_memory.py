"""Memory: what a share of a model takes, against the engine's own figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.rings import submit
from support.wires import Wire

from edgespec.config import QUANTISATIONS
from edgespec.daemon.profiles import profile_named
from edgespec.model import kv_cache
from edgespec.planning.cost_model import (
    ARCHITECTURES,
    COST_MODELS,
    NO_DRAFT,
    cost_model_named,
)
from edgespec.planning.memory import (
    GIB,
    RUNTIME_BYTES,
    SHARED_BYTES,
    SPECULATIVE_ROWS,
    STEP,
    WIDEST_SEGMENT,
    Needs,
    PlannedModel,
)
from edgespec.policy.adaptive import Adaptive

NANO = profile_named("jetson-orin-nano-8gb")
MODEL = PlannedModel(
    "llama-2-13b",
    ARCHITECTURES["llama-2-13b"],
    QUANTISATIONS["int4"],
    COST_MODELS["llama-2-13b"].draft,
)
NEEDS = Needs(MODEL, 4096, 1)


def test_the_engine_s_own_reserve_is_counted() -> None:
    wire = Wire()
    wire.submit(submit(1, "hello", 50, "autoregressive"))
    (part,) = wire.segments[0].parts
    assert part.reserve == len(wire.request.prompt), "what comes after it is given as it is used"
    rows = wire.request.rows_after(1000)
    assert rows == len(wire.request.prompt) + 50 + SPECULATIVE_ROWS, "of the longest answer"
    assert Adaptive().most_rows == WIDEST_SEGMENT
    assert NEEDS.rows == 4352 + 544 + 64
    assert Needs(MODEL, 1000, 3).rows == 3 * 1256 + 471 + 3 * 64
    assert STEP == kv_cache.STEP


def test_thirteen_billion_on_boards_of_8_gb() -> None:
    """The arithmetic that docs/memory.md shows."""
    of = MODEL.of
    assert of.layer_weights == 317_194_240
    assert MODEL.costs.layer_bytes == 317_194_240 * 9 // 16 == 178_421_760
    assert MODEL.costs.kv_bytes == 2 * 5120 * 2
    assert NEEDS.layer == 178_421_760 + 4960 * 20480
    assert NEEDS.most_layers(int(NANO.memory_bytes.value)) == 22


def test_a_stage_is_layers_cache_and_process() -> None:
    need = NEEDS.stage(10)
    assert need.weights == 10 * MODEL.costs.layer_bytes
    assert need.cache == 10 * NEEDS.rows * MODEL.costs.kv_bytes
    # Loading the largest matrix takes more than a pass of the widest segment.
    assert need.overhead == RUNTIME_BYTES + 2 * 5120 * 13824
    # With no layers yet, the head's original takes their place.
    last = replace(NEEDS, head_last=True).stage(0, last=True)
    assert last.overhead == RUNTIME_BYTES + 2 * 32000 * 5120


def test_the_coordinator_holds_head_and_draft() -> None:
    need, draft = NEEDS.coordinator(), MODEL.draft
    head = 32000 * (5120 + 2)  # 8 bits a weight, 16 a row
    assert need.weights == head + draft.held_bytes
    embedding = 2 * 32000 * 2048
    assert draft.held_bytes == 22 * draft.layer_bytes + embedding + draft.head.bytes
    assert need.cache == 22 * NEEDS.rows * draft.kv_bytes
    tied = cost_model_named("llama-3.1-8b", QUANTISATIONS["none"]).draft
    assert tied.held_bytes == tied.layers * tied.layer_bytes + tied.head.bytes


def test_while_the_head_is_loaded_its_original_is_there_too() -> None:
    """Without a draft, whose memory it could have meanwhile."""
    of = replace(MODEL.of, vocab=1, hidden=2**30)
    plain = replace(MODEL, of=of, draft=NO_DRAFT, head=QUANTISATIONS["none"])
    few = replace(plain, head=QUANTISATIONS["int4"])
    original = 2 * 2**30
    for model, held in ((plain, original), (few, 2**30 * 9 // 16)):
        need = Needs(model, 4096, 1).coordinator()
        assert (need.weights, need.overhead) == (held, RUNTIME_BYTES + original)


def test_beside_a_stage_the_coordinator_has_loaded_its_models() -> None:
    """The stage is started then (daemon.coordinator), so that the original of the head is gone."""
    plain = Needs(replace(MODEL, draft=NO_DRAFT), 4096, 1)
    loading, steady = plain.coordinator(), plain.coordinator(beside_stage=True)
    assert (loading.weights, loading.cache) == (steady.weights, steady.cache)
    logits = 3 * 4 * WIDEST_SEGMENT * 32000
    assert loading.overhead == RUNTIME_BYTES + 2 * 32000 * 5120
    assert steady.overhead == RUNTIME_BYTES - SHARED_BYTES + logits


@pytest.mark.parametrize("layers", [2, 10])
def test_the_head_is_counted_where_it_is(layers: int) -> None:
    there = replace(NEEDS, head_last=True)
    head = MODEL.costs.head.bytes
    here = NEEDS.coordinator()
    assert there.coordinator().weights == here.weights - head
    assert there.stage(layers) == NEEDS.stage(layers)
    assert there.stage(layers, True).weights == NEEDS.stage(layers).weights + head
    total = there.stage(layers, True).total
    assert there.most_layers(total, True) == layers
    assert there.most_layers(total - 1, True) == layers - 1
    assert there.most_layers(total) >= layers


@pytest.mark.parametrize("layers", [0, 1, 7, 40])
def test_so_many_layers_fit_and_not_one_more(layers: int) -> None:
    exactly = NEEDS.stage(layers).total
    assert NEEDS.most_layers(exactly) == layers
    assert NEEDS.most_layers(exactly - 1) == max(0, layers - 1)
    assert NEEDS.most_layers(1000 * GIB) == 40
