"""Noise that every part of the system can recompute: a pure function of seed, position and token.

Sampling from a distribution P with the Gumbel-max trick means taking the token with the largest
``log P + g``, where every ``g`` is an independent standard Gumbel number. Here ``g`` comes from a
counter-based hash instead of a generator with a state, so it does not matter which node asks for
it, in which order or how often: the base's choice is a function of seed,
position and prefix alone, and a draft may rank its guesses with the very same noise (Gumbel
coupling without communication: Daliri, Musco and Suresh, arXiv 2408.07978; lists of candidates:
Rowan et al., arXiv 2506.05632).

The hash, all in arithmetic modulo 2**64, with ``mix`` = splitmix64::

    key  = mix(mix(seed) ^ (position * 0xD1342543DE82EF95))
    h    = mix(key ^ token)
    u    = ((h >> 12) + 0.5) / 2**52          in [2**-53, 1 - 2**-53]
    g    = -log(-log(u))                      in about [-3.6, 36.8]

Two details are deliberate. The seed is mixed before the position meets it: with a bare
``seed ^ position * C`` the pairs (s, p) and (s ^ p*C ^ q*C, q) share one stream, a relation that
anyone can write down; after the mixing a collision is a 2**-64 accident. For one seed no two
positions collide, and for one position no two seeds do (both maps are bijections). And 52 bits are
used instead of 53: ``(2**53 - 1) + 0.5`` rounds to 2**53 in float64, so one hash in 2**53 would
give a ``u`` of exactly 1, and infinite noise.

The uniforms are the same on every machine; ``g`` may differ in its last bit where the C libraries'
logarithms do.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

KEPT_ROWS = 16
"""Positions whose noise is kept: a tree of guesses is hardly deeper, and at 150,000 tokens one
takes 1.2 MB."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_POSITION_STEP = 0xD1342543DE82EF95
_CHUNK = 1 << 14  # tokens worked on at once: the arrays between the steps stay in the cache

_ONE = np.float64(1).view(np.uint64)
_IN_CHUNK = np.arange(_CHUNK, dtype=np.uint64)

Keys = NDArray[np.uint64]
Integers = NDArray[np.int64] | NDArray[np.uint64]


def _splitmix64(value: int) -> int:
    """One step of splitmix64 on a Python integer."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def _splitmix64_inplace(values: Keys, shifted: Keys | None = None) -> Keys:
    """One step of splitmix64 on each element of an array of at least one dimension, in place;
    `shifted`: room for as many."""
    shifted = np.empty_like(values) if shifted is None else shifted
    values += np.uint64(_GOLDEN)
    np.right_shift(values, np.uint64(30), out=shifted)
    values ^= shifted
    values *= np.uint64(_MIX_1)
    np.right_shift(values, np.uint64(27), out=shifted)
    values ^= shifted
    values *= np.uint64(_MIX_2)
    np.right_shift(values, np.uint64(31), out=shifted)
    values ^= shifted
    return values


def _as_uint64(values: int | Integers) -> Keys:
    """The values as uint64, a negative int64 wrapping round; always at least one dimension."""
    array = np.atleast_1d(np.asarray(values))
    if array.dtype == np.uint64:
        return array
    if array.dtype.kind not in "iu":
        raise TypeError(f"positions and tokens must be integers, not {array.dtype}")
    return array.astype(np.int64, copy=False).view(np.uint64)


def position_keys(seed: int, positions: int | Integers) -> Keys:
    """The stream key of each position, to be combined with tokens by `uniform_from_keys`.

    `seed` is an integer in [0, 2**64) (higher bits are ignored); `positions` are absolute, 0-based
    indices of the tokens being sampled, any shape. Returns uint64 of the same shape (a lone integer
    gives shape [1]). Raises TypeError if positions are not integers.
    """
    keys = _as_uint64(positions) * np.uint64(_POSITION_STEP)
    keys ^= np.uint64(_splitmix64(seed & _MASK))
    return _splitmix64_inplace(keys)


def uniform_from_keys(keys: Keys, tokens: int | Integers) -> NDArray[np.float64]:
    """Uniform numbers strictly inside (0, 1), float64, one for each key and token, broadcast.

    Adjacent values are 2**-52 apart, starting at 2**-53. Raises TypeError if tokens are not
    integers, ValueError if the two shapes do not broadcast.
    """
    bits = np.bitwise_xor(np.atleast_1d(keys), _as_uint64(tokens))
    return _uniform(bits, np.empty(bits.shape, np.float64))


def gumbel_from_keys(keys: Keys, tokens: int | Integers) -> NDArray[np.float64]:
    """Standard Gumbel noise, float64, one number for each key and token, broadcast."""
    return _gumbel_inplace(uniform_from_keys(keys, tokens))


def _uniform(
    bits: Keys, out: NDArray[np.float64], shifted: Keys | None = None
) -> NDArray[np.float64]:
    """Fill `out` with the uniform numbers of keys that met their tokens, which are overwritten."""
    _splitmix64_inplace(bits, shifted)
    bits >>= np.uint64(12)
    # As the fraction of a float64 from 1 to 2: much faster than to convert them, and as exact.
    bits |= _ONE
    return np.subtract(bits.view(np.float64), 1 - 2.0**-53, out=out)


def _gumbel_inplace(uniform: NDArray[np.float64]) -> NDArray[np.float64]:
    np.log(uniform, out=uniform)
    np.negative(uniform, out=uniform)
    np.log(uniform, out=uniform)
    return np.negative(uniform, out=uniform)


def gumbel(seed: int, position: int | Integers, tokens: int | Integers) -> NDArray[np.float64]:
    """Standard Gumbel noise for `seed` at `position`, one float64 for each of `tokens`.

    `position` may be an array: it is broadcast against `tokens`, so a whole [R, V] table is
    ``gumbel(seed, positions[:, None], np.arange(V))``. A negative int64 stands for itself modulo
    2**64. The result has the broadcast shape, at least one dimension, all finite. Raises TypeError
    if positions or tokens are not integers.
    """
    return gumbel_from_keys(position_keys(seed, position), tokens)


def gumbel_row(seed: int, position: int, width: int) -> NDArray[np.float64]:
    """Standard Gumbel noise for `seed` at `position`, float64 [width], one for each token below
    `width`; read-only.

    All rows at a position share it, the draft's guesses and the base's choice alike, so it is made
    once.
    """
    return _whole_chunks(seed, position, -(-width // _CHUNK))[:width]


@functools.lru_cache(maxsize=KEPT_ROWS)
def _whole_chunks(seed: int, position: int, chunks: int) -> NDArray[np.float64]:
    """In whole chunks, so that a draft whose vocabulary is padded otherwise shares them."""
    (key,) = position_keys(seed, position)
    row = np.empty((chunks, _CHUNK), np.float64)
    bits, shifted = np.empty((2, _CHUNK), np.uint64)
    for number, chunk in enumerate(row):
        # A chunk's first token has none of the bits of a place in a chunk.
        np.bitwise_xor(_IN_CHUNK, key ^ np.uint64(number * _CHUNK), out=bits)
        _gumbel_inplace(_uniform(bits, chunk, shifted))
    row.flags.writeable = False
    return row.reshape(-1)
