"""Worker: effects take their time in order, and an abort ends a block with the layer that runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from support.segments import run_block

from edgespec.decoding.effects import CloseCache
from edgespec.errors import CapacityError
from edgespec.machines.effects import Effect, RunBlock
from edgespec.machines.events import BlockDone, ComputeFailed, Event
from edgespec.sim.clock import Clock
from edgespec.sim.worker import Span, Turns, VirtualWorker
from edgespec.tree.ledger import Rows

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
        self.worker = VirtualWorker(
            1,
            self.clock,
            self.perform,
            self.seconds,
            self.parts,
            self._done,
            self.spans,
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
