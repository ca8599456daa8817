"""Sums of a tile of a product by codes: one tensor [STRIP, BLOCK] for each of its four strips."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def zero_sums(STRIP: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of a block of rows by each of a tile's four strips."""
    zeros = tl.zeros([STRIP, BLOCK], tl.float32)
    return zeros, zeros, zeros, zeros


@triton.jit
def sum_of(some, more):
    """Of both, strip by strip."""
    return (
        _added(some[0], more[0]),
        _added(some[1], more[1]),
        _added(some[2], more[2]),
        _added(some[3], more[3]),
    )


@triton.jit
def _added(one, other):
    """In PTX that is not called pure, so that what is behind a condition stays there."""
    return tl.inline_asm_elementwise(
        "add.f32 $0, $1, $2;", "=f,f,f", [one, other], dtype=tl.float32, is_pure=False, pack=1
    )


@triton.jit
def sums_at(sums, section, count, row, wide, column, there, STRIP: tl.constexpr):
    """Sums of a section, as a program has written them."""
    at = sums + (section * count + row).to(tl.int64)[None, :] * wide + column[:, None]
    return (
        tl.load(at, mask=there, other=0.0, cache_modifier=".cg"),
        tl.load(at + STRIP, mask=there, other=0.0, cache_modifier=".cg"),
        tl.load(at + 2 * STRIP, mask=there, other=0.0, cache_modifier=".cg"),
        tl.load(at + 3 * STRIP, mask=there, other=0.0, cache_modifier=".cg"),
    )


@triton.jit
def finish(
    wholes,
    out,
    bias,
    row,
    there,
    column,
    out_features,
    UNIT: tl.constexpr,
    BIASED: tl.constexpr,
    STRIP: tl.constexpr,
):
    """Write a tile's sums [STRIP, BLOCK], with the bias."""
    out_at = out + row.to(tl.int64)[None, :] * out_features
    for strip in tl.static_range(len(wholes)):
        at = column + strip * STRIP
        inside = at < out_features
        whole = wholes[strip] * (1.0 / UNIT) if UNIT != 1.0 else wholes[strip]
        if BIASED:
            whole += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)[:, None]
        tl.store(
            out_at + at[:, None],
            whole.to(out.dtype.element_ty),
            mask=there & inside[:, None],
        )
