"""Codes: a packed GGUF tensor in the stored forms of model.quantised, nothing rounded again."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from edgespec.config import Quantisation
from edgespec.model.gguf.block_types import BlockType
from edgespec.model.gguf.unpacking import Unpacked, unpack
from edgespec.model.quantised.linear import stored
from edgespec.model.quantised.rounding import Packed

_FORMS = {
    "Q4_0": Quantisation("int4", 32, scales="float16"),
    "Q4_1": Quantisation("int4", 32, zeros="low", scales="float16"),
    "Q5_0": Quantisation("int8", 32, scales="float16"),
    "Q5_1": Quantisation("int8", 32, zeros="low", scales="float16"),
    "Q8_0": Quantisation("int8", 32, scales="float16"),
    "Q4_K": Quantisation("int4", 32, double=True, zeros="low", scales="float16"),
    "Q5_K": Quantisation("int8", 32, double=True, zeros="low", scales="float16"),
    "Q6_K": Quantisation("int8", 16, double=True, scales="float16"),
}
"""What each type is, code for code. Codes of 5 and 6 bits take 8."""

_MIDDLE = 8  # of the codes of "int4"

Rows = torch.Tensor | slice
"""Which rows of a matrix."""


def form_of(kind: BlockType) -> Quantisation:
    """The form that holds a type as it is; plain types stay plain."""
    return _FORMS.get(kind.name, Quantisation())


def stored_form(
    kind: BlockType, shape: torch.Size, chunks: Iterable[tuple[Rows, torch.Tensor]]
) -> Packed:
    """The stored form of a matrix [out, columns] of a packed type.

    `chunks`: all its rows, some at a time: which they are, and their bytes [n, row bytes].
    """
    form = form_of(kind)
    codes = torch.empty(shape, dtype=torch.uint8 if form.kind == "int4" else torch.int8)
    scales: Packed = {}
    for rows, data in chunks:
        unpacked = unpack(kind, data.reshape(-1, kind.bytes))
        # Of a type without offsets the codes have their middle at 0.
        low = _MIDDLE if form.kind == "int4" and not form.zeros else 0
        codes[rows] = (unpacked.codes + low).view(codes.dtype).view(data.shape[0], -1)
        for name, part in _scales(unpacked).items():
            flat = part.view(data.shape[0], -1)
            if name not in scales:
                scales[name] = torch.empty(shape[0], flat.shape[1], dtype=flat.dtype)
            scales[name][rows] = flat
    return stored(codes, form, scales)


def _scales(unpacked: Unpacked) -> Packed:
    """As `group_scales.scale_parts` has them, by blocks."""
    parts: Packed = {}
    if unpacked.scale_steps is None:
        parts["scales"] = unpacked.scale
    else:
        parts |= {"scales": unpacked.scale_steps, "blocks": unpacked.scale}
    if unpacked.offset is None:
        return parts
    if unpacked.offset_steps is None:
        return parts | {"zeros": unpacked.offset}
    return parts | {"zeros": unpacked.offset_steps, "zero_blocks": -unpacked.offset}
