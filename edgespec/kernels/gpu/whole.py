"""Whole numbers for grids and blocks: Triton's functions of these names take ten times as long."""

from __future__ import annotations


def cdiv(number: int, by: int) -> int:
    """How many blocks of `by` hold so many."""
    return -(-number // by)


def next_power_of_2(number: int) -> int:
    """The least power of two that is not below a number > 0."""
    return 1 << (number - 1).bit_length()
