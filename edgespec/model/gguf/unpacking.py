"""Unpacking: codes and scales of a GGUF file's blocks, and the numbers that they stand for.

The layouts are those of ggml-quants.h and ggml-common.h (ggml-org/llama.cpp). Every type is
w = code · scale + offset, both for a group of columns, or a number of a table in the place of the
code. K-types and IQ4_XS have scales of two levels: a float16 for a block of 256 columns times an
integer for each group in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from edgespec.model.gguf.block_types import BlockType
from edgespec.model.quantised.levels import power_scale, table


@dataclass(frozen=True)
class Unpacked:
    """`n` blocks of one type. What is not there is None: integers count as 1, offsets as 0.

    `codes` int8 [n, columns], their middle at 0 where the type has no offsets, or 0 to 15 where
    `levels` names a table. `scale` float16 [n], of MXFP4 bfloat16, and `scale_steps` int8 [n,
    groups]: a group's scale is their product. `offset` float16 [n] and `offset_steps` int8 [n,
    groups]: likewise, and added (K-types subtract: its sign is turned).
    """

    codes: torch.Tensor
    scale: torch.Tensor
    scale_steps: torch.Tensor | None = None
    offset: torch.Tensor | None = None
    offset_steps: torch.Tensor | None = None
    levels: str = ""

    def numbers(self) -> torch.Tensor:
        """What the blocks stand for, float32 [n, columns], rounded as ggml rounds."""
        scale = _product(self.scale, self.scale_steps)
        count, groups = scale.shape
        codes = table(self.levels)[self.codes.int()] if self.levels else self.codes.float()
        numbers = codes.view(count, groups, -1).mul_(scale.unsqueeze(2))
        if self.offset is not None:
            offset = _product(self.offset, self.offset_steps)
            numbers.add_(offset.unsqueeze(2))
        return numbers.view(count, -1)


def unpack(kind: BlockType, blocks: torch.Tensor) -> Unpacked:
    """Codes and scales of uint8 [n, kind.bytes], of a type that is not plain."""
    return _LAYOUTS[kind.name](blocks)


def numbers_of(kind: BlockType, data: torch.Tensor) -> torch.Tensor:
    """Numbers [n, columns] of rows of bytes [n, row bytes]: float32, plain types as they are."""
    if kind.plain:
        return data.view(PLAIN[kind.name])
    return unpack(kind, data.reshape(-1, kind.bytes)).numbers().view(data.shape[0], -1)


PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _product(whole: torch.Tensor, steps: torch.Tensor | None) -> torch.Tensor:
    """float32 [n, groups]."""
    product = whole.float().unsqueeze(1)
    return product if steps is None else product * steps


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte `start` of each block, [n]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).squeeze(1)


def _split(bytes_: torch.Tensor, bits: int) -> torch.Tensor:
    """Pieces of so many bits, of all bytes the lowest first: [..., b] to [..., 8 / bits, b]."""
    places = torch.arange(0, 8, bits, dtype=torch.uint8).view(-1, 1)
    return bytes_.unsqueeze(-2) >> places & ((1 << bits) - 1)


def _split_each(bytes_: torch.Tensor, bits: int) -> torch.Tensor:
    """Pieces of so many bits, byte by byte, the lowest first: [..., b] to [..., b · 8 / bits]."""
    return _split(bytes_, bits).transpose(-1, -2).flatten(-2)


def _nibbles(bytes_: torch.Tensor) -> torch.Tensor:
    """All low halves, then all high ones: [..., b] to [..., 2 b]."""
    return _split(bytes_, 4).flatten(-2)


def _q4_0(blocks: torch.Tensor) -> Unpacked:
    return Unpacked(_nibbles(blocks[:, 2:]).view(torch.int8) - 8, _half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> Unpacked:
    codes = _nibbles(blocks[:, 4:]).view(torch.int8)
    return Unpacked(codes, _half(blocks, 0), offset=_half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> Unpacked:
    codes = _nibbles(blocks[:, 6:]) | _split_each(blocks[:, 2:6], 1) << 4
    return Unpacked(codes.view(torch.int8) - 16, _half(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> Unpacked:
    codes = _nibbles(blocks[:, 8:]) | _split_each(blocks[:, 4:8], 1) << 4
    return Unpacked(codes.view(torch.int8), _half(blocks, 0), offset=_half(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> Unpacked:
    return Unpacked(blocks[:, 2:].contiguous().view(torch.int8), _half(blocks, 0))


def _k_steps(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight scales and eight offsets of 6 bits each, from 12 bytes: uint8 [n, 8] each."""
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((low & 63, high & 15 | low >> 6 << 4), dim=1)
    offsets = torch.cat((middle & 63, high >> 4 | middle >> 6 << 4), dim=1)
    return scales, offsets


def _k_with_offsets(blocks: torch.Tensor, codes: torch.Tensor) -> Unpacked:
    scales, offsets = _k_steps(blocks[:, 4:16])
    return Unpacked(
        codes.view(torch.int8),
        _half(blocks, 0),
        scales.view(torch.int8),
        -_half(blocks, 2),
        offsets.view(torch.int8),
    )


def _q4_k(blocks: torch.Tensor) -> Unpacked:
    return _k_with_offsets(blocks, _nibbles(blocks[:, 16:].view(-1, 4, 32)).view(-1, 256))


def _q5_k(blocks: torch.Tensor) -> Unpacked:
    low = _nibbles(blocks[:, 48:].view(-1, 4, 32)).view(-1, 8, 32)
    fifth = _split(blocks[:, 16:48], 1)
    return _k_with_offsets(blocks, (low | fifth << 4).view(-1, 256))


def _q6_k(blocks: torch.Tensor) -> Unpacked:
    low = _nibbles(blocks[:, :128].view(-1, 2, 64)).view(-1, 2, 4, 32)
    high = _split(blocks[:, 128:192].view(-1, 2, 32), 2)
    codes = (low | high << 4).view(-1, 256).view(torch.int8) - 32
    return Unpacked(codes, _half(blocks, 208), blocks[:, 192:208].contiguous().view(torch.int8))


def _crumbs(packed: torch.Tensor) -> torch.Tensor:
    """Codes of 2 bits, uint8 [n, 8, 32]: of each 32 bytes all lowest ones first."""
    return _split(packed.view(-1, 2, 32), 2).view(-1, 8, 32)


def _q2_k(blocks: torch.Tensor) -> Unpacked:
    steps = blocks[:, :16]
    return Unpacked(
        _crumbs(blocks[:, 16:80].contiguous()).view(-1, 256).view(torch.int8),
        _half(blocks, 80),
        (steps & 15).view(torch.int8),
        -_half(blocks, 82),
        (steps >> 4).view(torch.int8),
    )


def _q3_k(blocks: torch.Tensor) -> Unpacked:
    third = _split(blocks[:, :32], 1)
    codes = _crumbs(blocks[:, 32:96].contiguous()) | third << 2
    low = _nibbles(blocks[:, 96:104])
    high = _split(blocks[:, 104:108], 2).flatten(1)
    steps = (low | high << 4).view(torch.int8) - 32
    return Unpacked(codes.view(-1, 256).view(torch.int8) - 4, _half(blocks, 108), steps)


def _iq4_nl(blocks: torch.Tensor) -> Unpacked:
    codes = _nibbles(blocks[:, 2:]).view(torch.int8)
    return Unpacked(codes, _half(blocks, 0), levels="iq4")


def _iq4_xs(blocks: torch.Tensor) -> Unpacked:
    high, low = _split_each(blocks[:, 2:4], 2), _split_each(blocks[:, 4:8], 4)
    codes = _nibbles(blocks[:, 8:].view(-1, 8, 16)).view(-1, 256).view(torch.int8)
    steps = (low | high << 4).view(torch.int8) - 32
    return Unpacked(codes, _half(blocks, 0), steps, levels="iq4")


def _mxfp4(blocks: torch.Tensor) -> Unpacked:
    codes = _nibbles(blocks[:, 1:]).view(torch.int8)
    return Unpacked(codes, power_scale(blocks[:, 0]), levels="fp4")


_LAYOUTS: Mapping[str, Callable[[torch.Tensor], Unpacked]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
