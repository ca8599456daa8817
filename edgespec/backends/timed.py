"""Timed: how long a node's compute effects take, by its costs; for simulation and emulation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from edgespec.decoding.effects import (
    CloseCache,
    CloseDraft,
    Draft,
    ForkCache,
    GatherRows,
    OpenCache,
    OpenDraft,
    RunHead,
)
from edgespec.drafting.grower import DraftSource
from edgespec.machines.effects import Effect, RunBlock
from edgespec.planning.costs import NodeCosts
from edgespec.policy.base import Deepen
from edgespec.types.draft_pass import DraftPass


class EffectDurations(Protocol):
    """How long a node's compute effects take."""

    def seconds(self, effect: Effect) -> float:
        """Seconds of an effect; asked once for each, of others than RunBlock when it is done."""

    def parts(self, effect: Effect) -> Sequence[float]:
        """The lengths, in any unit, of an effect's parts (layers), between which it can be stopped
        or interrupted; of a draft: of the one whose seconds were asked last."""


class StageDurations:
    """What a stage's compute effects cost on its device."""

    def __init__(self, costs: NodeCosts) -> None:
        self._costs = costs

    def seconds(self, effect: Effect) -> float:
        """Seconds that an effect keeps the worker busy. Raises TypeError if no stage computes it.

        Every row of a block is charged for all rows that any of them could see.
        """
        match effect:
            case OpenCache() | ForkCache() | CloseCache():
                return 0.0
            case GatherRows():
                return self._costs.gather_seconds(len(effect.order))
            case RunBlock():
                return self._costs.block_seconds(len(effect.rows), effect.slots)
            case RunHead():
                return self._costs.head_seconds(effect.hidden.shape[0])
            case _:
                raise TypeError(f"a stage computes no {type(effect).__name__}")

    def parts(self, effect: Effect) -> Sequence[float]:
        return (1.0,) * (self._costs.layers if isinstance(effect, RunBlock) else 1)


class CoordinatorDurations:
    """What the coordinator's compute effects cost on its device."""

    def __init__(self, costs: NodeCosts, draft: DraftSource | None = None) -> None:
        self._costs = costs
        self._draft = draft
        self._context: dict[int, int] = {}  # rows that a request's draft attends to
        # The passes of the last draft, and the rows that they attended to.
        self._passes: tuple[tuple[DraftPass, ...], int] = (), 0

    def parts(self, effect: Effect) -> Sequence[float]:
        """A draft's layers, and behind those of each pass its output matrix."""
        if not isinstance(effect, Draft):
            return (1.0,)
        work, seen = self._passes
        return [t for rows, source in work for t in self._costs.draft_parts(rows, seen, source)]

    def seconds(self, effect: Effect, work: Sequence[DraftPass] | None = None) -> float:
        """Seconds that an effect keeps the worker busy. Raises TypeError if D0 computes no such.

        `work`: the forward passes that it took; left out, they are taken from the draft source.
        Every pass is charged for the whole context of its request, as last told.
        """
        if work is None:
            work = self._draft.take_work() if self._draft is not None else ()
        head = 0.0  # of the base, over rows of PPD tokens
        match effect:
            case OpenDraft(base=request) | CloseDraft(request):
                self._context.pop(request, None)
                return 0.0
            case RunHead():
                return self._costs.head_seconds(effect.hidden.shape[0])
            case Draft(plan=Deepen()):
                pass  # below the context of the request's last Grow
            case Draft():
                self._context[effect.request] = len(effect.context)
                if effect.features.ppd_rows is not None:
                    head = self._costs.head_seconds(effect.features.ppd_rows.shape[0])
            case _:
                raise TypeError(f"a coordinator computes no {type(effect).__name__}")
        seen = self._context.get(effect.request, 0)
        self._passes = tuple(work), seen
        return head + sum(self._costs.draft_seconds(rows, seen, source) for rows, source in work)
