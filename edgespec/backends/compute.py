"""Compute: carries out one node's compute effects on its backend; each gives at most one event."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edgespec.backends.base import BlockBackend, Head, Walk
from edgespec.backends.jobs import Drafts, JointDone, ReadPart, RunHeads, failure
from edgespec.decoding.effects import (
    CloseCache,
    CloseDraft,
    Draft,
    FindMasks,
    ForkCache,
    GatherRows,
    MoveCache,
    OpenCache,
    OpenDraft,
    RunHead,
)
from edgespec.decoding.events import Drafted, HeadDone, Masks, MasksFound
from edgespec.drafting.grower import Further, TreeGrower
from edgespec.drafting.steps import Steps, alone, together
from edgespec.errors import RemoteProtocolError
from edgespec.machines.effects import Effect, RunBlock
from edgespec.machines.events import BlockDone, ComputeFailed, Event
from edgespec.policy.base import Deepen, Expand, Grow
from edgespec.tree.drafted import Children, DraftedTree
from edgespec.types.stop_check import StopCheck
from edgespec.verify.sampling import Choice
from edgespec.verify.top_logprobs import TopLogprobs, joined

STAGE_COMPUTE = (
    OpenCache,
    MoveCache,
    ForkCache,
    CloseCache,
    RunBlock,
    GatherRows,
    RunHead,
)
COORDINATOR_COMPUTE = (OpenDraft, CloseDraft, Draft, RunHead, FindMasks)
COMPUTE = STAGE_COMPUTE + COORDINATOR_COMPUTE
"""Effects that go to the worker, in order; all others go to the sockets."""

FIRST = (RunHead, RunHeads, FindMasks)
"""Of these, what the worker does before anything else that waits: the ring waits for it, and it
depends on no draft."""

UNHURRIED = (GatherRows,)
"""What nothing waits for but the block that runs next: it wakes no worker by itself, which would
only compete with the loop that reads that block's segment."""

INTERRUPTIBLE = (Draft, Drafts, ReadPart)
"""What such a head interrupts between two layers (see backends.charged_time)."""


HEAD_LANE, STAGE_LANE, OWN_LANE = 0, 1, 2


def lane_of(effect: Effect) -> int:
    """Whose turn it is where several wait for one device: heads, then a stage's work, then D0's."""
    if isinstance(effect, FIRST):
        return HEAD_LANE
    return STAGE_LANE if isinstance(effect, STAGE_COMPUTE) else OWN_LANE


class StageCompute:
    """A stage's worker: its block of layers, and the output head if the last stage has it."""

    def __init__(
        self, block: BlockBackend, head: Head | None = None, *, keeps_tokens: bool = False
    ) -> None:
        """`keeps_tokens`: see StageMachine."""
        self._block = block
        self._head = head
        self.keeps_tokens = keeps_tokens

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
            case RunHead() | RunHeads():
                return _run_heads(self._head, effect)
            case _:
                raise TypeError(f"a stage computes no {type(effect).__name__}")
        return None


class CoordinatorCompute:
    """The coordinator's worker: the output head (None: the last stage has it) and the draft source
    (None: no draft)."""

    def __init__(self, head: Head | None, draft: TreeGrower | None) -> None:
        self._head = head
        self._draft = draft

    def perform(self, effect: Effect, stop: Callable[[], bool]) -> Event | None:
        """Carry out one effect; `stop()` is called between two layers of a draft, for what the
        worker does then: a draft is never stopped."""
        if isinstance(effect, RunHead | RunHeads):
            return _run_heads(self._head, effect)
        if isinstance(effect, FindMasks):
            return _found_masks(effect)
        if self._draft is None:
            raise TypeError(f"{type(effect).__name__} without a draft source")
        self._draft.take_work()  # of the effect before: where nothing is charged nobody did
        if isinstance(effect, INTERRUPTIBLE):
            self._draft.let_in(stop)
        match effect:
            case OpenDraft(request, sampling, base, rows, ends, grammar, prompt):
                self._draft.open(request, sampling, grammar, prompt)
                if base:
                    self._draft.fork(request, base, rows, ends)
                if ends:
                    self._draft.close(base)
            case CloseDraft(request):
                self._draft.close(request)
            case ReadPart(request, context, rows):
                alone(self._draft.reading_part(request, context, rows))
            case Draft():
                return _drafted(effect, alone(_steps(self._draft, effect)))
            case Drafts(drafts):
                found = together([_steps(self._draft, draft) for draft in drafts])
                return JointDone(tuple(map(_drafted, drafts, found)))
            case _:
                raise TypeError(f"a coordinator computes no {type(effect).__name__}")
        return None


def _steps(source: TreeGrower, draft: Draft) -> Steps[DraftedTree | Children]:
    request, context, features = draft.request, draft.context, draft.features
    match draft.plan:
        case Grow(depth, width):
            return source.refreshing(request, context, depth, width, features)
        case Deepen(levels, width):
            return source.deepening(request, levels, width)
        case Expand(width=width, most=most, least=least, free=free):
            further = Further(draft.scores, most, least, free)
            return source.expanding(request, context, draft.paths, width, features, further)


def _drafted(draft: Draft, found: DraftedTree | Children | Exception) -> Event:
    if isinstance(found, Exception):
        return failure(draft, found)
    return Drafted(draft.job, draft.request, found)


def _found_masks(effect: FindMasks) -> MasksFound:
    found: list[tuple[int, Masks]] = []
    for request, grammar, answers in effect.asked:
        try:
            masks = [None if grammar.has_ended(one) else grammar.allowed(one) for one in answers]
            found.append((request, tuple(masks)))
        except Exception as problem:  # of one request: the others' rows go on
            failed = failure(effect, problem)
            assert isinstance(failed, ComputeFailed)
            found.append((request, failed.reason))
    return MasksFound(effect.seq, tuple(found))


def _run_heads(head: Head | None, effect: RunHead | RunHeads) -> Event:
    if isinstance(effect, RunHead):
        return _chosen(head, [effect])[0]
    try:
        return JointDone(tuple(_chosen(head, effect.effects)))
    except Exception:  # of one of them: let it fail alone
        return JointDone(tuple(_chosen_alone(head, one) for one in effect.effects))


def _chosen_alone(head: Head | None, effect: RunHead) -> Event:
    try:
        return _chosen(head, [effect])[0]
    except Exception as problem:
        return failure(effect, problem)


def _chosen(head: Head | None, effects: Sequence[RunHead]) -> list[HeadDone]:
    if head is None:
        raise RemoteProtocolError("the output head is not on this node; start the ring again")
    walks = [
        Walk(e.hidden.take(e.walk), e.rows.take(e.walk), e.sampling, e.top, e.rules)
        for e in effects
        if len(e.walk)
    ]
    chosen = iter(head.choose(walks) if walks else ())
    found = []
    for effect in effects:
        told = next(chosen) if len(effect.walk) else None
        if len(effect.known):
            told = _scored(head, effect, told)
        assert told is not None
        found.append(HeadDone(effect.job, effect.request, *told))
    return found


def _scored(
    head: Head, effect: RunHead, chosen: tuple[Choice, TopLogprobs | None] | None
) -> tuple[Choice, TopLogprobs]:
    """The known tokens of a head's job, which had no rivals, and those that were chosen behind."""
    tokens = effect.known
    places = np.arange(len(tokens))
    scores = [head.score(effect.hidden.take(places), tokens, effect.top)]
    choice = Choice(places, tokens, np.full(len(tokens), np.inf))
    if chosen is not None:
        behind, others = chosen
        assert others is not None
        scores.append(others)
        choice = Choice(
            np.concatenate([places, effect.walk[behind.rows]]),
            np.concatenate([tokens, behind.tokens]),
            np.concatenate([choice.margins, behind.margins]),
        )
    return choice, joined(scores)
