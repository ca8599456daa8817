"""Products of rows by a matrix of codes, of 4 or 8 bits in groups, on GPUs.

A row's bits depend on the row and the matrix alone. Every program multiplies a tile of the
matrix by a block of rows. Tensor cores do eight rows in one instruction, whether so many are there
or not: a larger block is more of the same, so it says nothing about a row's sums. The columns are
cut into sections by the matrix alone; each is summed up from left to right, and the sections' sums
are added in their order, by whichever program comes last or by one that has all. What is compiled
is not made for a number of rows (`do_not_specialize`).

Codes (code_words.py) are multiplied as whole numbers (unpacking.py), which 16 bits hold exactly,
and summed up in float32; what they are too large by, scales and zeros come in behind each group,
also in float32, by way of the rows' own sums, so that only the result is rounded.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from edgespec.kernels.gpu.code_words import STRIP, WARPS, Codes
from edgespec.kernels.gpu.launch import Launcher, cdiv
from edgespec.kernels.gpu.tile_sums import finish, sum_of, sums_at, zero_sums
from edgespec.kernels.gpu.unpacking import by_strip, four, fragment, number, taken_apart

_STRIPS = 4
"""Strips of which a program has a tile."""

_TILE = STRIP * _STRIPS

_BLOCKS = (8, 16, 32)
"""Rows that are multiplied at once: the least of these that holds all, or the last; by codes of 8
bits not the last of these, as its sums do not fit into registers."""

_APART_BLOCK = 16
"""The most where sections are shared out: there are few programs then, and registers."""

_SPREAD = 256
"""Columns that share a number of `blocks`."""

_LONG = 64
"""Columns of a group from which on sums of so many groups take few registers."""

_STEPS = 4
"""Steps whose words a program holds: the one that is multiplied by, and those that are on their
way. Not measured."""


_PROGRAMS, _SECTIONS, _LEAST_STEPS = 512, 16, 4
"""Programs into which a matrix is cut, by so many sections at most, of at least so many steps."""

_PROGRAMS_EACH = 4
"""Programs of a multiprocessor from which on sections are not shared out."""


class CodesProduct:
    """x Wᵀ + bias of rows in the dtype of the bias [out]: float16, bfloat16 or float32."""

    def __init__(
        self, matrix: Codes, bias: torch.Tensor | None = None, enough: int | None = None
    ) -> None:
        """`enough`: programs from which on sections are not shared out; None: as many as keep all
        multiprocessors busy."""
        planes, strips, steps, words = matrix.words.shape
        self.tiles, self._blocks = cdiv(strips, _STRIPS), _BLOCKS[: 4 - planes]
        self.matrix, self._padded = matrix, strips * STRIP
        self._held = (
            *(matrix.words, matrix.scales, matrix.zeros, matrix.blocks),
            *(matrix.zero_blocks, matrix.levels, bias),
        )
        parts = min(_SECTIONS, cdiv(_PROGRAMS, self.tiles))
        self.section = max(_LEAST_STEPS, cdiv(steps, parts))
        self.sections = cdiv(steps, self.section)
        # How many programs of each tile and block of rows are done, 0 again behind the last one.
        device = matrix.words.device
        self._done = torch.zeros(_PROGRAMS, dtype=torch.int32, device=device)
        busy = min(_PROGRAMS, _PROGRAMS_EACH * _processors(device))
        self._enough = busy if enough is None else enough
        self._constants: dict[str, object] = {
            "COLUMNS": matrix.columns,
            "STEPS": steps,
            "SECTION": self.section,
            "SECTIONS": self.sections,
            "GROUP": matrix.group,
            "CHUNK": words // STRIP,
            "PLANES": planes,
            "ZERO": matrix.zero,
            "SCALE": _kind(matrix.scale_type),
            "ZERO_KIND": _kind(matrix.zero_type or matrix.scale_type),
            "DOUBLE": matrix.blocks is not None,
            "LEVELS": matrix.levels is not None,
            "BIASED": bias is not None,
            "SPREAD": _SPREAD,
            "STRIP": STRIP,
            "STRIPS": _STRIPS,
            "FULL": strips % _STRIPS == 0,
            "num_warps": WARPS,
            "enable_fp_fusion": False,
        }
        self._launchers: dict[tuple[int, bool], Launcher] = {}

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [R, in] to [R, out]."""
        rows = rows.contiguous()
        count = rows.shape[0]
        out = rows.new_empty(count, self.matrix.out)
        if count:
            block = next((block for block in self._blocks if count <= block), self._blocks[-1])
            least = min(block, _APART_BLOCK)
            apart = self.sections > 1 and cdiv(count, least) * self.tiles < self._enough
            block = least if apart else block
            blocks = cdiv(count, block)
            sums = None
            if apart:
                size = self.sections, count, self.tiles * _TILE
                sums = rows.new_empty(size, dtype=torch.float32)
            self._launcher(block, apart).launch(
                (blocks, self.tiles, self.sections if apart else 1),
                rows.get_device(),
                (rows, *self._held, sums, self._done if apart else None, out),
                (count, self.matrix.out, self._padded),
            )
        return out

    def _launcher(self, block: int, apart: bool) -> Launcher:
        if (block, apart) not in self._launchers:
            turn = steps_of_turn(self.matrix, block)
            stages = _STEPS // turn
            self._launchers[block, apart] = Launcher(
                _codes_product,
                **self._constants,
                BLOCK=block,
                APART=apart,
                UNROLL=turn,
                STAGES=stages,
                num_stages=stages,
            )
        return self._launchers[block, apart]


def steps_of_turn(matrix: Codes, block: int) -> int:
    """Steps in a turn of the loop, with a block of rows: two where registers hold what that
    takes, 1 else."""
    most = _BLOCKS[0] if matrix.group < _LONG else _BLOCKS[1]
    return 2 if len(matrix.words) == 1 and block <= most else 1


def _kind(dtype: torch.dtype) -> object:
    """Triton's name of it."""
    return getattr(tl, str(dtype).removeprefix("torch."))


@cache
def _processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; without one, as many as ask for sections by themselves."""
    if device.type != "cuda":
        return _PROGRAMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit
def _share(
    parts,
    x,
    share,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    EVEN: tl.constexpr,
    CHUNK: tl.constexpr,
    STRIP: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """`share` [STRIP, BLOCK] and the products of so many parts of a step, one after the other.

    Of several parts those of even numbers come first, which with `share` count EVEN times."""
    TURNS: tl.constexpr = 2 if COUNT > 1 else 1
    for turn in tl.static_range(TURNS):
        for part in tl.static_range(FIRST + turn, FIRST + COUNT, TURNS):
            weight = fragment(parts[part], CHUNK, STRIP, LEVELS)
            share = tl.dot(weight, x[part], share, input_precision="ieee")
        if turn + 1 < TURNS and EVEN != 1.0:
            share *= EVEN
    return share


@triton.jit
def _rows_part(at, there, depth, column, COLUMNS: tl.constexpr, STEP: tl.constexpr):
    """Numbers of the rows from a column on, [CHUNK, BLOCK]."""
    if COLUMNS % STEP == 0:
        return tl.load(at + column, mask=there, other=0.0)
    else:
        return tl.load(at + column, mask=there & (column + depth < COLUMNS), other=0.0)


@triton.jit(do_not_specialize=["count"])
def _codes_product(
    rows,
    words,
    scales,
    zeros,
    blocks,
    zero_blocks,
    levels,
    bias,
    sums,
    done,
    out,
    count,
    out_features,
    padded,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
    SECTION: tl.constexpr,
    SECTIONS: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    PLANES: tl.constexpr,
    ZERO: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO_KIND: tl.constexpr,
    DOUBLE: tl.constexpr,
    LEVELS: tl.constexpr,
    BIASED: tl.constexpr,
    SPREAD: tl.constexpr,
    STRIP: tl.constexpr,
    STRIPS: tl.constexpr,
    BLOCK: tl.constexpr,
    APART: tl.constexpr,
    FULL: tl.constexpr,
    UNROLL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A block of rows by a tile of the matrix: all its sections, or (`APART`) one of them."""
    DTYPE: tl.constexpr = rows.dtype.element_ty
    STEP: tl.constexpr = 4 * CHUNK
    WORDS: tl.constexpr = CHUNK * STRIP // (2 if LEVELS else 1)  # of a strip in one step
    GROUPS: tl.constexpr = STEP // GROUP if STEP > GROUP else 1
    EACH: tl.constexpr = 4 // GROUPS  # parts of a group, or of what a step has of it
    # What is multiplied exceeds what scales belong to, the code less MIDDLE (of 8 bits the high
    # half less that), by OFF: in 16 bits there are the middle itself and the BIAS of each number,
    # all in UNITs, of which numbers of even parts are EVEN times too small (see unpacking.py). The
    # rows' own sums take it off again.
    MIDDLE: tl.constexpr = 0.0 if PLANES == 1 and ZERO == "low" else 8.0
    UNIT: tl.constexpr = 2.0**-20 if tl.float16 == DTYPE and not LEVELS else 1.0
    EVEN: tl.constexpr = 16.0 if UNIT != 1.0 else 1.0
    BIAS: tl.constexpr = 128.0 if tl.bfloat16 == DTYPE else 0.0
    HALVES: tl.constexpr = 16.0 * (MIDDLE + BIAS) + BIAS if PLANES == 2 else MIDDLE + BIAS
    OFF: tl.constexpr = 0.0 if LEVELS or tl.float32 == DTYPE else HALVES
    # Where there are no zeros to multiply by, nothing else is wanted of the sums.
    OWN: tl.constexpr = -OFF * UNIT if ZERO == "" else UNIT
    tile = tl.program_id(1)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = (row < count)[None, :]
    depth = tl.arange(0, CHUNK)[:, None]
    row_at = rows + row.to(tl.int64)[None, :] * COLUMNS + depth
    # Strips that the last tile does not have are read as the matrix's last one, and not stored.
    if LEVELS:  # pairs of words, and all of the table
        words = words.to(tl.pointer_type(tl.int32))
        levels = tl.load(levels + tl.arange(0, 256))
    word_at = words + tl.arange(0, WORDS)
    plane = padded.to(tl.int64) * (STEPS * CHUNK)
    strips = (tile * STRIPS + tl.arange(0, STRIPS)).reshape(2, 2)
    if not FULL:
        strips = tl.minimum(strips, padded // STRIP - 1)
    strip_at = word_at[None, None, :] + strips.to(tl.int64)[:, :, None] * (STEPS * WORDS)
    column = tile * (STRIPS * STRIP) + tl.arange(0, STRIP)  # row of the matrix
    tile_row = tile * (STRIPS * STRIP) + tl.arange(0, STRIPS * STRIP)
    held = None if FULL else tile_row < padded
    wholes = zero_sums(STRIP, BLOCK)
    totals = zero_sums(STRIP, BLOCK)
    first, last = 0, STEPS
    if APART:
        first = tl.program_id(2) * SECTION
        last = tl.minimum(first + SECTION, STEPS)
    # A number of stages of its own has Triton read ahead what is not for tensor cores, too.
    for step in tl.range(first, last, num_stages=STAGES, loop_unroll_factor=UNROLL):
        at = step * STEP
        group_at = (step if GROUP <= STEP else at // GROUP) * padded + tile_row
        scale_bits = by_strip(scales + group_at, held, STRIP)
        if ZERO != "":
            zero_bits = by_strip(zeros + group_at, held, STRIP)
        if DOUBLE:
            block_at = at // SPREAD * padded + tile_row
            block = by_strip(blocks + block_at, held, STRIP)
            if ZERO == "low":
                zero_block = by_strip(zero_blocks + block_at, held, STRIP)
        x = (
            _rows_part(row_at, there, depth, at, COLUMNS, STEP),
            _rows_part(row_at, there, depth, at + CHUNK, COLUMNS, STEP),
            _rows_part(row_at, there, depth, at + 2 * CHUNK, COLUMNS, STEP),
            _rows_part(row_at, there, depth, at + 3 * CHUNK, COLUMNS, STEP),
        )
        owns = totals[:0]  # the rows' own sums, of each group
        for group in tl.static_range(GROUPS):
            own = tl.zeros([STRIP, BLOCK], tl.float32)
            if OWN != 0.0:
                small = EVEN if ZERO == "" and (EACH > 1 or group % 2 == 0) else 1.0
                each = tl.full([STRIP, CHUNK], OWN / small, DTYPE)
                for part in tl.static_range(group * EACH, (group + 1) * EACH):
                    own = tl.dot(each, x[part], own, input_precision="ieee")
            owns += (own,)
        if PLANES == 1:
            lows = four(tl.load(strip_at + step * WORDS))
        else:
            lows = four(tl.load(strip_at + step * WORDS + plane))
            highs = four(tl.load(strip_at + step * WORDS))
        added = totals[:0]
        for strip in tl.static_range(STRIPS):
            if PLANES == 1:
                low = taken_apart(lows[strip], levels, LEVELS, MIDDLE, DTYPE)
            else:
                low = taken_apart(lows[strip], levels, LEVELS, 0.0, DTYPE)
                high = taken_apart(highs[strip], levels, LEVELS, MIDDLE, DTYPE)
            nothing = tl.zeros([STRIP, BLOCK], tl.float32)
            total = nothing if DOUBLE else totals[strip]
            below = nothing if DOUBLE else total
            for group in tl.static_range(GROUPS):
                # What the first part's numbers are too small by, of one part its scale makes good.
                small = EVEN if EACH > 1 or group % 2 == 0 else 1.0
                share = nothing
                if OFF != 0.0:
                    share = owns[group] if ZERO == "" else owns[group] * (-OFF / small)
                share = _share(low, x, share, group * EACH, EACH, EVEN, CHUNK, STRIP, LEVELS)
                if PLANES == 2:
                    upper = _share(high, x, nothing, group * EACH, EACH, EVEN, CHUNK, STRIP, LEVELS)
                    share = tl.fma(upper, tl.full([STRIP, BLOCK], 16.0, tl.float32), share)
                scale = number(scale_bits[strip], group, SCALE)
                wide = scale * small if EACH == 1 and small != 1.0 else scale
                total = tl.fma(share, tl.broadcast_to(wide[:, None], [STRIP, BLOCK]), total)
                if ZERO != "":
                    zero = number(zero_bits[strip], group, ZERO_KIND)
                    if ZERO == "points":
                        zero = (8.0 - zero if PLANES == 1 else -zero) * scale
                    wide_zero = tl.broadcast_to(zero[:, None], [STRIP, BLOCK])
                    if DOUBLE and ZERO == "low":
                        below = tl.fma(owns[group], wide_zero, below)
                    else:
                        total = tl.fma(owns[group], wide_zero, total)
            if DOUBLE:
                factor = tl.broadcast_to(block[strip].to(tl.float32)[:, None], [STRIP, BLOCK])
                total = tl.fma(total, factor, totals[strip])
                if ZERO == "low":
                    factor = zero_block[strip].to(tl.float32) * -1.0
                    total = tl.fma(below, tl.broadcast_to(factor[:, None], [STRIP, BLOCK]), total)
            added += (total,)
        totals = added
        if not APART and SECTIONS > 1:  # noqa: SIM102 (one is known to the compiler)
            if step % SECTION == SECTION - 1:
                wholes = sum_of(wholes, totals)
                totals = zero_sums(STRIP, BLOCK)
    wholes = sum_of(wholes, totals)
    if APART:
        wide = tl.num_programs(1) * (STRIPS * STRIP)
        for strip in tl.static_range(STRIPS):
            at = sums + (tl.program_id(2) * count + row).to(tl.int64)[None, :] * wide
            tl.store(at + (column + strip * STRIP)[:, None], wholes[strip], mask=there)
        # Whoever comes last adds up what all have written, in the order of sections.
        tl.debug_barrier()
        ticket = done + tl.program_id(0) * tl.num_programs(1) + tile
        if tl.atomic_add(ticket, 1, sem="acq_rel") == SECTIONS - 1:
            tl.store(ticket, 0)
            wholes = zero_sums(STRIP, BLOCK)
            # Some at a time, so that more is on its way, as many as registers hold.
            for some in range(0, SECTIONS, 32 // BLOCK):
                for more in tl.static_range(32 // BLOCK):
                    section = some + more
                    known = there & (section < SECTIONS)
                    found = sums_at(sums, section, count, row, wide, column, known, STRIP)
                    wholes = sum_of(wholes, found)
            finish(wholes, out, bias, row, there, column, out_features, UNIT, BIASED, STRIP)
    else:
        finish(wholes, out, bias, row, there, column, out_features, UNIT, BIASED, STRIP)
