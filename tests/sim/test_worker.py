"""Worker: effects take their time in order, and an abort ends a block with the layer that runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.segments import run_block
from support.spans import Span, keeping

from edgespec.decoding.effects import CloseCache, RunHead
from edgespec.errors import CapacityError
from edgespec.machines.effects import Effect, RunBlock
from edgespec.machines.events import BlockDone, ComputeFailed, Event
from edgespec.sim.clock import Clock
from edgespec.sim.worker import Turns, VirtualWorker
from edgespec.tree.ledger import Rows
from edgespec.types.stop_check import StopCheck
from edgespec.types.tensor import Tensor
from edgespec.verify.sampling import Sampling

ROW = np.zeros(1, np.int64)


def block(job: int) -> RunBlock:
    return run_block(job, 1, Rows(ROW, ROW, ROW, ROW), None, 0, np.ones((1, 1), np.bool_))


class Bench:
    """A worker whose every effect takes one second, a block in four layers."""

    def __init__(self, *, at_start: bool = False, seconds: float = 1.0) -> None:
        self.clock = Clock()
        self.spans: list[Span] = []
        self.performed: list[tuple[float, Effect, bool]] = []
        self.done: list[tuple[float, Event | None]] = []
        self._seconds = seconds
        self.worker = keeping(self.spans)(
            1,
            self.clock,
            self.perform,
            self.seconds,
            self.parts,
            self._done,
            Turns(),
            at_start=at_start,
        )

    def seconds(self, effect: Effect, done: Event | None) -> float:
        return self._seconds

    def parts(self, effect: Effect) -> Sequence[float]:
        return (1.0,) * 4

    def perform(self, effect: Effect, stop: Callable[[], bool]) -> Event | None:
        self.performed.append((self.clock.now, effect, stop()))
        if isinstance(effect, CloseCache):
            raise CapacityError("no")
        return BlockDone(effect.job, None)

    def _done(self, node: int, effect: Effect, event: Event | None) -> None:
        self.done.append((self.clock.now, event))

    def run(self) -> None:
        while self.clock.step():
            pass


def test_effects_follow_one_another() -> None:
    bench = Bench()
    bench.worker.add(block(1))
    bench.worker.add(block(2))
    assert not bench.worker.quiet
    bench.run()
    assert bench.done == [(1.0, BlockDone(1, None)), (2.0, BlockDone(2, None))]
    assert [at for at, _, _ in bench.performed] == [1.0, 2.0]
    assert bench.worker.quiet
    assert bench.worker.busy == 2.0


def test_what_decides_its_own_duration_is_carried_out_at_its_start() -> None:
    bench = Bench(at_start=True)
    bench.worker.add(block(1))
    bench.worker.add(block(2))
    bench.run()
    assert [at for at, _, _ in bench.performed] == [0.0, 1.0]
    assert [at for at, _ in bench.done] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("abort_at", "end", "stopped"),
    [
        (0.0, 0.0, True),
        (0.3, 0.5, True),
        (0.5, 0.5, True),
        (0.7, 0.75, True),
        (0.8, 1.0, False),
    ],
)
def test_an_abort_ends_a_block_with_the_layer_that_runs(
    abort_at: float, end: float, stopped: bool
) -> None:
    bench = Bench()
    bench.worker.add(block(1))
    bench.clock.book(abort_at, bench.worker.abort, 1)
    bench.run()
    assert bench.performed[0][0] == pytest.approx(end)
    assert bench.performed[0][2] is stopped
    assert bench.worker.busy == pytest.approx(end)
    assert bench.spans[0].stopped is stopped


def test_a_second_abort_changes_nothing() -> None:
    bench = Bench()
    bench.worker.add(block(1))
    for at in (0.3, 0.4):
        bench.clock.book(at, bench.worker.abort, 1)
    bench.run()
    assert [at for at, _ in bench.done] == [0.5]


def test_a_block_that_is_aborted_before_its_turn_takes_no_time() -> None:
    bench = Bench()
    bench.worker.add(block(1))
    bench.worker.add(block(2))
    bench.worker.add(block(3))
    bench.clock.book(0.5, bench.worker.abort, 2)
    bench.run()
    assert [(at, stopped) for at, _, stopped in bench.performed] == [
        (1.0, False),
        (1.0, True),
        (2.0, False),
    ]


def test_a_block_that_takes_no_time_can_be_stopped_before_its_first_layer() -> None:
    bench = Bench(seconds=0.0)
    bench.worker.add(block(1))
    bench.worker.abort(1)
    bench.run()
    assert bench.performed[0][2]


def test_aborting_what_is_not_there_is_harmless() -> None:
    bench = Bench()
    bench.worker.abort(1)
    bench.worker.add(block(2))
    bench.worker.abort(1)
    bench.run()
    assert bench.performed[0][2] is False


def joint(job: int) -> RunBlock:
    """Rows of requests 1, 2, 3 and 4, each of which takes a quarter of the time."""
    parts = tuple(replace(block(job).parts[0], request=request) for request in (1, 2, 3, 4))
    return replace(block(job), parts=parts)


class JointBench(Bench):
    def __init__(self) -> None:
        super().__init__()
        self.left_out: list[list[int]] = []

    def seconds(self, effect: Effect, done: Event | None = None) -> float:
        return len(effect.parts) / 4 if isinstance(effect, RunBlock) else 1.0

    def perform(self, effect: Effect, stop: StopCheck) -> Event | None:
        self.left_out.append([request for request in (1, 2, 3, 4) if stop(request)])
        return super().perform(effect, stop)


@pytest.mark.parametrize(
    ("aborts", "ends", "left_out"),
    [
        ({0.1: 2}, 0.25 + 0.75 * 0.75, [2]),
        ({0.1: 2, 0.12: 3}, 0.25 + 0.75 * 0.5, [2, 3]),
        ({0.1: 2, 0.3: 2}, 0.25 + 0.75 * 0.75, [2]),
        ({0.1: 2, 0.3: 4}, 0.25 + 0.25 * 0.75 + 0.5 * 0.5, [2, 4]),
        ({0.8: 1}, 1.0, []),  # in the last layer
        ({0.1: 2, 0.26: None}, 0.25 + 0.25 * 0.75, [1, 2, 3, 4]),
    ],
)
def test_a_request_that_is_left_out_is_charged_up_to_the_layer_that_runs(
    aborts: dict[float, int | None], ends: float, left_out: list[int]
) -> None:
    bench = JointBench()
    bench.worker.add(joint(1))
    for at, request in aborts.items():
        bench.clock.book(at, bench.worker.abort, 1, request)
    bench.run()
    assert bench.left_out == [left_out]
    ((at, event),) = bench.done
    assert at == pytest.approx(ends)
    assert event == BlockDone(1, None)
    assert [span.stopped for span in bench.spans] == [None in aborts.values()]


def test_a_request_that_is_left_out_before_its_block_starts_is_not_charged() -> None:
    bench = JointBench()
    for job in (1, 2, 3):
        bench.worker.add(joint(job))
    for request in (2, 3):
        bench.clock.book(0.5, bench.worker.abort, 2, request)
    bench.run()
    assert [at for at, _ in bench.done] == [1.0, 1.5, 2.5]
    assert bench.left_out == [[], [2, 3], []]


def test_a_request_is_left_out_of_a_block_that_makes_way_for_a_head() -> None:
    """Two nodes share a device: the block waits for the other's head, and goes on with less."""
    turns, bench = Turns(), JointBench()
    bench.worker = VirtualWorker(*worker_of(bench, 1), turns, at_start=False)
    other = VirtualWorker(*worker_of(bench, 0), turns, at_start=True)
    one = np.zeros(1, np.int64)
    head = RunHead(7, 9, Tensor("uint64", (1, 1), bytes(8)), Rows(*[one] * 4), Sampling())
    bench.worker.add(joint(1))
    bench.clock.book(0.1, other.add, head)  # from 0.25 to 1.25
    bench.clock.book(0.15, bench.worker.abort, 1, 2)  # before it makes way
    bench.clock.book(0.5, bench.worker.abort, 1, 3)  # while it waits
    bench.run()
    assert [at for at, _ in bench.done] == [1.25, pytest.approx(1.25 + 0.75 * 0.5)]
    assert bench.left_out[-1] == [2, 3]


def worker_of(bench: Bench, node: int) -> tuple[Any, ...]:
    return node, bench.clock, bench.perform, bench.seconds, bench.parts, bench._done


def test_a_failure_comes_back_as_an_event() -> None:
    bench = Bench()
    bench.worker.add(CloseCache(4))
    bench.run()
    assert bench.done == [(1.0, ComputeFailed(-1, 4, "no"))]


def test_a_node_that_vanishes_takes_its_work_along() -> None:
    bench = Bench()
    bench.worker.add(block(1))
    bench.worker.add(block(2))
    bench.clock.book(0.25, bench.worker.vanish)
    bench.run()
    assert bench.done == []
    assert bench.worker.busy == 0.25


def test_spans_tell_what_a_node_did() -> None:
    bench = Bench()
    bench.worker.add(block(1))
    bench.run()
    assert bench.spans == [Span(1, "RunBlock", 1, 1, 0.0, 1.0, 1, (0,), False)]
