"""Words of codes (code_words.py) taken apart into numbers that tensor cores take, and what groups
of a product by codes have besides: scales and zeros.

Two words side by side are taken apart by one logic operation for each two codes, behind a shift
where there has to be one: the codes become the last bits of two numbers of 16 bits. Codes that
stand for the numbers of a table are looked up in pairs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from edgespec.kernels.gpu.code_words import PARTS


def _parts(among: tuple[tuple[int, int], ...], bits: int) -> tl.constexpr:
    """PTX that takes two words of 16 bits apart: of each the four codes, behind a shift to the
    right and by a mask, with `bits` above them."""
    lines = []
    for part, (by, mask) in enumerate(among):
        held = "$4"
        if by:
            lines.append(f"shr.u32 part, $4, {by};")
            held = "part"
        # 0xea: (a & b) | c
        lines.append(f"lop3.b32 ${part}, {held}, {mask * 0x10001:#010x}, {bits:#010x}, 0xea;")
    return tl.constexpr("{ .reg .b32 part; " + " ".join(lines) + " }")


_BRAIN_PARTS = _parts(((0, 0xF), (4, 0xF), (8, 0xF), (12, 0xF)), 0x43004300)
"""bfloat16: 128 + code."""

_HALF_PARTS = _parts(((0, 0xF), (0, 0xF0), (8, 0xF), (8, 0xF0)), 0)
"""float16: code times 2 ** -24 or 2 ** -20, which is subnormal, and exact in tensor cores."""

_PAIRS = tl.constexpr(
    " ".join(f"prmt.b32 ${part}, $4, 0, {0x4440 + part:#x};" for part in range(PARTS))
)
"""PTX that takes a word of 32 bits apart into its bytes."""


@triton.jit
def fragment(words, CHUNK: tl.constexpr, STRIP: tl.constexpr, LEVELS: tl.constexpr):
    """A strip's numbers of one part [STRIP, CHUNK], in the order of `words_of`: as threads read
    them, tensor cores take them."""
    apart = words.reshape(CHUNK // 16, STRIP // 16, 8, 4, 2, 2, 2)
    if LEVELS:  # Triton gives tensor cores twice as many columns in a row behind a join
        return tl.permute(apart, (1, 5, 2, 0, 3, 4, 6)).reshape(STRIP, CHUNK)
    else:
        return tl.permute(apart, (1, 5, 2, 0, 4, 3, 6)).reshape(STRIP, CHUNK)


@triton.jit
def _looked_up(words, levels, DTYPE: tl.constexpr):
    """What codes stand for, by pairs of them: a byte is looked up in `levels` [256], whose numbers
    are two of DTYPE's."""
    COUNT: tl.constexpr = words.shape[0]
    a, b, c, d = tl.inline_asm_elementwise(
        _PAIRS,
        "=r,=r,=r,=r,r",
        [words],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )
    pairs = tl.join(tl.join(a, b), tl.join(c, d)).reshape(4 * COUNT)
    first, second = tl.split(tl.gather(levels, pairs, 0).reshape(COUNT, 2, 2))
    a, b = tl.split(first)
    c, d = tl.split(second)
    return _both(a, DTYPE), _both(b, DTYPE), _both(c, DTYPE), _both(d, DTYPE)


@triton.jit
def _both(pairs, DTYPE: tl.constexpr):
    """Two numbers for each one: the low bits' and the high bits'."""
    WIDTH: tl.constexpr = DTYPE.primitive_bitwidth
    BITS: tl.constexpr = tl.int16 if WIDTH == 16 else tl.int32
    low = pairs.to(BITS).to(DTYPE, bitcast=True)
    high = (pairs >> WIDTH).to(BITS).to(DTYPE, bitcast=True)
    return tl.join(low, high).reshape(2 * pairs.shape[0])


@triton.jit
def taken_apart(words, levels, LEVELS: tl.constexpr, MIDDLE: tl.constexpr, DTYPE: tl.constexpr):
    """The four numbers of each word: levels, codes less MIDDLE in float32, else as 16 bits have
    them."""
    if LEVELS:
        return _looked_up(words, levels, DTYPE)
    elif tl.float32 == DTYPE:
        return (
            (words & 15).to(DTYPE) - MIDDLE,
            ((words >> 4) & 15).to(DTYPE) - MIDDLE,
            ((words >> 8) & 15).to(DTYPE) - MIDDLE,
            ((words >> 12) & 15).to(DTYPE) - MIDDLE,
        )
    else:
        TAKEN: tl.constexpr = _BRAIN_PARTS if tl.bfloat16 == DTYPE else _HALF_PARTS
        a, b, c, d = tl.inline_asm_elementwise(
            TAKEN,
            "=&r,=&r,=&r,=&r,r",
            [words],
            dtype=(tl.int16, tl.int16, tl.int16, tl.int16),
            is_pure=True,
            pack=2,
        )
        return (
            a.to(DTYPE, bitcast=True),
            b.to(DTYPE, bitcast=True),
            c.to(DTYPE, bitcast=True),
            d.to(DTYPE, bitcast=True),
        )


@triton.jit
def number(bits, index: tl.constexpr, KIND: tl.constexpr):
    """One of the numbers of `numbers_of`, in float32."""
    WIDTH: tl.constexpr = KIND.primitive_bitwidth
    if bits.dtype.primitive_bitwidth == 64:  # registers have 32
        bits = (bits >> (WIDTH * index // 32 * 32)).to(tl.int32)
    AT: tl.constexpr = WIDTH * index % 32
    if WIDTH == 32:
        return bits.to(KIND, bitcast=True)
    elif WIDTH == 8:
        return (bits >> AT).to(tl.int8).to(tl.float32)
    elif tl.bfloat16 == KIND and bits.dtype.primitive_bitwidth == 32:
        return (bits << 16 if AT == 0 else bits & -65536).to(tl.float32, bitcast=True)
    else:
        return (bits >> AT).to(tl.int16).to(KIND, bitcast=True).to(tl.float32)


@triton.jit
def by_strip(at, held, STRIP: tl.constexpr):
    """What is read there for the rows of a tile, in four tensors."""
    return four(tl.load(at, mask=held).reshape(2, 2, STRIP))


@triton.jit
def four(whole):
    """[2, 2, n] in four tensors."""
    whole = tl.permute(whole, (2, 0, 1))
    even, odd = tl.split(whole)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth
