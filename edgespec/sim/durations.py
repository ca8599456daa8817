"""Durations: what a run charges for work and for messages; by a cost model, or by chance."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from edgespec.backends.charged_time import LoopTime, loop_of
from edgespec.backends.timed import (
    CoordinatorDurations,
    EffectDurations,
    StageDurations,
    segment_bytes,
)
from edgespec.drafting.grower import TreeGrower
from edgespec.errors import ConfigError
from edgespec.machines.effects import Effect, RunBlock
from edgespec.machines.events import NO_JOB, Event
from edgespec.planning.costs import RingCosts
from edgespec.sim.links import LinkSpec, Network
from edgespec.wire.messages import Message
from edgespec.wire.segment import Segment


@dataclass(frozen=True, slots=True)
class Durations:
    """What a run charges: `nodes` D0's effects and those of V1 … VN; `loop`: of D0's own loop, of
    one world, None if it takes no time; `message_bytes`: of which a link is charged for a message
    that the codec made so many bytes of."""

    nodes: Sequence[EffectDurations]
    loop: LoopTime | None = None
    message_bytes: Callable[[Message, int], int] = lambda message, encoded: encoded


def charged_durations(
    costs: RingCosts,
    draft: TreeGrower | None = None,
    d0_free: bool = False,
    loop_free: bool = False,
) -> Durations:
    """What the devices of `costs` would take, whatever small model stands in for the real one.

    `draft`: the source on D0. `d0_free`: no model there takes time; `loop_free`: nor does its loop.
    """
    loop = None if loop_free else loop_of(costs.coordinator.profile)
    charged = CoordinatorDurations(costs.coordinator, draft, loop)
    d0 = NoTime(draft) if d0_free else charged

    def message_bytes(message: Message, encoded: int) -> int:
        """A segment as the charged model's rows would make it; all else as it is."""
        return segment_bytes(costs, message) if isinstance(message, Segment) else encoded

    return Durations((d0, *map(StageDurations, costs.stages)), loop, message_bytes)


class NoTime:
    """Whatever D0 does takes no time."""

    def __init__(self, draft: TreeGrower | None) -> None:
        self._draft = draft

    def seconds(self, effect: Effect, done: Event | None) -> float:
        _ = self._draft and self._draft.take_work()
        return 0.0

    def parts(self, effect: Effect) -> Sequence[float]:
        return (1.0,)


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

    def __init__(self, charged: EffectDurations, jitter: Jitter, rng: random.Random) -> None:
        self._charged, self._jitter, self._rng = charged, jitter, rng
        self._block = (NO_JOB, 0.0)  # the last one's job and noise

    def seconds(self, effect: Effect, done: Event | None) -> float:
        """A block that loses rows while it runs is asked about again: its noise stays."""
        seconds = self._charged.seconds(effect, done)
        if not seconds:
            return 0.0
        if not isinstance(effect, RunBlock):
            return seconds + self._jitter.drawn(self._rng)
        if self._block[0] != effect.job:
            self._block = effect.job, self._jitter.drawn(self._rng)
        return seconds + self._block[1]

    def parts(self, effect: Effect) -> Sequence[float]:
        return self._charged.parts(effect)


def jittered(charged: Durations, jitter: Jitter, seed: int) -> Durations:
    """The same with noise."""
    rng = random.Random(f"{seed} jitter")
    nodes = [JitteredDurations(node, jitter, rng) for node in charged.nodes]
    return replace(charged, nodes=nodes)


def network_of(costs: RingCosts) -> Network:
    """The links of `costs`; a control message takes the latency of the slowest link it could use.

    The control channel has its own connections and its messages are small, so that it is charged
    no bandwidth.
    """
    ring = tuple(LinkSpec(link.latency, link.bytes_per_second) for link in costs.links)
    control = (LinkSpec(max(link.latency for link in costs.links)),) * len(costs.stages)
    return Network(ring, control, control)
