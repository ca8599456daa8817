"""nf4: bitsandbytes' NormalFloat, a scale for each 64 columns, which may be quantised too."""

from __future__ import annotations

import functools
import importlib
import logging
from types import ModuleType
from typing import Any

import torch

from edgespec.config import Quantisation
from edgespec.errors import ModelError
from edgespec.model.quantised.rounding import Packed, Parts, row_chunks
from edgespec.model.quantised.slices import SlicedLinear

_NESTED = 256  # scales that share a scale, where they are quantised too
_LEAST = 1e-38  # as the library has it; a group of zeros is divided by this
_DEQUANTISES = (torch.bfloat16, torch.float16, torch.float32)  # what the library computes in


@functools.cache
def library() -> ModuleType:
    """bitsandbytes, imported when it is first needed. Raises ModelError where it is unusable."""
    # It announces an optional package of faster CPU kernels as a warning.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        return importlib.import_module("bitsandbytes")
    except ModuleNotFoundError as error:
        if error.name != "bitsandbytes":
            raise ModelError(_broken(error)) from error
        raise ModelError(
            "nf4 needs bitsandbytes, which is not installed; run `pip install bitsandbytes`, or "
            "choose int4"
        ) from None
    except Exception as error:  # it looks for compilers, drivers and libraries while it is imported
        raise ModelError(_broken(error)) from error


@functools.cache
def _levels(device: torch.device) -> torch.Tensor:
    """The 16 values of nf4. Made once: no CUDA graph could hold a copy from the host's memory."""
    levels: torch.Tensor = library().functional.get_4bit_type("nf4", device=device)
    return levels


def _broken(error: Exception) -> str:
    return (
        f"nf4 needs bitsandbytes, which cannot be imported ({error}); reinstall it, or choose int4"
    )


def stored_parts(quantisation: Quantisation, shape: torch.Size) -> Parts:
    """`codes`: two a byte, the first in the high nibble; `scales`: the greatest of each group.

    With double quantisation a scale is a code of 8 bit: `nested_map[code]` times the one of
    `nested_scales` that it shares with 256 others, plus `nested_mean`.
    """
    out, columns = shape
    group = quantisation.group
    if columns % group:
        raise ModelError(
            f"nf4 with groups of {group} columns does not fit a weight of {columns} columns; "
            "choose int8"
        )
    scales = torch.Size((out, columns // group))
    parts = {
        "codes": (torch.Size((out, columns // 2)), torch.uint8),
        "scales": (scales, torch.uint8 if quantisation.double else torch.float32),
    }
    if quantisation.double:
        parts["nested_scales"] = (torch.Size((-(-scales.numel() // _NESTED),)), torch.float32)
        parts["nested_map"] = (torch.Size((256,)), torch.float32)
        parts["nested_mean"] = (torch.Size((1,)), torch.float32)
    return parts


def stored(codes: torch.Tensor, form: Quantisation, scales: Packed) -> Packed:
    """The stored form of bitsandbytes' codes, uint8 [out, in / 2], and their scales."""
    return {"codes": codes, **scales}


def pack(weight: torch.Tensor, quantisation: Quantisation) -> Packed:
    """The codes and scales of bitsandbytes' own quantisation, bit for bit.

    Raises ModelError where the library is unusable.
    """
    parts = stored_parts(quantisation, weight.shape)
    functional = library().functional
    levels = functional.get_4bit_type("nf4", device="cpu")
    middles = ((levels[1:] + levels[:-1]) / 2).tolist()
    codes = torch.empty(parts["codes"][0], dtype=torch.uint8)
    scales = torch.empty(parts["scales"][0], dtype=torch.float32)
    for first, chunk in row_chunks(weight):
        end = first + chunk.shape[0]
        grouped = chunk.view(chunk.shape[0], -1, quantisation.group)
        scales[first:end] = grouped.abs().amax(2)
        grouped.mul_((1 / scales[first:end].clamp(min=_LEAST)).unsqueeze(2))
        codes[first:end] = _nearest(chunk, middles)
    if not quantisation.double:
        return {"codes": codes, "scales": scales}
    mean = scales.mean()
    nested, state = functional.quantize_blockwise(scales.flatten() - mean, blocksize=_NESTED)
    return {
        "codes": codes,
        "scales": nested.view(scales.shape),
        "nested_scales": state.absmax,
        "nested_map": state.code.clone(),  # in some releases it is one for all
        "nested_mean": mean.view(1),
    }


def _nearest(scaled: torch.Tensor, middles: list[float]) -> torch.Tensor:
    """Codes of the nearest levels, two a byte. Faster than the library's own search on a CPU."""
    codes = torch.zeros(scaled.shape, dtype=torch.uint8)
    for middle in middles:
        codes += scaled > middle
    return (codes[:, ::2] << 4) | codes[:, 1::2]


def product_parts(packed: Packed, form: Quantisation, dtype: torch.dtype) -> dict[str, Any]:
    """What kernels.products.RowProduct takes of it. Raises ModelError as `library` does."""
    out, groups = packed["scales"].shape
    shape = torch.Size((out, groups * form.group))
    sliced = Nf4Linear(packed, None, shape, form, torch.float32, "cpu")
    scales = sliced.plain_scales(0, out).view(out, groups)
    levels = _levels(torch.device("cpu")).float()
    return {"weight": packed["codes"], "scales": scales, "levels": levels, "group": form.group}


class Nf4Linear(SlicedLinear):
    """Multiplies by slices that bitsandbytes dequantises."""

    codes: torch.Tensor
    scales: torch.Tensor
    nested_scales: torch.Tensor
    nested_map: torch.Tensor
    nested_mean: torch.Tensor

    def held(self, packed: Packed, quantisation: Quantisation, device: torch.device) -> Packed:
        self.group, self.nested = quantisation.group, quantisation.double
        self._library = library()
        return {name: part.to(device) for name, part in packed.items()}

    def weight_rows(self, first: int, end: int) -> torch.Tensor:
        functional = self._library.functional
        state = functional.QuantState(
            self.plain_scales(first, end),
            shape=torch.Size((end - first, self.in_features)),
            code=_levels(self.codes.device),
            blocksize=self.group,
            quant_type="nf4",
            dtype=self.dtype if self.dtype in _DEQUANTISES else torch.float32,
        )
        rows: torch.Tensor = functional.dequantize_4bit(self.codes[first:end].reshape(-1, 1), state)
        return rows.to(self.dtype)

    def plain_scales(self, first: int, end: int) -> torch.Tensor:
        """Scales of rows [first, end), float32, flat."""
        scales = self.scales.flatten()
        begin, end = (row * self.in_features // self.group for row in (first, end))
        if not self.nested:
            return scales[begin:end]
        # Quantised scales share one of theirs by 256, whatever the rows: begin where one begins.
        shared = begin // _NESTED
        state = self._library.functional.QuantState(
            self.nested_scales[shared : -(-end // _NESTED)],
            code=self.nested_map,
            blocksize=_NESTED,
            dtype=torch.float32,
        )
        codes = scales[shared * _NESTED : end]
        plain: torch.Tensor = self._library.functional.dequantize_blockwise(codes, state)
        return (plain + self.nested_mean)[begin - shared * _NESTED :]
