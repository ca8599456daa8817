"""Problem: a model, the devices at hand, and what a plan has to provide for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from edgespec.errors import ConfigError
from edgespec.planning.costs import LOCAL_LINK, NodeCosts, RingCosts, link_between
from edgespec.planning.layout import Candidate, End, LinkTimes, fits
from edgespec.planning.memory import Device, Needs, PlannedModel
from edgespec.planning.profile import Profile

MOST_DEVICES = 17
"""A coordinator and 16 others."""

DRAFT_ROWS = 8
"""Rows of the draft pass that counts into D0's step."""

CHOSEN_ROWS = 3
"""Rows of a segment that are looked at, in D0's step: those that were right, and one."""


class Weights(NamedTuple):
    """Seconds a token by the slowest step, the trip, D0's step, and the step of the stage on D0's
    board (docs/planning.md)."""

    step: float
    trip: float
    coordinator: float
    shared: float


MODEL_DRAFT = Weights(0.074, 0.085, 0.73, 0.493)
"""With a draft that runs layers on D0."""

TOKEN_DRAFT = Weights(0.16, 0.51, 0.18, 0.11)
"""With n-grams, which are seldom right, and take next to no time."""

PLAIN = Weights(0.0, 1.0, 0.0, 0.0)
"""Without a draft: a token is a trip."""

SEGMENT_ROWS = 16
"""Rows of the segment whose time on a node is its step."""

_HEAD_ROWS = SEGMENT_ROWS, CHOSEN_ROWS


@dataclass(frozen=True)
class Problem:
    """What is to be planned: the coordinator is given, of the others any may be used.

    The coordinator's board may carry layers too, in a process of its own: as the last stage, in
    the memory that D0 leaves. `boards` are those that may have a stage; the coordinator's is the
    last of them. `context`: tokens that each of `requests` open requests may have, prompt and
    answer. `head_last`: the output head is on the last stage, and not on D0.
    """

    model: PlannedModel
    coordinator: Device
    others: tuple[Device, ...]
    context: int = 4096
    requests: int = 1
    head_last: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigError for numbers of devices, tokens or requests that cannot be."""
        if len(self.others) >= MOST_DEVICES:
            raise ConfigError(
                f"{len(self.others) + 1} devices; a plan has at most {MOST_DEVICES}, the first of "
                "them the coordinator"
            )
        for what, number in (("context", self.context), ("requests", self.requests)):
            if not 1 <= number < 2**31:
                raise ConfigError(f"{what} is {number}; it must be at least 1")

    @cached_property
    def needs(self) -> Needs:
        return Needs(self.model, self.context, self.requests, self.head_last)

    @property
    def boards(self) -> tuple[Device, ...]:
        return (*self.others, self.coordinator)

    def room(self, index: int) -> int:
        """Bytes that a stage may have on boards[index]."""
        own = index == len(self.others)
        taken = self.needs.coordinator(beside_stage=True).total if own else 0
        return self.boards[index].memory - taken

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """The boards: how many layers fit, and how long they take at half the context."""
        return tuple(map(self._candidate, range(len(self.boards))))

    def _candidate(self, index: int) -> Candidate:
        device, room = self.boards[index], self.room(index)
        node, seen = NodeCosts(device.profile, self.model.costs, 1), self.context // 2
        if not self._can_run(device):
            room = 0
        step, price = node.layer_seconds(SEGMENT_ROWS, seen), 0.0
        if closes := index == len(self.others):
            price = self.weights.shared * step
        end = None
        if self.head_last or self.model.of.bound:
            most = self.needs.most_layers(room, last=True)
            trip, head = (
                self.head_last * head_seconds(node, *rows) for rows in ((1, 1), _HEAD_ROWS)
            )
            # On the coordinator's board the head takes as much of D0's time as on D0.
            end = End(most, trip, head, self.weights.coordinator * head if price else 0.0)
        return Candidate(
            self.needs.most_layers(room),
            node.layer_seconds(1, seen),
            step,
            price=price,
            end=end,
            closes=closes,
        )

    @property
    def weights(self) -> Weights:
        """What the draft makes of the times."""
        if self.model.draft.layers:
            return MODEL_DRAFT
        return TOKEN_DRAFT if self.model.draft.name else PLAIN

    def fixed_seconds(self) -> float:
        """What D0 adds to the seconds of a token, whatever the layout is."""
        node, weights = NodeCosts(self.coordinator.profile, self.model.costs, 0), self.weights
        trip = 0.0 if self.head_last else head_seconds(node, 1, 1)
        step = coordinator_step(node, self.context // 2, self.head_last)
        return weights.trip * trip + weights.coordinator * step

    def runs(self) -> bool:
        """Whether all other devices can multiply by matrices of this quantisation."""
        return all(map(self._can_run, self.others))

    def _can_run(self, device: Device) -> bool:
        return self.model.quantisation.name not in device.profile.unusable

    def fits(self) -> bool:
        return self.needs.coordinator().total <= self.coordinator.memory and fits(
            self.model.of.layers, self.candidates, self.model.of.bound
        )

    def links(self) -> LinkTimes:
        """Between D0 and the boards; a segment from D0 holds tokens, no hidden rows, and neither
        does one to D0 if the head is on the last stage.

        From the coordinator's board the ring goes home, and nowhere else.
        """
        devices = [self.coordinator, *self.boards]
        bytes_of = RingCosts(NodeCosts(self.coordinator.profile, self.model.costs, 0), (), ())
        ran = [0] + [2] * len(self.boards)  # whatever stage it will be: 11 bytes each
        tokens = self.head_last or self.model.of.table_weights > 0
        trip = np.zeros((len(devices), len(devices)))
        step = np.zeros_like(trip)
        for i, near in enumerate(devices):
            for j, far in enumerate(devices):
                link = link_between(near.profile, far.profile)
                if {i, j} == {0, len(self.boards)}:
                    link = LOCAL_LINK
                one, wide = (
                    bytes_of.verdict_bytes(rows, ran[i], chosen)
                    if self.head_last and i and not j
                    else bytes_of.segment_bytes(rows, ran[i], tokens)
                    for rows, chosen in ((1, 1), _HEAD_ROWS)
                )
                trip[i, j] = link.latency + link.seconds(one)
                step[i, j] = link.seconds(wide)
        trip[-1, 1:] = step[-1, 1:] = np.inf
        return LinkTimes(trip, step)


def coordinator_step(node: NodeCosts, seen: int, head_last: bool = False) -> float:
    """D0's step at temperature 0: a segment's head and choice, unless the last stage has them, a
    draft pass and its ranking."""
    draft = node.draft_seconds(DRAFT_ROWS, seen) + node.rank_seconds(DRAFT_ROWS, "greedy")
    return draft if head_last else head_seconds(node, *_HEAD_ROWS) + draft


def trip_loop_seconds(profile: Profile, stages: int, head_last: bool) -> float:
    """What the coordinator's loop adds to a trip: a row comes home, with its credit from a single
    stage, and the next one leaves; behind a head, if that is not on the last stage."""
    loop = profile.loop_seconds
    return ((2 - head_last + (stages == 1)) * loop.event + 2 * loop.row) if loop else 0.0


def head_seconds(node: NodeCosts, rows: int, chosen: int) -> float:
    """The output head over `rows` rows, and taking the tokens after `chosen` of them."""
    return node.head_seconds(rows) + node.choose_seconds(chosen, "greedy")
