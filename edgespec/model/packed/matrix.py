"""Packed matrix: one matrix of a packed checkpoint, as its dialect reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from edgespec.config import Quantisation
from edgespec.errors import ModelError
from edgespec.model.quantised.rounding import Packed

TORCH_NAMES: dict[torch.dtype, Literal["bfloat16", "float16", "float32"]] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}
FLOATS = tuple(TORCH_NAMES)
REMEDY = "download the model again"

Parts = Mapping[str, torch.Tensor]
"""The tensors that a file has for one matrix, by what follows the matrix' name."""


@dataclass(frozen=True)
class PackedMatrix:
    """`shape` [out, in]; `pack` makes the parts of `form` (see model.quantised) from the codes."""

    shape: torch.Size
    form: Quantisation
    pack: Callable[[], Packed]


class Dialect(Protocol):
    """How one method names and packs the tensors of a matrix."""

    mark: str
    """What follows the name of each packed module in one of its tensors."""
    parts: tuple[str, ...]
    """What may follow it in all of them, the mark included."""

    def matrix(self, parts: Parts) -> PackedMatrix:
        """Reads shapes and small tensors only. Raises ModelError for what does not fit."""


class PartReader:
    """The parts of one matrix, with a ModelError for each that is missing or has another shape."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def __contains__(self, part: str) -> bool:
        return part in self._parts

    def any(self, part: str, dimensions: int) -> torch.Tensor:
        """A part of so many dimensions, none of which is 0."""
        if part not in self._parts:
            raise ModelError(f"it has no {part!r}; {REMEDY}")
        tensor = self._parts[part]
        if tensor.dim() != dimensions or not tensor.numel():
            raise ModelError(f"its {part!r} has the shape {list(tensor.shape)}; {REMEDY}")
        return tensor

    def part(self, part: str, shape: tuple[int, ...], *dtypes: torch.dtype) -> torch.Tensor:
        """The part of exactly this shape and one of these dtypes."""
        tensor = self.any(part, len(shape))
        if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
            raise ModelError(
                f"its {part!r} is {_named(tensor.dtype)} of {list(tensor.shape)}, where its other "
                f"tensors ask for {' or '.join(map(_named, dtypes))} of {list(shape)}; {REMEDY}"
            )
        return tensor


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
