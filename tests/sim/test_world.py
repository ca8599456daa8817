"""World: exact times of small rings by hand; crashes, slow stages and lost messages."""

from __future__ import annotations

import random

import pytest
from support.event_log import EventLog
from support.faults import Crash, Duplicate, Lose, SlowStage
from support.spans import Span
from support.toy_answers import plain_answer
from support.worlds import FixedDurations, submit, toy_world

from edgespec.decoding.request import LOST_WAIT_S
from edgespec.sim.links import LinkSpec
from edgespec.sim.oracle import Oracle
from edgespec.sim.toy import ToyCodec
from edgespec.sim.world import World
from edgespec.wire.client_messages import Failed, Finished, Progress, Tokens


def token_times(world: World, tag: int = 0) -> list[float]:
    """When each piece of an answer left the coordinator."""
    return [r.at for r in world.replies if isinstance(r.message, Tokens) and r.message.tag == tag]


def end_of(world: World, tag: int = 0) -> Finished | Failed:
    """The one end of a request."""
    (end,) = [
        r.message
        for r in world.replies
        if isinstance(r.message, Finished | Failed) and r.message.tag == tag
    ]
    return end


# Times in these tests are binary fractions, so that sums are exact.


def test_an_autoregressive_answer_takes_a_trip_a_token() -> None:
    world = toy_world(FixedDurations((0.25, 0.5), head=0.125), LinkSpec(latency=0.0625))
    world.submit(submit(limit=3))
    world.run()
    trip = 0.25 + 0.5 + 0.125 + 3 * 0.0625
    assert token_times(world) == [trip, 2 * trip, 3 * trip]
    end = end_of(world)
    assert isinstance(end, Finished)
    assert end.token_ids == plain_answer(ToyCodec(), submit(limit=3), 2, 2000).token_ids
    assert (end.seconds, end.first_token_seconds) == (3 * trip, trip)
    assert world.busy_seconds == [3 * 0.125, 3 * 0.25, 3 * 0.5]


def test_links_are_charged_the_bytes_of_the_charged_model() -> None:
    durations = FixedDurations((0.25, 0.5), segment_bytes=100)
    world = toy_world(durations, LinkSpec(bytes_per_second=1600.0))
    world.submit(submit(limit=1))
    world.run()
    assert token_times(world) == [0.75 + 3 * 0.0625]


def test_prompt_chunks_overlap_along_the_ring() -> None:
    world = toy_world(FixedDurations((0.25, 0.5)), prefill_chunk=2, spans=(spans := list[Span]()))
    world.submit(submit(prompt="abcd", limit=1))
    world.run()
    assert token_times(world) == [1.25]
    blocks = [(s.node, s.start, s.end, s.ids) for s in spans if s.kind == "RunBlock"]
    assert sorted(blocks) == [
        (1, 0.0, 0.25, (0, 1)),
        (1, 0.25, 0.5, (2, 3)),
        (2, 0.25, 0.75, (0, 1)),
        (2, 0.75, 1.25, (2, 3)),
    ]


def test_the_draft_is_charged_for_the_rows_that_it_ran() -> None:
    oracle = Oracle(random.Random(0), accuracy=1.0)
    ask = submit(limit=6, policy="naive_tree")
    oracle.tell(plain_answer(ToyCodec(), ask, 1, 2000).whole)
    durations = FixedDurations((0.0,), draft_row=1.0)
    world = toy_world(durations, draft=oracle)
    world.submit(ask)
    world.run()
    assert isinstance(end_of(world), Finished)
    works = [sum(one.rows for one in work) for work in durations.works]
    assert works[:2] == [0, 3]  # opening the draft; reading the prompt
    assert world.busy_seconds[0] == sum(works)
    assert world.now == sum(works)  # nothing else takes time, so that a token waits for its draft


def test_requests_wait_for_their_turn_and_are_answered_in_order() -> None:
    world = toy_world(FixedDurations((0.5, 0.5)))
    world.submit(submit(tag=0, limit=2))
    world.submit(submit(tag=1, limit=1), at=0.25)
    world.run()
    assert token_times(world, 0) == [1.0, 2.0]
    assert token_times(world, 1) == [3.0]


def test_a_cancelled_request_ends_at_once() -> None:
    world = toy_world(FixedDurations((0.5, 0.5)))
    world.submit(submit(limit=9))
    world.cancel(0, at=2.25)
    world.run()
    end = end_of(world)
    assert isinstance(end, Finished)
    assert (end.finish_reason, end.new_tokens, world.replies[-1].at) == ("cancelled", 2, 2.25)


def test_time_can_be_stopped_and_goes_on() -> None:
    world = toy_world(FixedDurations((0.5, 0.5)))
    world.submit(submit(limit=3))
    world.run(until=2.5)
    assert token_times(world) == [1.0, 2.0]
    world.run()
    assert token_times(world) == [1.0, 2.0, 3.0]


def test_a_slow_stage_is_slow_for_a_while() -> None:
    fault = SlowStage(stage=2, factor=3.0, start=1.0, end=2.0)
    world = toy_world(FixedDurations((0.5, 0.5)), faults=(fault,))
    world.submit(submit(limit=3))
    world.run()
    assert token_times(world) == [1.0, 3.0, 4.0]


def test_lost_and_repeated_messages_change_no_time_of_plain_decoding() -> None:
    faults = (Lose("retain", 1.0), Duplicate(1.0, 5.0))
    world = toy_world(FixedDurations((0.5, 0.5)), LinkSpec(latency=0.25), faults=faults)
    world.submit(submit(limit=3))
    world.run()
    assert token_times(world) == [1.75, 3.5, 5.25]


# --- a stage that is lost -----------------------------------------------------------------------

CRASH = Crash(stage=1, at=1.25, noticed_after=0.5, restart_after=1.0)


@pytest.fixture
def crashed() -> World:
    world = toy_world(FixedDurations((0.5, 0.5)), faults=(CRASH,))
    world.submit(submit(tag=0, limit=9))
    world.submit(submit(tag=1), at=1.5)  # the loss is not noticed yet: it waits
    world.submit(submit(tag=2), at=2.0)  # the ring is down
    world.submit(submit(tag=3, limit=2), at=3.0)  # and up again
    world.run()
    return world


def test_what_ran_and_what_waited_goes_on_when_the_ring_is_up_again(crashed: World) -> None:
    # One token came before the crash; the prompt is read again with it at 2.75.
    assert token_times(crashed, 0) == [1.0, *(3.75 + n for n in range(8))]
    assert token_times(crashed, 1) == [11.75, 12.75, 13.75]
    assert token_times(crashed, 2) == [14.75, 15.75, 16.75]
    assert token_times(crashed, 3) == [17.75, 18.75]
    ends = [end_of(crashed, tag) for tag in range(4)]
    assert [end.recoveries for end in ends if isinstance(end, Finished)] == [1, 0, 0, 0]
    assert not crashed.gone


@pytest.mark.parametrize(("tag", "at"), [(0, 2.25), (1, 2.25), (2, 2.5)])
def test_a_ring_that_takes_too_long_fails_each_once_and_then_answers(tag: int, at: float) -> None:
    world = toy_world(FixedDurations((0.5, 0.5)), faults=(CRASH,), recovery=0.5)
    world.submit(submit(tag=0, limit=9))
    world.submit(submit(tag=1), at=1.5)
    world.submit(submit(tag=2), at=2.0)
    world.submit(submit(tag=3, limit=2), at=3.0)
    world.run()
    end = end_of(world, tag)
    reason = "stage 1 was lost: it crashed; it did not come back within 0.5 s"
    assert end == Failed(tag, reason, "lost")
    assert [r.at for r in world.replies if r.message == end] == [at]
    assert token_times(world, 3) == [4.0, 5.0]


def test_work_before_a_crash_counts(crashed: World) -> None:
    # Token 1, then a quarter of a block when it crashed; sixteen tokens on the new ring.
    assert crashed.busy_seconds == [0.0, 0.5 + 0.25 + 8.0, 0.5 + 8.0]


def test_two_stages_that_crash_together_are_missed_once() -> None:
    other = Crash(stage=2, at=1.25, noticed_after=0.75, restart_after=9.0)
    log = EventLog()
    world = toy_world(FixedDurations((0.5, 0.5)), faults=(CRASH, other), log=log)
    world.submit(submit(limit=9))
    world.run()
    end = end_of(world)
    assert isinstance(end, Finished)
    assert end.recoveries == 1
    assert sum("is missed" in line for line in log.lines) == 1
    assert token_times(world)[1] == 3.75


def test_a_stage_that_crashes_while_another_is_missed_is_replaced_with_it() -> None:
    other = Crash(stage=2, at=2.0, noticed_after=0.75, restart_after=9.0)
    world = toy_world(FixedDurations((0.5, 0.5)), faults=(CRASH, other))
    world.submit(submit(limit=9))
    world.run()
    end = end_of(world)
    assert isinstance(end, Finished)
    assert end.recoveries == 1
    told = [r.message.text for r in world.replies if isinstance(r.message, Progress)]
    assert [text.partition(" was")[0] for text in told[:-1]] == ["stage 1", "stage 2"]
    assert told[-1].startswith("the ring is up again")
    assert token_times(world)[1] == 3.75


def test_a_stage_that_is_gone_cannot_crash() -> None:
    again = Crash(stage=1, at=1.5, noticed_after=0.0, restart_after=9.0)
    world = toy_world(FixedDurations((0.5, 0.5)), faults=(CRASH, again))
    world.run()
    assert not world.gone
    assert world.now == 2.75


# --- the coordinator's deadline -----------------------------------------------------------------


def test_the_coordinator_is_woken_at_its_deadline() -> None:
    # Stage 2 cannot hold the prompt; the result without its rows is back long before its Fault.
    log = EventLog()
    world = toy_world(
        FixedDurations((0.5, 0.5)),
        LinkSpec(),
        LinkSpec(latency=8.0),
        row_limits=(1000, 2),
        log=log,
    )
    world.submit(submit())
    world.run()
    end = end_of(world)
    assert isinstance(end, Failed)
    assert end.reason.endswith("rows of a request did not come back")
    renewals = [line for line in log.lines if "a new ring" in line]
    assert renewals[0].startswith(f"{0.5 + LOST_WAIT_S:g} D0 ")


def test_a_fault_that_comes_in_time_needs_no_deadline() -> None:
    log = EventLog()
    world = toy_world(
        FixedDurations((0.5, 0.5)),
        LinkSpec(),
        LinkSpec(latency=0.25),
        row_limits=(1000, 2),
        log=log,
    )
    world.submit(submit())
    world.run()
    end = end_of(world)
    assert isinstance(end, Failed)
    assert "more than the 2 rows" in end.reason
    assert world.replies[-1].at == 0.75
    assert not any("tick" in line for line in log.lines)
