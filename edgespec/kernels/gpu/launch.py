"""Launches without Triton's dispatch, which takes the host several times as long as the rest.

Triton looks anew at every argument of every launch, though what it compiles depends on little of
them. Here a launch is known by just that, or by more: the constants, the device, the tensors'
dtypes, and what whole numbers are divisible by. The first one of its kind goes by Triton, which
compiles it; others go straight to what it compiled. Code for tensors that begin at a multiple of 16
bytes relies on it, so a launch with any that does not goes by Triton, each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch
from triton.runtime import driver

_ALIGNMENT = 16
"""What Triton knows of addresses and whole numbers: whether this divides them."""


class Launcher:
    """A kernel with its constants; before these its parameters are tensors, then numbers."""

    def __init__(self, kernel: Any, **constants: object) -> None:
        """`kernel`: as triton.jit makes it; `constants`: its own, and options of Triton's."""
        self._kernel, self._constants = kernel, constants
        self._compiled: dict[tuple[object, ...], tuple[Any, tuple[None, ...]]] = {}

    def launch(
        self,
        grid: tuple[int, int, int],
        device: int,
        tensors: Sequence[torch.Tensor | None],
        numbers: Sequence[float],
    ) -> None:
        """Launch so many programs on a device, which is the current one and holds the tensors."""
        dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
        kind = (device, *dtypes, *map(_kind, numbers))
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        aligned = reduce(or_, addresses) % _ALIGNMENT == 0
        if aligned and kind in self._compiled:
            kernel, places = self._compiled[kind]
            kernel.run(
                *grid,
                driver.active.get_current_stream(device),
                *(kernel.function, kernel.packed_metadata, None, None, None),
                *(*addresses, *numbers, *places),
            )
            return
        kernel = self._kernel[grid](*tensors, *numbers, **self._constants)
        if aligned and kernel is not None:  # interpreted ones are not compiled
            # The places of constants, which nothing reads.
            places = (None,) * (len(self._kernel.params) - len(tensors) - len(numbers))
            self._compiled[kind] = kernel, places


def _kind(number: int | float) -> object:
    """What Triton knows of a number: whether it is 1, is divisible and fits into 32 bits, and that
    it is a float."""
    if isinstance(number, float):
        return float
    return number if number < _ALIGNMENT else (number % _ALIGNMENT, number >> 31)


def cdiv(number: int, by: int) -> int:
    """How many blocks of `by` hold so many."""
    return -(-number // by)


def next_power_of_2(number: int) -> int:
    """The least power of two that is not below a number > 0."""
    return 1 << (number - 1).bit_length()
