"""Attention of a tree's rows over the slots that each sees, in the order of their positions.

A row sees one slot for each position from 0 to its own: which one, a table says. So what a row
gives follows from its positions' keys and values alone, not from where they lie in the cache nor
from what lies between them. Positions come in blocks, and blocks in sections; both begin at
multiples of their length. Within a section the softmax goes on from block to block in float32;
sections run side by side, and a second kernel joins them in order.

Rows that share the keys of a block, as all do those of the text so far, go through it together, and
then each through its own. Both are the same dot products of the same shapes, and a block of which a
row sees nothing leaves its sums as they are, so a row's bits do not tell which it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl

from edgespec.kernels.gpu.launch import Launcher, cdiv, next_power_of_2
from edgespec.kernels.gpu.places import Places

_BLOCK, _LEAST_BLOCK, _BLOCK_BYTES = 64, 16, 1 << 15
"""Positions of a block, and what its keys may take at most: then they fit twice, with the values,
into what a program may have on any device. Wider ones come in blocks of a part of as many."""

_SECTION = 512
"""Positions of a section."""

_SCALES = 4
"""Numbers behind the sums of a row's head in a section: its greatest score and its total, and two
that fill them up to 16 bytes."""

_LANES = 16
"""Rows of a dot product at least: heads that share keys, and rows as far as there is room."""

_WARPS, _STAGES = 4, 2
"""Threads / 32 of a program, and blocks that it reads ahead. Not measured."""


def attention(
    query: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    places: Places,
    scaling: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of `query` [R, heads, head_dim], in float16, bfloat16 or float32.

    `keys`, `values`: pieces [kv_heads, T, head_dim] whose slots are counted on from one to the
    next, of any such dtype or as model.row_codes has them; they become numbers of the query's as
    they are read. See AttentionForm for the rest. Returns [R, heads * head_dim].
    """
    count, heads, head_dim = query.shape
    kv_heads = keys[0].shape[0]
    group = heads // kv_heads
    assert query.stride()[1:] == (head_dim, 1)
    row = keys[0].shape[2]
    for piece in (*keys, *values):
        assert piece.stride()[1:] == (row, 1)
    width = places.slots.shape[1]
    sections = cdiv(width, _SECTION)
    lanes = max(_LANES, next_power_of_2(group))
    wide = max(16, next_power_of_2(head_dim))
    block = max(_LEAST_BLOCK, min(_BLOCK, _BLOCK_BYTES // (wide * query.element_size())))
    sums = query.new_empty((sections, count, heads, wide + _SCALES), dtype=torch.float32)
    pieces = None if len(keys) == 1 else addresses_of(keys, values)
    device = query.get_device()
    tile = lanes // next_power_of_2(group)
    _sections_launcher(
        *(heads, group, lanes, head_dim, row, wide, block),
        *(len(keys) > 1, softcap is not None, window is not None),
    ).launch(
        (cdiv(count, tile), kv_heads, sections),
        device,
        (query, keys[0], values[0], pieces, *places, sums),
        (
            *(count, query.stride(0), keys[0].stride(0), values[0].stride(0), width, len(keys)),
            *(scaling, softcap or 0.0, window or 0),
        ),
    )
    out = query.new_empty((count, heads * head_dim))
    _join_launcher(heads, head_dim, wide, sinks is not None).launch(
        (count, heads, 1),
        device,
        (sums, sinks, places.rows, out),
        (count,),
    )
    return out


@cache
def _sections_launcher(
    heads: int,
    group: int,
    lanes: int,
    head_dim: int,
    row: int,
    wide: int,
    block: int,
    pieced: bool,
    capped: bool,
    windowed: bool,
) -> Launcher:
    return Launcher(
        _sections,
        HEADS=heads,
        GROUP=group,
        PADDED=next_power_of_2(group),
        LANES=lanes,
        DIM=head_dim,
        ROW=row,
        WIDE=wide,
        BLOCK=block,
        SECTION=_SECTION // block,
        SCALES=_SCALES,
        PIECED=pieced,
        CAPPED=capped,
        WINDOW=windowed,
        num_warps=_WARPS,
        num_stages=_STAGES,
        enable_fp_fusion=False,
    )


@cache
def _join_launcher(heads: int, head_dim: int, wide: int, sinks: bool) -> Launcher:
    return Launcher(
        _join,
        HEADS=heads,
        DIM=head_dim,
        WIDE=wide,
        LENGTH=_SECTION,
        SCALES=_SCALES,
        SINKS=sinks,
        num_warps=1,
        enable_fp_fusion=False,
    )


def addresses_of(keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of each piece its first slot, where its keys and values lie, and elements between heads of
    either: int64 [pieces, 5]."""
    found, first = [], 0
    for key, value in zip(keys, values, strict=True):
        found.append([first, key.data_ptr(), value.data_ptr(), key.stride(0), value.stride(0)])
        first += key.shape[1]
    return torch.tensor(found, device=keys[0].device)


@triton.jit
def held_at(pieces, count, slots, head, like, COLUMN: tl.constexpr, ROW: tl.constexpr):
    """Pointers to the rows of slots, of the keys (`COLUMN` 1) or values (2) of one head."""
    first = tl.zeros_like(slots).to(tl.int64)
    address = first
    stride = first
    for piece in range(count):
        begin = tl.load(pieces + piece * 5)
        behind = slots >= begin
        first = tl.where(behind, begin, first)
        address = tl.where(behind, tl.load(pieces + piece * 5 + COLUMN), address)
        stride = tl.where(behind, tl.load(pieces + piece * 5 + COLUMN + 2), stride)
    at = address.to(tl.pointer_type(like.dtype.element_ty))
    return at + head * stride + (slots - first) * ROW


@triton.jit
def numbers_at(at, there, lane, like, DIM: tl.constexpr, ROW: tl.constexpr):
    """The rows that begin at these pointers, as numbers like those."""
    inside = there[:, None] & (lane < DIM)[None, :]
    rows = tl.load(at[:, None] + lane[None, :], mask=inside, other=0)
    if ROW > DIM:
        scales_at = (at + (ROW - 4)).to(tl.pointer_type(tl.float32))
        scales = tl.load(scales_at, mask=there, other=0.0)
        rows = rows.to(tl.float32) * scales[:, None]
    return rows.to(like.dtype)


@triton.jit
def _attend(
    query,
    keys,
    values,
    pieces,
    piece_count,
    slots,
    seen,
    head,
    key_stride,
    value_stride,
    scaling,
    softcap,
    most,
    total,
    sums,
    DIM: tl.constexpr,
    ROW: tl.constexpr,
    WIDE: tl.constexpr,
    PIECED: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """The greatest scores, totals and sums of lanes after one block more."""
    lane = tl.arange(0, WIDE)
    there = slots >= 0
    least = tl.maximum(slots, 0).to(tl.int64)
    if PIECED:
        key_at = held_at(pieces, piece_count, least, head, keys, 1, ROW)
        value_at = held_at(pieces, piece_count, least, head, values, 2, ROW)
    else:
        key_at = keys + head * key_stride + least * ROW
        value_at = values + head * value_stride + least * ROW
    key = numbers_at(key_at, there, lane, query, DIM, ROW)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scaling
    if CAPPED:
        scores = (2.0 * tl.sigmoid(2.0 * (scores / softcap)) - 1.0) * softcap
    scores = tl.where(seen, scores, float("-inf"))
    greatest = tl.maximum(most, tl.max(scores, 1))
    # A lane that has seen nothing yet must not subtract infinity from infinity.
    base = tl.where(greatest == float("-inf"), 0.0, greatest)
    weights = tl.exp(scores - base[:, None])
    before = tl.exp(most - base)
    total = tl.fma(total, before, tl.sum(weights, 1))
    value = numbers_at(value_at, there, lane, query, DIM, ROW)
    sums = tl.dot(weights.to(value.dtype), value, sums * before[:, None], input_precision="ieee")
    return greatest, total, sums


@triton.jit(do_not_specialize=["count", "width", "piece_count"])
def _sections(
    query,
    keys,
    values,
    pieces,
    slots,
    common,
    shared,
    rows,
    sums_out,
    count,
    query_stride,
    key_stride,
    value_stride,
    width,
    piece_count,
    scaling,
    softcap,
    window,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    LANES: tl.constexpr,
    DIM: tl.constexpr,
    ROW: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    SECTION: tl.constexpr,
    SCALES: tl.constexpr,
    PIECED: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """One section of positions, for some rows and the heads that share one head of keys."""
    TILE: tl.constexpr = LANES // PADDED
    head = tl.program_id(1).to(tl.int64)
    first_block = tl.program_id(2) * SECTION
    lane = tl.arange(0, LANES)
    row = tl.program_id(0) * TILE + lane // PADDED
    own_head = head * GROUP + lane % PADDED
    real = (row < count) & (lane % PADDED < GROUP)
    dim = tl.arange(0, WIDE)
    place = tl.load(rows + row, mask=row < count, other=-1).to(tl.int32)
    query_at = query + row.to(tl.int64)[:, None] * query_stride + own_head[:, None] * DIM
    there = real[:, None] & (dim < DIM)[None, :]
    x = tl.load(query_at + dim[None, :], mask=there, other=0.0)
    most = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    sums = tl.zeros([LANES, WIDE], tl.float32)
    inside = tl.arange(0, BLOCK)
    last = tl.max(place, 0)
    end = tl.minimum(first_block + SECTION, last // BLOCK + 1)  # 0 without any rows
    begin = first_block
    if WINDOW:
        earliest = tl.min(tl.where(row < count, place, last), 0) - window + 1
        begin = tl.maximum(begin, tl.maximum(earliest, 0) // BLOCK)
    together = tl.maximum(tl.minimum(tl.load(shared) // BLOCK, end), begin)
    for block in range(begin, together):
        at = block * BLOCK + inside
        seen = real[:, None] & (at[None, :] <= place[:, None])
        if WINDOW:
            seen = seen & (at[None, :] > place[:, None] - window)
        most, total, sums = _attend(
            *(x, keys, values, pieces, piece_count, tl.load(common + at), seen, head),
            *(key_stride, value_stride, scaling, softcap, most, total, sums),
            *(DIM, ROW, WIDE, PIECED, CAPPED),
        )
    for number in range(TILE):
        one = tl.program_id(0) * TILE + number
        own = tl.load(rows + one, mask=one < count, other=-1).to(tl.int32)
        for block in range(together, tl.minimum(end, own // BLOCK + 1)):
            at = block * BLOCK + inside
            slot = tl.load(slots + one * width.to(tl.int64) + at, mask=at <= own, other=-1)
            visible = slot >= 0
            if WINDOW:
                visible = visible & (at > own - window)
            seen = (real & (row == one))[:, None] & visible[None, :]
            most, total, sums = _attend(
                *(x, keys, values, pieces, piece_count, slot, seen, head),
                *(key_stride, value_stride, scaling, softcap, most, total, sums),
                *(DIM, ROW, WIDE, PIECED, CAPPED),
            )
    at = (tl.program_id(2).to(tl.int64) * count + row) * HEADS + own_head
    begin_at = sums_out + at * (WIDE + SCALES)
    tl.store(begin_at[:, None] + dim[None, :], sums, mask=real[:, None])
    tl.store(begin_at + WIDE, most, mask=real)
    tl.store(begin_at + WIDE + 1, total, mask=real)


@triton.jit(do_not_specialize=["count"])
def _join(
    sums,
    sinks,
    rows,
    out,
    count,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    LENGTH: tl.constexpr,
    SCALES: tl.constexpr,
    SINKS: tl.constexpr,
):
    """All sections of one row and one head."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim = tl.arange(0, WIDE)
    ends = tl.load(rows + row).to(tl.int32) // LENGTH + 1
    most = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    whole = tl.zeros([WIDE], tl.float32)
    if SINKS:
        # A slot more, which has no value.
        most = tl.load(sinks + head).to(tl.float32)
        total = total + 1.0
    for section in range(ends):
        part_at = sums + ((section * count + row) * HEADS + head) * (WIDE + SCALES)
        part = tl.load(part_at + WIDE)
        greatest = tl.maximum(most, part)
        base = tl.where(greatest == float("-inf"), 0.0, greatest)
        before, now = tl.exp(most - base), tl.exp(part - base)
        total = tl.fma(total, before, tl.load(part_at + WIDE + 1) * now)
        whole = whole * before + tl.load(part_at + dim) * now
        most = greatest
    at = out + (row * HEADS + head) * DIM + dim
    tl.store(at, (whole / total).to(out.dtype.element_ty), mask=dim < DIM)
