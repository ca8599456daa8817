"""The worker: order, aborting, failures as events, stopping while something runs."""

from __future__ import annotations

import gc
import select
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from support.segments import run_block

from edgespec.backends.jobs import Drafts, JointDone, RunHeads, effects_of
from edgespec.decoding.effects import (
    CloseCache,
    Draft,
    GatherRows,
    OpenCache,
    RunHead,
)
from edgespec.errors import CapacityError, ModelError
from edgespec.machines.effects import (
    Effect,
    RunBlock,
)
from edgespec.machines.events import (
    BlockDone,
    ComputeFailed,
    Event,
)
from edgespec.policy.base import Grow
from edgespec.ring.effects import LoadBlock
from edgespec.ring.events import BlockLoading, LoadFailed
from edgespec.runtime.worker import Perform, Worker
from edgespec.tree.ledger import Rows
from edgespec.types.stop_check import StopCheck
from edgespec.types.tensor import Tensor
from edgespec.verify.sampling import Sampling
from edgespec.wire.messages import Assign

PATIENCE_S = 60.0
NONE = np.zeros(0, np.int64)
ASSIGN = Assign(1, 1, 0, 1, "m", "f", "float32", "none", 100, 7, "key")


def block(job: int, request: int = 1) -> RunBlock:
    """A job of no rows."""
    return run_block(
        job, request, Rows(NONE, NONE, NONE, NONE), None, 0, np.zeros((0, 0), np.bool_)
    )


@pytest.fixture
def start() -> Iterator[Callable[[Perform], Worker]]:
    """Starts workers, and stops them."""
    started: list[Worker] = []

    def make(perform: Perform) -> Worker:
        worker = Worker(perform)
        worker.start()
        started.append(worker)
        return worker

    yield make
    for worker in started:
        worker.stop(PATIENCE_S)


def collect(worker: Worker, count: int) -> list[Event]:
    """The next `count` events, waiting on the waker as the I/O loop does."""
    events: list[Event] = []
    limit = time.monotonic() + PATIENCE_S
    while len(events) < count:
        assert time.monotonic() < limit, events
        if select.select([worker.waker], [], [], 0.1)[0]:
            worker.waker.recv(4096)
        events += [event for _, event in worker.timed_events()]
    return events


def done(effect: Effect, stop: Callable[[], bool]) -> Event | None:
    """Does a block's job at once."""
    return BlockDone(effect.job, None) if isinstance(effect, RunBlock) else None


def test_effects_are_carried_out_in_order_in_one_other_thread(
    start: Callable[[Perform], Worker],
) -> None:
    seen: list[Effect] = []
    threads: set[int] = set()

    def perform(effect: Effect, stop: Callable[[], bool]) -> Event | None:
        threads.add(threading.get_ident())
        seen.append(effect)
        return done(effect, stop)

    worker = start(perform)
    effects: list[Effect] = []
    for job in range(200):
        effects += [OpenCache(job, 1), block(job), CloseCache(job)]
    for effect in effects:
        worker.submit(effect)
    events = collect(worker, 200)
    assert [e.job for e in events if isinstance(e, BlockDone)] == list(range(200))
    assert all(a is b for a, b in zip(seen, effects, strict=False))
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_rows_are_moved_when_the_next_block_wakes_it_and_before_that(
    start: Callable[[Perform], Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a token's retained set and segment the second alone wakes the worker."""
    seen: list[Effect] = []
    woken: list[int] = []

    def perform(effect: Effect, stop: Callable[[], bool]) -> Event | None:
        seen.append(effect)
        return done(effect, stop)

    worker = start(perform)
    notify = worker._more.notify

    def counted(n: int = 1) -> None:
        woken.append(n)
        notify(n)

    monkeypatch.setattr(worker._more, "notify", counted)
    gather = GatherRows(1, 0, NONE)
    worker.submit(gather)
    assert not woken
    worker.submit(block(1))
    assert len(woken) == 1
    collect(worker, 1)
    assert seen[0] is gather


def test_a_failure_is_an_event_and_the_next_effect_is_carried_out(
    start: Callable[[Perform], Worker], caplog: pytest.LogCaptureFixture
) -> None:
    problems: dict[int, Exception] = {
        1: CapacityError("no room"),
        2: RuntimeError("CUDA is out of memory"),
        3: MemoryError(),
    }

    def perform(effect: Effect, stop: Callable[[], bool]) -> Event | None:
        if isinstance(effect, RunBlock) and effect.job in problems:
            raise problems[effect.job]
        return done(effect, stop)

    worker = start(perform)
    for job in range(1, 5):
        worker.submit(block(job, request=10 + job))
    assert collect(worker, 4) == [
        ComputeFailed(1, 11, "no room"),
        ComputeFailed(2, 12, "RuntimeError: CUDA is out of memory"),
        ComputeFailed(3, 13, "MemoryError: "),
        BlockDone(4, None),
    ]
    assert "no room" not in caplog.text, "what is meant for users is no bug"
    assert "Traceback" in caplog.text, "a bug leaves its trace in the log"


def test_a_failure_without_a_job_still_names_its_request(
    start: Callable[[Perform], Worker],
) -> None:
    def perform(effect: Effect, stop: Callable[[], bool]) -> Event | None:
        raise CapacityError("no memory for the cache")

    worker = start(perform)
    worker.submit(OpenCache(8, 100))
    assert collect(worker, 1) == [ComputeFailed(-1, 8, "no memory for the cache")]


def test_a_block_that_cannot_be_loaded_is_an_event(start: Callable[[Perform], Worker]) -> None:
    def perform(effect: Effect, stop: Callable[[], bool]) -> Event | None:
        raise ModelError("another model")

    worker = start(perform)
    worker.submit(LoadBlock(ASSIGN))
    assert collect(worker, 1) == [LoadFailed("another model")]


def test_events_may_come_while_an_effect_runs(start: Callable[[Perform], Worker]) -> None:
    go_on = threading.Event()

    def perform(effect: Effect, stop: Callable[[], bool]) -> Event | None:
        worker.post(BlockLoading("half"))
        go_on.wait(PATIENCE_S)
        return BlockDone(1, None)

    worker = start(perform)
    worker.submit(LoadBlock(ASSIGN))
    assert collect(worker, 1) == [BlockLoading("half")]
    go_on.set()
    assert collect(worker, 1) == [BlockDone(1, None)]


def test_many_events_that_nobody_reads_do_not_block_the_worker(
    start: Callable[[Perform], Worker],
) -> None:
    worker = start(done)
    for job in range(20_000):
        worker.submit(block(job))
    limit = time.monotonic() + PATIENCE_S
    while len(worker._events) < 20_000 and time.monotonic() < limit:
        time.sleep(0.01)
    assert len(worker.timed_events()) == 20_000


def test_abort_reaches_the_job_it_is_meant_for_and_no_other(
    start: Callable[[Perform], Worker],
) -> None:
    running = threading.Event()
    aborted: list[int] = []

    def perform(effect: Effect, stop: Callable[[], bool]) -> Event | None:
        assert isinstance(effect, RunBlock)
        running.set()
        limit = time.monotonic() + (PATIENCE_S if effect.job == 1 else 0.1)
        while time.monotonic() < limit:
            if stop():
                aborted.append(effect.job)
                break
            time.sleep(0.005)
        return BlockDone(effect.job, None)

    worker = start(perform)
    worker.submit(block(1))
    worker.submit(block(2))
    running.wait(PATIENCE_S)
    worker.abort(1)
    collect(worker, 2)
    assert aborted == [1]
    worker.abort(2)  # it has ended already: nothing happens
    worker.submit(block(3))
    collect(worker, 1)
    assert aborted == [1]


def test_it_knows_since_when_rows_are_no_longer_wanted() -> None:
    worker = Worker(lambda effect, stop: None)
    assert worker.aborted_at(None) == worker.aborted_at(7) == float("inf")
    worker.abort(1, 7, at=3.0)
    worker.abort(1, 7, at=4.0)
    assert (worker.aborted_at(7), worker.aborted_at(8), worker.aborted_at(None)) == (
        *(3.0, float("inf"), float("inf")),
    )
    worker.abort(1, at=5.0)
    assert (worker.aborted_at(7), worker.aborted_at(8), worker.aborted_at(None)) == (3.0, 5.0, 5.0)
    worker.abort(2, 8, at=6.0)
    assert worker.aborted_at(7) == float("inf")
    worker.stop()


def test_a_job_aborted_before_its_turn_sees_it(start: Callable[[Perform], Worker]) -> None:
    gate = threading.Event()
    stops: list[bool] = []

    def perform(effect: Effect, stop: Callable[[], bool]) -> Event | None:
        if isinstance(effect, OpenCache):
            gate.wait(PATIENCE_S)
            return None
        stops.append(stop())
        return done(effect, stop)

    worker = start(perform)
    worker.submit(OpenCache(1, 1))
    worker.submit(block(1))
    worker.abort(1)
    gate.set()
    collect(worker, 1)
    assert stops == [True]


def test_one_requests_rows_are_left_out_of_the_job_it_is_meant_for(
    start: Callable[[Perform], Worker],
) -> None:
    gate = threading.Event()
    asked: list[tuple[bool, ...]] = []

    def perform(effect: Effect, stop: StopCheck) -> Event | None:
        if isinstance(effect, OpenCache):
            gate.wait(PATIENCE_S)
            return None
        asked.append((stop(), stop(4), stop(5), stop(6)))
        return done(effect, stop)

    worker = start(perform)
    worker.submit(OpenCache(1, 1))
    for job in (1, 2):
        worker.submit(block(job))
    worker.abort(1, 4)
    worker.abort(1, 6)
    gate.set()
    collect(worker, 2)
    assert asked == [(False, True, False, True), (False,) * 4]
    gate.clear()
    worker.submit(OpenCache(1, 1))
    worker.submit(block(3))
    worker.abort(3, 4)
    worker.abort(3)
    gate.set()
    collect(worker, 1)
    assert asked[2] == (True,) * 4, "in the end nothing of it is wanted"


def head(job: int, request: int = 1) -> RunHead:
    """A head of one row."""
    one = np.zeros(1, np.int64)
    hidden = Tensor("float32", (1, 1), bytes(4))
    return RunHead(job, request, hidden, Rows(one, one - 1, one, one), Sampling())


DRAFT = Draft(7, 1, Grow(2, 2, 1), (1, 2, 3))


class Layered:
    """A device whose drafts have layers, which wait for what the test submits meanwhile."""

    def __init__(self) -> None:
        self.worker: Worker
        self.heads: list[RunHead] = []
        self.order: list[str] = []
        self.asked_at: list[float] = []

    def perform(self, effect: Effect, stop: Callable[[], bool]) -> Event | None:
        """A draft asks for the heads in its middle; a head that is named twice asks for one too."""
        jobs = [getattr(one, "job", 0) for one in effects_of(effect)]
        name = f"{type(effect).__name__} {jobs}"
        self.order.append(f"{name} begins")
        before = self.worker.asked_at
        for layer in range(3):
            if layer == 1:
                for one in self.heads:
                    self.worker.submit(one, at=50.0 + one.job)
                self.heads = []
            assert not stop()
        self.asked_at.append(before)
        assert self.worker.asked_at == before, "as if nothing had come between"
        self.order.append(f"{name} ends")
        if 13 in jobs:
            raise CapacityError("no memory")
        done = tuple(BlockDone(job, None) for job in jobs)  # whatever the kind: it names the job
        return JointDone(done) if len(done) > 1 else done[0]


def test_heads_are_carried_out_between_two_layers_of_a_draft(
    start: Callable[[Perform], Worker],
) -> None:
    device = Layered()
    device.heads = [head(11), head(12)]
    device.worker = start(device.perform)
    device.worker.submit(DRAFT, at=20.0)
    device.worker.submit(OpenCache(1, 1))
    assert collect(device.worker, 4) == [BlockDone(job, None) for job in (11, 12, 7, 0)]
    assert device.order == [
        "Draft [7] begins",
        *(f"RunHeads [11, 12] {what}" for what in ("begins", "ends")),
        "Draft [7] ends",
        "OpenCache [0] begins",
        "OpenCache [0] ends",
    ]
    assert device.asked_at[:2] == [61.0, 20.0]


@pytest.mark.parametrize("effect", [head(10), block(10)])
def test_no_head_and_no_block_is_interrupted(
    effect: Effect, start: Callable[[Perform], Worker]
) -> None:
    device = Layered()
    device.heads = [head(11)]
    device.worker = start(device.perform)
    device.worker.submit(effect)
    assert collect(device.worker, 2) == [BlockDone(10, None), BlockDone(11, None)]


def test_heads_that_fail_in_the_middle_of_a_draft_fail_alone(
    start: Callable[[Perform], Worker],
) -> None:
    device = Layered()
    device.heads = [head(13, request=4), head(14)]
    device.worker = start(device.perform)
    device.worker.submit(DRAFT)
    assert collect(device.worker, 3) == [
        ComputeFailed(13, 4, "no memory"),
        ComputeFailed(14, 1, "no memory"),
        BlockDone(7, None),
    ]


def test_a_worker_that_is_to_end_lets_no_head_in() -> None:
    seen: list[Effect] = []
    running = threading.Event()

    def perform(effect: Effect, stop: Callable[[], bool]) -> Event | None:
        seen.append(effect)
        running.set()
        while not stop():
            time.sleep(0.005)
        worker.submit(head(11))
        assert worker.head_asked(PATIENCE_S) is None
        assert stop()
        return None

    worker = Worker(perform)
    worker.start()
    worker.submit(DRAFT)
    assert running.wait(PATIENCE_S)
    worker.stop(PATIENCE_S)
    assert seen == [DRAFT]
    assert not worker.thread.is_alive()


def test_it_tells_when_the_head_was_asked_for_that_waits_longest(
    start: Callable[[Perform], Worker],
) -> None:
    told: list[float | None] = []

    def submit_both() -> None:
        with worker.gathering():
            for number in (5, 6):
                worker.submit(head(number), at=number)

    def perform(effect: Effect, stop: Callable[[], bool]) -> Event | None:
        if isinstance(effect, RunHeads):
            return JointDone(tuple(BlockDone(head.job, None) for head in effect.effects))
        told.append(worker.head_asked(0.0))
        told.append(worker.head_asked(0.01))
        threading.Timer(0.05, submit_both).start()
        told.append(worker.head_asked(PATIENCE_S))
        worker.run_head()
        told.append(worker.head_asked(0.0))
        return BlockDone(7, None)

    worker = start(perform)
    worker.submit(DRAFT)
    assert collect(worker, 3) == [BlockDone(job, None) for job in (5, 6, 7)]
    assert told == [None, None, 5, None]


def drafts(*numbers: int) -> list[Draft]:
    """Of as many requests."""
    return [Draft(10 + number, number, Grow(2, 2, 1), (1, 2, 3)) for number in numbers]


def test_what_is_gathered_is_one_job_with_an_event_for_each_request(
    start: Callable[[Perform], Worker],
) -> None:
    seen: list[Effect] = []

    def perform(effect: Effect, stop: Callable[[], bool]) -> Event | None:
        seen.append(effect)
        return JointDone(tuple(BlockDone(one.job, None) for one in effects_of(effect)))  # type: ignore[attr-defined]

    worker = start(perform)
    for _ in range(20):
        with worker.gathering(), worker.gathering():
            for one in drafts(1, 2):
                worker.submit(one)
            time.sleep(0.001)  # so that the worker could begin
            for one in (head(1), head(2)):
                worker.submit(one)
        assert collect(worker, 4) == [BlockDone(job, None) for job in (1, 2, 11, 12)]
    assert [type(one) for one in seen] == [RunHeads, Drafts] * 20


def test_a_joint_job_that_a_bug_ends_fails_each_of_its_requests(
    start: Callable[[Perform], Worker], caplog: pytest.LogCaptureFixture
) -> None:
    def perform(effect: Effect, stop: Callable[[], bool]) -> Event | None:
        raise ZeroDivisionError("a bug")

    worker = start(perform)
    with worker.gathering():
        for one in drafts(1, 2):
            worker.submit(one)
    assert collect(worker, 2) == [
        ComputeFailed(10 + number, number, "ZeroDivisionError: a bug") for number in (1, 2)
    ]
    assert "Traceback" in caplog.text


def test_stop_ends_what_runs_and_drops_what_waits() -> None:
    running = threading.Event()
    seen: list[int] = []

    def perform(effect: Effect, stop: Callable[[], bool]) -> Event | None:
        assert isinstance(effect, RunBlock)
        seen.append(effect.job)
        running.set()
        while not stop():
            time.sleep(0.005)
        return BlockDone(effect.job, None)

    worker = Worker(perform)
    worker.start()
    for job in range(5):
        worker.submit(block(job))
    assert running.wait(PATIENCE_S)
    started = time.monotonic()
    worker.stop(PATIENCE_S)
    assert time.monotonic() - started < PATIENCE_S / 2
    assert seen == [0]
    assert not worker.thread.is_alive()
    assert worker.waker.fileno() == -1, "its sockets are closed"


def test_stop_does_not_wait_for_what_cannot_be_stopped() -> None:
    go_on = threading.Event()
    running = threading.Event()

    def perform(effect: Effect, stop: Callable[[], bool]) -> Event | None:
        running.set()
        go_on.wait(PATIENCE_S)
        return BlockDone(1, None)

    worker = Worker(perform)
    worker.start()
    worker.submit(block(1))
    running.wait(PATIENCE_S)
    started = time.monotonic()
    worker.stop(timeout=0.1)
    assert time.monotonic() - started < PATIENCE_S / 2
    go_on.set()  # its late event finds nobody, and does no harm
    worker.stop(PATIENCE_S)
    assert not worker.thread.is_alive()


def test_a_worker_that_never_started_leaves_nothing_behind() -> None:
    worker = Worker(done)
    worker.stop()
    del worker
    gc.collect()  # an unclosed socket would be a warning, and so a failure
