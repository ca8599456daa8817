"""Effort: how busy a stage was, and how much slower its blocks are than its best ones."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.segments import run_block

from edgespec.decoding.effects import (
    CloseCache,
)
from edgespec.machines.events import (
    NO_JOB,
    BlockDone,
    ComputeFailed,
)
from edgespec.runtime.stage_load import WINDOW, StageLoad
from edgespec.tree.ledger import Rows
from edgespec.types.tensor import Tensor
from edgespec.wire.messages import Health

DEVICE = Health(50.0, 90.0, 8, 4, 0.0, False, "")
DONE = Tensor("float32", (0, 0), b"")


class Stage:
    """Blocks that take what a test says, one after the other."""

    def __init__(self) -> None:
        self.stage_load = StageLoad()
        self.now = 100.0
        self.jobs = 0

    def ask(self, rows: int = 1, committed: int = 0) -> int:
        """A block is asked for; returns its job."""
        self.jobs += 1
        ids = np.arange(rows, dtype=np.int64)
        sees = np.ones((rows, rows), np.bool_)
        block = run_block(self.jobs, 1, Rows(ids, ids, ids, ids), None, committed, sees)
        self.stage_load.asked([CloseCache(9), block], self.now)
        return self.jobs

    def run(self, seconds: float, rows: int = 1, committed: int = 0) -> None:
        """One block from its beginning to its end."""
        job = self.ask(rows, committed)
        self.now += seconds
        self.stage_load.ended(BlockDone(job, DONE), self.now)

    def health(self) -> Health:
        """What it says now."""
        return self.stage_load.health(DEVICE, self.now)


def test_what_the_device_says_is_passed_on() -> None:
    said = Stage().health()
    assert said == DEVICE, "and nothing is added that is not known"


def test_busy_is_the_share_since_the_last_time() -> None:
    stage = Stage()
    stage.health()
    stage.run(0.5)
    stage.now += 1.5
    assert stage.health().busy == pytest.approx(0.25)
    stage.now += 2.0
    assert stage.health().busy == 0.0


def test_a_block_that_still_runs_counts_on_both_sides() -> None:
    stage = Stage()
    stage.health()
    job = stage.ask()
    stage.now += 2.0
    assert stage.health().busy == 1.0
    stage.now += 1.0
    stage.stage_load.ended(BlockDone(job, DONE), stage.now)
    stage.now += 1.0
    assert stage.health().busy == pytest.approx(0.5)


def test_a_block_of_an_earlier_ring_delays_the_next_one_and_is_counted_once() -> None:
    stage = Stage()
    stage.health()
    first, second = stage.ask(), stage.ask()
    stage.now += 1.0
    stage.stage_load.ended(BlockDone(first, None), stage.now)
    stage.now += 0.5
    stage.stage_load.ended(BlockDone(second, DONE), stage.now)
    stage.now += 0.5
    said = stage.health()
    assert said.busy == pytest.approx(0.75)
    assert said.one_row == pytest.approx(0.5), "it was computed from the end of the first one on"


@pytest.mark.parametrize("event", [BlockDone(1, None), ComputeFailed(1, 1, "no memory")])
def test_a_block_that_was_stopped_or_failed_tells_no_time(event: BlockDone | ComputeFailed) -> None:
    stage = Stage()
    stage.health()
    stage.ask()
    stage.now += 1.0
    stage.stage_load.ended(event, stage.now)
    said = stage.health()
    assert (said.busy, said.one_row, said.slowdown) == (1.0, 0.0, 0.0)


def test_ends_of_what_was_no_block_change_nothing() -> None:
    stage = Stage()
    stage.stage_load.ended(ComputeFailed(NO_JOB, 1, "no memory"), stage.now)
    stage.stage_load.ended(BlockDone(77, DONE), stage.now)
    assert stage.health() == DEVICE


def test_times_are_medians_by_the_number_of_rows() -> None:
    stage = Stage()
    for seconds in (0.01, 0.02, 0.9):
        stage.run(seconds, rows=1)
    for rows in (2, 9, 16):
        stage.run(rows / 100, rows=rows)
    stage.run(3.0, rows=17)
    said = stage.health()
    assert said.one_row == pytest.approx(0.02)
    assert said.few_rows == pytest.approx(0.09)


def test_what_is_long_past_is_not_told() -> None:
    stage = Stage()
    for _ in range(20):
        stage.run(0.01)
    assert stage.health().slowdown == pytest.approx(1.0)
    stage.now += 6.0
    said = stage.health()
    assert (said.slowdown, said.one_row, said.few_rows) == (0.0, 0.0, 0.0)


def test_a_stage_that_becomes_slower_says_by_how_much() -> None:
    stage = Stage()
    rng = random.Random(3)
    for _ in range(100):
        stage.run(0.02 * rng.uniform(0.9, 1.1), rows=rng.choice((1, 3, 4)))
    assert stage.health().slowdown == pytest.approx(1.0, abs=0.15)
    stage.now += 10.0
    for _ in range(20):
        stage.run(0.04 * rng.uniform(0.9, 1.1), rows=rng.choice((1, 3, 4)))
    assert stage.health().slowdown == pytest.approx(2.0, abs=0.3)


def test_more_rows_and_longer_contexts_are_no_slowness() -> None:
    stage = Stage()
    for _ in range(WINDOW):
        stage.run(0.01)
    stage.now += 10.0
    for _ in range(WINDOW):
        stage.run(0.10, rows=16)
        stage.run(0.05, committed=9000)
    assert stage.health().slowdown == pytest.approx(1.0)


def test_one_quick_block_is_not_what_all_others_are_measured_by() -> None:
    stage = Stage()
    for seconds in (0.02, 0.001, *[0.02] * 20):
        stage.run(seconds)
    assert stage.health().slowdown == pytest.approx(1.0)


def test_times_of_another_block_do_not_count_but_those_of_another_ring_do() -> None:
    stage = Stage()
    stage.stage_load.take_place("layers 0 to 3")
    for _ in range(WINDOW):
        stage.run(0.01)
    stage.stage_load.take_place("layers 0 to 3")
    for _ in range(WINDOW):
        stage.run(0.03)
    assert stage.health().slowdown > 1.5
    stage.stage_load.take_place("layers 0 to 9")
    for _ in range(WINDOW):
        stage.run(0.03)
    assert stage.health().slowdown == pytest.approx(1.0)
