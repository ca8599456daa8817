"""A stage computes the parts of several requests in one block."""

from __future__ import annotations

import numpy as np
import pytest
from support.segments import one_part, retain_message
from support.stages import (
    REQUEST,
    Stage,
    draft,
    hidden,
    opening,
    runs,
    sent,
    values_of,
)

from edgespec.decoding.effects import AbortBlock, CloseCache, Renew
from edgespec.errors import RemoteProtocolError
from edgespec.machines.effects import Effect
from edgespec.machines.events import MessageArrived
from edgespec.types.tensor import Tensor
from edgespec.wire.codec import decode, encode
from edgespec.wire.segment import Segment

OTHER = 8


def both(first: Segment, second: Segment) -> Segment:
    """One segment of two: the parts of both, and their rows in that order."""
    tensors = [s.hidden for s in (first, second) if s.hidden is not None]
    stacked = hidden(*(n for each in tensors for n in values_of(each))) if tensors else None
    return Segment(first.header, first.parts + second.parts, hidden=stacked)


def opened() -> Stage:
    """A stage that holds rows 0 and 1 of one request, and rows 0 to 2 of another."""
    stage = Stage()
    stage.segment(both(opening(), opening(1, prompt=3, request=OTHER)))
    stage.done()
    return stage


def two_drafts(seq: int = 2, parent: int = 1) -> Segment:
    """Rows 2 and 3 of the one, row 3 of the other."""
    mine = draft(seq, (2, parent, 2), (3, 2, 3))
    return both(mine, draft(seq, (3, 2, 3), request=OTHER))


def retain(stage: Stage, request: int, *retained: int, epoch: int = 1) -> list[Effect]:
    return stage.tell(MessageArrived(b"", retain_message(request, epoch, 3, (), retained)))


def ids(segment: Segment) -> list[list[int]]:
    return [part.ids.tolist() for part in segment.parts]


def test_rows_of_all_parts_are_one_job() -> None:
    stage = opened()
    segment = two_drafts()
    job = runs(stage.segment(segment))
    assert [(part.request, part.committed) for part in job.parts] == [(REQUEST, 2), (OTHER, 3)]
    assert job.parts[0].sees.tolist() == [[True, False], [True, True]]
    assert job.parts[1].sees.tolist() == [[True]]
    assert values_of(job.hidden) == [2, 3, 3]
    out = sent(stage.done(after=0.5))
    assert out.header is segment.header
    assert ids(out) == [[2, 3], [3]]
    assert values_of(out.hidden) == [102, 103, 103]
    assert [(time.rows, time.seconds) for time in out.cost] == [(3, 0.5)]


def test_what_is_dropped_of_one_part_leaves_the_other() -> None:
    stage = opened()
    job = runs(stage.segment(two_drafts()))
    assert AbortBlock(job.job, REQUEST) in retain(stage, REQUEST), "the job goes on without it"
    out = sent(stage.done())
    assert ids(out) == [[], [3]]
    assert values_of(out.hidden) == [103]
    assert [part.epoch for part in out.parts] == [0, 0], "the segment left before the set"


def test_a_job_is_aborted_when_no_part_is_wanted() -> None:
    stage = opened()
    job = runs(stage.segment(two_drafts()))
    assert not any(isinstance(e, AbortBlock) for e in retain(stage, REQUEST, 2)), "row 2 is wanted"
    assert AbortBlock(job.job, OTHER) in retain(stage, OTHER)
    assert AbortBlock(job.job) in retain(stage, REQUEST, epoch=2)
    out = sent(stage.done(aborted=True))
    assert (ids(out), out.hidden, out.cost) == ([[], []], None, ())


def test_an_end_of_one_request_leaves_the_other() -> None:
    stage = opened()
    job = runs(stage.segment(two_drafts()))
    assert stage.end() == [CloseCache(REQUEST), AbortBlock(job.job, REQUEST)]
    assert ids(sent(stage.done())) == [[], [3]]


def test_a_malformed_part_ends_the_ring() -> None:
    stage = opened()
    (renewal,) = stage.segment(two_drafts(parent=-1))
    assert isinstance(renewal, Renew)
    assert stage.running is None


def test_rows_that_were_booked_beside_a_malformed_part_are_never_gathered() -> None:
    """No cache holds them, as no block of them ran."""
    stage = opened()
    mine = draft(2, (2, 1, 2), (3, 2, 3))
    (renewal,) = stage.segment(both(mine, draft(2, (3, -1, 3), request=OTHER)))
    assert isinstance(renewal, Renew)
    assert retain(stage, REQUEST, 3) == []


def test_parts_cross_the_wire() -> None:
    segment = two_drafts()
    back = decode(encode(segment))
    assert isinstance(back, Segment)
    assert [part.request for part in back.parts] == [REQUEST, OTHER]
    assert ids(back) == ids(segment)
    assert back.hidden == segment.hidden


@pytest.mark.parametrize("requests", [[], [REQUEST, REQUEST], list(range(65))])
def test_parts_that_cannot_be_are_refused(requests: list[int]) -> None:
    none = np.zeros(0, np.int64)
    parts = tuple(one_part(r, 1, 0, False, 0, 0, *[none] * 4, None).parts[0] for r in requests)
    segment = Segment(two_drafts().header, parts, hidden=Tensor("float32", (0, 1), b""))
    with pytest.raises(RemoteProtocolError, match=r"Segment: (wrong number|a request has two)"):
        decode(encode(segment))
