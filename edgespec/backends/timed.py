"""Timed: how long a node's compute effects take, by its costs; for simulation and emulation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

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
from edgespec.decoding.events import HeadDone
from edgespec.drafting.grower import DraftSource
from edgespec.machines.effects import Effect, RunBlock
from edgespec.machines.events import Event
from edgespec.planning.costs import NodeCosts, RingCosts, frame_bytes
from edgespec.policy.base import Deepen
from edgespec.types.draft_pass import DraftPass, DraftWork, RankedRows
from edgespec.verify.noise import KEPT_ROWS
from edgespec.wire.segment import Segment


class EffectDurations(Protocol):
    """How long a node's compute effects take."""

    def seconds(self, effect: Effect, done: Event | None) -> float:
        """Seconds of an effect; asked once for each, of others than RunBlock when it is done: what
        came of it."""

    def parts(self, effect: Effect) -> Sequence[float]:
        """The lengths, in any unit, of an effect's parts (layers, or CUDA graphs of some), between
        which it can be stopped or interrupted; of a draft: of the one whose seconds were asked
        last."""


_SCALE_BYTES = 4  # of an auxiliary row, beside a byte a number


def segment_bytes(costs: RingCosts, segment: Segment) -> int:
    """Bytes of a segment on the wire, were its rows those of the charged model."""
    hidden, aux_hidden, rows = segment.hidden, segment.aux_hidden, segment.rows
    verdicts = [part.verdict for part in segment.parts if part.verdict is not None]
    if verdicts:
        shapes = [one.figures.shape for one in verdicts]
        numbers = sum(chosen * (columns - 1) for chosen, columns in shapes)
        numbers += sum(len(one.top) for one in verdicts)
        chosen = sum(chosen for chosen, _ in shapes)
        return costs.verdict_bytes(
            rows, len(segment.cost), chosen, numbers, requests=len(segment.parts)
        )
    tokens = any(len(part.tokens) for part in segment.parts)
    ran = 0 if hidden is None else max(len(segment.cost), 1)
    total = costs.segment_bytes(rows, ran, tokens, requests=len(segment.parts))
    if segment.ppd_tokens is not None:
        total += frame_bytes(segment.ppd_tokens.shape[0] * costs.row_bytes)
    if aux_hidden is not None and hidden is not None:
        layers = round(aux_hidden.shape[1] / (hidden.shape[1] + _SCALE_BYTES))
        total += frame_bytes(rows * layers * (costs.row_bytes // 2 + _SCALE_BYTES))
    return total


class TokenTimes:
    """What it costs on a device to take tokens from logits, and to guess them: noise is made once a
    position, as long as verify.noise keeps it."""

    def __init__(self, costs: NodeCosts) -> None:
        self._costs = costs
        self._made: OrderedDict[tuple[int, int], None] = OrderedDict()  # seed and position

    def chosen(self, effect: RunHead, done: Event | None) -> float:
        """The output head, and the walk over the rows that it looked at, none if it failed."""
        seconds = self._costs.head_seconds(effect.hidden.shape[0])
        if not isinstance(done, HeadDone):
            return seconds
        looked_at, way = done.choice.rows, effect.sampling.way
        seconds += self._costs.choose_seconds(len(looked_at), way)
        if effect.top >= 0:  # log-probabilities: about twice a choice with filters, measured
            seconds += 2 * self._costs.choose_seconds(len(looked_at), "filtered")
        if way == "sampled":
            positions = effect.rows.positions[looked_at] + 1
            seconds += self._noise(effect.sampling.seed, positions.tolist())
        return seconds

    def ranked(self, rows: RankedRows) -> float:
        """A draft's output head over these rows, and the best guesses of each."""
        seconds = self._costs.rank_seconds(len(rows.positions), rows.way, rows.source)
        if rows.way == "sampled" and self._costs.model.draft_of(rows.source).vocab:
            seconds += self._noise(rows.seed, rows.positions)
        return seconds

    def _noise(self, seed: int, positions: Sequence[int]) -> float:
        """The noise of those positions that was not made lately."""
        missing = 0
        for key in ((seed, position) for position in positions):
            missing += key not in self._made
            self._made[key] = None
            self._made.move_to_end(key)
            if len(self._made) > KEPT_ROWS:
                self._made.popitem(last=False)
        return self._costs.noise_seconds(missing)


class StageDurations:
    """What a stage's compute effects cost on its device."""

    def __init__(self, costs: NodeCosts) -> None:
        self._costs = costs
        self._taking = TokenTimes(costs)

    def seconds(self, effect: Effect, done: Event | None = None) -> float:
        """Seconds that an effect keeps the worker busy. Raises TypeError if no stage computes it.

        A block reads the weights once for all its rows, and of each request's cache every row that
        any of them could see.
        """
        match effect:
            case OpenCache() | MoveCache() | CloseCache():
                return 0.0
            case ForkCache(how=how):
                return self._costs.gather_seconds(how.moved)
            case GatherRows():
                return self._costs.gather_seconds(len(effect.order))
            case RunBlock():
                rows, requests = len(effect.rows), len(effect.parts)
                tapped = bool(effect.aux_layers)
                return self._costs.block_seconds(rows, effect.slots, requests, tapped)
            case RunHead():
                return self._taking.chosen(effect, done)
            case _:
                raise TypeError(f"a stage computes no {type(effect).__name__}")

    def parts(self, effect: Effect) -> Sequence[float]:
        if not isinstance(effect, RunBlock):
            return (1.0,)
        rows, requests = len(effect.rows), len(effect.parts)
        return self._costs.block_parts(rows, requests, bool(effect.aux_layers))


class CoordinatorDurations:
    """What the coordinator's compute effects cost on its device."""

    def __init__(self, costs: NodeCosts, draft: DraftSource | None = None) -> None:
        self._costs = costs
        self._draft = draft
        self._context: dict[int, int] = {}  # rows that a request's draft attends to
        self._taking = TokenTimes(costs)
        self._parts: list[float] = []  # of the last draft

    def parts(self, effect: Effect) -> Sequence[float]:
        """A draft's layers or graphs, and every ranking of guesses with its output matrix."""
        return self._parts if isinstance(effect, Draft) else (1.0,)

    def seconds(
        self, effect: Effect, done: Event | None, work: Sequence[DraftWork] | None = None
    ) -> float:
        """Seconds that an effect keeps the worker busy. Raises TypeError if D0 computes no such.

        `done`: what came of it, which says how many rows a head looked at. `work`: what the draft
        source did; left out, it is asked. Every pass is charged for the whole context of its
        request, as last told.
        """
        if work is None:
            work = self._draft.take_work() if self._draft is not None else ()
        head = 0.0  # of the base, over rows of PPD tokens
        match effect:
            case OpenDraft(base=request) | CloseDraft(request):
                self._context.pop(request, None)
                return 0.0
            case RunHead():
                return self._taking.chosen(effect, done)
            case Draft(plan=Deepen()):
                pass  # below the context of the request's last Grow
            case Draft():
                self._context[effect.request] = len(effect.context)
                if effect.features.ppd_rows is not None:
                    head = self._costs.head_seconds(effect.features.ppd_rows.shape[0])
            case _:
                raise TypeError(f"a coordinator computes no {type(effect).__name__}")
        seen = self._context.get(effect.request, 0)
        self._parts = [head] if head else []
        for one in work:
            if isinstance(one, DraftPass):
                self._parts += self._costs.draft_parts(one.rows, seen, one.source)
            else:
                self._parts.append(self._taking.ranked(one))
        return sum(self._parts)
