"""Spans: what the nodes of a simulated ring ran from when to when."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.backends.jobs import effects_of
from edgespec.decoding.effects import RunHead
from edgespec.machines.effects import Effect, RunBlock
from edgespec.machines.events import NO_JOB
from edgespec.sim.worker import VirtualWorker


@dataclass(frozen=True, slots=True)
class Span:
    """One effect that a node carried out, from `start` to `end` in virtual seconds.

    `kind` is the effect's type. `ids` are the rows of a RunBlock, by which useful rows can be
    told from wasted ones; `rows` counts what a RunBlock or RunHead ran. `stopped`:
    it was aborted between two layers. `job` is -1 where the effect has none. Of effects that were
    carried out together it is the first, with the rows of all. A draft that heads
    interrupted has a span for each stretch in which it ran: no two spans of a node overlap, and
    together they are its busy time.
    """

    node: int
    kind: str
    request: int
    job: int
    start: float
    end: float
    rows: int
    ids: tuple[int, ...]
    stopped: bool


def keeping(spans: list[Span]) -> type[VirtualWorker]:
    """Workers that add what they ran to the list."""

    class SpanWorker(VirtualWorker):
        def note_run(self, effect: Effect, start: float, end: float, stopped: bool) -> None:
            super().note_run(effect, start, end, stopped)
            effects = effects_of(effect)
            first = effects[0]
            rows = sum(len(one.rows) for one in effects if isinstance(one, RunBlock | RunHead))
            ids = tuple(first.rows.ids.tolist()) if isinstance(first, RunBlock) else ()
            kind, job = type(first).__name__, getattr(first, "job", NO_JOB)
            whose = getattr(first, "request", -1)
            spans.append(Span(self.node, kind, whose, job, start, end, rows, ids, stopped))

    return SpanWorker
