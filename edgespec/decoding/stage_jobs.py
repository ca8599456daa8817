"""Stage jobs: the one job that a stage is at."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.decoding.effects import RunHead
from edgespec.tree.ledger import Rows
from edgespec.types.tensor import Tensor
from edgespec.wire.segment import Segment


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
