"""Quantised linear: packing a weight matrix, and multiplying rows by the packed form."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import nn

from edgespec.config import Quantisation
from edgespec.errors import ModelError
from edgespec.kernels.gpu.usable import DTYPES, usable
from edgespec.kernels.products import TILE, RowProduct
from edgespec.model.quantised import int4, int8, levels, nf4
from edgespec.model.quantised.exact import ExactLinear
from edgespec.model.quantised.group_scales import check_columns
from edgespec.model.quantised.int4_kernels import kernel_group
from edgespec.model.quantised.rounding import Packed, Parts
from edgespec.model.quantised.slices import SlicedLinear
from edgespec.model.tensors import one_view

_log = logging.getLogger(__name__)
_KINDS = {"int4": int4, "int8": int8, "nf4": nf4, **dict.fromkeys(levels.KINDS, levels)}
_STEP = 128  # columns of a step of the kernel for GPUs, or half as many
_CODES = ("tiles", "codes")
"""The parts that have nearly all bytes of a stored form."""
_SLICED: dict[str, type[SlicedLinear]] = {
    "int4": int4.Int4Linear,
    "int8": int8.Int8Linear,
    "nf4": nf4.Nf4Linear,
    **dict.fromkeys(levels.KINDS, levels.LevelsLinear),
}


def stored_parts(form: Quantisation, shape: torch.Size) -> Parts:
    """What is stored of a weight [out, in]: shape and dtype of each part.

    Raises ModelError if the weight's shape does not fit the form.
    """
    parts: Parts = _kind(form).stored_parts(form, shape)
    return parts


def stored(codes: torch.Tensor, form: Quantisation, scales: Packed) -> Packed:
    """The stored form of a weight [out, in] that is quantised already; nothing is rounded.

    `codes`, on the CPU: uint8 [out, in] of 0 to 15 for "int4", "iq4" and "fp4", of all for "fp8";
    int8 [out, in] for "int8"; uint8 [out, in / 2] as bitsandbytes has them, for "nf4". `scales`:
    contiguous tensors, all that `scale_parts` lists, or `nf4.stored_parts`. Raises ModelError if a
    shape or dtype does not fit.
    """
    shape = torch.Size((codes.shape[0], codes.shape[1] * (2 if form.kind == "nf4" else 1)))
    expected = stored_parts(form, shape)
    packed: Packed = _kind(form).stored(codes, form, scales)
    for name in expected.keys() | packed.keys():
        found = packed.get(name)
        if found is None or (found.shape, found.dtype) != expected.get(name):
            what = "missing" if found is None else f"{found.dtype} of {list(found.shape)}"
            raise ModelError(f"{name!r} of a {form.name} matrix of {list(shape)} is {what}")
    return packed


def pack(weight: torch.Tensor, quantisation: Quantisation) -> Packed:
    """Exactly `stored_parts` of a float weight [out, in], contiguous, on the CPU.

    Works on some rows at a time, as the weight may be larger than the memory that is left. Raises
    ModelError if its shape or values do not fit, or what the quantisation needs is not installed.
    """
    packed: Packed = _kind(quantisation).pack(weight, quantisation)
    return packed


def joined(
    parts: Sequence[Packed], form: Quantisation, shapes: Sequence[torch.Size], copied: bool
) -> Packed | None:
    """The stored form of weights [out, in] with the same columns as one, each below the one before.

    None where the form has no such join (its scales share numbers, or are in another order of
    columns, or its tiles would hold rows of two weights), and where codes would have to be copied
    for it, unless they may be (`copied`).
    """
    if form.kind == "nf4" and form.double:
        return None
    if form.kind == "int4" and any(shape[0] % TILE for shape in shapes[:-1]):
        return None
    if form.ordered and any(not torch.equal(one["order"], parts[0]["order"]) for one in parts):
        return None
    whole: Packed = {}
    for name, first in parts[0].items():
        every = [part[name] for part in parts]
        view = one_view(every) if name in _CODES else None
        if view is None and name in _CODES and not copied:
            return None
        paired = form.kind == "int4" and form.zeros == "middle" and name == "scales"
        if name == "order":
            view = first
        whole[name] = torch.cat(every, int(paired)) if view is None else view
    return whole


def linear_from(
    packed: Packed,
    bias: torch.Tensor | None,
    shape: torch.Size,
    form: Quantisation,
    dtype: torch.dtype,
    device: torch.device | str,
) -> nn.Module:
    """The layer that multiplies rows [..., in] in `dtype` by a packed weight of `shape` [out, in].

    All it holds are buffers on `device`; what the kernel takes as it is stored is kept, not
    copied. `bias` [out] is in `dtype` on `device`. Raises ModelError where the form needs
    something that is not installed.
    """
    place = torch.device(device)
    if place.type != "cpu":
        if dtype in DTYPES and usable(place):
            # Only here, as it needs triton.
            from edgespec.model.quantised import triton_linear

            if triton_linear.fits(form, shape):
                return triton_linear.TritonLinear(packed, bias, shape, form, dtype, device)
        if form.kind == "fp8":
            _tell_of_slices()
        return _sliced(packed, bias, shape, form, dtype, device)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    @functools.cache
    def sliced() -> SlicedLinear:
        return _sliced(packed, None, shape, form, wide, device)

    product = RowProduct(
        shape=(shape[0], shape[1]),
        dtype=dtype,
        codes=form.kind,
        order=packed.get("order"),
        bias=bias,
        dequantised=lambda first, end: sliced().weight_rows(first, end),
        **_kind(form).product_parts(packed, form, dtype),
    )
    return ExactLinear(product)


@functools.cache
def _tell_of_slices() -> None:
    """Once a process."""
    _log.warning(
        "there is no kernel for FP8 on a GPU: each pass unpacks these matrices anew, which is "
        "slow, and texts may differ from plain decoding in near-ties; take the original 16-bit "
        "release with --quant int8"
    )


def _sliced(
    packed: Packed,
    bias: torch.Tensor | None,
    shape: torch.Size,
    form: Quantisation,
    dtype: torch.dtype,
    device: torch.device | str,
) -> SlicedLinear:
    layer = int8.Int8GroupLinear if form.kind == "int8" and form.group else _SLICED[form.kind]
    return layer(packed, bias, shape, form, dtype, device)


def held_bytes(form: Quantisation, shape: torch.Size, dtype: torch.dtype) -> int:
    """The most that a layer of `linear_from` takes, without its bias; of a plain one just that.

    Scales are held in the dtype in which it computes or which loses nothing of them, with a zero
    for each where a kernel wants so. On a GPU every kind has whole tiles of outputs, and codes and
    scales in whole steps of columns (see kernels.gpu.code_words); it is not worth telling devices
    apart.
    """
    if form.kind == "none":
        return shape.numel() * dtype.itemsize
    columns = shape[1]
    out = -(-shape[0] // TILE) * TILE
    table = 512 * dtype.itemsize  # on a GPU all pairs of 16 numbers
    filled = columns if columns % (_STEP // 2) == 0 else -(-columns // _STEP) * _STEP
    if form.kind == "nf4":
        return out * (filled // 2 + filled // form.group * 4) + table
    if not form.group:
        return out * (filled + 4)
    check_columns(form, columns)
    made = form.double or form.zeros == "points" or form.scales == "float32"  # see kept_type
    kept = max(dtype.itemsize, 4 if made else 2)
    if form.kind in levels.KINDS:
        codes = filled if form.kind == "fp8" else filled // 2
        return out * (codes + -(-filled // form.group) * kept) + table
    if form.kind == "int4":
        codes, widest = filled // 2, kernel_group(form.group)
    else:
        codes, widest = filled, form.group
    scales = 2 * -(-filled // widest) * kept
    return out * (codes + scales) + 4 * columns * form.ordered


def dequantised(
    packed: Packed, shape: torch.Size, form: Quantisation, dtype: torch.dtype
) -> torch.Tensor:
    """The weight [out, in] that the packed form stands for, in `dtype`, on the CPU."""
    return _sliced(packed, None, shape, form, dtype, "cpu").whole_weight()


def _kind(form: Quantisation) -> ModuleType:
    if form.kind not in _KINDS:
        raise ModelError(
            f"{form.name!r} is no packed form of a matrix; choose another quantisation"
        )
    return _KINDS[form.kind]
