"""Filters agree with transformers, and every choice is an exact, reproducible sample."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.distribution import filtered_log_probs
from support.tiers import tiered
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from edgespec.errors import ConfigError
from edgespec.tree.ledger import Rows
from edgespec.verify.noise import gumbel
from edgespec.verify.sampling import BadLogits, Sampling, choose, choose_along

SETTINGS = [
    Sampling(0.7),
    Sampling(1.0),
    Sampling(1.5),
    Sampling(0.05),
    Sampling(1.0, top_k=1),
    Sampling(1.0, top_k=7),
    Sampling(1.0, top_k=10_000),
    Sampling(1.0, top_p=0.9),
    Sampling(1.3, top_p=0.3),
    Sampling(1.0, top_p=1e-9),
    Sampling(1.0, top_p=0.999999),
    Sampling(1.0, min_p=0.05),
    Sampling(1.0, min_p=1.0),
    Sampling(0.8, top_k=50, top_p=0.95),
    Sampling(1.2, top_k=40, top_p=0.9, min_p=0.1),
    Sampling(0.6, top_p=0.95, min_p=0.02),
]
SHAPES = [(2, 1), (3, 2), (4, 50), (3, 2048), (2, 40_000)]

# Quarters, so that no two values come together when the largest is subtracted from them.
finite_rows = st.lists(st.integers(-120, 120).map(lambda n: n / 4), min_size=1, max_size=12)
any_sampling = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-300, 0.1, 0.7, 1.0, 1.5, 2.0]),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([1e-12, 0.2, 0.5, 0.9, 1.0 - 1e-16, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)


def warped(logits: NDArray[Any], sampling: Sampling) -> NDArray[np.float64]:
    """What transformers' generate would sample from, as log-probabilities."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    scores = warpers(torch.zeros((len(logits), 1), dtype=torch.long), torch.from_numpy(logits))
    return np.asarray(torch.log_softmax(scores, dim=-1).numpy(), dtype=np.float64)


# ---- the filtered distribution --------------------------------------------------------------


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_filters_agree_with_transformers(sampling: Sampling) -> None:
    for shape in SHAPES:
        rng = np.random.default_rng(shape[1])
        for scale in (0.5, 4.0):
            logits = rng.standard_normal(shape) * scale
            want, got = warped(logits, sampling), filtered_log_probs(logits, sampling)
            case = f"{shape}, scale {scale}"
            np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want), case)
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-10, err_msg=case)


@given(st.lists(finite_rows, min_size=1, max_size=1), any_sampling)
def test_is_a_distribution_and_obeys_each_filter(rows: list[Any], sampling: Sampling) -> None:
    log_p = filtered_log_probs(np.array(rows), sampling)[0]
    p = np.exp(log_p)
    assert not np.isnan(log_p).any()
    assert p.sum() == pytest.approx(1.0, abs=1e-12)
    kept = p > 0
    if sampling.top_k:
        assert kept.sum() <= sampling.top_k
    # A kept token is never less likely than a dropped one, and loses ties to lower ids only.
    order = np.lexsort((np.arange(p.size), -np.asarray(rows[0], dtype=np.float64)))
    flags = kept[order]
    assert flags[0]
    assert not (flags[1:] & ~flags[:-1]).any()
    if sampling.min_p and not sampling.greedy:
        assert p[kept].min() >= sampling.min_p * p.max() * (1 - 1e-9)


@given(finite_rows, st.sampled_from([0.1, 0.37, 0.5, 0.9, 0.99]))
def test_top_p_keeps_the_smallest_set_that_reaches_it(row: list[float], top_p: float) -> None:
    whole = np.exp(filtered_log_probs(np.array(row), Sampling(1.0)))
    kept = np.isfinite(filtered_log_probs(np.array(row), Sampling(1.0, top_p=top_p)))
    assert whole[kept].sum() >= top_p - 1e-12
    assert whole[kept].sum() - whole[kept].min() < top_p + 1e-12


def test_ties_go_to_the_lower_id() -> None:
    flat = np.zeros((1, 8))
    keeps = {
        Sampling(1.0, top_k=3): 3,
        Sampling(1.0, top_p=0.5): 4,
        Sampling(1.0, top_p=0.51): 5,
        Sampling(1.0, top_k=4, top_p=0.5): 2,
        Sampling(1.0, min_p=1.0): 8,
        Sampling(): 1,
    }
    for sampling, count in keeps.items():
        log_p = filtered_log_probs(flat, sampling)[0]
        np.testing.assert_allclose(log_p[:count], -math.log(count), atol=1e-12)
        assert np.isneginf(log_p[count:]).all()
    mixed = np.array([[1.0, 3.0, 1.0, 3.0, 1.0, 0.0]])
    kept = np.isfinite(filtered_log_probs(mixed, Sampling(1.0, top_k=3)))[0]
    np.testing.assert_array_equal(kept, [True, True, False, True, False, False])
    # Ties across the whole of a large vocabulary, and in only one of two rows.
    rows = np.zeros((2, 20_000))
    rows[1] = np.random.default_rng(0).permutation(20_000)
    kept = np.isfinite(filtered_log_probs(rows, Sampling(1.0, top_k=100)))
    np.testing.assert_array_equal(kept.sum(axis=1), [100, 100])
    assert kept[0, :100].all()
    kept = np.isfinite(filtered_log_probs(rows, Sampling(1.0, top_p=0.25)))
    assert kept[0].sum() == 5000
    assert kept[0, :5000].all()


def test_shapes_dtypes_and_masked_tokens() -> None:
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((2, 3, 40)).astype(np.float16)
    logits[..., 5] = -np.inf
    before = logits.copy()
    sampling = Sampling(0.9, top_k=30, top_p=0.95)
    got = filtered_log_probs(logits, sampling)
    assert got.shape == logits.shape
    assert got.dtype == np.float64
    np.testing.assert_array_equal(logits, before)
    np.testing.assert_array_equal(got[1, 2], filtered_log_probs(logits[1, 2], sampling))
    np.testing.assert_array_equal(got, filtered_log_probs(logits.astype(np.float64), sampling))
    assert np.isneginf(got[..., 5]).all()
    assert filtered_log_probs(np.zeros((0, 4)), sampling).shape == (0, 4)
    # Only one token has any chance: every filter keeps just that one.
    alone = np.full((1, 600), -np.inf)
    alone[0, 77] = -3.0
    for each in SETTINGS:
        assert filtered_log_probs(alone, each)[0, 77] == 0.0
        assert choose(alone, np.array([4]), each).tokens[0] == 77
        assert choose(alone, np.array([4]), each).margins[0] == np.inf


# ---- the choice -----------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_choice_is_its_definition(sampling: Sampling) -> None:
    rng = np.random.default_rng(2)
    for rows, width in ((40, 37), (6, 2048), (3, 40_000)):
        logits = (rng.standard_normal((rows, width)) * 3).astype(np.float32)
        where = rng.integers(0, 5000, rows)
        log_p = filtered_log_probs(logits, sampling)
        scores = log_p + gumbel(sampling.seed, where[:, None], np.arange(width))
        choice = choose(logits, where, sampling)
        np.testing.assert_array_equal(choice.tokens, scores.argmax(axis=1))
        ordered = np.sort(scores, axis=1)
        margins = ordered[:, -1] - ordered[:, -2]
        np.testing.assert_allclose(choice.margins, margins, rtol=1e-9, atol=1e-12)


def test_greedy_choice() -> None:
    logits = np.array(
        [[1.0, 4.0, 4.0, 0.0], [2.0, -1.0, 0.5, 1.5], [-np.inf, -np.inf, 3.0, -np.inf]]
    )
    choice = choose(logits.astype(np.float32), np.array([0, 9, 9]), Sampling(seed=3, top_p=0.5))
    assert choice.tokens.dtype == np.int64
    assert choice.margins.dtype == np.float64
    np.testing.assert_array_equal(choice.tokens, [1, 0, 2])
    np.testing.assert_array_equal(choice.margins, [0.0, 0.5, np.inf])
    single = choose(np.array([[-5.0]]), np.array([1]), Sampling())
    assert (single.tokens[0], single.margins[0]) == (0, np.inf)


@given(st.integers(1, 12), st.integers(0, 2**32), st.booleans())
def test_a_path_is_chosen_for_as_each_row_by_itself(count: int, seed: int, warm: bool) -> None:
    """Of a random tree, and no row off the path is looked at."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((count, 4)) * 2
    parents = np.array([0, *(int(rng.integers(0, row)) for row in range(1, count))])
    depths = np.zeros(count, np.int64)
    for row in range(1, count):
        depths[row] = depths[parents[row]] + 1
    tokens, sampling = rng.integers(0, 4, count), Sampling(float(warm), seed=seed)
    looked_at: list[int] = []

    def row_of(row: int) -> NDArray[Any]:
        looked_at.append(row)
        return logits[row]

    path = choose_along(row_of, Rows(np.arange(count), parents, tokens, depths + 4), sampling)
    every = choose(logits, depths + 5, sampling)
    rows = path.rows.tolist()
    assert looked_at == rows
    np.testing.assert_array_equal(path.tokens, every.tokens[rows])
    np.testing.assert_array_equal(path.margins, every.margins[rows])
    for row, below in itertools.pairwise(rows):
        assert (parents[below], tokens[below]) == (row, every.tokens[row])
    last = rows[-1]
    rest = [row for row in range(1, count) if parents[row] == last]
    assert every.tokens[last] not in tokens[rest]


@pytest.mark.parametrize("sampling", [Sampling(), *SETTINGS], ids=str)
def test_a_row_does_not_depend_on_the_rows_beside_it(sampling: Sampling) -> None:
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((9, 40_000)).astype(np.float32) * 2
    where = np.arange(9) * 3
    together = choose(logits, where, sampling)
    for row in range(9):
        alone = choose(logits[row : row + 1], where[row : row + 1], sampling)
        assert alone.tokens[0] == together.tokens[row]
        assert alone.margins[0] == together.margins[row]


@given(st.lists(st.floats(-8, 8), min_size=2, max_size=20), st.data())
def test_changes_below_half_the_margin_change_no_token(row: list[float], data: Any) -> None:
    temperature = data.draw(st.sampled_from([0.0, 0.5, 1.0, 2.0]))
    sampling = Sampling(temperature, seed=data.draw(st.integers(0, 2**64 - 1)))
    where = np.array([data.draw(st.integers(0, 10**6))])
    choice = choose(np.array([row]), where, sampling)
    reach = 0.49 * float(choice.margins[0]) * (temperature or 1.0)
    shifts = data.draw(st.lists(st.floats(-1, 1), min_size=len(row), max_size=len(row)))
    moved = np.array([row]) + reach * np.array([shifts])
    if reach > 1e-9:
        assert choose(moved, where, sampling).tokens[0] == choice.tokens[0]


# ---- the draws have the right distribution --------------------------------------------------


def p_value(statistic: float, freedom: int) -> float:
    """The chance of a chi-square sum at least this large."""
    half = torch.tensor([freedom / 2.0, statistic / 2.0], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def pooled_fit(tokens: NDArray[np.int64], p: NDArray[np.float64]) -> float:
    """p-value of the draws against p; tokens with fewer than 8 expected draws share one cell."""
    expected = p * tokens.size
    counts = np.bincount(tokens, minlength=p.size).astype(np.float64)
    assert counts[p == 0].sum() == 0
    large = expected >= 8
    rest = expected[~large].sum()
    cells = np.append(expected[large], [rest] if rest > 0 else [])
    seen = np.append(counts[large], [counts[~large].sum()] if rest > 0 else [])
    if cells.size == 1:
        return 1.0
    return p_value(float(((seen - cells) ** 2 / cells).sum()), cells.size - 1)


DRAWS = 20_000
ROWS = {
    "peaked": -2.0 * np.log(np.arange(1, 61)) + np.sin(np.arange(60)),
    "flat": 0.2 * np.sin(np.arange(60)),
    "two": np.concatenate([[3.0, 2.9], np.zeros(40)]),
}
DRAWN = [
    Sampling(0.7, seed=1),
    Sampling(1.0, seed=0),
    Sampling(1.5, seed=2**64 - 1),
    Sampling(1.0, top_k=9, seed=2),
    Sampling(1.0, top_p=0.8, seed=3),
    Sampling(1.0, min_p=0.2, seed=4),
    Sampling(1.2, top_k=25, top_p=0.9, min_p=0.05, seed=5),
]


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("sampling", DRAWN, ids=str)
def test_draws_over_positions_follow_the_distribution(sampling: Sampling, name: str) -> None:
    row = ROWS[name]
    p = np.exp(filtered_log_probs(row, sampling))
    many = np.broadcast_to(row, (DRAWS, row.size))
    tokens = choose(many, np.arange(DRAWS), sampling).tokens
    assert pooled_fit(tokens, p) > 1e-4
    # Neighbouring positions draw independently: two halves of the alphabet, all four pairs.
    upper = tokens >= np.searchsorted(np.cumsum(p), 0.5)
    share = upper.mean()
    if 0.05 < share < 0.95:
        joint = np.bincount(upper[:-1] * 2 + upper[1:], minlength=4)
        expected = np.outer([1 - share, share], [1 - share, share]).ravel() * (DRAWS - 1)
        assert p_value(float(((joint - expected) ** 2 / expected).sum()), 1) > 1e-4


@pytest.mark.parametrize("name", ROWS)
def test_draws_over_seeds_follow_the_distribution(name: str) -> None:
    row = ROWS[name]
    p = np.exp(filtered_log_probs(row, Sampling(1.0)))
    noise = np.concatenate([gumbel(seed, 12, np.arange(row.size))[None] for seed in range(DRAWS)])
    tokens = (np.log(p) + noise).argmax(axis=1)
    assert pooled_fit(tokens, p) > 1e-4
    for seed in range(0, DRAWS, 997):
        chosen = choose(row[None], np.array([12]), Sampling(1.0, seed=seed)).tokens[0]
        assert chosen == tokens[seed]


@pytest.mark.parametrize("size", tiered([2_048, 49_152, 151_936], [2_048]))
def test_draws_from_real_vocabularies_follow_the_distribution(size: int) -> None:
    """As frequent as words are, and the token of each place is the definition's for that seed."""
    row = np.random.default_rng(size).permutation(-1.1 * np.log(np.arange(1, size + 1)))
    for sampling in (Sampling(1.0, seed=11), Sampling(0.8, top_p=0.95, seed=12)):
        log_p = filtered_log_probs(row, sampling)
        rows = np.broadcast_to(row, (32, size))
        places = np.arange(1_024).reshape(-1, 32)
        tokens = np.concatenate([choose(rows, some, sampling).tokens for some in places])
        assert pooled_fit(tokens, np.exp(log_p)) > 1e-4
        for place in (0, 7, 501, 1_023):
            noise = gumbel(sampling.seed, place, np.arange(size))
            assert tokens[place] == (log_p + noise).argmax()


def test_the_fit_catches_a_wrong_sampler() -> None:
    row = ROWS["peaked"]
    p = np.exp(filtered_log_probs(row, Sampling(1.0)))
    tokens = choose(
        np.broadcast_to(row, (DRAWS, row.size)), np.arange(DRAWS), Sampling(0.95)
    ).tokens
    assert pooled_fit(tokens, p) < 1e-4


# ---- refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "values", "allowed"),
    [
        ("temperature", [-0.1, math.nan, math.inf, 2.5, True, "1", None, 10**400], "0 to 2"),
        ("top_k", [-1, 1.0, True, math.nan, None, "5"], "at least 0"),
        ("top_p", [0, 0.0, -0.5, 1.01, math.nan, math.inf, True, "0.9", None], "above 0 and at"),
        ("min_p", [-0.01, 1.5, math.nan, -math.inf, False, None], "from 0 to 1"),
        ("seed", [-1, 2**64, 1.0, True, None, "7"], "0 to 2"),
    ],
)
def test_settings_out_of_range_are_refused(field: str, values: list[Any], allowed: str) -> None:
    for value in values:
        with pytest.raises(ConfigError) as caught:
            Sampling(**{field: value})
        text = str(caught.value)
        assert text.startswith(f"{field} is ")
        assert repr(value)[:40] in text
        assert allowed in text


def test_settings_at_their_limits_are_taken() -> None:
    assert Sampling().greedy
    assert Sampling(0).greedy
    assert not Sampling(5e-324).greedy
    Sampling(temperature=2, top_k=10**30, top_p=1, min_p=1, seed=2**64 - 1)
    Sampling(temperature=1, top_p=5e-324, min_p=0)
    assert Sampling(1, top_p=1) == Sampling(1.0)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(1.0, top_k=2)], ids=str)
@pytest.mark.parametrize(
    ("value", "word"), [(math.nan, "NaN"), (math.inf, r"\+inf"), (-math.inf, "nothing but -inf")]
)
def test_unusable_logits_are_refused(sampling: Sampling, value: float, word: str) -> None:
    logits = np.zeros((300, 2000), dtype=np.float32)
    logits[211, :] = -np.inf
    logits[211, 3] = value
    with pytest.raises(BadLogits, match=f"row 211 .*{word}"):
        choose(logits, np.arange(300), sampling)
    with pytest.raises(BadLogits, match=f"row 211 .*{word}"):
        filtered_log_probs(logits, sampling)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="V >= 1"):
        filtered_log_probs(np.zeros((2, 0)), Sampling())
    with pytest.raises(ValueError, match="V >= 1"):
        filtered_log_probs(np.array(1.0), Sampling())
    with pytest.raises(ValueError, match=r"\[R, V\]"):
        choose(np.zeros(3), np.zeros(3, dtype=np.int64), Sampling())
    with pytest.raises(ValueError, match=r"shape \[2\]"):
        choose(np.zeros((2, 3)), np.zeros(3, dtype=np.int64), Sampling())
    with pytest.raises(ValueError, match="negative"):
        choose(np.zeros((2, 3)), np.array([4, -1]), Sampling(1.0))
    with pytest.raises(TypeError, match="integers"):
        choose(np.zeros((2, 3)), np.array([4.0, 1.0]), Sampling(1.0))
    assert choose(np.zeros((0, 3)), np.zeros(0, dtype=np.int64), Sampling(1.0)).tokens.size == 0
