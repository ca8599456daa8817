"""Segmentation: cutting a draft sequence into the segments that go round the ring."""

from __future__ import annotations

from collections.abc import Sequence


def near_equal(ids: Sequence[int], parts: int, longest: int) -> list[tuple[int, ...]]:
    """Cut `ids` into at most `parts` consecutive segments of near-equal length.

    FlowSpec §3.2: a sequence in descending score is cut into equal segments, none longer than
    `longest` (L_max); what does not fit stays behind for later segments. Lengths differ by at
    most one; empty segments are left out.
    """
    ids = ids[: parts * longest]
    short, extra = divmod(len(ids), parts)
    segments = []
    at = 0
    for part in range(parts):
        length = short + (1 if part < extra else 0)
        if length:
            segments.append(tuple(ids[at : at + length]))
        at += length
    return segments
