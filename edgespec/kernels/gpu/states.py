"""Layers whose rows add to a state, for GPUs.

What kernels/states_of.h does for a row, in four launches for all rows of a pass: `_enter` convolves
and writes down what each keeps, `_meet` takes the products of its query, and of its key by the
delta rule, with the keys on its path, `_read` has a head of values of a state, takes old rows into
it and goes through the rows that read it one after the other, as these may be each other's
ancestors, and `_leave` gates and norms. A program has one row, or goes from row to row by the same
sums of the same shapes, over slots that stand where the row's own path says. So no row's bits
depend on those beside it. Rows are float16, bfloat16 or float32, all else is float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from edgespec.kernels.gpu.launch import Launcher, cdiv, next_power_of_2
from edgespec.kernels.gpu.places import PATH, Paths
from edgespec.kernels.gpu.rows import normed_row

_PART = 1024
"""Numbers of a row that a program of `_leave` has where nothing is normed."""

_STATE, _VALUES = 2048, 16
"""Numbers of a state that a program holds in its registers, and values of a head among them, at
most. Programs have one warp, so that a sum over keys or rows needs no other. Not measured."""


class GpuMixer:
    """One such layer: what is between its two products."""

    def __init__(
        self, vectors: Mapping[str, torch.Tensor], dtype: torch.dtype, width: int, **numbers: float
    ) -> None:
        """`vectors`, `numbers`: as kernels.states.CompiledMixer has them, and `tiled`, of rows in
        this dtype, which keep so many numbers of it."""
        self._of = {name: one.contiguous() for name, one in vectors.items()}
        self._low, self._high = numbers.pop("step_low"), numbers.pop("step_high")
        self._eps = numbers.pop("eps")
        whole = {name: int(number) for name, number in numbers.items()}
        self._delta, self._heads, self._groups = (
            whole[name] for name in ("delta", "heads", "groups")
        )
        self._inner = self._heads * whole["value"]
        self._terms = self._groups * whole["key"] + self._inner + self._heads
        begin = self._terms * torch.float32.itemsize // dtype.itemsize
        self._enter, self._meet, self._read, self._leave = _launchers(
            begin=begin, width=width, **whole
        )
        self._key, self._value = whole["key"], whole["value"]
        self._part = whole["normed"] or _PART

    def enter(
        self, projected: torch.Tensor, kept: torch.Tensor, paths: Paths
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write what rows of projections [R, ...] keep but what a delta layer has yet to read, into
        their slots of `kept` [slots, width]. Returns what `read` takes of them."""
        count, by = len(projected), self._of
        assert projected.is_contiguous()
        assert kept.is_contiguous()
        mixed = projected.new_empty((count, self._terms), dtype=torch.float32)
        dots = mixed.new_empty((count, self._groups, 1 + self._delta, PATH))
        self._enter.launch(
            (count, 2 * self._groups + self._heads, 1),
            projected.get_device(),
            (
                *(projected, kept, paths.slots, mixed),
                *map(by.get, ("taps", "bias", "scale", "step_bias", "decay")),
            ),
            (paths.new, float(self._low), float(self._high)),
        )
        self._meet.launch(
            (count, self._groups, 1), projected.get_device(), (kept, paths.slots, mixed, dots), ()
        )
        return mixed, dots

    def read(
        self,
        kept: torch.Tensor,
        paths: Paths,
        entered: tuple[torch.Tensor, torch.Tensor],
        source: torch.Tensor | None,
        folds: torch.Tensor,
        state: torch.Tensor,
        rows: tuple[int, int],
        out: torch.Tensor,
    ) -> None:
        """Make `state` [heads, key, value] of the `source` (of zeros without one) by the rows in
        the slots `folds` int32 [n]; then what rows [first, end) of the pass, which were entered,
        read of it goes into `out` float32 [R, heads * value]."""
        self._read.launch(
            (self._heads, cdiv(self._value, _values(self._key, self._value)), 1),
            kept.get_device(),
            (kept, paths.slots, *entered, source, folds, state, self._of.get("skip"), out),
            (len(folds), int(source is not state or len(folds) > 0), *rows),
        )

    def leave(self, projected: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Gate and norm what was read: [R, heads * value], in the dtype of the projections."""
        done = torch.empty_like(out, dtype=projected.dtype)
        self._leave.launch(
            (len(out), cdiv(self._inner, self._part), 1),
            projected.get_device(),
            (projected, out, self._of.get("gain"), self._of.get("scale"), done),
            (self._eps,),
        )
        return done


def _values(key: int, value: int) -> int:
    """How many of a head's values a program has."""
    return min(_VALUES, next_power_of_2(value), max(1, _STATE // next_power_of_2(key)))


@cache
def _launchers(
    *, begin: int, width: int, normed: int, gate_last: int, kernel: int, **sizes: int
) -> tuple[Launcher, Launcher, Launcher, Launcher]:
    shape: dict[str, Any] = {name.upper(): number for name, number in sizes.items()}
    shape |= {"WIDTH": width, "enable_fp_fusion": False}
    tiled = shape.pop("TILED")
    key, part = next_power_of_2(sizes["key"]), normed or _PART
    wide = max(key, next_power_of_2(sizes["value"]))
    return (
        Launcher(_enter, **shape, BEGIN=begin, WIDE=wide, TAPS=kernel, PATH=PATH, num_warps=1),
        Launcher(_meet, **shape, WIDE=key, PATH=PATH, num_warps=4),
        Launcher(
            _read,
            **shape,
            TILED=tiled,
            WIDE=key,
            VALUES=_values(sizes["key"], sizes["value"]),
            PATH=PATH,
            num_warps=1,
            num_stages=1,  # what a row stores the next one loads
        ),
        Launcher(
            _leave,
            **shape,
            PART=part,
            WIDE=next_power_of_2(part),
            GATE_LAST=gate_last,
            num_warps=max(1, min(8, next_power_of_2(part) // 512)),
        ),
    )


@triton.jit
def _terms(kept, slots, WIDTH: tl.constexpr):
    """Where the terms of the rows in slots begin."""
    return (kept + slots.to(tl.int64) * WIDTH).to(tl.pointer_type(tl.float32))


@triton.jit
def _softplus(x):
    """log(1 + e^x), as exact for small results as for large ones: of e in (0, 1] the logarithm of 1
    + e is twice the area tangent of e / (2 + e), whose series ends soon."""
    e = tl.exp(-tl.abs(x))
    s = tl.div_rn(e, 2.0 + e)
    square = s * s
    series = 1.0 / 15.0 + square * 0.0
    series = tl.fma(series, square, 1.0 / 13.0)
    series = tl.fma(series, square, 1.0 / 11.0)
    series = tl.fma(series, square, 1.0 / 9.0)
    series = tl.fma(series, square, 1.0 / 7.0)
    series = tl.fma(series, square, 1.0 / 5.0)
    series = tl.fma(series, square, 1.0 / 3.0)
    series = tl.fma(series, square, 1.0)
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit(do_not_specialize=["new"])
def _enter(
    projected,
    kept,
    paths,
    mixed,
    taps,
    bias,
    scale,
    step_bias,
    decay,
    new,
    low,
    high,
    DELTA: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    WIDTH: tl.constexpr,
    BEGIN: tl.constexpr,
    WIDE: tl.constexpr,
    TAPS: tl.constexpr,
    PATH: tl.constexpr,
):
    """One row: a group's queries or keys behind the convolution, or a head's values."""
    HELD: tl.constexpr = kept.dtype.element_ty
    KEYS: tl.constexpr = GROUPS * KEY
    INNER: tl.constexpr = HEADS * VALUE
    CONV: tl.constexpr = 2 * KEYS + INNER
    TERMS: tl.constexpr = KEYS + INNER + HEADS
    PROJECTED: tl.constexpr = INNER + CONV + (1 + DELTA) * HEADS
    row, unit = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, WIDE)
    head = unit - 2 * GROUPS
    of_query, of_value = unit < GROUPS, head >= 0
    if DELTA:  # queries, keys, values
        begin = tl.where(of_value, 2 * KEYS + head * VALUE, unit * KEY)
    else:  # values, keys, queries
        behind = tl.where(of_query, KEYS + unit * KEY, (unit - GROUPS) * KEY)
        begin = tl.where(of_value, head * VALUE, INNER + behind)
    there = lane < tl.where(of_value, VALUE, KEY)
    channel = begin + lane
    sums = tl.zeros([WIDE], tl.float32)
    if bias is not None:
        sums = tl.load(bias + channel, mask=there, other=0.0)
    if scale is not None:
        scales = tl.load(scale + INNER + channel, mask=there, other=0.0)
    own = tl.load(paths + row * PATH + PATH - 1).to(tl.int64)
    for tap in tl.static_range(TAPS):
        # Rows of this pass are read where they were projected: they may not be kept yet.
        slot = tl.load(paths + row * PATH + PATH - TAPS + tap).to(tl.int64)
        at = projected + (slot - new) * PROJECTED + INNER + channel
        here = tl.load(at, mask=there & (slot >= new), other=0.0)
        if scale is not None:
            here = (here.to(tl.float32) * scales).to(HELD)
        if tap == TAPS - 1:
            tl.store(kept + own * WIDTH + BEGIN + channel, here, mask=there)
        at = kept + slot * WIDTH + BEGIN + channel
        before = tl.load(at, mask=there & (slot >= 0) & (slot < new), other=0.0)
        near = tl.where(slot >= new, here, before).to(tl.float32)
        sums = tl.fma(tl.load(taps + tap * CONV + channel, mask=there, other=0.0), near, sums)
    made = sums * tl.sigmoid(sums)
    terms = _terms(kept, own, WIDTH)
    to = mixed + row * TERMS
    if of_value:
        tl.store(to + KEYS + head * VALUE + lane, made, mask=there)
        steps = projected + row * PROJECTED + INNER + CONV
        raw = tl.load(steps + DELTA * HEADS + head).to(tl.float32)
        if scale is not None:
            raw = raw * tl.load(scale + INNER + CONV + head)
        step = _softplus(raw + tl.load(step_bias + head))
        if DELTA:
            share = tl.sigmoid(tl.load(steps + head).to(tl.float32))
            tl.store(to + KEYS + INNER + head, share)
        else:
            step = tl.minimum(tl.maximum(step, low), high)
            tl.store(terms + KEYS + head * VALUE + lane, step * made, mask=there)
        tl.store(terms + KEYS + INNER + head, tl.exp(tl.load(decay + head) * step))
    else:
        if DELTA:
            length = tl.sqrt_rn(tl.sum(tl.where(there, made * made, 0.0), 0) + 1e-6)
            length = tl.where(of_query, length * tl.sqrt_rn(KEY * 1.0), length)
            made = tl.div_rn(made, length)
        if of_query:
            tl.store(to + unit * KEY + lane, made, mask=there)
        else:
            tl.store(terms + (unit - GROUPS) * KEY + lane, made, mask=there)


@triton.jit
def _meet(
    kept,
    paths,
    mixed,
    dots,
    DELTA: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    PATH: tl.constexpr,
):
    """One row and group: what its query, and its key, have in common with the keys on its path."""
    TERMS: tl.constexpr = GROUPS * KEY + HEADS * VALUE + HEADS
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane, at = tl.arange(0, WIDE), tl.arange(0, PATH)
    there = lane < KEY
    slot = tl.load(paths + row * PATH + at)
    near = _terms(kept, slot, WIDTH)[:, None] + group * KEY + lane[None, :]
    keys = tl.load(near, mask=(slot >= 0)[:, None] & there[None, :], other=0.0)
    query = tl.load(mixed + row * TERMS + group * KEY + lane, mask=there, other=0.0)
    to = dots + (row * GROUPS + group) * (1 + DELTA) * PATH + at
    tl.store(to, tl.sum(keys * query[None, :], 1))
    if DELTA:
        own = _terms(kept, tl.load(paths + row * PATH + PATH - 1), WIDTH)
        key = tl.load(own + group * KEY + lane, mask=there, other=0.0)
        tl.store(to + PATH, tl.sum(keys * key[None, :], 1))


@triton.jit(do_not_specialize=["folds_count", "changed", "first", "end"])
def _read(
    kept,
    paths,
    mixed,
    dots,
    source,
    folds,
    state,
    skip,
    out,
    folds_count,
    changed,
    first,
    end,
    DELTA: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    WIDTH: tl.constexpr,
    TILED: tl.constexpr,
    WIDE: tl.constexpr,
    VALUES: tl.constexpr,
    PATH: tl.constexpr,
):
    """Some values of one head: the state, and what each row reads of it and of its path."""
    KEYS: tl.constexpr = GROUPS * KEY
    INNER: tl.constexpr = HEADS * VALUE
    TERMS: tl.constexpr = KEYS + INNER + HEADS
    head = tl.program_id(0)
    group = head % GROUPS if TILED else head // (HEADS // GROUPS)
    lane, at = tl.arange(0, WIDE), tl.arange(0, PATH)
    value = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    there, inside = lane < KEY, value < VALUE
    of_value = head * VALUE + value
    of_state = head.to(tl.int64) * KEY * VALUE + lane[:, None] * VALUE + value[None, :]
    of_tile = there[:, None] & inside[None, :]
    if source is None:
        held = tl.zeros([WIDE, VALUES], tl.float32)
    else:
        held = tl.load(source + of_state, mask=of_tile, other=0.0)
    for number in range(folds_count):
        terms = _terms(kept, tl.load(folds + number), WIDTH)
        key = tl.load(terms + group * KEY + lane, mask=there, other=0.0)
        add = tl.load(terms + KEYS + of_value, mask=inside, other=0.0)
        left = held * tl.load(terms + KEYS + INNER + head)
        held = tl.fma(tl.broadcast_to(key[:, None], [WIDE, VALUES]), add[None, :], left)
    if changed != 0:
        tl.store(state + of_state, held, mask=of_tile)
    for row in range(first, end):
        path = tl.load(paths + row * PATH + at)
        after = tl.load(paths + row * PATH + at + 1, mask=at < PATH - 1, other=-1)
        decays = _terms(kept, after, WIDTH) + KEYS + INNER + head
        # What is left, at this row, of what was added by those before; first, of the state.
        left = tl.cumprod(tl.load(decays, mask=after >= 0, other=1.0), 0, reverse=True)
        whole = tl.sum(tl.where(at == 0, left, 0.0), 0)
        before = (path >= 0) & (at < PATH - 1)
        adds_at = _terms(kept, path, WIDTH)[:, None] + KEYS + of_value[None, :]
        adds = tl.load(adds_at, mask=before[:, None] & inside[None, :], other=0.0)
        own = _terms(kept, tl.load(paths + row * PATH + PATH - 1), WIDTH)
        met_at = dots + (row * GROUPS + group) * (1 + DELTA) * PATH + at
        met = tl.load(met_at)
        query = tl.load(mixed + row * TERMS + group * KEY + lane, mask=there, other=0.0)
        plain = tl.load(mixed + row * TERMS + KEYS + of_value, mask=inside, other=0.0)
        if DELTA:
            key = tl.load(own + group * KEY + lane, mask=there, other=0.0)
            seen = tl.sum((tl.load(met_at + PATH) * left)[:, None] * adds, 0)
            seen = tl.fma(tl.sum(held * key[:, None], 0), whole, seen)
            new = tl.load(mixed + row * TERMS + KEYS + INNER + head) * (plain - seen)
            tl.store(own + KEYS + of_value, new, mask=inside)
            # Threads of the rows to come load what these stored.
            tl.debug_barrier()
        else:
            new = tl.load(own + KEYS + of_value, mask=inside, other=0.0)
        made = tl.sum((met * left)[:, None] * adds, 0)
        made = tl.fma(tl.sum(held * query[:, None], 0), whole, made)
        made = tl.fma(new, tl.sum(tl.where(at == PATH - 1, met, 0.0), 0), made)
        if skip is not None:
            made = tl.fma(plain, tl.load(skip + head), made)
        tl.store(out + row * INNER + of_value, made, mask=inside)


@triton.jit
def _leave(
    projected,
    read,
    gain,
    scale,
    out,
    eps,
    DELTA: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    WIDE: tl.constexpr,
    GATE_LAST: tl.constexpr,
):
    """A part of one row, whose numbers are normed together."""
    INNER: tl.constexpr = HEADS * VALUE
    PROJECTED: tl.constexpr = 2 * INNER + 2 * GROUPS * KEY + (1 + DELTA) * HEADS
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    at = tl.program_id(1) * PART + lane
    there = (lane < PART) & (at < INNER)
    x = tl.load(read + row * INNER + at, mask=there, other=0.0)
    gate = tl.load(projected + row * PROJECTED + at, mask=there, other=0.0).to(tl.float32)
    if scale is not None:
        gate = gate * tl.load(scale + at, mask=there, other=0.0)
    gate = gate * tl.sigmoid(gate)
    if not GATE_LAST:
        x = x * gate
    if gain is not None:
        x = normed_row(x, tl.load(gain + at, mask=there, other=0.0), eps, PART)
    if GATE_LAST:
        x = x * gate
    tl.store(out + row * INNER + at, x.to(out.dtype.element_ty), mask=there)
