"""Clock and links: order of bookings, bandwidth, latency, jitter and loss, always in order."""

from __future__ import annotations

import random

import pytest
from support.faults import Delay, Dice, Duplicate, Late, Lose, SlowStage
from support.segments import retain_message

from edgespec.errors import ConfigError
from edgespec.sim.clock import Clock
from edgespec.sim.links import Link, LinkSpec, Network
from edgespec.wire.client_messages import Submit
from edgespec.wire.messages import CloseRequest

RETAIN = retain_message(1, 1, 5, (), ())


def test_bookings_happen_by_time_and_then_in_the_order_of_booking() -> None:
    clock, seen = Clock(), []
    for name, at in (("c", 2.0), ("a", 1.0), ("d", 2.0), ("b", 1.0)):
        clock.book(at, lambda n: seen.append((n, clock.now)), name)
    while clock.step():
        pass
    assert seen == [("a", 1.0), ("b", 1.0), ("c", 2.0), ("d", 2.0)]


def test_a_cancelled_booking_neither_happens_nor_takes_time() -> None:
    clock, seen = Clock(), []
    clock.book(5.0, seen.append, 1).cancel()
    assert not clock.step()
    assert (clock.now, seen) == (0.0, [])


def test_the_clock_stops_where_it_is_told_and_never_runs_backwards() -> None:
    clock, seen = Clock(), []
    clock.book(2.0, seen.append, "late")
    assert not clock.step(until=1.0)
    assert clock.step()
    clock.book(1.0, seen.append, "past")
    assert clock.step()
    assert (clock.now, seen) == (2.0, ["late", "past"])


def test_a_message_leaves_when_the_one_before_it_has() -> None:
    link = Link(LinkSpec(latency=1.0, bytes_per_second=100.0), random.Random(0))
    assert link.send(0.0, 50) == 1.5
    assert link.send(0.0, 50) == 2.0
    assert link.send(10.0, 100) == 12.0


def test_a_link_without_a_limit_adds_its_latency_alone() -> None:
    link = Link(LinkSpec(latency=0.25), random.Random(0))
    assert [link.send(1.0, 10**9), link.send(1.0, 1)] == [1.25, 1.25]


def test_a_delayed_message_holds_up_those_behind_it() -> None:
    link = Link(LinkSpec(latency=1.0), random.Random(0))
    assert link.send(0.0, 1, extra=3.0) == 4.0
    assert link.send(0.5, 1) == 4.0
    assert link.send(4.0, 1) == 5.0


@pytest.mark.parametrize("seed", range(20))
def test_jitter_and_loss_never_reorder(seed: int) -> None:
    spec = LinkSpec(latency=0.1, jitter=1.0, loss=0.4, retry_after=0.5, bytes_per_second=1e3)
    link = Link(spec, random.Random(seed))
    arrivals = [link.send(at * 0.1, 10) for at in range(200)]
    assert arrivals == sorted(arrivals)
    assert all(arrival >= at * 0.1 + 0.11 for at, arrival in enumerate(arrivals))


def test_a_lost_attempt_costs_the_time_of_a_retry() -> None:
    class Coins(random.Random):
        def random(self) -> float:
            return next(coins)

    coins = iter([0.1, 0.1, 0.9, 0.9])
    link = Link(LinkSpec(latency=1.0, loss=0.5, retry_after=10.0), Coins())
    assert [link.send(0.0, 1), link.send(0.0, 1)] == [21.0, 21.0]


@pytest.mark.parametrize("wrong", [{"latency": -1.0}, {"loss": 1.0}, {"bytes_per_second": -1.0}])
def test_figures_that_no_link_can_have_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="loss must be below 1"):
        LinkSpec(**wrong)


def test_a_network_has_one_more_ring_link_than_stages() -> None:
    with pytest.raises(ConfigError, match="one more ring link"):
        Network((LinkSpec(),) * 2, (LinkSpec(),) * 2, (LinkSpec(),) * 2)


def test_only_retained_sets_are_lost_or_late() -> None:
    dice = Dice((Lose("retain", 1.0), Late(1.0, 1.0)), random.Random(0))
    assert dice.loses(RETAIN)
    assert not dice.loses(CloseRequest(1))
    assert 0 < dice.lateness(RETAIN) <= 1
    assert dice.lateness(CloseRequest(1)) == 0


def test_what_the_protocol_tolerates_twice_comes_twice() -> None:
    dice = Dice((Duplicate(1.0, 2.0),), random.Random(0))
    for message in (RETAIN, CloseRequest(1)):
        (after,) = dice.repeats(message)
        assert 0 <= after <= 2
    assert dice.repeats(Submit(0, "", 1, 0, 0, 1, 0, 0, (), "")) == []


def test_delays_strike_with_their_probability() -> None:
    dice = Dice((Delay(0.25, 1.0),), random.Random(0))
    struck = sum(dice.delay() > 0 for _ in range(2000))
    assert 400 < struck < 600


def test_a_stage_is_slow_for_as_long_as_it_is_told() -> None:
    dice = Dice((SlowStage(2, 3.0, 1.0, 2.0), SlowStage(2, 2.0, 1.5, 9.0)), random.Random(0))
    factors = [dice.slowness(2, at) for at in (0.5, 1.0, 1.7, 2.0, 9.0)]
    assert factors == [1.0, 3.0, 6.0, 2.0, 1.0]
    assert dice.slowness(1, 1.7) == 1.0
