"""Emulated compute: charged time, the real work hidden in it, blocks that are stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from support.fake_draft import FakeDraft
from support.passes import rows_of
from support.segments import run_block

from edgespec.backends.compute import CoordinatorCompute
from edgespec.backends.emulated import Emulated
from edgespec.backends.timed import CoordinatorDurations
from edgespec.daemon.profiles import profile_named
from edgespec.decoding.effects import Draft, GatherRows, OpenDraft
from edgespec.errors import EdgespecError
from edgespec.machines.effects import Effect, RunBlock
from edgespec.machines.events import BlockDone, Event
from edgespec.planning.cost_model import cost_model_named
from edgespec.planning.costs import ring_costs
from edgespec.policy.base import Grow
from edgespec.sim.toy_model import FakeHead
from edgespec.tree.ledger import Rows
from edgespec.types.stop_check import StopCheck
from edgespec.types.tensor import Tensor
from edgespec.verify.sampling import Sampling

LAYERS = 4
CHARGED = 0.4
GATHER = 0.05


def block(job: int = 1) -> RunBlock:
    """One row."""
    one = np.zeros(1, np.int64)
    return run_block(job, 1, Rows(one, one - 1, one, one), None, 0, np.ones((1, 1), np.bool_))


def gather() -> GatherRows:
    """Cache rows move."""
    return GatherRows(1, 0, np.zeros(1, np.int64))


class Prices:
    """Known ones: of a block with that many requests, each its share."""

    def __init__(self, requests: int = 1) -> None:
        self._requests = requests

    def seconds(self, effect: Effect, done: Event | None) -> float:
        """Charged."""
        if isinstance(effect, RunBlock):
            return CHARGED * len(effect.parts) / self._requests
        return GATHER

    def parts(self, effect: Effect) -> Sequence[float]:
        """Layers."""
        return (1.0,) * LAYERS


class Alone:
    """A worker that was asked for one thing only."""

    def __init__(self, asked_at: float) -> None:
        self.asked_at = asked_at

    def aborted_at(self, request: int | None) -> float:
        """Whenever it is noticed."""
        return float("inf")

    def head_asked(self, timeout: float) -> float | None:
        """None waits."""
        return None

    def run_head(self) -> None:
        """Never called."""
        raise AssertionError


class Device(Alone):
    """A worker whose real work takes `real` seconds of a clock that only moves when it is told."""

    def __init__(self, real: float = 0.0, requests: int = 1) -> None:
        super().__init__(100.0)
        self.now = 100.0
        self.real = real
        self.stop_at = float("inf")
        self.begun: list[float] = []
        prices = Prices(requests)
        self.emulated = Emulated(self._perform, prices, self, lambda: self.now, self._sleep)
        self.usual = self.emulated._usual
        """Seconds that it knows blocks to take, by size class."""

    def _sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds

    def _perform(self, effect: Effect, stop: Callable[[], bool]) -> Event | None:
        self.begun.append(self.now)
        if not isinstance(effect, RunBlock):
            self.now += self.real
            return None
        for _ in range(LAYERS):
            if stop():
                return BlockDone(effect.job, None)
            self.now += self.real / LAYERS
        return BlockDone(effect.job, HIDDEN)

    def run(self, effect: Effect) -> Event | None:
        """Carry out one effect."""
        return self.emulated.perform(effect, lambda request=None: self.now >= self.stop_at)


HIDDEN = Tensor("float32", (1, 1), b"\0\0\0\0")


@pytest.mark.parametrize("real", [0.0, 0.3])
def test_a_block_takes_what_is_charged(real: float) -> None:
    device = Device(real)
    assert device.run(block()) == BlockDone(1, HIDDEN)
    assert device.now == pytest.approx(100.0 + CHARGED)
    assert device.emulated.late == pytest.approx(0.0)


def test_the_time_counts_from_the_cause_not_from_when_the_worker_woke() -> None:
    device = Device()
    device.asked_at, device.now = 100.1, 100.2
    device.run(block())
    assert device.now == pytest.approx(100.1 + CHARGED)


def test_what_took_too_long_is_not_charged_again_to_those_behind_it() -> None:
    device = Device(real=0.5)
    device.run(block())
    assert device.now == pytest.approx(100.5)
    assert device.emulated.late == pytest.approx(0.1)
    device.real = 0.0
    device.run(block(2))  # it waited all the time
    assert device.now == pytest.approx(100.0 + 2 * CHARGED)
    assert device.emulated.late == pytest.approx(0.0)


def test_effects_that_wait_are_charged_one_behind_the_other() -> None:
    device = Device()
    for effect in (block(), gather(), block(2)):
        device.run(effect)
    assert device.now == pytest.approx(100.0 + 2 * CHARGED + GATHER)


def test_a_known_block_runs_just_in_time() -> None:
    device = Device(real=0.1)
    device.run(block())
    assert device.begun == [100.0]  # nobody knows yet how long it takes
    device.run(block(2))
    assert 100.0 + CHARGED < device.begun[1] < device.now - 0.1


@pytest.mark.parametrize(("asked", "ends"), [(0.0, 0.0), (0.03, 0.1), (0.15, 0.2), (0.29, 0.3)])
def test_a_stopped_block_ends_with_the_layer_that_it_is_in(asked: float, ends: float) -> None:
    device = Device(real=0.04)
    device.run(block())  # so that it knows how long a block takes
    start = device.now
    device.stop_at = start + asked
    assert device.run(block(2)) == BlockDone(2, None)
    assert device.now == pytest.approx(start + ends)
    device.stop_at = float("inf")
    device.run(block(3))
    assert device.now == pytest.approx(start + ends + CHARGED)


@pytest.mark.parametrize(("asked", "ends"), [(0.03, 0.1), (0.15, 0.2)])
def test_however_late_a_stop_is_noticed_it_counts_from_when_it_was_asked_for(
    asked: float, ends: float
) -> None:
    device = Device(real=0.04)
    device.run(block())
    start = device.now
    device.aborted_at = lambda request: start + asked  # type: ignore[method-assign]
    device.stop_at = start + asked + 0.08  # after the next boundary
    assert device.run(block(2)) == BlockDone(2, None)
    assert device.emulated.free_at == pytest.approx(start + ends)


def test_until_when_messages_have_to_come_before_what_comes_of_an_effect() -> None:
    told: list[float] = []

    class Telling(Device):
        def _perform(self, effect: Effect, stop: Callable[[], bool]) -> Event | None:
            told.append(self.emulated.ends_at)
            return super()._perform(effect, stop)

        def _sleep(self, seconds: float) -> None:
            told.append(self.emulated.ends_at)
            super()._sleep(seconds)

    device = Telling()
    assert device.emulated.ends_at == float("inf")
    device.run(gather())
    assert told == [100.0, pytest.approx(100.0 + GATHER)], "what it takes is known when it is done"
    told.clear()
    device.run(block())
    assert told == [pytest.approx(100.0 + GATHER + CHARGED)] * len(told)
    assert len(told) > 1
    assert device.emulated.ends_at == float("inf")


def test_a_block_that_is_stopped_while_it_really_runs_ends_with_its_layer() -> None:
    device = Device(real=0.3)
    device.stop_at = 100.12
    assert device.run(block()) == BlockDone(1, None)
    assert device.now == pytest.approx(100.2)


class Joint(Device):
    """A device with a block of two requests, each of which costs half; one is no longer wanted
    from `gone_at` on."""

    def __init__(self, real: float) -> None:
        super().__init__(real, requests=2)
        self.gone_at = float("inf")

    def _perform(self, effect: Effect, stop: StopCheck) -> Event | None:
        assert isinstance(effect, RunBlock)
        self.begun.append(self.now)
        for _ in range(LAYERS):
            if stop():
                return BlockDone(effect.job, None)
            stop(2)
            self.now += self.real / LAYERS
        return BlockDone(effect.job, HIDDEN)

    def run(self, effect: Effect) -> Event | None:
        """Carry out one effect."""

        def stop(request: int | None = None) -> bool:
            if request is None:
                return self.now >= self.stop_at
            return request == 2 and self.now >= self.gone_at

        return self.emulated.perform(effect, stop)


def two_requests(job: int) -> RunBlock:
    one, other = block(job), replace(block(job).parts[0], request=2)
    return replace(one, parts=(*one.parts, other))


@pytest.mark.parametrize(
    ("real", "gone", "ends"),
    [
        (0.04, 0.0, 0.2),  # left out from the start: all layers take half
        (0.04, 0.03, 0.1 + 0.15),
        (0.04, 0.15, 0.2 + 0.1),
        (0.3, 0.12, 0.2 + 0.1),  # while it really runs
        (0.04, 0.35, 0.4),  # in the last layer: too late
    ],
)
def test_a_part_that_is_left_out_is_charged_up_to_the_end_of_its_layer(
    real: float, gone: float, ends: float
) -> None:
    device = Joint(real)
    device.usual[2] = real
    start, device.gone_at = device.now, device.now + gone
    assert device.run(two_requests(1)) == BlockDone(1, HIDDEN)
    assert device.now == pytest.approx(start + ends)
    assert device.emulated.free_at == pytest.approx(start + ends)
    assert device.usual == {2: real}, "how long a whole one takes is not learnt from it"


def test_a_block_may_lose_a_part_and_then_all() -> None:
    device = Joint(0.04)
    device.usual[2] = 0.04
    device.gone_at, device.stop_at = 100.0, 100.12
    assert device.run(two_requests(1)) == BlockDone(1, None)
    assert device.now == pytest.approx(100.15), "the third layer, at 0.05 s each"


def test_an_error_passes_through() -> None:
    def fails(effect: Effect, stop: Callable[[], bool]) -> Event | None:
        raise EdgespecError("no")

    with pytest.raises(EdgespecError, match="no"):
        Emulated(fails, Prices(), Alone(time.monotonic())).perform(gather(), lambda: False)


def test_a_draft_is_charged_for_the_passes_that_it_took() -> None:
    profile = profile_named("jetson-orin-nano-super-8gb")
    costs = ring_costs([profile] * 4, cost_model_named("llama-2-13b")).coordinator
    draft = FakeDraft(1, 40, 0.7)
    compute = CoordinatorCompute(FakeHead(40), draft)
    waited: list[float] = []
    emulated = Emulated(
        compute.perform,
        CoordinatorDurations(costs, draft),
        Alone(100.0),
        lambda: 100.0,
        waited.append,
    )
    emulated.perform(OpenDraft(1, Sampling()), lambda: False)
    assert not waited
    context = (1, 2, 3)
    emulated.perform(Draft(1, 1, Grow(2, 2, 1), context), lambda: False)
    assert rows_of(draft) == (), "it was taken"
    same = FakeDraft(1, 40, 0.7)
    same.open(1, Sampling())
    same.refresh(1, context, 2, 2)
    passes = rows_of(same)
    assert len(passes) == 2
    charged = sum(costs.draft_seconds(rows, len(context)) for rows in passes)
    assert sum(waited) == pytest.approx(charged)


def test_a_real_clock_keeps_the_charged_time() -> None:
    class Short(Prices):
        def seconds(self, effect: Effect, done: Event | None) -> float:
            return 0.05

    start = time.monotonic()
    emulated = Emulated(lambda effect, stop: None, Short(), Alone(start))
    emulated.perform(block(), lambda request=None: False)
    assert time.monotonic() - start >= 0.05  # usually 50.1 ms
