"""The noise is a fixed, well mixed function of seed, position and token."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgespec.verify.noise import gumbel, gumbel_from_keys, position_keys, uniform_from_keys

Uniform = Callable[[int, NDArray[np.int64], NDArray[np.int64]], NDArray[np.float64]]

MASK = (1 << 64) - 1
STEP = 0xD1342543DE82EF95
seeds = st.integers(0, MASK)
positions = st.integers(0, 2**62)


def mix(value: int) -> int:
    """splitmix64, written from its published form."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def unmix(value: int) -> int:
    """The inverse of `mix`, to reach chosen hash values."""
    value ^= (value >> 31) ^ (value >> 62)
    value = (value * pow(0x94D049BB133111EB, -1, 1 << 64)) & MASK
    value ^= (value >> 27) ^ (value >> 54)
    value = (value * pow(0xBF58476D1CE4E5B9, -1, 1 << 64)) & MASK
    value ^= (value >> 30) ^ (value >> 60)
    return (value - 0x9E3779B97F4A7C15) & MASK


def real(seed: int, where: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    return uniform_from_keys(position_keys(seed, where), tokens)


# ---- what it computes -----------------------------------------------------------------------


def test_splitmix64_is_the_published_one() -> None:
    # The first outputs of the reference generator started at 0.
    assert mix(0) == 0xE220A8397B1DCDAF
    assert mix(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4


@given(seeds, positions, st.integers(0, 2**40))
def test_equals_its_definition(seed: int, position: int, token: int) -> None:
    key = mix(mix(seed) ^ (position * STEP & MASK))
    u = ((mix(key ^ token) >> 12) + 0.5) / 2**52
    assert uniform_from_keys(position_keys(seed, position), token)[0] == u
    assert gumbel(seed, position, token)[0] == pytest.approx(-math.log(-math.log(u)), rel=1e-14)


def test_golden_values() -> None:
    # These must never change: they decide the text that a seed gives.
    got = real(7, np.array([[0], [41]]), np.array([0, 1, 31999]))
    want = [
        [0.609394524568175, 0.9633517225922469, 0.030925792644700745],
        [0.4858215625922143, 0.7849201955553188, 0.14654035767234996],
    ]
    np.testing.assert_array_equal(got, want)


@given(seeds, st.lists(positions, min_size=1, max_size=5), st.integers(1, 40))
def test_a_table_equals_its_cells(seed: int, where: list[int], width: int) -> None:
    table = gumbel(seed, np.array(where)[:, None], np.arange(width))
    assert table.shape == (len(where), width)
    assert table.dtype == np.float64
    for row, position in enumerate(where):
        np.testing.assert_array_equal(table[row], gumbel(seed, position, np.arange(width)))
    tokens = np.arange(width)[::-1]
    np.testing.assert_array_equal(table[0][::-1], gumbel(seed, where[0], tokens))


@pytest.mark.parametrize("wanted", [0, 1, MASK, MASK - 1, 1 << 63, (1 << 12) - 1])
def test_extreme_hash_values_give_finite_noise(wanted: int) -> None:
    key = position_keys(3, 5)
    token = np.array([unmix(wanted) ^ int(key[0])], dtype=np.uint64)
    u = uniform_from_keys(key, token)
    assert u[0] == ((wanted >> 12) + 0.5) / 2**52
    assert 0.0 < u[0] < 1.0
    assert -3.7 < gumbel_from_keys(key, token)[0] < 36.9


def test_53_bits_would_have_reached_one() -> None:
    assert ((MASK >> 11) + 0.5) / 2**53 == 1.0


def test_arguments_are_left_alone_and_types_checked() -> None:
    tokens = np.arange(9, dtype=np.uint64)
    keys = position_keys(1, np.arange(9, dtype=np.uint64))
    before = keys.copy()
    gumbel_from_keys(keys, tokens)
    np.testing.assert_array_equal(keys, before)
    np.testing.assert_array_equal(tokens, np.arange(9))
    np.testing.assert_array_equal(gumbel(1, 2, tokens), gumbel(1, 2, tokens.astype(np.int64)))
    short = gumbel(1, 2, tokens.astype(np.int32))  # type: ignore[arg-type]
    np.testing.assert_array_equal(gumbel(1, 2, tokens), short)
    assert gumbel(1, 2, np.zeros((0,), dtype=np.int64)).shape == (0,)
    with pytest.raises(TypeError, match="integers"):
        gumbel(1, 2, np.zeros(3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="integers"):
        gumbel(1, np.zeros(3), 3)  # type: ignore[arg-type]


# ---- seeds and positions do not meet ----------------------------------------------------------


@given(seeds, positions, positions)
@settings(max_examples=200)
def test_no_written_down_relation_makes_two_pairs_share_a_stream(
    seed: int, first: int, second: int
) -> None:
    """With a bare seed ^ position * STEP these two pairs would have the same noise throughout."""
    other = seed ^ (first * STEP & MASK) ^ (second * STEP & MASK)
    if first != second:
        assert seed ^ (first * STEP & MASK) == other ^ (second * STEP & MASK)
        assert position_keys(seed, first)[0] != position_keys(other, second)[0]
        assert position_keys(seed, first)[0] != position_keys(seed, second)[0]


def test_keys_of_small_seeds_and_positions_are_all_different() -> None:
    keys = np.concatenate([position_keys(seed, np.arange(4096)) for seed in range(64)])
    assert np.unique(keys).size == keys.size


# ---- statistics -------------------------------------------------------------------------------
#
# The battery below lists the defects it finds. It runs on the real hash, on several regions of
# seeds and positions, and on broken hashes, which it has to catch. All of it is deterministic: the
# bounds are wide enough that a good hash fails one of them with a chance well under one in 1000.


def chi_square_z(observed: NDArray[np.int64], expected: float | NDArray[np.float64]) -> float:
    """How many standard deviations a chi-square sum is out, by Wilson and Hilferty."""
    statistic = float(((observed - expected) ** 2 / expected).sum())
    freedom = observed.size - 1
    spread = 2.0 / (9.0 * freedom)
    third = math.pow(statistic / freedom, 1.0 / 3.0)
    return (third - (1.0 - spread)) / math.sqrt(spread)


def correlation_z(left: NDArray[np.float64], right: NDArray[np.float64]) -> float:
    """The correlation of two tables, in standard deviations of what independence would give."""
    return float(np.corrcoef(left.ravel(), right.ravel())[0, 1]) * math.sqrt(left.size)


def defects(uniform: Uniform, first_seed: int = 0, first_position: int = 0) -> list[str]:
    """What is visibly wrong with a hash, near one seed and position; each entry names the test."""
    found = []
    width = 128
    tokens = np.arange(width)[None, :]
    where = first_position + np.arange(128)[:, None]

    def table(seed: int = 0, step: int = 0, shift: int = 0) -> NDArray[np.float64]:
        return uniform((first_seed + seed) & MASK, where + step, tokens + shift)

    cube = np.stack([table(seed) for seed in range(8)])
    counts = np.bincount((cube * 64).astype(np.int64).ravel(), minlength=64)
    if abs(chi_square_z(counts, cube.size / 64)) > 5:
        found.append("the uniforms do not fill [0, 1) evenly, or too evenly")
    for axis, name in ((0, "token and position"), (1, "seed and token"), (2, "seed and position")):
        cells = np.moveaxis((cube * 8).astype(np.int64), axis, 0).reshape(cube.shape[axis], -1)
        worst = max(
            abs(chi_square_z(np.bincount(row, minlength=8), row.size / 8))
            for row in (cells if axis != 0 else cells[:, ::3])
        )
        if worst > 5.5:
            found.append(f"a slice over {name} is not uniform")
    if np.unique(cube).size < cube.size:
        found.append("numbers repeat")
    bits = (cube * 2.0**52).astype(np.int64)
    for bit in range(52):
        ones = int(((bits >> bit) & 1).sum())
        if abs(ones - cube.size / 2) > 5 * math.sqrt(cube.size) / 2:
            found.append(f"bit {bit} is biased")
    steps = {"neighbouring seed": (1, 0, 0), "neighbouring position": (0, 1, 0)}
    steps |= {f"token {2**k} further": (0, 0, 2**k) for k in range(0, 18, 3)}
    steps |= {f"position {2**k} further": (0, 2**k, 0) for k in range(2, 20, 3)}
    steps |= {f"seed {2**k} further": (2**k, 0, 0) for k in range(2, 60, 9)}
    steps |= {"seed up, position down": (1, -1, 0), "seed and position up": (1, 1, 0)}
    steps |= {"position up, token down": (0, 1, -1), "position and token up": (0, 1, 1)}
    here = table()
    for name, (seed, position, token) in steps.items():
        if first_position + position < 0:
            position = -position + 1
        there = table(seed, position, token)
        views = {
            "numbers": (here, there),
            "distances from 1/2": ((here - 0.5) ** 2, (there - 0.5) ** 2),
            "noise": (-np.log(-np.log(here)), -np.log(-np.log(there))),
            "low bits": ((here * 2.0**40) % 1.0, (there * 2.0**40) % 1.0),
        }
        for what, (left, right) in views.items():
            if abs(correlation_z(left, right)) > 5:
                found.append(f"{what} are correlated: {name}")
    rows = [uniform((first_seed + seed) & MASK, where, tokens)[:, 0] for seed in range(128)]
    swapped = np.stack(rows)
    lower = np.tril_indices(128, -1)
    if abs(correlation_z(swapped[lower], swapped.T[lower])) > 5:
        found.append("seed and position may be swapped")
    # What sampling uses: which of 16 tokens is largest, alone and with the next position's winner.
    winners = uniform(first_seed, first_position + np.arange(20_001)[:, None], np.arange(16)[None])
    best = winners.argmax(axis=1)
    if abs(chi_square_z(np.bincount(best, minlength=16), best.size / 16)) > 5:
        found.append("some tokens win more often")
    pairs = np.bincount(best[:-1] * 16 + best[1:], minlength=256)
    if abs(chi_square_z(pairs, 20_000 / 256)) > 5:
        found.append("winners of neighbouring positions depend on each other")
    return found


@pytest.mark.parametrize(
    ("seed", "position"),
    [(0, 0), (1, 0), (2**32 - 4, 1000), (2**64 - 200_000, 0), (STEP, 7), (123456789, 2**31 - 64)],
)
def test_real_hash_has_no_defects(seed: int, position: int) -> None:
    assert defects(real, seed, position) == []


def vectorised_mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed


def to_unit(values: NDArray[np.uint64]) -> NDArray[np.float64]:
    unit: NDArray[np.float64] = ((values >> np.uint64(12)).astype(np.float64) + 0.5) / 2.0**52
    return unit


def broken_xor(
    seed: int, where: NDArray[np.int64], tokens: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Everything in one XOR: seed, position and token may be exchanged."""
    mixed = np.uint64(seed & MASK) ^ where.astype(np.uint64) ^ tokens.astype(np.uint64)
    return to_unit(vectorised_mix(mixed))


def broken_linear(
    seed: int, where: NDArray[np.int64], tokens: NDArray[np.int64]
) -> NDArray[np.float64]:
    """No mixing at all: a plain multiplicative hash."""
    value = np.uint64(seed & MASK) * np.uint64(0x9E3779B97F4A7C15)
    value = value + where.astype(np.uint64) * np.uint64(STEP)
    return to_unit(value + tokens.astype(np.uint64) * np.uint64(0xBF58476D1CE4E5B9))


def broken_position(
    seed: int, where: NDArray[np.int64], tokens: NDArray[np.int64]
) -> NDArray[np.float64]:
    """The position never reaches the hash."""
    return real(seed, where * 0, tokens)


def broken_shift(
    seed: int, where: NDArray[np.int64], tokens: NDArray[np.int64]
) -> NDArray[np.float64]:
    """A position's stream is the last one moved by one token."""
    return real(seed, where * 0, tokens + where)


def broken_seed(
    seed: int, where: NDArray[np.int64], tokens: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Seeds 2k and 2k + 1 are the same."""
    return real(seed >> 1, where, tokens)


def broken_bias(
    seed: int, where: NDArray[np.int64], tokens: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Well mixed, and 4 % off uniform."""
    return real(seed, where, tokens) ** 1.04


def broken_blend(
    seed: int, where: NDArray[np.int64], tokens: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Uniform, without repeats, but one number in sixteen is near that of the next position."""
    mine, following = real(seed, where, tokens), real(seed, where + 1, tokens)
    return np.where((tokens % 8 == 3) & (where % 2 == 0), following * (1 - 1e-6), mine)


@pytest.mark.parametrize(
    "broken",
    [
        broken_xor,
        broken_linear,
        broken_position,
        broken_shift,
        broken_seed,
        broken_bias,
        broken_blend,
    ],
)
def test_the_battery_catches_a_broken_hash(broken: Uniform) -> None:
    with np.errstate(over="ignore"):
        assert defects(broken) != []


def test_gumbel_moments() -> None:
    noise = gumbel(11, np.arange(2000)[:, None], np.arange(256))
    spread = math.pi / math.sqrt(6.0)
    assert abs(noise.mean() - np.euler_gamma) < 5 * spread / math.sqrt(noise.size)
    assert abs(noise.std() - spread) < 0.01
