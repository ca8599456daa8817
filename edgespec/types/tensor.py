"""Tensor: a dense array as it crosses the wire, with explicit dtype and shape, free of torch."""

from __future__ import annotations

from math import prod
from typing import Annotated, NewType

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from edgespec.types.record import Buffer, Record

MOST_AXES = 4

Layers = NewType("Layers", tuple[int, ...])
"""Numbers of some of the model's layers, few and ascending: they travel in the header."""

NO_LAYERS = Layers(())

ITEM_SIZES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "uint64": 8,
    "uint8": 1,
}
"""Bytes of one element of every dtype that may cross the wire."""


class Tensor(Record, frozen=True):
    """A C-contiguous little-endian array: dtype name, shape, raw bytes.

    Rows are the first axis. Raises ValueError for an unknown dtype, a negative extent, or a
    number of bytes that is not what dtype and shape say.
    """

    dtype: str
    shape: Annotated[tuple[int, ...], Meta(max_length=MOST_AXES)]
    data: Buffer

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_SIZES:
            raise ValueError(f"unknown dtype {self.dtype!r}")
        if min(self.shape, default=0) < 0:
            raise ValueError(f"negative extent in shape {self.shape}")
        expected = prod(self.shape) * ITEM_SIZES[self.dtype]
        if len(self.data) != expected:
            raise ValueError(
                f"{self.dtype}{list(self.shape)} takes {expected} bytes, not {len(self.data)}"
            )

    def __deepcopy__(self, memo: object) -> Tensor:
        return self  # it does not change, and views cannot be copied

    def take(self, index: npt.NDArray[np.int64]) -> Tensor:
        """The rows at `index` (int64 [n]) of a tensor with at least one axis, in that order."""
        if len(index) == self.shape[0] and bool((index == np.arange(self.shape[0])).all()):
            return self
        row_bytes = prod(self.shape[1:]) * ITEM_SIZES[self.dtype]
        rows = np.frombuffer(self.data, np.uint8).reshape(self.shape[0], row_bytes)
        return Tensor(self.dtype, (len(index), *self.shape[1:]), rows[index].tobytes())

    def beside(self, other: Tensor) -> Tensor:
        """The columns of this matrix, then those of another one of the same dtype and rows.

        Raises ValueError if it is not.
        """
        if (self.dtype, self.shape[:-1]) != (other.dtype, other.shape[:-1]) or len(self.shape) != 2:
            raise ValueError(f"{self.dtype}{self.shape} and {other.dtype}{other.shape} differ")
        rows = self.shape[0]
        both = [np.frombuffer(t.data, np.uint8).reshape(rows, -1) for t in (self, other) if rows]
        data = np.concatenate(both, 1).tobytes() if both else b""
        return Tensor(self.dtype, (rows, self.shape[1] + other.shape[1]), data)
