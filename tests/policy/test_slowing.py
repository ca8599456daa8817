"""The adaptive policy on a ring of which one stage takes three times as long from the middle on."""

from __future__ import annotations

import random
from dataclasses import dataclass
from statistics import mean

import pytest
from support.faults import SlowStage
from support.toy_answers import plain_answer
from support.worlds import FixedDurations, submit, toy_world

from edgespec.machines.effects import Effect, RunBlock
from edgespec.machines.events import Event
from edgespec.policy.estimates import RingEstimates
from edgespec.sim.oracle import Oracle
from edgespec.sim.toy import ToyCodec
from edgespec.wire.client_messages import Finished, Tokens

STAGES, TOKENS = 3, 90
BLOCK_S, ROW_S = 0.010, 0.0005
SLOWER = 3.0
MIDDLE_S = 0.6
SEEDS = range(6)


@dataclass
class RowDurations(FixedDurations):
    """A block takes longer with more rows."""

    def stage(self, number: int, effect: Effect, done: Event | None) -> float:
        """A constant and something for each row."""
        rows = len(effect.rows) if isinstance(effect, RunBlock) else 0
        return super().stage(number, effect, done) + ROW_S * rows


@dataclass(frozen=True)
class Outcome:
    """`rate`: tokens a second from the middle on."""

    rate: float
    step_before: float  # seconds of four rows on the busiest stage, as learnt
    step_after: float
    spread_before: float
    spread_after: float


def play(seed: int, slow_stage: int, *, learning: bool) -> Outcome:
    """One request; the answer is checked. Without `learning`, costs stay what they were."""
    draft = Oracle(random.Random(f"{seed} draft"), 0.8)
    ask = submit(prompt=f"hello{seed}", limit=TOKENS, policy="adaptive")
    right = plain_answer(ToyCodec(), ask, STAGES, 2000)
    draft.tell(right.whole)
    world = toy_world(
        RowDurations([BLOCK_S] * STAGES, head=0.001, draft_row=0.002),
        draft=draft,
        faults=[SlowStage(slow_stage, SLOWER, MIDDLE_S, 1e9)],
    )
    world.submit(ask)
    world.run(until=MIDDLE_S)
    estimates = world.coordinator.learnt["adaptive"]
    step, spread = estimates.step.seconds(4), estimates.step.spread
    early = sum(len(r.message.token_ids) for r in world.replies if isinstance(r.message, Tokens))
    assert 10 < early < TOKENS - 30, "it is in the middle"
    with pytest.MonkeyPatch.context() as patch:
        if not learning:
            patch.setattr(RingEstimates, "segment", lambda *_: None)
        world.run()
    end = world.replies[-1]
    assert isinstance(end.message, Finished)
    assert end.message.token_ids == right.token_ids, "exact, whatever was slow"
    return Outcome(
        (TOKENS - early) / (end.at - MIDDLE_S),
        step,
        estimates.step.seconds(4),
        spread,
        estimates.step.spread,
    )


@pytest.mark.slow
@pytest.mark.parametrize("slow_stage", [1, 2])
def test_costs_are_learnt_anew_and_segments_adapt(slow_stage: int) -> None:
    learnt = [play(seed, slow_stage, learning=True) for seed in SEEDS]
    fixed = [play(seed, slow_stage, learning=False) for seed in SEEDS]
    for one in learnt:
        assert one.step_after > 1.5 * one.step_before, "what a segment costs now"
        assert one.spread_after < 0.9 * one.spread_before, "one stage is what all wait for"
    assert all(one.step_after == one.step_before for one in fixed)
    gain = mean(one.rate for one in learnt) / mean(one.rate for one in fixed)
    assert gain > 0.9, f"learning made it {gain:.2f} times as fast"
