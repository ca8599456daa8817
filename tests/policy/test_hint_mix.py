"""HintMix: weights that follow what comes true, and whether hints pay."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edgespec.policy.hint_mix import Floats, HintMix

TOKENS = 4


def spoken(rng: np.random.Generator, right: int, sure: float) -> Floats:
    """Natural-log probabilities of TOKENS tokens and of none: one of them has `sure`."""
    shares = rng.dirichlet(np.ones(TOKENS + 1)) * (1 - sure)
    shares[right] += sure
    return np.log(shares)


def taught(hint_knows: bool, draft_knows: bool, rounds: int = 600) -> HintMix:
    rng, mix = np.random.default_rng(3), HintMix()
    for _ in range(rounds):
        at, one, two = rng.integers(TOKENS, size=3).tolist()
        is_told = rng.random() < 0.8  # else those who know are wrong, too
        hinted = spoken(rng, at if hint_knows and is_told else one, 0.75)
        drafted = spoken(rng, at if draft_knows and is_told else two, 0.75)
        mix.learn(hinted, drafted, at)
    return mix


def test_all_that_is_said_adds_up() -> None:
    rng, mix = np.random.default_rng(1), HintMix()
    both = mix.log_probs(spoken(rng, 1, 0.5), spoken(rng, 2, 0.5))
    assert np.exp(both).sum() == pytest.approx(1.0)


@pytest.mark.parametrize(("hint_knows", "draft_knows"), [(True, False), (False, True)])
def test_who_knows_nothing_counts_for_nothing(hint_knows: bool, draft_knows: bool) -> None:
    mix = taught(hint_knows, draft_knows)
    hint, draft, _ = mix.weights.tolist()
    known, unknown = (hint, draft) if hint_knows else (draft, hint)
    assert unknown < 0.15 < 0.6 < known
    assert mix.better > 0.3 if hint_knows else abs(mix.better) < 0.05


def test_tokens_that_nobody_named_speak_for_none() -> None:
    mix, flat = HintMix(), np.log(np.full(TOKENS + 1, 1 / (TOKENS + 1)))
    for _ in range(200):
        mix.learn(flat.copy(), flat.copy(), -1)
    assert mix.log_probs(flat.copy(), flat.copy())[-1] > math.log(0.6)


def test_hints_pay_by_what_they_save_and_what_they_take() -> None:
    mix = HintMix()
    mix.took(0.01)
    assert mix.pays(0.0), "nothing is known yet"
    mix = taught(True, False)
    mix.took(0.01)
    assert mix.pays(0.05)
    assert [mix.pays(0.001) for _ in range(64)].count(True) == 2, "now and then one is asked"
    mix = taught(False, True)
    mix.took(0.01)
    assert [mix.pays(0.05) for _ in range(64)].count(True) == 2, "they know nothing"


def test_how_long_they_take_is_a_mean_of_late_ones() -> None:
    mix = HintMix()
    mix.took(0.5)
    assert mix.seconds == 0.5
    for _ in range(1000):
        mix.took(0.1)
    assert mix.seconds == pytest.approx(0.1, rel=1e-3)
