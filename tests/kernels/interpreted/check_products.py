"""Products for GPUs, interpreted: against float64, and each row alone and beside others."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from support.tiers import tiered

from edgespec.kernels.gpu.code_words import Codes, chunk_of, numbers_of, pairs_of, words_of
from edgespec.kernels.gpu.plain_product import plain_product
from edgespec.kernels.gpu.products import CodesProduct
from edgespec.model.quantised.kernels import relative_error

ROUNDING = {torch.float32: 3e-7, torch.float16: 4e-4, torch.bfloat16: 3e-3}
"""Of a result that was reckoned in float32 and rounded once, or (float32) of some sums."""

FORMS = [
    # out, columns, group, zero, bits
    (100, 256, 32, "middle", 4),
    (64, 192, 64, "", 4),
    (70, 160, 32, "low", 4),
    (64, 384, 128, "points", 4),
    (64, 512, 256, "low", 4),
    (64, 288, 16, "points", 4),
    (64, 128, 32, "", 8),
    (90, 144, 16, "low", 8),
    (64, 200, 200, "", 8),
]


class Made(NamedTuple):
    """A matrix by chance, its codes, uint8 [out, columns], its scales [out, groups], and the weight
    that it stands for, float64 [out, columns]."""

    matrix: Codes
    codes: torch.Tensor
    scales: torch.Tensor
    weight: torch.Tensor


def made(out: int, columns: int, group: int, zero: str, bits: int) -> Made:
    """Of one of FORMS."""
    generator = torch.Generator().manual_seed(out + columns)
    groups = columns // group
    codes = torch.randint(1 << bits, (out, columns), generator=generator).to(torch.uint8)
    scales = (torch.rand(out, groups, generator=generator) + 0.1).to(torch.float16)
    numbers = codes.double() - (8 if bits == 4 else 128)
    wide = scales.double().repeat_interleave(group, 1)
    weight = numbers * wide
    zeros = None
    if zero == "points":
        zeros = torch.randint(16, (out, groups), generator=generator).to(torch.int8)
        added = zeros.double().repeat_interleave(group, 1)
        weight = (numbers + (8 if bits == 4 else 0) - added) * wide
    elif zero:
        zeros = torch.randn(out, groups, generator=generator).to(torch.float16)
        added = zeros.double().repeat_interleave(group, 1)
        weight += added + (8 * wide if zero == "low" and bits == 4 else 0)
    chunk = chunk_of(group, columns, 2)
    assert chunk is not None
    parts = [codes] if bits == 4 else [codes >> 4, codes & 15]
    words = torch.stack([words_of(part, chunk) for part in parts])
    held = [None if one is None else numbers_of(one, group, chunk) for one in (scales, zeros)]
    kinds = scales.dtype, None if zeros is None else zeros.dtype
    matrix = Codes(words, out, columns, group, held[0], kinds[0], held[1], kinds[1], zero)
    return Made(matrix, codes, scales, weight)


def invariant(multiply: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """The product of 19 rows, which is to the bit that of some of them: a block, a part of one, and
    single rows of the first block and the second."""
    whole = multiply(rows)
    for first, end in ((0, 1), (0, 16), (3, 14), (7, 8), (11, 19), (18, 19)):
        assert torch.equal(multiply(rows[first:end]), whole[first:end]), (rows.dtype, first, end)
    return whole


def by_chance(*size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))


# One of each way to give a zero, of each number of bits, and a matrix that fills no tile.
QUICK = [FORMS[0], FORMS[1], FORMS[3], FORMS[4], FORMS[6]]


@pytest.mark.parametrize("form", tiered(FORMS, QUICK), ids=str)
def check_codes(form: tuple[int, int, int, str, int]) -> None:
    matrix, _, _, weight = made(*form)
    for dtype, limit in ROUNDING.items():
        rows, bias = by_chance(19, form[1]).to(dtype), by_chance(form[0]).to(dtype)
        result = invariant(CodesProduct(matrix, bias), rows)
        assert relative_error(result, rows.double() @ weight.T + bias.double()) < limit, dtype


def check_sections_are_added_in_order_by_whoever_has_them() -> None:
    matrix, _, _, weight = made(40, 320, 16, "middle", 4)  # five steps, so two sections
    rows = by_chance(9, 320).to(torch.bfloat16)
    apart, together = CodesProduct(matrix), CodesProduct(matrix, enough=0)
    result = apart(rows)
    assert relative_error(result, rows.double() @ weight.T) < ROUNDING[torch.bfloat16]
    assert torch.equal(together(rows), result)
    assert torch.equal(apart(rows[3:4]), result[3:4]), "the count of programs is as it was"


def check_two_levels_of_scales() -> None:
    out, columns, group = 64, 512, 32
    matrix, codes, _, _ = made(out, columns, group, "low", 4)
    generator = torch.Generator().manual_seed(2)
    fine = torch.randint(64, (2, out, columns // group), generator=generator).to(torch.int8)
    blocks = torch.rand(2, out, columns // 256, generator=generator).to(torch.float16)
    chunk = chunk_of(group, columns, 1)
    assert chunk is not None
    scale_bits, zero_bits = (numbers_of(one, group, chunk) for one in fine)
    matrix = matrix._replace(
        scales=scale_bits,
        scale_type=torch.int8,
        zeros=zero_bits,
        zero_type=torch.int8,
        blocks=blocks[0].T.contiguous(),
        zero_blocks=blocks[1].T.contiguous(),
    )
    wide = fine.double() * blocks.double().repeat_interleave(256 // group, 2)
    scale, zero = wide.repeat_interleave(group, 2)
    rows = by_chance(19, columns).to(torch.float16)
    result = invariant(CodesProduct(matrix), rows)
    weight = codes.double() * scale - zero
    assert relative_error(result, rows.double() @ weight.T) < ROUNDING[torch.float16]


def check_levels() -> None:
    matrix, codes, scales, _ = made(64, 256, 64, "", 4)
    words = words_of(codes, 32, paired=True)[None]
    for dtype, limit in ROUNDING.items():
        levels = by_chance(16).to(dtype)
        weight = levels.double()[codes.long()] * scales.double().repeat_interleave(64, 1)
        rows = by_chance(19, 256).to(dtype)
        held = matrix._replace(words=words, levels=pairs_of(levels))
        result = invariant(CodesProduct(held), rows)
        assert relative_error(result, rows.double() @ weight.T) < limit, dtype


def check_plain() -> None:
    for out, columns in ((70, 192), (32, 512)):
        weight = by_chance(out, columns)
        for dtype, limit in ROUNDING.items():
            rows, plain, bias = (
                one.to(dtype) for one in (by_chance(19, columns), weight, by_chance(out))
            )
            result = invariant(lambda some, w=plain, b=bias: plain_product(some, w, b), rows)
            exact = rows.double() @ plain.double().T + bias.double()
            assert relative_error(result, exact) < 2 * limit, (dtype, out)
