"""Byte spelling: what byte-level tokenizers (GPT-2's and most since) write for each byte."""

from __future__ import annotations


def _byte_spelling() -> dict[str, int]:
    """Itself, or a letter from U+0100 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = (byte for byte in range(256) if byte not in plain)
    return {chr(byte): byte for byte in plain} | {
        chr(256 + number): byte for number, byte in enumerate(rest)
    }


BYTES = _byte_spelling()
"""Byte by letter."""
