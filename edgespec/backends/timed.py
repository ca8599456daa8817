"""Timed: how long a node's compute effects take, by its costs; for simulation and emulation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Protocol

from edgespec.backends.charged_time import LoopTime
from edgespec.backends.compute import INTERRUPTIBLE
from edgespec.backends.jobs import Drafts, ReadPart, RunHeads, effects_of, events_of
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
from edgespec.decoding.events import HeadDone
from edgespec.drafting.grower import TreeGrower
from edgespec.machines.effects import Effect, RunBlock
from edgespec.machines.events import Event
from edgespec.planning.costs import NodeCosts, RingCosts
from edgespec.policy.base import Deepen
from edgespec.types.draft_pass import DraftPass, DraftWork, RankedRows, SpentSeconds
from edgespec.verify.noise import KEPT_ROWS
from edgespec.wire.segment import Segment


class EffectDurations(Protocol):
    """How long a node's compute effects take."""

    def seconds(self, effect: Effect, done: Event | None) -> float:
        """Seconds of an effect; asked once for each, of others than RunBlock when it is done: what
        came of it."""

    def parts(self, effect: Effect) -> Sequence[float]:
        """The lengths, in any unit, of an effect's parts (layers), between which it can be stopped
        or interrupted; of a draft: of the one whose seconds were asked last."""


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
    choosing = [part.choosing for part in segment.parts if part.choosing is not None]
    told = [mask for one in choosing if one.allowed for mask in one.allowed.masks]
    tokens = any(len(part.tokens) for part in segment.parts)
    ran = 0 if hidden is None else max(len(segment.cost), 1)
    total = costs.segment_bytes(rows, ran, tokens, requests=len(segment.parts))
    total += sum(len(mask.data) for mask in told)
    if segment.ppd_tokens is not None:
        total += segment.ppd_tokens.shape[0] * costs.row_bytes
    if aux_hidden is not None and hidden is not None:
        layers = round(aux_hidden.shape[1] / (hidden.shape[1] + _SCALE_BYTES))
        total += rows * layers * (costs.row_bytes // 2 + _SCALE_BYTES)
    return total


class TokenTimes:
    """What it costs on a device to take tokens from logits, and to guess them: noise is made once a
    position, as long as verify.noise keeps it."""

    def __init__(self, costs: NodeCosts) -> None:
        self._costs = costs
        self.host = 0.0
        """Of what was chosen last: seconds on the host, where the token of each row is taken."""
        self._made: OrderedDict[tuple[int, int], None] = OrderedDict()  # seed and position

    def chosen(self, effect: RunHead | RunHeads, done: Event | None) -> float:
        """The output head over the rows of all walks, and for each walk that did not fail the rows
        that it looked at."""
        walks = [one for one in effects_of(effect) if isinstance(one, RunHead)]
        seconds = self._costs.head_seconds(sum(walk.hidden.shape[0] for walk in walks))
        self.host = 0.0
        for walk, event in zip(walks, events_of(done), strict=False):
            if isinstance(event, HeadDone):
                for part in self._walked(walk, event):
                    seconds += part
                    self.host += part
        return seconds

    def _walked(self, walk: RunHead, done: HeadDone) -> Iterator[float]:
        looked_at, way = done.choice.rows[len(walk.known) :], walk.sampling.way
        yield self._costs.choose_seconds(len(looked_at), way)
        if walk.top >= 0:  # log-probabilities: about twice a choice with filters, measured
            yield 2 * self._costs.choose_seconds(len(done.choice.rows), "filtered")
        if way == "sampled":
            positions = walk.rows.positions[looked_at] + 1
            yield self._noise(walk.sampling.seed, positions.tolist())

    def ranked(self, rows: RankedRows) -> float:
        """A draft's output head over these rows, and the best guesses of each."""
        count = len(rows.positions)
        seconds = self._costs.rank_seconds(count, rows.way, rows.source, rows.product, rows.form)
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
            case OpenCache() | CloseCache() | MoveCache():
                return 0.0
            case ForkCache(how=how):
                return self._costs.gather_seconds(how.moved)
            case GatherRows():
                return self._costs.gather_seconds(len(effect.order))
            case RunBlock():
                rows, requests = len(effect.rows), len(effect.parts)
                return self._costs.block_seconds(rows, effect.slots, requests)
            case RunHead() | RunHeads():
                return self._taking.chosen(effect, done)
            case _:
                raise TypeError(f"a stage computes no {type(effect).__name__}")

    def parts(self, effect: Effect) -> Sequence[float]:
        if not isinstance(effect, RunBlock):
            return (1.0,)
        return (1.0,) * self._costs.layers


class CoordinatorDurations:
    """What the coordinator's compute effects cost on its device."""

    def __init__(
        self, costs: NodeCosts, draft: TreeGrower | None = None, loop: LoopTime | None = None
    ) -> None:
        """`loop`: whose work beside a job the next one is charged (see LoopTime)."""
        self._costs = costs
        self._draft = draft
        self.loop = loop
        self._context: dict[int, int] = {}  # rows that a request's draft attends to
        self._taking = TokenTimes(costs)
        self._parts: list[float] = []  # of the last draft

    def parts(self, effect: Effect) -> Sequence[float]:
        """A draft's layers, and every ranking of guesses with its output matrix."""
        return self._parts if isinstance(effect, INTERRUPTIBLE) else (1.0,)

    def seconds(
        self, effect: Effect, done: Event | None, work: Sequence[DraftWork] | None = None
    ) -> float:
        """Seconds that an effect keeps the worker busy. Raises TypeError if D0 computes no such.

        `done`: what came of it, which says how many rows a head looked at. `work`: what the draft
        source did; left out, it is asked. Every pass is charged for the whole contexts of its
        requests, as last told.
        """
        if work is None:
            work = self._draft.take_work() if self._draft is not None else ()
        match effect:
            case OpenDraft(base=request) | CloseDraft(request):
                self._context.pop(request, None)
                return 0.0
            case FindMasks():
                return 0.0
            case RunHead() | RunHeads():
                seconds = self._taking.chosen(effect, done)
                held_up = 0.0 if self.loop is None else self.loop.held_up(self._taking.host)
                return seconds + held_up
            case ReadPart(request, context):
                self._context[request] = len(context)
                self._parts = self._worked(work, request, 0)
            case Draft() | Drafts():
                drafts = [one for one in effects_of(effect) if isinstance(one, Draft)]
                chains = [self._told(draft) for draft in drafts]
                self._parts = self._worked(work, drafts[0].request, sum(chains))
            case _:
                raise TypeError(f"a coordinator computes no {type(effect).__name__}")
        if self.loop is not None and self._parts:
            launched = sum(self._launched(one) for one in work if isinstance(one, DraftPass))
            self._parts[0] += self.loop.held_up(launched)
        return sum(self._parts)

    def _launched(self, one: DraftPass) -> float:
        """Seconds of the host for launching a pass operation by operation."""
        return self._costs.launch_seconds(self._costs.model.draft_of(one.source, one.form).layers)

    def _told(self, draft: Draft) -> int:
        """Learn how long a draft's context is; how many rows of PPD tokens it brings."""
        if not isinstance(draft.plan, Deepen):  # that is below the context of the last Grow
            self._context[draft.request] = len(draft.context)
        rows = draft.features.ppd_rows
        return 0 if rows is None else rows.shape[0]

    def _worked(self, work: Sequence[DraftWork], asker: int, chains: int) -> list[float]:
        """Seconds part by part; before it the base's head goes over rows of PPD tokens."""
        parts = [self._costs.head_seconds(chains)] if chains else []
        for one in work:
            if isinstance(one, DraftPass):
                requests = one.requests or (asker,)
                seen = sum(self._context.get(request, 0) for request in requests)
                parts += self._costs.pass_parts(one, seen, len(requests))
            elif isinstance(one, SpentSeconds):
                parts.append(one.seconds)
            elif one.product == 0 and parts:  # ranked with those before it
                parts[-1] += self._taking.ranked(one)
            else:
                parts.append(self._taking.ranked(one))
        return parts
