"""Segments that do not come back are missed, and nobody waits for them for ever."""

from __future__ import annotations

import pytest
from support.rings import submit
from support.wires import Wire

from edgespec.decoding.events import StageBeat
from edgespec.decoding.flights import BUSY_S, LEAST_S, MOST_DOUBTS, TIMES, FlightWatch
from edgespec.machines.events import RingDown, RingUp, Tick
from edgespec.wire.client_messages import Failed


def watched(*trips: float) -> tuple[FlightWatch, float]:
    """A watch that has seen trips of so many seconds, and what time it is."""
    watch, now = FlightWatch(), 0.0
    for seq, seconds in enumerate(trips, 100):
        watch.left(seq, now)
        now += seconds
        watch.came(seq, now)
    return watch, now


@pytest.mark.parametrize("trip", [0.01, 3.0])
def test_a_segment_is_overdue_by_what_trips_took(trip: float) -> None:
    watch, now = watched(trip, trip)
    assert watch.deadline() is None
    watch.left(1, now)
    limit = now + max(LEAST_S, TIMES * trip)
    assert watch.deadline() == pytest.approx(limit)
    assert watch.overdue(limit - 0.01) == ""
    assert watch.overdue(limit + 0.01).startswith("it has waited for a segment for ")


def test_a_segment_that_a_stage_says_it_has_is_waited_for_and_not_for_ever() -> None:
    watch, now = watched()
    watch.left(1, now)
    while now < BUSY_S - 1.0:
        watch.beat(1, 1, -1, now)
        assert watch.overdue(now) == ""
        now += 1.0
    watch.beat(1, 1, -1, BUSY_S + 1.0)
    assert "stage 1 has not" in watch.overdue(BUSY_S + 1.0)


def test_each_ring_from_which_nothing_came_back_is_waited_for_longer() -> None:
    """The network may be slow: a large segment takes its time."""
    watch = FlightWatch()
    for doubts in range(MOST_DOUBTS + 2):
        watch.left(doubts, 0.0)
        limit = LEAST_S * 2 ** min(doubts, MOST_DOUBTS)
        assert watch.deadline() == limit
        watch.doubt_ring()
    watch.left(99, 0.0)
    watch.came(99, 0.5)
    watch.left(100, 1.0)
    assert watch.deadline() == 1.0 + LEAST_S


def test_it_is_told_where_a_segment_was_seen_last() -> None:
    watch, now = watched()
    watch.left(7, now)
    for stage, passed in ((1, 7), (2, 6), (3, 6)):
        watch.beat(stage, 0, passed, now)
    assert watch.overdue(now + LEAST_S + 1.0).endswith("stage 1 has passed it on, stage 2 has not")


def test_what_lands_and_what_a_stage_passes_on_shows_that_the_ring_turns() -> None:
    watch, now = watched()
    watch.left(1, now)
    watch.left(2, now)
    watch.came(1, now + LEAST_S - 1.0)
    assert watch.overdue(now + LEAST_S + 1.0) == ""
    watch.beat(1, 0, 2, now + 2 * LEAST_S - 2.0)
    assert watch.overdue(now + 2 * LEAST_S) == ""
    slowest = LEAST_S - 1.0
    assert watch.overdue(now + 2 * LEAST_S - 1.0 + TIMES * slowest)


def test_a_lost_segment_renews_the_ring_and_the_request_goes_on() -> None:
    wire = Wire()
    wire.first_token("autoregressive")
    lost = wire.segments[-1]
    limit = wire.machine.deadline()
    assert limit is not None
    wire.take(wire.machine.handle(StageBeat(1, 0, lost.header.seq), 0.0))
    wire.take(wire.machine.handle(StageBeat(2, 0, lost.header.seq - 1), 0.0))
    wire.take(wire.machine.handle(Tick(), limit))
    (why,) = wire.renewals
    assert "stage 1 has passed it on, stage 2 has not" in why
    wire.back(lost)
    assert not wire.heads, "it comes too late"
    wire.take(wire.machine.handle(RingDown(why), limit))
    wire.take(wire.machine.handle(RingUp(), limit))
    assert wire.segments[-1] is not lost
    assert not any(isinstance(reply, Failed) for reply in wire.replies)


def test_rings_that_are_of_no_use_do_not_keep_a_request_for_ever() -> None:
    wire = Wire()
    wire.submit(submit(1, "hello", 5, "autoregressive"))
    rings = 0
    while not (failed := [r for r in wire.replies if isinstance(r, Failed)]):
        wire.take(wire.machine.handle(RingDown("stage 2 (b) cannot go on"), wire.now))
        wire.take(wire.machine.handle(RingUp(), wire.now))
        rings += 1
        assert rings < 20
    why = f"{rings} rings in a row gave it no token; the last: stage 2 (b) cannot go on"
    assert failed == [Failed(1, why, "lost")]
