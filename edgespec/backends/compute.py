"""Compute: carries out one node's compute effects on its backend; each gives at most one event."""

from __future__ import annotations

from collections.abc import Callable

from edgespec.backends.base import BlockBackend, Head
from edgespec.decoding.effects import (
    CloseCache,
    CloseDraft,
    Draft,
    ForkCache,
    GatherRows,
    MoveCache,
    OpenCache,
    OpenDraft,
    RunHead,
)
from edgespec.decoding.events import Drafted, HeadDone
from edgespec.drafting.grower import DraftSource
from edgespec.errors import RemoteProtocolError
from edgespec.machines.effects import Effect, RunBlock
from edgespec.machines.events import BlockDone, Event
from edgespec.policy.base import Deepen, Expand, Grow
from edgespec.tree.drafted import Children, DraftedTree
from edgespec.types.stop_check import StopCheck

STAGE_COMPUTE = (OpenCache, MoveCache, ForkCache, CloseCache, RunBlock, GatherRows, RunHead)
COORDINATOR_COMPUTE = (OpenDraft, CloseDraft, Draft, RunHead)
COMPUTE = STAGE_COMPUTE + COORDINATOR_COMPUTE
"""Effects that go to the worker, in order; all others go to the sockets."""

FIRST = (RunHead,)
"""Of these, what the worker does before anything else that waits: the ring waits for a head, and it
depends on no draft."""

INTERRUPTIBLE = (Draft,)
"""What such a head interrupts between two layers (see backends.charged_time)."""


def lane_of(effect: Effect) -> int:
    """Whose turn it is where several wait for one device: heads, then a stage's work, then D0's."""
    return 0 if isinstance(effect, FIRST) else 1 if isinstance(effect, STAGE_COMPUTE) else 2


class StageCompute:
    """A stage's worker: its block of layers, and the output head if the last stage has it."""

    def __init__(self, block: BlockBackend, head: Head | None = None) -> None:
        self._block = block
        self._head = head

    def perform(self, effect: Effect, stop: StopCheck) -> Event | None:
        """Carry out one effect; `stop()` turns true when a running block is no longer wanted."""
        match effect:
            case OpenCache(request, reserve):
                self._block.open(request, reserve)
            case MoveCache(request, base):
                self._block.move(request, base)
            case ForkCache(request, base, how):
                self._block.fork(request, base, how)
            case CloseCache(request):
                self._block.close(request)
            case GatherRows(request, start, order):
                self._block.gather(request, start, order)
            case RunBlock():
                hidden = self._block.run(effect, stop)
                tapped = effect.aux_layers and hidden is not None
                aux_hidden = self._block.take_aux_hidden() if tapped else None
                return BlockDone(effect.job, hidden, aux_hidden)
            case RunHead():
                return _run_head(self._head, effect)
            case _:
                raise TypeError(f"a stage computes no {type(effect).__name__}")
        return None


class CoordinatorCompute:
    """The coordinator's worker: the output head (None: the last stage has it) and the draft source
    (None: no draft)."""

    def __init__(self, head: Head | None, draft: DraftSource | None) -> None:
        self._head = head
        self._draft = draft

    def perform(self, effect: Effect, stop: Callable[[], bool]) -> Event | None:
        """Carry out one effect; `stop()` is called between two layers of a draft, for what the
        worker does then: a draft is never stopped."""
        if isinstance(effect, RunHead):
            return _run_head(self._head, effect)
        if self._draft is None:
            raise TypeError(f"{type(effect).__name__} without a draft source")
        match effect:
            case OpenDraft(request, sampling, base, rows, ends):
                self._draft.open(request, sampling)
                if base:
                    self._draft.fork(request, base, rows, ends)
                if ends:
                    self._draft.close(base)
            case CloseDraft(request):
                self._draft.close(request)
            case Draft():
                self._draft.let_in(stop)
                return Drafted(effect.job, effect.request, self._guess(self._draft, effect))
            case _:
                raise TypeError(f"a coordinator computes no {type(effect).__name__}")
        return None

    def _guess(self, source: DraftSource, draft: Draft) -> DraftedTree | Children:
        request, context, features = draft.request, draft.context, draft.features
        match draft.plan:
            case Grow(depth, width):
                return source.refresh(request, context, depth, width, features)
            case Deepen(levels, width):
                return source.deepen(request, levels, width)
            case Expand(width=width):
                return source.expand(request, context, draft.paths, width, features)


def _run_head(head: Head | None, effect: RunHead) -> HeadDone:
    if head is None:
        raise RemoteProtocolError("the output head is not on this node; start the ring again")
    wanted = effect.hidden, effect.rows, effect.sampling, effect.top
    return HeadDone(effect.job, effect.request, *head.choose(*wanted))
