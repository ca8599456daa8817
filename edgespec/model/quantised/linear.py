"""Quantised linear: packing a weight matrix, and multiplying rows by the packed form."""

from __future__ import annotations

import torch

from edgespec.config import Quantisation
from edgespec.model.quantised import int4, int8, nf4
from edgespec.model.quantised.rounding import Packed, Parts
from edgespec.model.quantised.slices import SlicedLinear

_KINDS = {"int4": int4, "int8": int8, "nf4": nf4}
_LAYERS: dict[str, type[SlicedLinear]] = {
    "int4": int4.Int4Linear,
    "int8": int8.Int8Linear,
    "nf4": nf4.Nf4Linear,
}


def stored_parts(quantisation: Quantisation, shape: torch.Size) -> Parts:
    """What is stored of a weight [out, in]: shape and dtype of each part.

    Raises ModelError if the weight's shape does not fit the quantisation.
    """
    parts: Parts = _KINDS[quantisation.kind].stored_parts(quantisation, shape)
    return parts


def pack(weight: torch.Tensor, quantisation: Quantisation) -> Packed:
    """Exactly `stored_parts` of a float weight [out, in], contiguous, on the CPU.

    Works on some rows at a time, as the weight may be larger than the memory that is left. Raises
    ModelError if its shape or values do not fit, or what the quantisation needs is not installed.
    """
    packed: Packed = _KINDS[quantisation.kind].pack(weight, quantisation)
    return packed


def linear_from(
    packed: Packed,
    bias: torch.Tensor | None,
    shape: torch.Size,
    quantisation: Quantisation,
    dtype: torch.dtype,
    device: torch.device | str,
) -> SlicedLinear:
    """The layer that multiplies rows [..., in] in `dtype` by a packed weight of `shape` [out, in].

    All it holds are buffers on `device`; what the kernel takes as it is stored is kept, not
    copied. `bias` [out] is in `dtype` on `device`. Raises ModelError where the quantisation needs
    something that is not installed.
    """
    return _LAYERS[quantisation.kind](packed, bias, shape, quantisation, dtype, device)


def dequantised(
    packed: Packed, shape: torch.Size, quantisation: Quantisation, dtype: torch.dtype
) -> torch.Tensor:
    """The weight [out, in] that the packed form stands for, in `dtype`, on the CPU."""
    return linear_from(packed, None, shape, quantisation, dtype, "cpu").whole_weight()
