"""StageMachine, event by event."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from msgspec.structs import replace
from support.segments import changed, one_part
from support.stages import (
    REQUEST,
    Stage,
    draft,
    faults,
    hidden,
    is_empty,
    numbers,
    opened,
    opening,
    runs,
    sent,
    values_of,
    with_tree,
)

from edgespec.decoding.effects import AbortBlock, CloseCache, GatherRows, OpenCache, Renew, SendRing
from edgespec.decoding.events import (
    HeadDone,
)
from edgespec.decoding.held_rows import REMEMBERED_ENDS
from edgespec.errors import LocalProtocolError
from edgespec.machines.events import (
    NO_JOB,
    BlockDone,
    ComputeFailed,
    Event,
    MessageArrived,
    RingUp,
)
from edgespec.types.tensor import Layers, Tensor
from edgespec.verify.sampling import Choice
from edgespec.wire.messages import Fault
from edgespec.wire.segment import Segment

# --- the plain way --------------------------------------------------------------------------------


def test_the_opening_segment_opens_the_cache_and_runs() -> None:
    stage = Stage()
    effects = stage.segment(opening())
    assert effects[0] == OpenCache(REQUEST, 64)
    job = runs(effects)
    assert (job.parts[0].committed, job.hidden) == (0, None)
    assert job.rows.tokens.tolist() == [0, 1]
    assert job.parts[0].sees.tolist() == [[True, False], [True, True]]
    out = sent(stage.done())
    assert out.parts[0].ids.tolist() == [0, 1]
    assert values_of(out.hidden) == [100, 100]
    assert (
        out.parts[0].committed,
        out.parts[0].want,
        out.parts[0].reserve,
        len(out.parts[0].tokens),
    ) == (True, 1, 64, 0)


def test_prefill_chunks_continue_each_other() -> None:
    stage = opened()
    ids = numbers(2, 3)
    job = runs(stage.segment(one_part(REQUEST, 2, 0, True, 0, 1, ids, ids - 1, ids, ids, None)))
    assert job.parts[0].committed == 2
    assert job.parts[0].sees.tolist() == [[True, False], [True, True]]


@pytest.mark.parametrize(("wanted", "ids"), [(0, []), (1, [1]), (2, [0, 1]), (9, [0, 1])])
def test_behind_the_last_stage_only_wanted_certain_rows_go_on(wanted: int, ids: list[int]) -> None:
    stage = Stage(is_last=True)
    base = opening()
    stage.segment(
        one_part(
            REQUEST,
            1,
            0,
            True,
            64,
            wanted,
            base.parts[0].ids,
            base.parts[0].parents,
            base.parts[0].ids,
            base.parts[0].ids,
            None,
        )
    )
    out = sent(stage.done())
    assert out.parts[0].ids.tolist() == ids
    assert len(values_of(out.hidden)) == len(ids)


def test_speculative_rows_see_their_path() -> None:
    stage = with_tree()
    job = runs(stage.segment(draft(3, (5, 4, 4))))
    assert job.parts[0].committed == 2
    assert job.parts[0].sees.tolist() == [[True, False, True, True]]
    out = sent(stage.done())
    assert (
        out.parts[0].ids.tolist(),
        out.parts[0].parents.tolist(),
        out.parts[0].positions.tolist(),
    ) == ([5], [4], [4])
    assert values_of(out.hidden) == [105]


def test_segments_are_computed_one_by_one_in_order() -> None:
    stage = opened()
    stage.segment(draft(2, (2, 1, 2)))
    assert stage.segment(draft(3, (3, 2, 3))) == []
    effects = stage.done()
    assert sent(effects).header.seq == 2
    assert runs(effects).rows.ids.tolist() == [3]
    assert sent(stage.done()).header.seq == 3


def test_a_repeated_segment_is_ignored() -> None:
    stage = opened()
    assert stage.segment(opening()) == []
    again = draft(2, (2, 1, 2))
    stage.segment(again)
    assert stage.segment(again) == []
    stage.done()
    assert stage.segment(again) == []
    assert len(stage.machine.ledgers()[REQUEST]) == 3


# --- retained sets --------------------------------------------------------------------------------


def test_a_retained_set_is_one_gather() -> None:
    stage = with_tree()
    effects = stage.retain(1, 4, (2,), (4,))
    assert len(effects) == 1
    gather = effects[0]
    assert isinstance(gather, GatherRows)
    assert (gather.request, gather.start, gather.order.tolist()) == (REQUEST, 2, [0, 2])
    assert stage.machine.ledgers()[REQUEST].speculative == (4,)
    assert stage.retain(1, 4, (2,), (4,)) == [], "twice"
    assert stage.retain(0, 9, (), ()) == [], "older"


def test_before_computing_dropped_rows_are_left_out() -> None:
    stage = with_tree()
    stage.retain(1, 6, (2,), (4, 6))
    job = runs(stage.segment(draft(3, (5, 3, 4), (6, 4, 4), (7, 6, 5))))
    assert job.rows.ids.tolist() == [6, 7]
    assert values_of(job.hidden) == [6, 7]
    assert job.parts[0].committed == 3
    assert job.parts[0].sees.tolist() == [[True, True, False], [True, True, True]]


def test_while_computing_dropped_rows_are_not_sent_on() -> None:
    stage = with_tree()
    stage.segment(draft(3, (5, 3, 4), (6, 4, 4)))
    effects = stage.retain(1, 6, (2,), (4, 6))
    assert [type(e) for e in effects] == [GatherRows], "some of the job is still wanted"
    out = sent(stage.done())
    assert out.parts[0].ids.tolist() == [6]
    assert values_of(out.hidden) == [106]


def test_a_job_of_which_nothing_is_wanted_is_aborted() -> None:
    stage = with_tree()
    job = runs(stage.segment(draft(3, (5, 3, 4))))
    effects = stage.retain(1, 5, (2,), (4,))
    assert [type(e) for e in effects] == [GatherRows, AbortBlock]
    assert effects[1] == AbortBlock(job.job)
    out = sent(stage.done(aborted=True))
    assert is_empty(out, 3)


def test_an_abort_that_came_too_late_sends_nothing_either() -> None:
    stage = with_tree()
    stage.segment(draft(3, (5, 3, 4)))
    stage.retain(1, 5, (2,), (4,))
    out = sent(stage.done())
    assert not len(out.parts[0].ids)


def test_another_requests_job_and_certain_rows_are_not_aborted() -> None:
    stage = with_tree()
    stage.segment(opening(3, request=8))
    assert [type(e) for e in stage.retain(1, 4, (2,), (4,))] == [GatherRows]
    stage.done()
    fresh = Stage()
    fresh.segment(opening())
    assert fresh.retain(1, 99, (), ()) == []
    assert sent(fresh.done()).parts[0].ids.tolist() == [0, 1]


def test_an_emptied_segment_still_travels() -> None:
    stage = with_tree()
    stage.retain(1, 5, (2,), (4,))
    out = sent(stage.segment(draft(3, (5, 3, 4))))
    assert is_empty(out, 3)
    assert stage.running is None
    ids = numbers()
    arriving_empty = one_part(REQUEST, 4, 1, False, 0, 1, ids, ids, ids, ids, None)
    assert is_empty(sent(stage.segment(arriving_empty)), 4)
    assert sent(stage.segment(draft(5))).header.seq == 5


@pytest.mark.parametrize(("entered", "leaves"), [(0, 0), (1, 1), (2, 2), (3, 2)])
def test_a_segment_leaves_with_the_oldest_epoch_on_its_way(entered: int, leaves: int) -> None:
    stage = with_tree()
    stage.retain(2, 4, (2,), (4,))
    stage.segment(draft(3, (5, 4, 4), epoch=entered))
    assert sent(stage.done()).parts[0].epoch == leaves
    dropped = sent(stage.segment(draft(4, (3, 2, 3), epoch=entered)))
    assert is_empty(dropped, 4)
    assert dropped.parts[0].epoch == leaves


def test_a_set_that_arrives_while_computing_is_acknowledged_by_that_segment() -> None:
    stage = with_tree()
    stage.segment(draft(3, (5, 4, 4), epoch=1))
    stage.retain(1, 5, (2,), (4, 5))
    assert sent(stage.done()).parts[0].epoch == 1


def test_lost_sets_are_made_up_for_by_the_next() -> None:
    stage = with_tree()
    stage.segment(draft(3, (5, 4, 4)))
    stage.done()
    stage.retain(3, 5, (2, 4), (5,))
    ledger = stage.machine.ledgers()[REQUEST]
    assert (ledger.committed, ledger.last_committed, ledger.speculative) == (4, 4, (5,))


def test_a_set_for_an_unknown_request_is_ignored() -> None:
    assert Stage().retain(1, 4, (2,), (4,)) == []


# --- ends -----------------------------------------------------------------------------------------


def test_an_end_frees_everything() -> None:
    stage = with_tree()
    assert stage.end() == [CloseCache(REQUEST)]
    assert stage.machine.ledgers() == {}
    assert stage.end() == [], "twice"
    assert is_empty(sent(stage.segment(draft(3, (5, 4, 4)))), 3)


def test_an_end_stops_the_running_job() -> None:
    stage = opened()
    job = runs(stage.segment(draft(2, (2, 1, 2))))
    stage.segment(draft(3, (3, 2, 3)))
    assert stage.end() == [CloseCache(REQUEST), AbortBlock(job.job)]
    effects = stage.done(aborted=True)
    left = [e.segment for e in effects if isinstance(e, SendRing)]
    assert [s.header.seq for s in left] == [2, 3]
    assert all(is_empty(s, s.header.seq) for s in left)
    assert len(effects) == 2


def test_an_end_may_overtake_the_opening_segment() -> None:
    stage = Stage()
    assert stage.end() == []
    effects = stage.segment(opening())
    assert len(effects) == 1
    assert is_empty(sent(effects), 1)


def test_no_more_ends_are_remembered_than_needed() -> None:
    stage = Stage()
    for request in range(3 * REMEMBERED_ENDS):
        stage.end(request)
        stage.end(request)
    assert len(stage.machine._held._ended) == REMEMBERED_ENDS


def test_requests_may_be_interleaved() -> None:
    stage = opened()
    stage.segment(opening(2, prompt=3, request=8))
    stage.done()
    assert runs(stage.segment(draft(3, (2, 1, 2)))).parts[0].committed == 2
    stage.done()
    assert runs(stage.segment(draft(4, (3, 2, 3), request=8))).parts[0].committed == 3
    stage.done()
    stage.end(8)
    assert set(stage.machine.ledgers()) == {REQUEST}


def test_an_unknown_request_travels_on_empty() -> None:
    assert is_empty(sent(Stage().segment(draft(1, (2, 1, 2)))), 1)


# --- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        draft(3, (5, 99, 4)),
        draft(3, (4, 2, 3)),
        draft(3, (5, 4, 9)),
        draft(3, (6, 5, 5), (5, 4, 4)),
        one_part(
            REQUEST, 3, 0, True, 0, 1, numbers(5), numbers(4), numbers(4), numbers(4), hidden(1)
        ),
    ],
    ids=["unknown parent", "repeated", "position", "child first", "committed behind guesses"],
)
def test_malformed_rows_end_the_ring(bad: Segment) -> None:
    stage = with_tree()
    (renewal,) = stage.segment(bad)
    assert isinstance(renewal, Renew)
    assert renewal.by_sender
    assert renewal.why.startswith("sent rows that do not fit: ")
    assert stage.running is None
    assert stage.segment(opening(4, request=8)) == [], "nothing of this ring counts any more"
    stage.machine.reset()
    assert runs(stage.segment(opening(5, request=8))).request == 8


def test_a_segment_that_is_left_out_ends_the_ring() -> None:
    stage = with_tree()
    (renewal,) = stage.segment(draft(4, (5, 4, 4)))
    assert renewal == Renew("left out the segments before number 4", by_sender=True)
    assert stage.segment(draft(5, (5, 4, 4))) == []


def test_a_malformed_opening_leaves_no_cache() -> None:
    stage = Stage()
    ids = numbers(3)
    effects = stage.segment(one_part(REQUEST, 1, 0, True, 64, 1, ids, ids - 1, ids, ids, None))
    assert isinstance(effects[-1], Renew)
    effects += stage.machine.reset()
    opened_or_closed = [type(e) for e in effects if isinstance(e, OpenCache | CloseCache)]
    assert opened_or_closed in ([OpenCache, CloseCache], [CloseCache])
    assert stage.machine.ledgers() == {}


@pytest.mark.parametrize("accepted", [(4,), (3, 4), (2, 4, 3)])
def test_a_retained_set_of_rows_that_never_came_ends_the_ring_and_changes_nothing(
    accepted: tuple[int, ...],
) -> None:
    stage = with_tree()
    (renewal,) = stage.retain(1, 4, accepted, ())
    assert isinstance(renewal, Renew)
    assert not renewal.by_sender
    ledger = stage.machine.ledgers()[REQUEST]
    assert (ledger.committed, ledger.speculative, ledger.epoch) == (2, (2, 3, 4), 0)


def test_the_row_limit_ends_the_request() -> None:
    stage = opened(row_limit=3)
    stage.segment(draft(2, (2, 1, 2)))
    stage.done()
    effects = stage.segment(draft(3, (3, 2, 3)))
    assert "3 rows" in faults(effects)[0]
    assert is_empty(sent(effects), 3)


def test_no_more_is_reserved_than_the_row_limit() -> None:
    stage = Stage(row_limit=50)
    huge = opening()
    effects = stage.segment(
        one_part(
            REQUEST,
            1,
            0,
            True,
            2**62,
            1,
            huge.parts[0].ids,
            huge.parts[0].parents,
            huge.parts[0].ids,
            huge.parts[0].tokens,
            None,
        )
    )
    assert effects[0] == OpenCache(REQUEST, 50)


def test_a_failed_job_ends_the_request() -> None:
    stage = opened()
    stage.segment(draft(2, (2, 1, 2)))
    stage.segment(opening(3, request=8))
    effects = stage.fail()
    assert faults(effects) == ["out of memory"]
    assert CloseCache(REQUEST) in effects
    assert is_empty(sent(effects), 2)
    assert runs(effects).request == 8


def test_a_failed_job_of_an_ended_request_is_no_news() -> None:
    stage = opened()
    stage.segment(draft(2, (2, 1, 2)))
    stage.end()
    effects = stage.fail()
    assert len(effects) == 1
    assert is_empty(sent(effects), 2)


def test_a_cache_that_cannot_be_opened_or_moved_ends_the_request() -> None:
    stage = Stage()
    job = runs(stage.segment(opening()))
    failed = ComputeFailed(NO_JOB, REQUEST, "out of memory")
    effects = stage.tell(failed)
    assert faults(effects) == ["out of memory"]
    assert CloseCache(REQUEST) in effects
    assert AbortBlock(job.job) in effects
    assert stage.tell(failed) == [], "it ended already"
    assert is_empty(sent(stage.fail()), 1)


@pytest.mark.parametrize(
    "event",
    [
        BlockDone(99, hidden(1)),
        BlockDone(0, None),
        ComputeFailed(99, REQUEST, "?"),
        RingUp(),
        HeadDone(1, 1, Choice(numbers(0), numbers(1), np.ones(1))),
        MessageArrived(b"", Fault(REQUEST, "?")),
    ],
    ids=lambda e: type(e).__name__,
)
@pytest.mark.parametrize("running", [False, True])
def test_an_event_that_cannot_be_is_our_bug_and_changes_nothing(
    event: Event, running: bool
) -> None:
    stage = with_tree()
    if running:
        stage.segment(draft(3, (5, 4, 4)))
    before = copy.deepcopy(vars(stage.machine))
    with pytest.raises(LocalProtocolError):
        stage.tell(event)
    after = vars(stage.machine)
    assert {k: repr(v) for k, v in after.items() if k != "_held"} == {
        k: repr(v) for k, v in before.items() if k != "_held"
    }
    assert {r: repr(vars(ledger)) for r, ledger in after["_held"].ledgers().items()} == {
        r: repr(vars(ledger)) for r, ledger in before["_held"].ledgers().items()
    }


def test_tokens_travel_to_stages_whose_layers_are_told_of_them() -> None:
    stage = Stage(is_first=True)
    stage.machine.take_place(is_first=True, is_last=False, row_limit=100, keeps_tokens=True)
    stage.segment(opening(prompt=3))
    (part,) = sent(stage.done()).parts
    assert part.tokens.tolist() == [0, 1, 2]
    between = Stage()
    between.machine.take_place(is_first=False, is_last=False, row_limit=100, keeps_tokens=True)
    lacking = replace(opening(prompt=3), hidden=hidden(0, 1, 2))
    part = replace(lacking.parts[0], tokens=numbers())
    (renew,) = between.segment(replace(lacking, parts=(part,)))[-1:]
    assert isinstance(renew, Renew)
    assert "lack their tokens" in renew.why
    last = Stage(is_last=True)
    last.machine.take_place(is_first=False, is_last=True, row_limit=100, keeps_tokens=True)
    last.segment(lacking)
    assert not len(sent(last.done()).parts[0].tokens)


def test_a_stage_waits_for_nothing() -> None:
    assert Stage().machine.deadline() is None


def test_taps_of_the_stages_stay_beside_their_rows_when_some_are_dropped() -> None:
    stage = opened()
    rows = draft(2, (2, 1, 2), (3, 2, 3), (4, 2, 3))
    aux_hidden = Tensor("uint8", (3, 2), b"aabbcc")
    effects = stage.segment(changed(rows, aux_layers=Layers((0, 5)), aux_hidden=aux_hidden))
    assert runs(effects).aux_layers == (0, 5)
    stage.retain(1, 4, (), (2, 4))
    job, stage.running = stage.running, None
    assert job is not None
    own = Tensor("uint8", (3, 1), b"xyz")
    out = sent(stage.tell(BlockDone(job.job, hidden(1, 2, 3), own)))
    assert out.parts[0].ids.tolist() == [2, 4]
    assert out.header.aux_layers == (0, 5)
    assert out.aux_hidden == Tensor("uint8", (2, 3), b"aaxccz")


def test_taps_of_rows_that_were_dropped_before_they_came() -> None:
    stage = opened(is_last=True)
    stage.retain(1, 3, (), (3,))
    rows = draft(2, (2, 1, 2), (3, 1, 2))
    aux_hidden = Tensor("uint8", (2, 1), b"ab")
    stage.segment(changed(rows, aux_layers=Layers((0,)), aux_hidden=aux_hidden))
    assert sent(stage.done()).aux_hidden == Tensor("uint8", (1, 1), b"b")
