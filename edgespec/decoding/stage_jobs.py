"""Stage jobs: what a stage holds of a request, and the one job that it is at."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgespec.decoding.effects import RunHead
from edgespec.decoding.target_walk import TargetWalk
from edgespec.tree.ledger import RetainSet, RowLedger, Rows
from edgespec.types.tensor import Tensor
from edgespec.wire.segment import Segment


@dataclass(slots=True)
class Held:
    """What a stage holds of one open request."""

    ledger: RowLedger = field(default_factory=RowLedger)
    keep: RetainSet = field(default_factory=lambda: RetainSet(0, -1, (), frozenset()))
    walk: TargetWalk | None = None  # if the last stage chooses its tokens, which then travel


@dataclass(frozen=True, slots=True)
class Job:
    """The one job at work: the segment as it came in, the rows of each part that are computed, and
    what the stages before tapped of these. Once the block has run, the `head` may be at work, on
    part number `at` of the segment as it shall leave, `done`."""

    job: int
    segment: Segment
    rows: tuple[Rows, ...]
    aux_hidden: Tensor | None
    since: float
    head: RunHead | None = None
    done: Segment | None = None
    at: int = 0
