"""Heads in the middle of drafts: an emulated and a simulated coordinator are charged alike."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from support.cases import case
from support.spans import Span, keeping

from edgespec.backends.emulated import Emulated
from edgespec.backends.jobs import JointDone, effects_of
from edgespec.backends.waiting import Waiting
from edgespec.decoding.effects import CloseDraft, Draft, RunHead
from edgespec.machines.effects import Effect
from edgespec.machines.events import BlockDone, Event
from edgespec.policy.base import Grow
from edgespec.sim.clock import Clock
from edgespec.sim.worker import Turns
from edgespec.tree.ledger import Rows
from edgespec.types.tensor import Tensor
from edgespec.verify.sampling import Sampling

TOGETHER = 0.7
"""What joint jobs are charged of what they would take one by one."""
ONE = np.zeros(1, np.int64)


def head(job: int) -> RunHead:
    return RunHead(
        job, 1, Tensor("float32", (1, 1), bytes(4)), Rows(ONE, ONE, ONE, ONE), Sampling()
    )


def draft(job: int, request: int = 1) -> Draft:
    return Draft(job, request, Grow(1, 1, 1), ())


@dataclass
class Schedule:
    """What a coordinator is asked for: {job: (when, effect, seconds, parts)}; real seconds of all
    are a share of the charged ones."""

    asked: dict[int, tuple[float, Effect, float, Sequence[float]]]
    real: float = 0.0
    charged: float = 0.0

    def seconds(self, effect: Effect, done: Event | None = None) -> float:
        """As charged, together less."""
        jobs = [getattr(one, "job", -1) for one in effects_of(effect)]
        seconds = sum(self.asked[job][2] for job in jobs)
        self.charged += seconds if len(jobs) == 1 else TOGETHER * seconds
        return seconds if len(jobs) == 1 else TOGETHER * seconds

    def parts(self, effect: Effect) -> Sequence[float]:
        """As charged."""
        return self.asked[getattr(effects_of(effect)[0], "job", -1)][3]


def simulated(schedule: Schedule) -> tuple[dict[int, float], list[Span]]:
    """When each job ends in virtual time, and the spans."""
    clock, ends, spans = Clock(), dict[int, float](), list[Span]()

    def done(node: int, effect: Effect, event: Event | None) -> None:
        ends[getattr(effect, "job", -1)] = clock.now

    worker = keeping(spans)(
        0,
        clock,
        lambda effect, stop: JointDone((BlockDone(0, None),) * len(effects_of(effect))),
        schedule.seconds,
        schedule.parts,
        done,
        Turns(),
        at_start=True,
    )
    for at, effect, _, _ in schedule.asked.values():
        clock.book(at, worker.add, effect)
    while clock.step():
        pass
    assert worker.quiet
    assert worker.busy == pytest.approx(sum(span.end - span.start for span in spans))
    return ends, spans


class EmulatedWorker:
    """A worker on a clock that moves as it waits, and notices a head as soon as that is asked."""

    def __init__(self, schedule: Schedule) -> None:
        self.now = self.asked_at = 0.0
        self.ends: dict[int, float] = {}
        self._schedule = schedule
        coming = sorted(schedule.asked.values(), key=lambda one: one[0])
        self._coming = deque((at, effect) for at, effect, _, _ in coming)
        self._waiting = Waiting()
        self._emulated = Emulated(self._perform, schedule, self, lambda: self.now, self._wait)

    def run(self) -> dict[int, float]:
        """Carry out everything; when each job ended."""
        while self._coming or self._waiting:
            self._wait(0.0)
            if not self._waiting:
                self._wait(self._coming[0][0] - self.now + 1e-12)
            self._do(*self._waiting.take(self._emulated.free_at))
        return self.ends

    def head_asked(self, timeout: float) -> float | None:
        """See emulated.Asked."""
        until = self.now + max(timeout, 0.0)
        waiting = self._waiting
        while waiting.head_at is None and self._coming and self._coming[0][0] <= until:
            self._wait(max(self._coming[0][0] - self.now, 0.0))
        if waiting.head_at is None:
            self._wait(until - self.now)
        return waiting.head_at

    def run_head(self) -> None:
        """See emulated.Asked."""
        asked_at = self.asked_at
        self._do(*self._waiting.take(self._emulated.free_at))
        self.asked_at = asked_at

    def _do(self, asked_at: float, effect: Effect) -> None:
        self.asked_at = asked_at
        self._emulated.perform(effect, lambda: False)
        for one in effects_of(effect):
            self.ends[getattr(one, "job", -1)] = self._emulated.free_at
        assert self.now >= self._emulated.free_at - 1e-9

    def _perform(self, effect: Effect, stop: Callable[[], bool]) -> Event | None:
        self._wait(self._schedule.real * self._schedule.seconds(effect, None))
        return BlockDone(0, None)

    def _wait(self, seconds: float) -> None:
        self.now += seconds
        while self._coming and self._coming[0][0] <= self.now:
            at, effect = self._coming.popleft()
            self._waiting.add(effect, at)


def both(schedule: Schedule) -> tuple[dict[int, float], list[Span]]:
    """Play it both ways; the ends, which are the same, and the simulated spans."""
    ends, spans = simulated(schedule)
    assert EmulatedWorker(schedule).run() == pytest.approx(ends)
    return ends, spans


@pytest.mark.parametrize("real", [0.0, 0.9])
def test_a_head_starts_at_the_drafts_next_boundary_and_moves_its_end(real: float) -> None:
    asked = {
        1: (0.0, draft(1), 1.0, (1.0,) * 10),
        2: (0.12, head(2), 0.5, (1.0,)),
        3: (0.3, head(3), 0.25, (1.0,)),
        4: (1.31, head(4), 0.125, (1.0,)),
        5: (0.01, draft(5), 1.0, (1.0,)),
    }
    ends, spans = both(Schedule(asked, real))
    expected = {2: 0.7, 3: 0.95, 4: 1.475, 1: 1.875, 5: 2.875}
    assert ends == pytest.approx(expected)
    stretches = [(span.job, span.start, span.end) for span in spans]
    assert stretches == [
        (job, pytest.approx(start), pytest.approx(end))
        for job, start, end in (
            (1, 0.0, 0.2),
            (2, 0.2, 0.7),
            (3, 0.7, 0.95),
            (1, 0.95, 1.35),
            (4, 1.35, 1.475),
            (1, 1.475, 1.875),
            (5, 1.875, 2.875),
        )
    ]


def test_a_head_of_a_drafts_last_part_waits_for_its_end() -> None:
    asked = {
        1: (0.0, draft(1), 1.0, (1.0, 4.0)),
        2: (0.21, head(2), 0.5, (1.0,)),
        3: (0.0, CloseDraft(1), 0.0, (1.0,)),
    }
    schedule = Schedule(asked)
    schedule.asked[-1] = schedule.asked.pop(3)
    ends, spans = both(schedule)
    assert ends == pytest.approx({1: 1.0, 2: 1.5, -1: 1.5})
    assert len(spans) == 3


def test_any_schedule_is_charged_alike() -> None:
    interrupted = joined = 0
    for seed in range(200):
        rng = random.Random(seed)
        asked: dict[int, tuple[float, Effect, float, Sequence[float]]] = {}
        for job in range(12):
            parts = [rng.choice((0.5, 1.0, 3.0)) for _ in range(rng.randint(1, 8))]
            what = head(job) if rng.random() < 0.5 else draft(job, request=rng.randint(1, 3))
            asked[job] = rng.uniform(0.0, 6.0), what, rng.uniform(0.1, 1.5), parts
        with case(seed):
            schedule = Schedule(asked)
            ends, spans = simulated(schedule)
            charged, schedule.real = schedule.charged, rng.choice((0.0, 0.5))
            assert EmulatedWorker(schedule).run() == pytest.approx(ends)
            assert len(ends) == 12
            assert all(a.end <= b.start + 1e-9 for a, b in pairwise(spans))
            assert sum(span.end - span.start for span in spans) == pytest.approx(charged)
            jobs = len({span.job for span in spans})
            interrupted, joined = interrupted + len(spans) - jobs, joined + 12 - jobs
    assert interrupted > 150
    assert joined > 150
