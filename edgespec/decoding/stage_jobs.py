"""Stage jobs: what a stage is at: a segment in its block, then the heads of its parts."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgespec.decoding.effects import RunHead
from edgespec.tree.ledger import Rows
from edgespec.types.tensor import Tensor
from edgespec.wire.segment import Segment


@dataclass(slots=True)
class Job:
    """The segment at work: as it came in, the rows of each part that are computed, and what the
    stages before tapped of these. `job`: the block's. Once that has run, on the last stage: the
    `heads` at work, by their jobs, each with its part's place in the segment as it shall leave,
    `done`; their worker makes one pass of them."""

    job: int
    segment: Segment
    rows: tuple[Rows, ...]
    aux_hidden: Tensor | None
    since: float
    done: Segment | None = None
    heads: dict[int, tuple[RunHead, int]] = field(default_factory=dict)
