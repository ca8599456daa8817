"""A draft that guesses with the base's own noise is right far more often."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.distribution import filtered_log_probs, guess_log_scores
from support.tiers import tiered

from edgespec.drafting.guess_scores import DEFAULT_DRAFT_TEMPERATURE, best_guesses
from edgespec.verify.noise import gumbel
from edgespec.verify.sampling import BadLogits, Sampling, choose

Floats = NDArray[np.float64]

FILTERED = [
    Sampling(1.0, top_k=20, seed=5),
    Sampling(1.0, top_p=0.9, seed=5),
    Sampling(1.0, min_p=0.05, seed=5),
    Sampling(0.8, top_k=50, top_p=0.95, seed=5),
]


def pair(rows: int, width: int, error: float, seed: int = 0) -> tuple[Floats, Floats]:
    """Base and draft logits: Zipf-like, peaked and flat rows, the draft off by Gaussian errors."""
    rng = np.random.default_rng(seed)
    slope = rng.uniform(1.0, 2.5, (rows, 1))
    base = -slope * np.log(np.arange(1, width + 1)) + 0.7 * rng.standard_normal((rows, width))
    draft = base + error * rng.standard_normal((rows, width))
    shuffle = rng.permutation(width)
    return base[:, shuffle], draft[:, shuffle]


def hits(scores: Floats, tokens: NDArray[np.int64], count: int) -> float:
    """How often the token is among the `count` best-scored ones."""
    mine = scores[np.arange(len(tokens)), tokens]
    return float(((scores > mine[:, None]).sum(axis=1) < count).mean())


@pytest.mark.parametrize("temperature", tiered([0.7, 1.0, 1.5], [1.0]))
def test_shared_noise_couples_better_than_other_noise_or_none(temperature: float) -> None:
    base, draft = pair(1000, 500, 0.6)
    where = np.arange(1000) + 30
    tokens = choose(base, where, Sampling(temperature, seed=9)).tokens
    shared = guess_log_scores(draft, where, Sampling(temperature, seed=9))
    other = guess_log_scores(draft, where, Sampling(temperature, seed=10))
    late = guess_log_scores(draft, where + 1, Sampling(temperature, seed=9))
    plain = guess_log_scores(draft, where, Sampling())
    for count, gain in ((1, 0.15), (4, 0.05)):
        right = hits(shared, tokens, count)
        assert right > hits(plain, tokens, count) + gain
        assert right > hits(other, tokens, count) + gain
        assert right > hits(late, tokens, count) + gain
    # Daliri et al.: one guess agrees with probability at least (1 - TV) / (1 + TV).
    p = np.exp(filtered_log_probs(base, Sampling(temperature)))
    q = np.exp(filtered_log_probs(draft, Sampling(temperature)))
    distance = 0.5 * np.abs(p - q).sum(axis=1)
    floor = ((1 - distance) / (1 + distance)).mean()
    assert hits(shared, tokens, 1) > floor - 3 * math.sqrt(0.25 / 1000)


def test_a_perfect_draft_is_right() -> None:
    base, _ = pair(200, 500, 0.0)
    where = np.arange(200)
    for sampling in [Sampling(), Sampling(0.5, seed=1), Sampling(2.0, seed=1), *FILTERED]:
        tokens = choose(base, where, sampling).tokens
        right = hits(guess_log_scores(base, where, sampling), tokens, 1)
        assert right == 1.0 or (sampling.filtered and right > 0.9)


@pytest.mark.parametrize("sampling", tiered(FILTERED, FILTERED[-1:]), ids=str)
def test_leaning_on_the_filters_beats_ignoring_or_obeying_them(sampling: Sampling) -> None:
    base, draft = pair(1500, 800, 0.8)
    where = np.arange(1500)
    tokens = choose(base, where, sampling).tokens
    ours = guess_log_scores(draft, where, sampling)
    unfiltered = Sampling(sampling.temperature, seed=sampling.seed)
    ignored = guess_log_scores(draft, where, unfiltered)
    obeyed = filtered_log_probs(draft, sampling)
    obeyed = obeyed + gumbel(sampling.seed, where[:, None], np.arange(800))
    # Tokens that the draft would have filtered out were taken, and stay possible here.
    excluded = np.isneginf(obeyed[np.arange(1500), tokens]).mean()
    assert excluded > 0.01
    outside = np.isneginf(obeyed[np.arange(1500), tokens])
    assert np.isfinite(ours[np.arange(1500), tokens][outside]).mean() > 0.9
    assert hits(ours, tokens, 1) > hits(ignored, tokens, 1)
    assert hits(ours, tokens, 8) > hits(obeyed, tokens, 8) - excluded / 4
    assert hits(ours, tokens, 2) > hits(ignored, tokens, 2)


def test_scores_are_a_log_softmax_in_noise_order() -> None:
    _, draft = pair(20, 300, 0.5)
    where = np.arange(20) + 4
    for sampling in [Sampling(), Sampling(0.7, seed=3), *FILTERED]:
        for kind, close in ((np.float64, 1e-12), (np.float32, 1e-6)):
            scores = guess_log_scores(draft.astype(kind), where, sampling)
            assert scores.dtype == np.float64
            np.testing.assert_allclose(np.exp(scores).sum(axis=1), 1.0, atol=close)
    plain = guess_log_scores(draft, where, Sampling(top_k=3, top_p=0.1))
    np.testing.assert_allclose(plain, filtered_log_probs(draft, Sampling(1.0)), atol=1e-12)
    warm = Sampling(0.7, seed=3)
    noisy = draft + 0.7 * gumbel(3, where[:, None], np.arange(300))
    for draft_temperature in (None, 0.3, 2.0):
        scores = guess_log_scores(draft, where, warm, draft_temperature)
        want = noisy / (draft_temperature or DEFAULT_DRAFT_TEMPERATURE)
        np.testing.assert_allclose(scores - scores[:, :1], want - want[:, :1], rtol=1e-9, atol=1e-9)
        np.testing.assert_array_equal(scores.argmax(axis=1), choose(draft, where, warm).tokens)


def test_a_smaller_vocabulary_gets_the_noise_of_the_base_ids() -> None:
    _, draft = pair(50, 400, 0.5)
    where = np.arange(50)
    ids = np.sort(np.random.default_rng(1).permutation(400)[:150])
    for sampling in (Sampling(1.0, seed=4), Sampling(1.0, top_k=30, seed=4)):
        part = guess_log_scores(draft[:, ids], where, sampling, token_ids=ids)
        masked = np.full_like(draft, -np.inf)
        masked[:, ids] = draft[:, ids]
        whole = guess_log_scores(masked, where, sampling)
        np.testing.assert_allclose(part, whole[:, ids], rtol=1e-12, atol=1e-12)
        assert np.isneginf(np.delete(whole, ids, axis=1)).all()
        assert hits(part, np.searchsorted(ids, choose(masked, where, sampling).tokens), 1) > 0.95


def test_refusals() -> None:
    logits, where = np.zeros((2, 5)), np.arange(2)
    for draft_temperature in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="draft_temperature"):
            guess_log_scores(logits, where, Sampling(1.0), draft_temperature)
    with pytest.raises(BadLogits, match="NaN"):
        guess_log_scores(logits * np.nan, where, Sampling(1.0))
    extreme = guess_log_scores(np.array([[0.0, 1e300, -1e300]]), np.array([3]), Sampling(2.0), 1e-9)
    np.testing.assert_array_equal(extreme, [[-np.inf, 0.0, -np.inf]])


@given(
    rows=st.lists(
        st.lists(st.sampled_from([0.0, -1.0, -2.5, -np.inf]), min_size=6, max_size=6).filter(
            lambda row: max(row) > -np.inf
        ),
        min_size=1,
        max_size=4,
    ),
    width=st.integers(1, 8),
    copies=st.sampled_from([1, 400]),
)
def test_ties_go_to_the_lower_column(rows: list[list[float]], width: int, copies: int) -> None:
    """Narrow rows and rows so wide that the maxima of blocks are looked at first."""
    wide = [row * copies for row in rows]
    expected = [
        (row, column)
        for row, values in enumerate(wide)
        for column in sorted(range(len(values)), key=lambda i: (-values[i], i))[:width]
        if values[column] > -np.inf
    ]
    tensor = torch.tensor(wide, dtype=torch.float64)
    found = best_guesses(tensor, np.arange(len(rows)), Sampling(), width)
    assert list(zip(*(part.tolist() for part in found[:2]), strict=True)) == expected
