"""Words: the codes that are packed into 32-bit integers, the first in the lowest bits."""

from __future__ import annotations

import torch

BITS = (4, 8)
"""Bits of a code that are read."""

WORD = 32
"""Bits of a word."""


def columns_of(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of 4 or 8 bits, uint8 [rows, columns], of words int32 [rows, words]."""
    return _codes(words, bits).flatten(1)


def rows_of(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of 4 or 8 bits, uint8 [rows, columns], of words int32 [words, columns]."""
    return _codes(words, bits).transpose(1, 2).reshape(-1, words.shape[1])


def _codes(words: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [first, second, codes a word]. By bytes, as wider integers would need more memory."""
    # A view of a file's bytes, which safetensors has in little-endian order.
    bytes_ = words.flatten().view(torch.uint8).view(*words.shape, WORD // 8)
    if bits == 8:
        return bytes_
    return torch.stack((bytes_ & 15, bytes_ >> 4), dim=-1).flatten(2)
