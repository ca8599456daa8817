"""Levels: codes that stand for the numbers of a table, with a scale for each group of columns, as
only files have them: "iq4" and "fp4" of 4 bits, "fp8" of 8."""

from __future__ import annotations

import functools
from typing import Any

import torch

from edgespec.config import Quantisation
from edgespec.errors import ModelError
from edgespec.model.quantised.group_scales import kept_type, scale_and_zero, scale_parts
from edgespec.model.quantised.int8 import Int8GroupLinear
from edgespec.model.quantised.rounding import Packed, Parts

LEVELS: dict[str, tuple[int, ...]] = {
    "iq4": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    "fp4": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
}
"""The numbers that codes of 4 bits stand for: of llama.cpp's IQ4_NL and IQ4_XS (kvalues_iq4nl in
its ggml-common.h), and twice those of E2M1 (OCP Microscaling Formats 1.0, 5.3.3), so that all are
whole and exact in 16 bits."""

_WIDTH = {"iq4": 32, "fp4": 32, "fp8": 16}
"""Columns of which groups have whole numbers, as the kernel adds them up side by side."""

KINDS = tuple(_WIDTH)
"""Kinds of quantisation that are held so."""


def stored_parts(form: Quantisation, shape: torch.Size) -> Parts:
    """`codes` uint8: of 4 bits [out, in / 2], two a byte, the first in the high nibble; of 8
    [out, in]; and `scale_parts`. Raises ModelError for groups that kernels do not take."""
    out, columns = shape
    if form.group % _WIDTH[form.kind] and form.group != columns:
        raise ModelError(
            f"{form.kind} in groups of {form.group} columns is not multiplied, only in multiples "
            f"of {_WIDTH[form.kind]}; take its original 16-bit release with --quant int8"
        )
    size = torch.Size((out, columns // 2 if form.kind in LEVELS else columns))
    return {"codes": (size, torch.uint8)} | scale_parts(form, shape)


def stored(codes: torch.Tensor, form: Quantisation, scales: Packed) -> Packed:
    """The stored form of codes, uint8 [out, in], and `scale_parts`."""
    if form.kind in LEVELS:
        codes = codes[:, ::2] << 4 | codes[:, 1::2]
    return {"codes": codes, **scales}


@functools.cache
def table(kind: str) -> torch.Tensor:
    """What each code stands for, float32 [16], or of 8 bits [256]."""
    if kind in LEVELS:
        return torch.tensor(LEVELS[kind], dtype=torch.float32)
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def power_scale(exponents: torch.Tensor) -> torch.Tensor:
    """2 ** (e - 128) of E8M0 exponents e, uint8, in bfloat16: "fp4" has twice its numbers."""
    wide = exponents.to(torch.int16)
    return torch.where(wide < 2, 32 << wide, (wide - 1) << 7).to(torch.int16).view(torch.bfloat16)


def unpacked(codes: torch.Tensor, kind: str) -> torch.Tensor:
    """Stored codes of some rows as uint8 [rows, in]; those of "nf4", too."""
    return codes if kind == "fp8" else torch.stack((codes >> 4, codes & 15), 2).flatten(1)


def product_parts(packed: Packed, form: Quantisation, dtype: torch.dtype) -> dict[str, Any]:
    """What kernels.products.RowProduct takes of it."""
    scale, _ = scale_and_zero(packed, form, 0, kept_type(packed, form, dtype))
    parts = {"weight": packed["codes"], "scales": scale, "group": form.group}
    return parts | ({"levels": table(form.kind)} if form.kind in LEVELS else {})


class LevelsLinear(Int8GroupLinear):
    """Multiplies by slices that are looked up in the table."""

    levels: torch.Tensor

    def held(self, packed: Packed, quantisation: Quantisation, device: torch.device) -> Packed:
        self.kind = quantisation.kind
        levels = table(self.kind).to(device, self.dtype)
        return super().held(packed, quantisation, device) | {"levels": levels}

    def numbers(self, codes: torch.Tensor) -> torch.Tensor:
        return self.levels[unpacked(codes, self.kind).int()]
