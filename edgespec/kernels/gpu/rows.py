"""What a layer does beside its products and its attention, each at one launch, row by row.

A program has one row, or a part of it that nothing else enters, so no row depends on another. All
is reckoned in float32 and rounded once. Rows are float16, bfloat16 or float32, gains float32.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from edgespec.kernels.gpu.launch import Launcher, cdiv, next_power_of_2

_PART = 1024
"""Numbers of a row that a program of `gated` has."""


def norm(rows: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of rows [R, n] with a gain [n], in new memory."""
    rows = rows.contiguous()
    out = torch.empty_like(rows)
    _launch_norm(rows, None, 1.0, None, gain, eps, None, out)
    return out


def add(
    rows: torch.Tensor,
    more: torch.Tensor,
    share: float,
    more_gain: torch.Tensor | None,
    gain: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [R, n] with `share` times `more` added, which is normed before if it has a gain; and
    RMSNorm of the sum if there is `gain`, else the sum again. Both in new memory."""
    rows, more = rows.contiguous(), more.contiguous()
    out = torch.empty_like(rows)
    normed = out if gain is None else torch.empty_like(rows)
    _launch_norm(rows, more, share, more_gain, gain, eps, out, normed)
    return out, normed


def _launch_norm(
    rows: torch.Tensor,
    more: torch.Tensor | None,
    share: float,
    more_gain: torch.Tensor | None,
    gain: torch.Tensor | None,
    eps: float,
    out: torch.Tensor | None,
    normed: torch.Tensor,
) -> None:
    count, width = rows.shape
    if not count:
        return
    _norm_launcher(width, more is not None, more_gain is not None, gain is not None).launch(
        (count, 1, 1),
        rows.get_device(),
        (rows, more, more_gain, gain, out, normed),
        (share, eps),
    )


@cache
def _norm_launcher(width: int, added: bool, added_normed: bool, normed: bool) -> Launcher:
    wide = next_power_of_2(width)
    return Launcher(
        _norm,
        WIDTH=width,
        WIDE=wide,
        ADDED=added,
        ADDED_NORMED=added_normed,
        NORMED=normed,
        num_warps=max(1, min(8, wide // 512)),
        enable_fp_fusion=False,
    )


def rotate(
    qkv: torch.Tensor,
    heads: int,
    kv_heads: int,
    angles: tuple[torch.Tensor, torch.Tensor] | None,
    gains: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
) -> None:
    """Norm the first `heads` and the next `kv_heads` heads of `qkv` [R, ..., head_dim] by their
    gains [head_dim], if there are, and turn them by cosines and signed sines [R, 1, D] (see
    model.rope), if there are, where they are."""
    count, dim = qkv.shape[0], qkv.shape[-1]
    assert qkv.stride()[1:] == (dim, 1)
    turned = dim if angles is None else angles[0].shape[-1]
    if not count:
        return
    _turn_launcher(turned, dim - turned, angles is not None, gains is not None).launch(
        (count, heads + kv_heads, 1),
        qkv.get_device(),
        (qkv, *(angles or (None, None)), *(gains or (None, None))),
        (heads, qkv.stride(0), eps),
    )


@cache
def _turn_launcher(turned: int, rest: int, with_angles: bool, normed: bool) -> Launcher:
    return Launcher(
        _turn,
        HALF=turned // 2,
        WIDE=next_power_of_2(turned // 2),
        REST=rest,
        WIDE_REST=next_power_of_2(max(1, rest)),
        TURNED=with_angles,
        NORMED=normed,
        num_warps=1,
        enable_fp_fusion=False,
    )


def gated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Of rows [R, 2 * n] the activation ("silu", "gelu" or "gelu_pytorch_tanh") of the first half
    times the second: [R, n]."""
    gate_up = gate_up.contiguous()
    count, both = gate_up.shape
    width = both // 2
    out = gate_up.new_empty((count, width))
    if count:
        _gated_launcher(activation).launch(
            (count, cdiv(width, _PART), 1), gate_up.get_device(), (gate_up, out), (width,)
        )
    return out


@cache
def _gated_launcher(activation: str) -> Launcher:
    return Launcher(_gated, ACTIVATION=activation, PART=_PART, num_warps=4, enable_fp_fusion=False)


def code(rows: torch.Tensor, out: torch.Tensor, scale_at: int, least: float) -> None:
    """Write `rows` [parts, heads, R, n] as model.row_codes has them into `out`, contiguous int8
    [parts, heads, R, scale_at + 4]; rows of no number as large as `least` become zeros."""
    parts, heads, count, width = rows.shape
    assert rows.stride(3) == 1
    if rows.numel():
        _code_launcher(width, scale_at).launch(
            (count, heads, parts),
            rows.get_device(),
            (rows, out),
            (*rows.stride()[:3], count, heads, least),
        )


@cache
def _code_launcher(width: int, scale_at: int) -> Launcher:
    wide = next_power_of_2(scale_at)
    return Launcher(_code, WIDTH=width, WIDE=wide, AT=scale_at, num_warps=1, enable_fp_fusion=False)


@triton.jit
def normed_row(x, gain, eps, WIDTH: tl.constexpr):
    """RMSNorm of one row, in float32."""
    return x * (1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / WIDTH + eps)) * gain


@triton.jit
def _norm(
    rows,
    more,
    more_gain,
    gain,
    out,
    normed,
    share,
    eps,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    ADDED: tl.constexpr,
    ADDED_NORMED: tl.constexpr,
    NORMED: tl.constexpr,
):
    """One row: what is added to it, and its norm."""
    lane = tl.arange(0, WIDE)
    there = lane < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + lane
    x = tl.load(rows + at, mask=there, other=0.0).to(tl.float32)
    if ADDED:
        y = tl.load(more + at, mask=there, other=0.0).to(tl.float32)
        if ADDED_NORMED:
            y = normed_row(y, tl.load(more_gain + lane, mask=there, other=0.0), eps, WIDTH)
        whole = (x + y * share).to(rows.dtype.element_ty)
        tl.store(out + at, whole, mask=there)
        x = whole.to(tl.float32)
    if NORMED:
        x = normed_row(x, tl.load(gain + lane, mask=there, other=0.0), eps, WIDTH)
        tl.store(normed + at, x.to(rows.dtype.element_ty), mask=there)


@triton.jit
def _turn(
    qkv,
    cosines,
    sines,
    query_gain,
    key_gain,
    heads,
    stride,
    eps,
    HALF: tl.constexpr,
    WIDE: tl.constexpr,
    REST: tl.constexpr,
    WIDE_REST: tl.constexpr,
    TURNED: tl.constexpr,
    NORMED: tl.constexpr,
):
    """One head of one row: both halves of what is turned, and the rest of it."""
    DIM: tl.constexpr = 2 * HALF + REST
    DTYPE: tl.constexpr = qkv.dtype.element_ty
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane, rest_lane = tl.arange(0, WIDE), tl.arange(0, WIDE_REST)
    there, rest_there = lane < HALF, rest_lane < REST
    at = qkv + row * stride + head * DIM
    low = tl.load(at + lane, mask=there, other=0.0).to(tl.float32)
    high = tl.load(at + HALF + lane, mask=there, other=0.0).to(tl.float32)
    rest = tl.load(at + 2 * HALF + rest_lane, mask=rest_there, other=0.0).to(tl.float32)
    if NORMED:
        squares = tl.sum(low * low, 0) + tl.sum(high * high, 0) + tl.sum(rest * rest, 0)
        factor = 1.0 / tl.sqrt_rn(squares / DIM + eps)
        gain = query_gain
        if head >= heads:
            gain = key_gain
        low = low * factor * tl.load(gain + lane, mask=there, other=0.0)
        high = high * factor * tl.load(gain + HALF + lane, mask=there, other=0.0)
        rest = rest * factor * tl.load(gain + 2 * HALF + rest_lane, mask=rest_there, other=0.0)
        tl.store(at + 2 * HALF + rest_lane, rest.to(DTYPE), mask=rest_there)
    first, second = low, high
    if TURNED:
        angle = row * 2 * HALF + lane
        first = low * tl.load(cosines + angle, mask=there, other=0.0).to(tl.float32)
        second = high * tl.load(cosines + angle + HALF, mask=there, other=0.0).to(tl.float32)
        first += high * tl.load(sines + angle, mask=there, other=0.0).to(tl.float32)
        second += low * tl.load(sines + angle + HALF, mask=there, other=0.0).to(tl.float32)
    tl.store(at + lane, first.to(DTYPE), mask=there)
    tl.store(at + HALF + lane, second.to(DTYPE), mask=there)


@triton.jit
def _gated(gate_up, out, width, ACTIVATION: tl.constexpr, PART: tl.constexpr):
    """A part of one row."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * PART + tl.arange(0, PART)
    there = lane < width
    gate = tl.load(gate_up + row * 2 * width + lane, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * width + lane, mask=there, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        share = tl.sigmoid(gate)
    elif ACTIVATION == "gelu":
        share = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        share = tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    tl.store(out + row * width + lane, (gate * share * up).to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["count"])
def _code(
    rows,
    out,
    part_stride,
    head_stride,
    row_stride,
    count,
    heads,
    least,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    AT: tl.constexpr,
):
    """One row of one head: its codes, nothing, and its scale."""
    row, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    lane = tl.arange(0, WIDE)
    at = rows + part * part_stride + head * head_stride + row * row_stride
    x = tl.load(at + lane, mask=lane < WIDTH, other=0.0).to(tl.float32)
    greatest = tl.max(tl.abs(x), 0)
    scale = tl.where(greatest < least, 0.0, tl.div_rn(greatest, 127.0))
    finite = tl.min((tl.abs(x) < float("inf")).to(tl.int32), 0) > 0
    scale = tl.where(finite, scale, float("inf"))  # which makes of codes no numbers
    sound = finite & (scale > 0)
    over = tl.div_rn(x, tl.where(sound, scale, 1.0))
    # Adding so much rounds to the nearest integer, of two to the even one.
    codes = tl.where(sound, (over + 12582912.0) - 12582912.0, 0.0)
    place = out + ((part * heads + head).to(tl.int64) * count + row) * (AT + 4)
    tl.store(place + lane, codes.to(tl.int8), mask=lane < AT)
    tl.store((place + AT).to(tl.pointer_type(tl.float32)), scale)
