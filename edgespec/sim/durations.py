"""Durations: what a run charges for work and for messages; by a cost model, or by chance."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from edgespec.backends.charged_time import LoopTime, loop_of
from edgespec.backends.compute import FIRST
from edgespec.backends.timed import CoordinatorDurations, StageDurations, segment_bytes
from edgespec.errors import ConfigError
from edgespec.machines.effects import Effect, RunBlock
from edgespec.machines.events import NO_JOB, Event
from edgespec.planning.costs import RingCosts
from edgespec.sim.links import LinkSpec, Network
from edgespec.types.draft_pass import DraftWork
from edgespec.wire.messages import Message
from edgespec.wire.segment import Segment


class Durations(Protocol):
    """What a run charges; stages are numbered from 1. `loop`: of the coordinator's own loop, of one
    world; None: it takes no time."""

    loop: LoopTime | None

    def coordinator(self, effect: Effect, done: Event | None, work: tuple[DraftWork, ...]) -> float:
        """Seconds of a coordinator's effect; `done`: what came of it; `work`: what the draft did
        for it."""

    def stage(self, number: int, effect: Effect, done: Event | None) -> float:
        """Seconds of a stage's effect; `done`: what came of it, of a head alone."""

    def parts(self, number: int, effect: Effect) -> Sequence[float]:
        """The lengths, in any unit, of an effect's parts (layers) at stage `number`, 0: the
        coordinator's, between which it can be stopped or interrupted; of a draft: of the one whose
        seconds were asked last."""

    def message_bytes(self, message: Message, encoded: int) -> int:
        """Bytes that a link is charged for a message that the codec made `encoded` bytes of."""


class CostDurations:
    """What the devices of `costs` would take, whatever small model stands in for the real one."""

    def __init__(self, costs: RingCosts, d0_free: bool = False, loop_free: bool = False) -> None:
        """`d0_free`: no model on the coordinator takes time; `loop_free`: nor does its loop."""
        self._costs, self._d0_free = costs, d0_free
        self.loop = None if loop_free else loop_of(costs.coordinator.profile)
        self._coordinator = CoordinatorDurations(costs.coordinator, loop=self.loop)
        self._stages = [StageDurations(stage) for stage in costs.stages]

    def coordinator(self, effect: Effect, done: Event | None, work: tuple[DraftWork, ...]) -> float:
        return 0.0 if self._d0_free else self._coordinator.seconds(effect, done, work)

    def stage(self, number: int, effect: Effect, done: Event | None) -> float:
        return self._stages[number - 1].seconds(effect, done)

    def parts(self, number: int, effect: Effect) -> Sequence[float]:
        if not number and self._d0_free:
            return (1.0,)
        return (self._stages[number - 1] if number else self._coordinator).parts(effect)

    def message_bytes(self, message: Message, encoded: int) -> int:
        """A segment as the charged model's rows would make it; all else as it is."""
        return segment_bytes(self._costs, message) if isinstance(message, Segment) else encoded


_JITTER = re.compile(r"(?:(?P<percent>[0-9.]+)%x|exp)(?P<ms>[0-9.]+)ms")


@dataclass(frozen=True, slots=True)
class Jitter:
    """Noise of what nodes compute: a job takes more than it is charged.

    `share`: the probability of that, and it is `seconds` more; 0: each job takes more, by an
    exponential time of that mean.
    """

    share: float
    seconds: float

    @staticmethod
    def parse(text: str) -> Jitter:
        """`1%x100ms`: of each hundred jobs one takes 100 ms more; `exp5ms`: each takes an
        exponential time of that mean more. Raises ConfigError for other texts."""
        found = _JITTER.fullmatch(text)
        try:
            figures = [float(figure or 0) for figure in found.groups()] if found else []
        except ValueError:
            figures = []
        if not figures or (found and found["percent"] and not 0 < figures[0] <= 100):
            raise ConfigError(f"{text!r} is no jitter; give one such as 1%x100ms or exp5ms")
        return Jitter(figures[0] / 100, figures[1] / 1e3)

    def drawn(self, rng: random.Random) -> float:
        """Seconds more of one job."""
        if not self.share:
            return rng.expovariate(1.0) * self.seconds
        return self.seconds if rng.random() < self.share else 0.0


class JitteredDurations:
    """What `charged` charges, and noise for each job that takes time: a block, a head, a draft."""

    def __init__(self, charged: Durations, jitter: Jitter, seed: int) -> None:
        self._charged, self._jitter = charged, jitter
        self.loop = charged.loop
        self._rng = random.Random(f"{seed} jitter")
        self._blocks: dict[int, tuple[int, float]] = {}  # of each stage, the last: job and noise

    def coordinator(self, effect: Effect, done: Event | None, work: tuple[DraftWork, ...]) -> float:
        seconds = self._charged.coordinator(effect, done, work)
        return seconds and seconds + self._jitter.drawn(self._rng)

    def stage(self, number: int, effect: Effect, done: Event | None) -> float:
        """A block that loses rows while it runs is asked about again: its noise stays."""
        seconds = self._charged.stage(number, effect, done)
        if not seconds:
            return 0.0
        if not isinstance(effect, RunBlock):
            return seconds + self._jitter.drawn(self._rng)
        if self._blocks.get(number, (NO_JOB, 0.0))[0] != effect.job:
            self._blocks[number] = effect.job, self._jitter.drawn(self._rng)
        return seconds + self._blocks[number][1]

    def parts(self, number: int, effect: Effect) -> Sequence[float]:
        return self._charged.parts(number, effect)

    def message_bytes(self, message: Message, encoded: int) -> int:
        return self._charged.message_bytes(message, encoded)


def network_of(costs: RingCosts) -> Network:
    """The links of `costs`; a control message takes the latency of the slowest link it could use.

    The control channel has its own connections and its messages are small, so that it is charged
    no bandwidth.
    """
    ring = tuple(LinkSpec(link.latency, link.bytes_per_second) for link in costs.links)
    control = (LinkSpec(max(link.latency for link in costs.links)),) * len(costs.stages)
    return Network(ring, control, control)


class RandomDurations:
    """Times drawn for every effect: up to twice a place's `pace` (s), now and then none."""

    def __init__(
        self,
        rng: random.Random,
        head: float,
        draft: float,
        stages: Sequence[float],
        layers: Sequence[int],
    ) -> None:
        """`head`, `draft`, `stages[s - 1]`: mean seconds; `layers[s - 1]`: layers of stage s; the
        draft has as many as stage 1."""
        self._rng = rng
        self._head = head
        self._draft = draft
        self._stages = stages
        self._layers = layers
        self.loop: LoopTime | None = None
        self._passes = 0  # of the last draft

    def coordinator(self, effect: Effect, done: Event | None, work: tuple[DraftWork, ...]) -> float:
        """A draft is charged for every pass."""
        if isinstance(effect, FIRST):
            return self._draw(self._head)
        self._passes = len(work)
        return self._draw(self._draft) * len(work)

    def stage(self, number: int, effect: Effect, done: Event | None) -> float:
        """What is neither a block nor a head costs a tenth of a block."""
        if isinstance(effect, FIRST):
            return self._draw(self._head)
        share = 1.0 if isinstance(effect, RunBlock) else 0.1
        return self._draw(self._stages[number - 1]) * share

    def parts(self, number: int, effect: Effect) -> Sequence[float]:
        if number:
            return (1.0,) * (self._layers[number - 1] if isinstance(effect, RunBlock) else 1)
        return (1.0,) * (self._layers[0] * self._passes)

    def message_bytes(self, message: Message, encoded: int) -> int:
        return encoded

    def _draw(self, pace: float) -> float:
        factor = self._rng.random() * 2.0
        return 0.0 if factor < 0.2 else pace * factor
