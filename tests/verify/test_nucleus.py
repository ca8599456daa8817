"""Nucleus: found among few tokens, it is the one that sorting all of them gives."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.verify.sampling import nucleus


def by_sorting(scores: np.ndarray, top_p: float) -> tuple[float, int]:
    head = np.sort(scores)[::-1]
    reached = np.cumsum(np.exp(head))
    count = 1 + int((reached[:-1] < top_p * np.exp(scores).sum()).sum())
    return float(head[count - 1]), count


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_it_is_that_of_all_tokens(dtype: type) -> None:
    random = np.random.default_rng(5)
    for spread in (0.0, 0.01, 1.0, 4.0, 300.0):
        for top_p in (1e-9, 0.3, 0.95, 1 - 1e-6, 1 - 1e-12, 1 - 2**-53):
            for width in (1, 2, 17, 3000, 20_000):
                scores = (spread * random.standard_normal(width)).astype(dtype)
                scores -= scores.max()
                found, count = nucleus(scores, top_p)
                case = spread, top_p, width
                expected, number = by_sorting(scores, top_p)
                if dtype is np.float64 or top_p < 1 - 1e-5:
                    assert (found, count) == (expected, number), case
                else:  # nearer to 1 than sums of float32 are
                    assert found <= expected or found == scores.min(), case


def test_equal_tokens_and_impossible_ones() -> None:
    assert nucleus(np.zeros(8), 0.5) == (0.0, 4)
    assert nucleus(np.array([0.0, -np.inf, -np.inf]), 0.9) == (0.0, 1)
    assert nucleus(np.array([-np.inf, 0.0, -np.inf, 0.0]), 0.9) == (0.0, 2)
