"""Problem: a model, the devices at hand, and what a plan has to provide for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from edgespec.errors import ConfigError
from edgespec.planning.costs import NodeCosts, RingCosts, link_between
from edgespec.planning.layout import Candidate, LinkTimes, fits
from edgespec.planning.memory import Device, Needs, PlannedModel

MOST_DEVICES = 17
"""A coordinator and 16 others."""

SEGMENT_ROWS = 16
"""Rows of the segment whose time on a node is its step."""


@dataclass(frozen=True)
class Problem:
    """What is to be planned: the coordinator is given, of the others any may be used.

    `context`: tokens that each of `requests` open requests may have, prompt and answer.
    """

    model: PlannedModel
    coordinator: Device
    others: tuple[Device, ...]
    context: int = 4096
    requests: int = 1

    def __post_init__(self) -> None:
        """Raises ConfigError for numbers of devices, tokens or requests that cannot be."""
        if not 1 <= len(self.others) < MOST_DEVICES:
            raise ConfigError(
                f"{len(self.others) + 1} devices; a plan needs 2 to {MOST_DEVICES}, the first of "
                "them the coordinator"
            )
        for what, number in (("context", self.context), ("requests", self.requests)):
            if not 1 <= number < 2**31:
                raise ConfigError(f"{what} is {number}; it must be at least 1")

    @cached_property
    def needs(self) -> Needs:
        return Needs(self.model, self.context, self.requests)

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """The others: how many layers fit, and how long they take at half the context."""
        return tuple(map(self._candidate, self.others))

    def _candidate(self, device: Device) -> Candidate:
        node, seen = NodeCosts(device.profile, self.model.costs, 1), self.context // 2
        return Candidate(
            self.needs.most_layers(device, first=True),
            self.needs.most_layers(device, first=False),
            node.layer_seconds(1, seen),
            node.layer_seconds(SEGMENT_ROWS, seen),
        )

    def runs(self) -> bool:
        """Whether all devices can multiply by matrices of this quantisation."""
        return not any(self.model.quantisation.name in d.profile.unusable for d in self.others)

    def fits(self) -> bool:
        return self.needs.coordinator().total <= self.coordinator.memory and fits(
            self.model.of.layers, self.candidates
        )

    def links(self) -> LinkTimes:
        """Between all devices, D0 first; a segment from D0 holds tokens, no hidden rows."""
        devices = [self.coordinator, *self.others]
        bytes_of = RingCosts(NodeCosts(self.coordinator.profile, self.model.costs, 0), (), ())
        ran = [0] + [2] * len(self.others)  # whatever stage it will be: 11 bytes each
        trip = np.zeros((len(devices), len(devices)))
        step = np.zeros_like(trip)
        for i, near in enumerate(devices):
            for j, far in enumerate(devices):
                link = link_between(near.profile, far.profile)
                trip[i, j] = link.latency + link.seconds(bytes_of.segment_bytes(1, ran[i]))
                step[i, j] = link.seconds(bytes_of.segment_bytes(SEGMENT_ROWS, ran[i]))
        return LinkTimes(trip, step)
