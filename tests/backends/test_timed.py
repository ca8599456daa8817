"""Durations: each compute effect is charged by what it really does, on the node that does it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs
from support.segments import run_block

from edgespec.backends.compute import COORDINATOR_COMPUTE, STAGE_COMPUTE
from edgespec.backends.timed import CoordinatorDurations, StageDurations
from edgespec.daemon.profiles import profile_named
from edgespec.decoding.effects import (
    CloseCache,
    CloseDraft,
    Draft,
    FindMasks,
    ForkCache,
    GatherRows,
    MoveCache,
    OpenCache,
    OpenDraft,
    RunHead,
)
from edgespec.decoding.events import HeadDone
from edgespec.machines.effects import Effect, RunBlock
from edgespec.machines.events import ComputeFailed
from edgespec.planning.cost_model import cost_model_named
from edgespec.planning.costs import ring_costs
from edgespec.planning.profile import Figure
from edgespec.policy.base import Deepen, Expand, Grow
from edgespec.tree.ledger import Rows
from edgespec.tree.stems import Fork
from edgespec.types.draft_pass import DraftPass, RankedRows
from edgespec.types.tensor import Tensor
from edgespec.verify.noise import KEPT_ROWS
from edgespec.verify.sampling import Choice, Sampling

NANO = profile_named("jetson-orin-nano-8gb")
# So that cached rows count.
QUICK = structs.replace(NANO, launch_seconds=Figure(0, "made up"))
RING = ring_costs([QUICK] * 5, cost_model_named("llama-2-13b"))
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
    MoveCache(2, 1),
    ForkCache(3, 2, Fork(split=0, frozen=40, stems=1, copied=0, moved=50)),
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
    FindMasks(1, ()),
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
        STAGE.gather_seconds(50),
        0.0,
        STAGE.gather_seconds(3),
        STAGE.block_seconds(4, 124),
        STAGE.head_seconds(3),
    ]
    assert durations.seconds(block(0, 100, 20)) == 0.0


def test_weights_are_read_once_for_all_requests_and_every_cache_for_itself() -> None:
    durations = StageDurations(STAGE)
    one, two = block(4, 100, 24), block(2, 300, 5)
    both = replace(one, parts=(*one.parts, *two.parts))
    together = durations.seconds(both)
    assert together == STAGE.block_seconds(6, 124 + 305, requests=2)
    apart = durations.seconds(one) + durations.seconds(two)
    weights = STAGE.block_seconds(2, 0)
    assert together == pytest.approx(apart - weights, rel=0.08), "two rows more cost 8 %, too"


def test_a_block_can_be_stopped_behind_each_of_its_layers() -> None:
    durations = StageDurations(STAGE)
    assert [len(durations.parts(effect)) for effect in STAGE_EFFECTS] == [
        1,
        1,
        1,
        1,
        1,
        10,
        1,
    ]
    whole = durations.seconds(block(4, 100, 24))
    assert set(durations.parts(block(4, 100, 24))) == {1.0}, "layers are alike"
    assert whole / 10 == pytest.approx(STAGE.layer_seconds(4, 124))


def test_a_draft_can_be_interrupted_behind_each_layer_of_its_passes_and_not_in_its_matrix() -> None:
    durations = CoordinatorDurations(D0)
    expand = Draft(1, 1, Expand((1,), 8, 1), tuple(range(50)), ((1,),))
    ranks = [RankedRows((50,) * rows, "independent", "greedy", 0) for rows in (3, 4)]
    one, other = passes(3, 4)
    whole = durations.seconds(expand, None, (one, ranks[0], other, ranks[1]))
    parts = durations.parts(expand)
    layers = D0.model.draft_of("independent").layers
    assert len(parts) == 2 * (layers + 1)
    assert sum(parts) == pytest.approx(whole)
    assert len(set(parts[:layers])) == 1, "layers are alike"
    assert parts[layers] == D0.rank_seconds(3, "greedy")
    assert sum(parts[layers + 1 : -1]) == pytest.approx(D0.draft_seconds(4, 50))
    durations.seconds(head(6), None, ())
    assert durations.parts(expand) == parts, "a head in between has no say in it"
    durations.seconds(expand, None, ())
    assert not durations.parts(expand)


def passes(*rows: int, source: str = "independent") -> tuple[DraftPass, ...]:
    return tuple(DraftPass(count, source) for count in rows)


def test_every_source_has_its_own_price() -> None:
    durations = CoordinatorDurations(D0)
    expand = Draft(1, 1, Expand((1,), 8, 1), tuple(range(50)), ((1,),))
    both = (*passes(3), *passes(4, source="eagle"))
    assert durations.seconds(expand, None, both) == pytest.approx(
        D0.draft_seconds(3, 50) + D0.draft_seconds(4, 50, "eagle")
    )
    assert D0.draft_seconds(4, 50, "eagle") != D0.draft_seconds(4, 50)
    ranks = RankedRows((50, 51), "eagle", "greedy", 0), RankedRows((50,), "ngram", "greedy", 0)
    assert durations.seconds(expand, None, ranks) == pytest.approx(
        D0.rank_seconds(2, "greedy", "eagle") + D0.rank_seconds(1, "greedy", "ngram")
    )


def test_the_coordinator_is_charged_for_head_rows_and_draft_passes() -> None:
    durations = CoordinatorDurations(D0)
    context = tuple(range(50))
    assert durations.seconds(OpenDraft(1, Sampling()), None, ()) == 0.0
    assert durations.seconds(head(6), None, ()) == D0.head_seconds(6)
    assert durations.seconds(
        Draft(1, 1, Grow(5, 8, 1), context), None, passes(50, 1, 8)
    ) == pytest.approx(D0.draft_seconds(50, 50) + D0.draft_seconds(1, 50) + D0.draft_seconds(8, 50))
    assert durations.seconds(
        Draft(1, 1, Expand((1,), 8, 1), context, ((1,),)), None, passes(3)
    ) == (D0.draft_seconds(3, 50))
    assert durations.seconds(Draft(1, 1, Grow(5, 8, 1), context), None, ()) == 0.0


def done(*rows: int) -> HeadDone:
    """A head that looked at these rows."""
    found = np.array(rows)
    return HeadDone(1, 1, Choice(found, found, np.zeros(len(rows))))


def test_a_head_is_charged_for_the_rows_that_it_looked_at() -> None:
    for sampling in (Sampling(), Sampling(1.0), Sampling(1.0, top_k=5)):
        durations = CoordinatorDurations(D0)
        walk = replace(head(6), sampling=sampling)
        seconds = durations.seconds(walk, done(0, 2, 5), ())
        noise = D0.noise_seconds(3 if sampling.way == "sampled" else 0)
        expected = D0.head_seconds(6) + D0.choose_seconds(3, sampling.way) + noise
        assert seconds == pytest.approx(expected)
        assert durations.seconds(walk, ComputeFailed(1, 1, "no"), ()) == D0.head_seconds(6)
    logprobs = CoordinatorDurations(D0).seconds(replace(head(6), top=0), done(0), ())
    both = D0.choose_seconds(1, "greedy") + D0.choose_seconds(2, "filtered")
    assert logprobs == pytest.approx(D0.head_seconds(6) + both)


def test_noise_is_made_once_a_position_for_draft_and_head() -> None:
    durations = CoordinatorDurations(D0)
    expand = Draft(1, 1, Expand((1,), 8, 1), (1,), ((1,),))

    def ranked(*positions: int, seed: int = 7, source: str = "independent") -> float:
        work = (RankedRows(positions, source, "sampled", seed),)
        seconds = durations.seconds(expand, None, work)
        return seconds - D0.rank_seconds(len(positions), "sampled", source)

    walk = replace(head(6), sampling=Sampling(1.0, seed=7))  # row i is of position i + 1

    def chosen(*rows: int) -> float:
        seconds = durations.seconds(walk, done(*rows), ())
        return seconds - D0.head_seconds(6) - D0.choose_seconds(len(rows), "sampled")

    assert ranked(1, 1, 2) == pytest.approx(D0.noise_seconds(2))
    assert chosen(0, 1) == pytest.approx(0.0)
    assert chosen(0, 2) == pytest.approx(D0.noise_seconds(1))
    assert ranked(3) == pytest.approx(0.0)
    assert ranked(3, seed=8) == pytest.approx(D0.noise_seconds(1))
    assert ranked(9, source="ngram") == pytest.approx(0.0), "it needs that of few tokens"
    assert ranked(*range(100, 100 + KEPT_ROWS)) == pytest.approx(D0.noise_seconds(KEPT_ROWS))
    assert chosen(0) == pytest.approx(D0.noise_seconds(1)), "it was forgotten"


def test_a_deepened_tree_attends_to_the_context_that_it_hangs_from() -> None:
    durations = CoordinatorDurations(D0)
    durations.seconds(Draft(1, 1, Grow(5, 8, 1), tuple(range(50))), None, passes(50))
    durations.seconds(Draft(1, 2, Grow(5, 8, 1), tuple(range(900))), None, passes(900))
    deepen = Draft(2, 1, Deepen(2, 8, 1), ())
    seconds = durations.seconds(deepen, None, passes(8, 8))
    assert seconds == pytest.approx(2 * D0.draft_seconds(8, 50))
    assert durations.seconds(CloseDraft(1), None, ()) == 0.0
    durations.seconds(Draft(1, 3, Grow(5, 8, 1), tuple(range(50))), None, passes(50))
    assert durations.seconds(OpenDraft(4, Sampling(), base=3, rows=20), None, ()) == 0.0
    assert durations.seconds(Draft(2, 3, Deepen(2, 8, 1), ()), None, passes(8)) == D0.draft_seconds(
        8, 0
    )
    assert durations.seconds(Draft(2, 1, Deepen(2, 8, 1), ()), None, passes(8)) == D0.draft_seconds(
        8, 0
    )


def test_an_effect_of_the_other_node_is_refused() -> None:
    with pytest.raises(TypeError, match="a stage computes no CloseDraft"):
        StageDurations(STAGE).seconds(CloseDraft(1))
    with pytest.raises(TypeError, match="a coordinator computes no RunBlock"):
        CoordinatorDurations(D0).seconds(block(1, 0, 1), None, ())
