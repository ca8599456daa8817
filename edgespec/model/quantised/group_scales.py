"""Group scales: what "int4" and "int8" store beside codes where a model's file chose these."""

from __future__ import annotations

import torch

from edgespec.config import Quantisation
from edgespec.errors import ModelError
from edgespec.model.quantised.rounding import Packed, Parts
from edgespec.model.tensors import TORCH_DTYPES

BLOCK = 256
"""Columns that share the float16 numbers of scales in two levels, as GGUF's K-quants have them."""


def scale_parts(form: Quantisation, shape: torch.Size) -> Parts:
    """What is stored of the scales of a weight [out, columns], beside its codes.

    `scales` [out, groups]; `zeros` [out, groups], where the form has any: whole numbers for
    "points", else like the scales. With two levels both are whole numbers, and `blocks` and
    `zero_blocks` [out, columns / 256] their factors. `order` [columns], of an ordered form: the
    column of the weight that each stored one is. Raises ModelError for columns that groups do not
    divide.
    """
    out, columns = shape
    check_columns(form, columns)
    groups = torch.Size((out, columns // form.group))
    parts: Parts = {}
    fine = torch.int8 if form.double else TORCH_DTYPES[form.scales]
    parts["scales"] = (groups, fine)
    if form.zeros:
        parts["zeros"] = (groups, torch.int8 if form.zeros == "points" else fine)
    if form.double:
        blocks = (torch.Size((out, columns // BLOCK)), torch.float16)
        parts["blocks"] = blocks
        if form.zeros == "low":
            parts["zero_blocks"] = blocks
    if form.ordered:
        parts["order"] = (torch.Size((columns,)), torch.int32)
    return parts


def check_columns(form: Quantisation, columns: int) -> None:
    """Raise ModelError if the groups of a form do not divide so many columns."""
    if form.group < 1 or columns % form.group:
        raise ModelError(
            f"{form.kind} with groups of {form.group} columns does not fit its {columns} columns; "
            "choose a group that divides them, or int8"
        )
    if form.double and (columns % BLOCK or BLOCK % form.group):
        raise ModelError(
            f"{form.kind} with scales in two levels needs groups that divide {BLOCK}, and whole "
            f"blocks of {BLOCK} columns, not groups of {form.group} and {columns} columns; "
            "download the model again"
        )


def kept_type(packed: Packed, form: Quantisation, dtype: torch.dtype) -> torch.dtype:
    """The narrowest type in which rows of `dtype` lose nothing of these scales and zeros."""
    if dtype == torch.float64:
        return dtype
    made = form.double or form.zeros == "points"  # by a product of two numbers
    return torch.float32 if made else packed["scales"].dtype


def scale_and_zero(
    packed: Packed, form: Quantisation, middle: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """s and z [out, groups] of w = (code - middle) s + z; z is None where it is 0 throughout.

    Reckoned in float64 where `dtype` is that, else in float32, and rounded to `dtype` once.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scale = packed["scales"].to(wide)
    if form.double:
        scale = scale * _spread(packed["blocks"], scale)
    if not form.zeros:
        return scale.to(dtype), None
    zero = packed["zeros"].to(wide)
    if form.zeros == "points":
        zero = (middle - zero) * scale
    elif form.zeros == "low":
        if form.double:
            zero = zero * -_spread(packed["zero_blocks"], zero)
        zero = zero + middle * scale
    return scale.to(dtype), zero.to(dtype)


def _spread(blocks: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """The number of each group's block, like `groups`."""
    return blocks.to(groups.dtype).repeat_interleave(groups.shape[1] // blocks.shape[1], 1)
