"""What a stage tells beside its rows: what a segment cost, and when the first stage is free."""

from __future__ import annotations

import pytest
from support.segments import changed, one_part
from support.stages import (
    REQUEST,
    Stage,
    draft,
    is_empty,
    numbers,
    opened,
    opening,
    sent,
    with_tree,
)

from edgespec.decoding.effects import (
    SendRing,
)
from edgespec.machines.effects import (
    Effect,
    SendCoordinator,
)
from edgespec.wire.messages import Credit, Fault
from edgespec.wire.segment import Segment, StageTime


def ran(segment: Segment) -> list[tuple[int, float]]:
    """Rows and seconds at each stage so far."""
    return [(time.rows, time.seconds) for time in segment.cost]


BEFORE = (StageTime(3, 0.5), StageTime(3, 1.0))


def credits_of(effects: list[Effect]) -> list[int]:
    """Which segments the coordinator hears of as handed on, each right behind its segment."""
    found = []
    for before, effect in zip([None, *effects], effects, strict=False):
        if isinstance(effect, SendCoordinator) and isinstance(effect.message, Credit):
            assert isinstance(before, SendRing)
            assert before.segment.header.seq == effect.message.seq
            found.append(effect.message.seq)
    return found


# --- what it cost ---------------------------------------------------------------------------------


def test_each_stage_tells_its_rows_and_its_seconds() -> None:
    segment = draft(2, (2, 1, 2), (3, 2, 3))
    for seconds in (0.25, 0.5, 0.125):
        stage = opened()
        stage.segment(segment)
        segment = sent(stage.done(after=seconds))
    assert ran(segment) == [(2, 0.25), (2, 0.5), (2, 0.125)]


def test_rows_are_those_that_the_stage_computed() -> None:
    stage = with_tree()
    stage.retain(1, 7, (2,), (4, 6))
    stage.segment(changed(draft(3, (5, 3, 4), (6, 4, 4), (7, 3, 4)), cost=BEFORE))
    out = sent(stage.done(after=0.25))
    assert out.parts[0].ids.tolist() == [6]
    assert ran(out) == [(3, 0.5), (3, 1.0), (1, 0.25)]


def test_rows_that_are_dropped_while_they_are_computed_were_computed() -> None:
    stage = with_tree()
    stage.segment(draft(3, (5, 3, 4), (6, 4, 4)))
    stage.retain(1, 6, (2,), (4, 6))
    assert ran(sent(stage.done(after=0.5))) == [(2, 0.5)]


def test_waiting_is_no_work() -> None:
    stage = opened()
    stage.segment(draft(2, (2, 1, 2)))
    stage.segment(draft(3, (3, 2, 3)))  # waits for a second behind the one before
    assert ran(sent(stage.done(after=1.0))) == [(1, 1.0)]
    assert ran(sent(stage.done(after=0.25))) == [(1, 0.25)]


def test_prefill_counts_all_its_rows_whatever_goes_on() -> None:
    stage = Stage(is_last=True)
    stage.segment(opening(prompt=9))
    out = sent(stage.done(after=2.0))
    assert len(out.parts[0].ids) == 1
    assert ran(out) == [(9, 2.0)]


def test_an_emptied_segment_keeps_what_was_computed_before() -> None:
    stage = with_tree()
    stage.retain(1, 5, (2,), (4,))
    out = sent(stage.segment(changed(draft(3, (5, 3, 4)), cost=BEFORE)))
    assert is_empty(out, 3)
    assert out.cost == BEFORE


def test_a_clock_that_stands_still_still_tells_the_rows() -> None:
    stage = opened()
    stage.segment(draft(2, (2, 1, 2), (3, 2, 3)))
    assert ran(sent(stage.done())) == [(2, 0.0)]


# --- when the first stage is free -----------------------------------------------------------------


def test_the_first_stage_tells_what_it_handed_on_and_no_other_does() -> None:
    for is_first in (True, False):
        stage = Stage(is_first=is_first)
        assert credits_of(stage.segment(opening())) == []
        assert credits_of(stage.done()) == [1] * is_first
        stage.segment(draft(2, (2, 1, 2)))
        stage.segment(draft(3, (3, 2, 3)))
        assert credits_of(stage.done()) == [2] * is_first
        assert credits_of(stage.done()) == [3] * is_first


def test_what_comes_twice_is_handed_on_once() -> None:
    stage = opened(is_first=True)
    segment = draft(2, (2, 1, 2))
    stage.segment(segment)
    assert stage.segment(segment) == []
    assert credits_of(stage.done()) == [2]
    assert stage.segment(segment) == []


def test_emptied_segments_are_handed_on_too() -> None:
    ids = numbers()
    stage = with_tree(is_first=True)
    stage.retain(1, 5, (2,), (4,))
    assert credits_of(stage.segment(draft(3, (5, 3, 4)))) == [3]
    empty = one_part(REQUEST, 4, 1, False, 0, 1, ids, ids, ids, ids, None)
    assert credits_of(stage.segment(empty)) == [4]
    stage.end()
    assert credits_of(stage.segment(draft(5, (6, 4, 4)))) == [5]


@pytest.mark.parametrize("how", ["aborted", "failed"])
def test_a_segment_that_ends_badly_is_handed_on_all_the_same(how: str) -> None:
    """Else the coordinator would wait for the first stage for ever."""
    stage = with_tree(is_first=True)
    stage.segment(draft(3, (5, 4, 4)))
    stage.end()
    effects = stage.fail() if how == "failed" else stage.done(aborted=True)
    assert credits_of(effects) == [3]
    told = [e.message for e in effects if isinstance(e, SendCoordinator)]
    assert not any(isinstance(m, Fault) for m in told)
