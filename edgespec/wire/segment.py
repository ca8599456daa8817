"""Segment: what travels on the data ring, rows of one or several requests at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgespec.tree.ledger import Rows
from edgespec.types.tensor import NO_LAYERS, IntArray, Layers, Tensor

MOST_PARTS = 64
"""Requests whose rows one segment holds at most."""


@dataclass(frozen=True, slots=True)
class StageTime:
    """How many rows of a segment a stage computed, and in how many seconds."""

    rows: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Header:
    """What every stage hands on as it came.

    `seq` numbers the segments of a ring in sending order. `aux_layers`: layers of which a draft
    source wants the rows that enter them (EAGLE-3).
    """

    seq: int
    aux_layers: Layers = NO_LAYERS


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one request in a segment (FlowSpec §3.2, a draft segment).

    `epoch` starts as the coordinator's newest retained set; every stage lowers it to the newest one
    that it has applied, so that what returns is an acknowledgement by all. `committed` rows
    (prefill) enter the committed region at once. `reserve` > 0 opens the request with room for that
    many rows; with `fork_of` > 0 it begins with rows of that answered request: those that had the
    ids `fork_ids` there, in the order of their positions. `want`: how many of the last rows the
    coordinator wants back (a prefill chunk but the last wants none).

    `ids`, `parents`, `positions`, `tokens`: see tree.ledger.Rows. The first stage alone reads the
    tokens; after it they are empty.
    """

    request: int
    epoch: int
    committed: bool
    reserve: int
    want: int
    ids: IntArray
    parents: IntArray
    positions: IntArray
    tokens: IntArray
    fork_of: int = 0
    fork_ids: tuple[int, ...] = ()

    def rows(self) -> Rows:
        """The part's rows; tokens that did not travel are 0."""
        tokens = self.tokens if len(self.tokens) else np.zeros(len(self.ids), np.int64)
        return Rows(self.ids, self.parents, tokens, self.positions)


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows that go round the ring together: `parts` has at most one part of a request.

    Stacked over all parts: `hidden` [R, H], None until the first stage ran, and `aux_hidden` uint8
    [R, ...], to which each stage that owns some of `header.aux_layers` appends its columns, packed
    (see model.aux_hidden); None until one did. `cost`: what the stages so far computed of it, in
    their order; a stage that found it empty adds nothing. `ppd_tokens` [P, H]: vectors of PPD
    prompt tokens, which rows name as tokens -1, -2, …; they travel to the first stage only.

    A segment without rows still travels, so that credits stay right.
    """

    header: Header
    parts: tuple[Part, ...]
    cost: tuple[StageTime, ...] = ()
    hidden: Tensor | None = None
    aux_hidden: Tensor | None = None
    ppd_tokens: Tensor | None = None

    @property
    def request(self) -> int:
        """The first part's: names the segment where one number has to."""
        return self.parts[0].request

    @property
    def rows(self) -> int:
        """How many rows all parts have."""
        return sum(len(part.ids) for part in self.parts)
