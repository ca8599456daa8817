"""Durations: each compute effect is charged by what it really does, on the node that does it."""

from __future__ import annotations

import numpy as np
import pytest
from support.segments import run_block

from edgespec.backends.compute import COORDINATOR_COMPUTE, STAGE_COMPUTE
from edgespec.backends.timed import CoordinatorDurations, StageDurations
from edgespec.daemon.profiles import profile_named
from edgespec.decoding.effects import (
    CloseCache,
    CloseDraft,
    Draft,
    ForkCache,
    GatherRows,
    OpenCache,
    OpenDraft,
    RunHead,
)
from edgespec.machines.effects import Effect, RunBlock
from edgespec.planning.cost_model import cost_model_named
from edgespec.planning.costs import ring_costs
from edgespec.policy.base import Deepen, Expand, Grow
from edgespec.tree.ledger import Rows
from edgespec.types.draft_pass import DraftPass
from edgespec.types.tensor import Tensor
from edgespec.verify.sampling import Sampling

RING = ring_costs([profile_named("jetson-orin-nano-8gb")] * 5, cost_model_named("llama-2-13b"))
STAGE, D0 = RING.stages[0], RING.coordinator


def block(rows: int, committed: int, behind: int) -> RunBlock:
    """A block of `rows` rows, with `behind` slots behind the committed ones, its own included."""
    ids = np.arange(rows)
    sees = np.ones((rows, behind), np.bool_)
    return run_block(1, 1, Rows(ids, ids - 1, ids, ids), None, committed, sees)


def head(rows: int) -> RunHead:
    hidden = Tensor("float16", (rows, 4), bytes(rows * 8))
    return RunHead(1, 1, hidden, Rows(*[np.arange(rows)] * 4), Sampling())


STAGE_EFFECTS: list[Effect] = [
    OpenCache(1, 64),
    ForkCache(2, 1),
    CloseCache(1),
    GatherRows(1, 10, np.array([3, 5, 6])),
    block(4, 100, 24),
    head(3),
]
COORDINATOR_EFFECTS: list[Effect] = [
    OpenDraft(1, Sampling()),
    Draft(1, 1, Grow(5, 8, 1), (1, 2, 3)),
    Draft(1, 1, Deepen(2, 8, 1), ()),
    Draft(1, 1, Expand((1,), 8, 1), (1, 2, 3), ((4,),)),
    head(2),
    CloseDraft(1),
]


def test_every_compute_effect_is_covered() -> None:
    assert {type(effect) for effect in STAGE_EFFECTS} == set(STAGE_COMPUTE)
    assert {type(effect) for effect in COORDINATOR_EFFECTS} == set(COORDINATOR_COMPUTE)


def test_a_stage_is_charged_for_rows_seen_rows_and_moved_rows() -> None:
    durations = StageDurations(STAGE)
    assert [durations.seconds(effect) for effect in STAGE_EFFECTS] == [
        0.0,
        0.0,
        0.0,
        STAGE.gather_seconds(3),
        STAGE.block_seconds(4, 124),
        STAGE.head_seconds(3),
    ]
    assert durations.seconds(block(0, 100, 20)) == 0.0


def test_a_block_can_be_stopped_behind_each_of_its_layers() -> None:
    durations = StageDurations(STAGE)
    assert [len(durations.parts(effect)) for effect in STAGE_EFFECTS] == [1, 1, 1, 1, 10, 1]
    whole = durations.seconds(block(4, 100, 24))
    assert set(durations.parts(block(4, 100, 24))) == {1.0}, "layers are alike"
    assert whole / 10 == pytest.approx(STAGE.layer_seconds(4, 124))


def test_a_draft_can_be_interrupted_behind_each_layer_of_its_passes_and_not_in_its_matrix() -> None:
    durations = CoordinatorDurations(D0)
    expand = Draft(1, 1, Expand((1,), 8, 1), tuple(range(50)), ((1,),))
    whole = durations.seconds(expand, passes(3, 4))
    parts = durations.parts(expand)
    layers = D0.model.draft_of("independent").layers
    assert len(parts) == 2 * (layers + 1)
    assert sum(parts) == pytest.approx(whole)
    assert len(set(parts[:layers])) == 1, "layers are alike"
    assert parts[layers] > 2 * parts[0], "a matrix of 32k tokens is larger than a layer"
    assert sum(parts[layers + 1 :]) == pytest.approx(D0.draft_seconds(4, 50))
    durations.seconds(head(6), ())
    assert durations.parts(expand) == parts, "a head in between has no say in it"
    durations.seconds(expand, ())
    assert not durations.parts(expand)


def passes(*rows: int, source: str = "independent") -> tuple[DraftPass, ...]:
    return tuple(DraftPass(count, source) for count in rows)


def test_every_source_has_its_own_price() -> None:
    durations = CoordinatorDurations(D0)
    expand = Draft(1, 1, Expand((1,), 8, 1), tuple(range(50)), ((1,),))
    both = (*passes(3), *passes(4, source="eagle"))
    assert durations.seconds(expand, both) == pytest.approx(
        D0.draft_seconds(3, 50) + D0.draft_seconds(4, 50, "eagle")
    )
    assert D0.draft_seconds(4, 50, "eagle") != D0.draft_seconds(4, 50)


def test_the_coordinator_is_charged_for_head_rows_and_draft_passes() -> None:
    durations = CoordinatorDurations(D0)
    context = tuple(range(50))
    assert durations.seconds(OpenDraft(1, Sampling()), ()) == 0.0
    assert durations.seconds(head(6), ()) == D0.head_seconds(6)
    assert durations.seconds(
        Draft(1, 1, Grow(5, 8, 1), context), passes(50, 1, 8)
    ) == pytest.approx(D0.draft_seconds(50, 50) + D0.draft_seconds(1, 50) + D0.draft_seconds(8, 50))
    assert durations.seconds(Draft(1, 1, Expand((1,), 8, 1), context, ((1,),)), passes(3)) == (
        D0.draft_seconds(3, 50)
    )
    assert durations.seconds(Draft(1, 1, Grow(5, 8, 1), context), ()) == 0.0


def test_a_deepened_tree_attends_to_the_context_that_it_hangs_from() -> None:
    durations = CoordinatorDurations(D0)
    durations.seconds(Draft(1, 1, Grow(5, 8, 1), tuple(range(50))), passes(50))
    durations.seconds(Draft(1, 2, Grow(5, 8, 1), tuple(range(900))), passes(900))
    assert durations.seconds(Draft(2, 1, Deepen(2, 8, 1), ()), passes(8, 8)) == pytest.approx(
        2 * D0.draft_seconds(8, 50)
    )
    assert durations.seconds(CloseDraft(1), ()) == 0.0
    durations.seconds(Draft(1, 3, Grow(5, 8, 1), tuple(range(50))), passes(50))
    assert durations.seconds(OpenDraft(4, Sampling(), base=3, rows=20), ()) == 0.0
    assert durations.seconds(Draft(2, 3, Deepen(2, 8, 1), ()), passes(8)) == D0.draft_seconds(8, 0)
    assert durations.seconds(Draft(2, 1, Deepen(2, 8, 1), ()), passes(8)) == D0.draft_seconds(8, 0)


def test_an_effect_of_the_other_node_is_refused() -> None:
    with pytest.raises(TypeError, match="a stage computes no CloseDraft"):
        StageDurations(STAGE).seconds(CloseDraft(1))
    with pytest.raises(TypeError, match="a coordinator computes no RunBlock"):
        CoordinatorDurations(D0).seconds(block(1, 0, 1), ())
