"""Segments, blocks and retained sets of one request, and changes of them, each in one call."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import fields, replace

from edgespec.machines.effects import BlockPart, RunBlock
from edgespec.tree.ledger import BoolArray, RetainSet, Rows
from edgespec.types.record import IntArray, Record
from edgespec.types.tensor import NO_LAYERS, Layers, Tensor
from edgespec.wire.messages import Retain
from edgespec.wire.segment import Header, Part, Segment, StageTime


def one_part(
    request: int,
    seq: int,
    epoch: int,
    committed: bool,
    reserve: int,
    want: int,
    ids: IntArray,
    parents: IntArray,
    positions: IntArray,
    tokens: IntArray,
    hidden: Tensor | None,
    cost: tuple[StageTime, ...] = (),
    aux_layers: Layers = NO_LAYERS,
    aux_hidden: Tensor | None = None,
) -> Segment:
    """A segment of one request."""
    part = Part(request, epoch, committed, reserve, want, ids, parents, positions, tokens)
    return Segment(Header(seq, aux_layers), (part,), cost, hidden, aux_hidden)


def rows_of(segment: Segment) -> Rows:
    """Its one part's rows."""
    (part,) = segment.parts
    return part.rows()


def changed(segment: Segment, **changes: object) -> Segment:
    """The same with other fields, be they of its header, its one part, or the segment itself."""

    def own(kind: type[Record]) -> dict[str, object]:
        return {f.name: changes[f.name] for f in fields(kind) if f.name in changes}

    header, part, whole = own(Header), own(Part), own(Segment)
    assert len(header) + len(part) + len(whole) == len(changes), changes
    if part:
        whole["parts"] = (replace(segment.parts[0], **part), *segment.parts[1:])
    if header:
        whole["header"] = replace(segment.header, **header)
    return replace(segment, **whole)


def run_block(
    job: int,
    request: int,
    rows: Rows,
    hidden: Tensor | None,
    committed: int,
    sees: BoolArray,
    aux_layers: Layers = NO_LAYERS,
    ppd_tokens: Tensor | None = None,
) -> RunBlock:
    """A job with rows of one request."""
    part = BlockPart(request, rows, committed, sees)
    return RunBlock(job, (part,), hidden, aux_layers, ppd_tokens)


def retain_message(
    request: int, epoch: int, watermark: int, accepted: Iterable[int], retained: Iterable[int]
) -> Retain:
    """A retained set on its way."""
    return Retain(request, RetainSet(epoch, watermark, tuple(accepted), frozenset(retained)))
