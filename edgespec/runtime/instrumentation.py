"""Instrumentation: another device's pace, and a trace, for a node."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from edgespec.backends.charged_time import LoopTime
from edgespec.backends.emulated import Emulated
from edgespec.backends.timed import EffectDurations
from edgespec.net.emulated_link import LinkPace, PacedTransport
from edgespec.runtime.node import RingNode
from edgespec.runtime.trace import Trace
from edgespec.runtime.worker import Perform
from edgespec.wire.messages import Assign


@dataclass(frozen=True, slots=True)
class NodePace:
    """The times that a node's compute and its links keep to; `loop`: of a coordinator's own loop,
    if that is charged."""

    durations: EffectDurations
    links: LinkPace
    loop: LoopTime | None = None


@dataclass(frozen=True, slots=True)
class Instrumentation:
    """Of one node. `pace(assign)`: the times that it keeps to (`assign` None: the coordinator)."""

    transport: PacedTransport
    pace: Callable[[Assign | None], NodePace] | None = None
    trace: Trace | None = None

    def equip(self, assign: Assign | None, perform: Perform, node: RingNode) -> Perform:
        """Prepare the transport; returns the function with which the worker carries out effects."""
        emulated: Emulated | None = None
        if self.pace is not None:
            pace = self.pace(assign)
            self.transport.pace = pace.links
            self.transport.happened_at = lambda: node.happened_at
            emulated = held = Emulated(perform, pace.durations, node.worker)
            self.transport.compute_ends = lambda: held.ends_at
            node.worker.ended_at = lambda: held.free_at
            if pace.loop is not None:
                node.charge_loop(pace.loop, lambda: math.isfinite(held.ends_at))
            perform = held.perform
        if self.trace is not None:
            self.trace.node = assign.stage if assign else 0
            self.transport.on_sent = self.trace.sent
            perform = self.trace.around(perform, emulated)
        return perform
