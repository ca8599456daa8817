"""One stage alone, fed by hand."""

from __future__ import annotations

import numpy as np
from support.segments import one_part, retain_message

from edgespec.decoding.effects import (
    SendRing,
)
from edgespec.decoding.events import (
    SegmentArrived,
)
from edgespec.decoding.stage import StageMachine
from edgespec.machines.effects import (
    Effect,
    RunBlock,
    SendCoordinator,
)
from edgespec.machines.events import (
    BlockDone,
    ComputeFailed,
    Event,
    MessageArrived,
)
from edgespec.types.record import IntArray
from edgespec.types.tensor import Tensor
from edgespec.wire.messages import CloseRequest, Fault
from edgespec.wire.segment import Segment

REQUEST = 7


def numbers(*values: int) -> IntArray:
    """An int64 list."""
    return np.array(values, np.int64)


def hidden(*values: float) -> Tensor:
    """One number a row."""
    return Tensor("float32", (len(values), 1), np.array(values, np.float32).tobytes())


def values_of(tensor: Tensor | None) -> list[float]:
    """The numbers of `hidden`."""
    assert tensor is not None
    return np.frombuffer(tensor.data, np.float32).tolist()


def opening(seq: int = 1, prompt: int = 2, request: int = REQUEST) -> Segment:
    """The first prefill segment: ids 0 to `prompt` - 1."""
    ids = np.arange(prompt, dtype=np.int64)
    return one_part(request, seq, 0, True, 64, 1, ids, ids - 1, ids, ids, None)


def draft(
    seq: int, *triples: tuple[int, int, int], epoch: int = 0, request: int = REQUEST
) -> Segment:
    """Speculative rows from (id, parent, position), with hidden numbers equal to their ids."""
    ids, parents, positions = np.array(triples, np.int64).reshape(-1, 3).T
    rows = hidden(*ids.tolist())
    return one_part(
        request, seq, epoch, False, 0, len(ids), ids, parents, positions, numbers(), rows
    )


class Stage:
    """A StageMachine whose block adds 100 to every hidden number; `now` is its time."""

    def __init__(
        self, *, is_first: bool = False, is_last: bool = False, row_limit: int = 1000
    ) -> None:
        self.machine = StageMachine(is_first=is_first, is_last=is_last, row_limit=row_limit)
        self.running: RunBlock | None = None
        self.now = 0.0

    def tell(self, event: Event) -> list[Effect]:
        effects = self.machine.handle(event, self.now)
        for effect in effects:
            if isinstance(effect, RunBlock):
                assert self.running is None, "two jobs at once"
                self.running = effect
        return effects

    def segment(self, segment: Segment) -> list[Effect]:
        return self.tell(SegmentArrived(segment))

    def retain(
        self, epoch: int, mark: int, accepted: tuple[int, ...], retained: tuple[int, ...]
    ) -> list[Effect]:
        return self.tell(
            MessageArrived(b"", retain_message(REQUEST, epoch, mark, accepted, retained))
        )

    def end(self, request: int = REQUEST) -> list[Effect]:
        return self.tell(MessageArrived(b"", CloseRequest(request)))

    def done(self, *, aborted: bool = False, after: float = 0.0) -> list[Effect]:
        self.now += after
        job, self.running = self.running, None
        assert job is not None
        ids = [0.0] * len(job.rows) if job.hidden is None else values_of(job.hidden)
        result = None if aborted else hidden(*(100 + i for i in ids))
        return self.tell(BlockDone(job.job, result))

    def fail(self) -> list[Effect]:
        job, self.running = self.running, None
        assert job is not None
        return self.tell(ComputeFailed(job.job, job.request, "out of memory"))


def opened(*, is_first: bool = False, is_last: bool = False, row_limit: int = 1000) -> Stage:
    """A stage that holds rows 0 and 1 of the request."""
    stage = Stage(is_first=is_first, is_last=is_last, row_limit=row_limit)
    stage.segment(opening())
    stage.done()
    return stage


def with_tree(*, is_first: bool = False, is_last: bool = False) -> Stage:
    """Also 2 below 1; 3 and 4 below 2 (computed)."""
    stage = opened(is_first=is_first, is_last=is_last)
    stage.segment(draft(2, (2, 1, 2), (3, 2, 3), (4, 2, 3)))
    stage.done()
    return stage


def sent(effects: list[Effect]) -> Segment:
    """The one segment that leaves."""
    segments = [e.segment for e in effects if isinstance(e, SendRing)]
    assert len(segments) == 1
    return segments[0]


def runs(effects: list[Effect]) -> RunBlock:
    """The one job that starts."""
    jobs = [e for e in effects if isinstance(e, RunBlock)]
    assert len(jobs) == 1
    return jobs[0]


def faults(effects: list[Effect]) -> list[str]:
    """What the coordinator is told."""
    found = [e.message for e in effects if isinstance(e, SendCoordinator)]
    assert all(isinstance(m, Fault) and m.request == REQUEST for m in found)
    return [m.reason for m in found if isinstance(m, Fault)]


def is_empty(segment: Segment, seq: int) -> bool:
    """Whether it is the header of that segment alone."""
    return segment.header.seq == seq and not segment.rows and segment.hidden is None
