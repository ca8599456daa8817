"""Alternatives: the model's own log-probabilities, and the likeliest tokens in order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.verify.top_logprobs import MOST, top_logprobs


def plainly(row: list[float]) -> list[float]:
    """Log-softmax, written down without the code under test."""
    top = max(row)
    total = sum(np.exp(np.float64(x) - top) for x in row)
    return [float(x - top - np.log(total)) for x in row]


@given(
    rows=st.integers(1, 30).flatmap(
        lambda wide: st.lists(
            st.lists(
                st.sampled_from([-3.0, -1.5, 0.0, 0.25, 2.0, 7.0]), min_size=wide, max_size=wide
            ),
            min_size=1,
            max_size=4,
        )
    ),
    count=st.integers(0, MOST),
    data=st.data(),
)
def test_they_are_the_distributions_own(
    rows: list[list[float]], count: int, data: st.DataObject
) -> None:
    """Few different values, so that ties are common: the smaller id comes first."""
    wide = len(rows[0])
    taken = [data.draw(st.integers(0, wide - 1)) for _ in rows]
    found = top_logprobs(np.array(rows), np.array(taken), count)
    assert found.top.shape == found.top_log_probs.shape == (len(rows), min(count, wide))
    for number, row in enumerate(rows):
        right = plainly(row)
        assert found.log_probs[number] == pytest.approx(right[taken[number]], abs=1e-12)
        best = sorted(range(wide), key=lambda i: (-row[i], i))[:count]
        assert found.top[number].tolist() == best
        values = found.top_log_probs[number].tolist()
        assert values == pytest.approx([right[i] for i in best], abs=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_large_logits_and_excluded_tokens_are_no_trouble(dtype: type[np.floating]) -> None:
    logits = np.array([[1e4, -np.inf, 1e4 - 1.0, -1e4]], dtype)
    found = top_logprobs(logits, np.array([1]), 4)
    assert found.log_probs[0] == -np.inf
    assert found.top[0].tolist() == [0, 2, 3, 1]
    assert np.exp(found.top_log_probs[0, :2]).sum() == pytest.approx(1.0)
    assert found.log_probs.dtype == found.top_log_probs.dtype == np.float64


def test_a_large_vocabulary_is_not_sorted_whole() -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(4, 150_000))
    found = top_logprobs(logits, np.zeros(4, np.int64), MOST)
    assert (found.top == np.argsort(-logits, axis=-1)[:, :MOST]).all()
