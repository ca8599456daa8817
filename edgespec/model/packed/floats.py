"""Floats of few bits, each a number of a table: the dialects of MXFP4 and FP8."""

from __future__ import annotations

from typing import Any

import torch

from edgespec.config import Quantisation
from edgespec.errors import ModelError
from edgespec.model.packed.matrix import (
    FLOATS,
    REMEDY,
    TORCH_NAMES,
    PackedMatrix,
    PartReader,
    Parts,
)
from edgespec.model.packed.settings import float_weights
from edgespec.model.quantised.levels import power_scale
from edgespec.model.quantised.linear import stored
from edgespec.model.quantised.rounding import Packed

_BLOCK = 32
_NOT_A_NUMBER = 255  # of exponents
_MAGNITUDE = 0x7F  # of E4M3; all ones is no number


class Mxfp4:
    """Experts as gpt-oss is published (OCP Microscaling Formats 1.0): of 32 columns each the codes
    of E2M1, two a byte, the first in the low half, and an exponent.

    `blocks` uint8 [out, in / 32, 16], `scales` uint8 [out, in / 32].
    """

    mark = "blocks"
    parts = ("blocks", "scales")

    def __init__(self, packing: dict[str, Any]) -> None:
        """All that `packing` may say is said by the tensors too."""

    def matrix(self, parts: Parts) -> PackedMatrix:
        read = PartReader(parts)
        out, count, _ = read.any("blocks", 3).shape
        blocks = read.part("blocks", (out, count, _BLOCK // 2), torch.uint8)
        exponents = read.part("scales", (out, count), torch.uint8)
        form = Quantisation("fp4", _BLOCK, scales="bfloat16")

        def pack() -> Packed:
            if (exponents == _NOT_A_NUMBER).any():
                raise ModelError(f"its 'scales' hold what is no number; {REMEDY}")
            codes = torch.stack((blocks & 15, blocks >> 4), 3).view(out, -1)
            return stored(codes, form, {"scales": power_scale(exponents)})

        return PackedMatrix(torch.Size((out, count * _BLOCK)), form, pack)


class Fp8:
    """E4M3 with a scale for each square block, for each row, or for all, as DeepSeek's, Qwen's and
    Mistral's releases have it, and those of compressed-tensors under another name. Rows are not
    rounded to 8 bits, as their `activation_scale` would have it.

    `weight` float8_e4m3fn [out, in], `weight_scale_inv` [out / block, in / block], [out, 1] or one
    number.
    """

    def __init__(self, packing: dict[str, Any]) -> None:
        weights = float_weights(packing)
        self.mark = "weight_scale_inv" if weights is None else "weight_scale"
        self.parts = ("weight", self.mark, "activation_scale", "input_scale")
        block = packing.get("weight_block_size") if weights is None else weights["block_structure"]
        self._block: list[int] | None = block

    def matrix(self, parts: Parts) -> PackedMatrix:
        one = parts[self.mark].numel() == 1
        if not self._block and one:
            parts = {**parts, self.mark: parts[self.mark].view(1, 1)}
        read = PartReader(parts)
        shape = read.any("weight", 2).shape
        weight = read.part("weight", tuple(shape), torch.float8_e4m3fn).view(torch.uint8)
        rows, columns = self._block or (shape[0] if one else 1, shape[1])
        if shape[1] % columns:
            raise ModelError(
                f"its {shape[1]} columns are no whole number of blocks of {columns}; take its "
                "original 16-bit release with --quant int8"
            )
        scales = read.part(self.mark, (-(-shape[0] // rows), shape[1] // columns), *FLOATS)
        form = Quantisation("fp8", columns, scales=TORCH_NAMES[scales.dtype])

        def pack() -> Packed:
            if ((weight & _MAGNITUDE) == _MAGNITUDE).any():
                raise ModelError(f"its 'weight' holds what is no number; {REMEDY}")
            every = scales.repeat_interleave(rows, 0)[: shape[0]].contiguous()
            return stored(weight.clone(), form, {"scales": every})

        return PackedMatrix(shape, form, pack)
