"""The learnt sharpness: found again from data of a known one, and steady within a request."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edgespec.drafting.guess_scores import DEFAULT_DRAFT_TEMPERATURE
from edgespec.drafting.ranking import (
    DRAFT_TEMPERATURES,
    WEIGHTS,
    Feedback,
    LearntSharpness,
    Ranking,
    Sharpness,
)
from edgespec.verify.noise import gumbel_row
from edgespec.verify.sampling import Sampling

WARM = Sampling(temperature=1.0, seed=3)


@pytest.mark.parametrize("truth", [Sharpness(0.3), Sharpness(0.6, 1.3), Sharpness(1.2, 1.1)])
@pytest.mark.parametrize("used", [Sharpness(0.3), Sharpness(0.6, 1.2)])
def test_the_sharpness_that_tokens_were_taken_with_is_found(
    truth: Sharpness, used: Sharpness
) -> None:
    random = np.random.default_rng(5)
    learnt = LearntSharpness(0.8)
    assert learnt.value == Sharpness(DEFAULT_DRAFT_TEMPERATURE)
    for _ in range(3000):
        logits, noise = random.normal(0, 1.5, 8), random.gumbel(size=8)
        chances = np.exp((logits + 0.8 / truth.weight * noise) / truth.draft_temperature)
        right = int(random.choice(8, p=chances / chances.sum()))
        heights = logits + 0.8 / used.weight * noise
        scores = heights / used.draft_temperature - random.normal()  # any constant: other tokens
        learnt.learn(scores, noise, used, right)
    assert learnt.value.draft_temperature == pytest.approx(truth.draft_temperature, rel=0.2)
    assert learnt.value.weight == pytest.approx(truth.weight, abs=0.1)


def test_few_tokens_change_little() -> None:
    learnt = LearntSharpness(1.0)
    for _ in range(3):
        learnt.learn(np.array([-0.1, -3.0]), np.array([2.0, 0.0]), Sharpness(0.6), 1)
    heat, weight = learnt.value
    assert DRAFT_TEMPERATURES.min() < heat < 2 * DEFAULT_DRAFT_TEMPERATURE
    assert weight < WEIGHTS.max()


def test_noise_counts_less_for_a_model_that_knows_more_than_it_says() -> None:
    ranking = Ranking(lambda positions, sampling, product=None: None)
    ranking.open(1, WARM)
    logits = torch.from_numpy(np.random.default_rng(2).normal(0, 2, (1, 50)))
    for _ in range(300):
        found = ranking.children(1, [()], logits, np.array([4]), 5)
        likeliest = found.tokens[np.argmax(logits[0].numpy()[found.tokens])]
        assert likeliest != found.tokens[0], "the noise has put another one first"
        ranking.read(1, [int(likeliest)])
    ranking.open(2, WARM)
    now = ranking.children(2, [()], logits, np.array([4]), 5)
    sampling, heat = ranking.scoring(2)
    assert sampling.temperature == pytest.approx(WARM.temperature / WEIGHTS.max())
    noise = gumbel_row(WARM.seed, 4, 50)
    heights = (logits[0].numpy() + sampling.temperature * noise) / heat
    wanted = heights - np.log(np.exp(heights).sum())
    assert now.tokens.tolist() == np.argsort(-wanted)[:5].tolist()
    assert now.scores == pytest.approx(np.sort(wanted)[::-1][:5])


def test_a_request_keeps_the_sharpness_that_it_began_with() -> None:
    ranking = Ranking(lambda positions, sampling, product=None: None)
    ranking.open(1, WARM)
    logits = torch.from_numpy(np.random.default_rng(2).normal(0, 2, (1, 50)))
    first = ranking.children(1, [()], logits, np.array([4]), 5)
    for step in range(200):  # never the best guess: the scores were too sharp
        found = ranking.children(1, [()], logits, np.array([4]), 5)
        ranking.read(1, [int(found.tokens[1 + step % 4])])
    again = ranking.children(1, [()], logits, np.array([4]), 5)
    assert again.scores.tolist() == first.scores.tolist()
    ranking.open(2, WARM)
    other = ranking.children(2, [()], logits, np.array([4]), 5)
    assert np.ptp(other.scores) < np.ptp(first.scores)
    ranking.open(3, Sampling())
    ranking.open(4, Sampling(temperature=0.5, seed=3))
    assert ranking.scoring(3) == (Sampling(), 1.0)
    assert ranking.scoring(4) == (Sampling(temperature=0.5, seed=3), DEFAULT_DRAFT_TEMPERATURE)


def test_what_was_said_is_judged_along_the_certain_path_and_forgotten_beside_it() -> None:
    judged = Feedback[str]()
    judged.guessed([(), (1,), (2,), (1, 4), (1, 4, 5)], ["root", "one", "two", "four", "five"])
    assert list(judged.committed([1, 4])) == [("root", 1), ("one", 4)]
    assert list(judged.committed([5, 6, 7])) == [("four", 5), ("five", 6)]
    assert list(judged.committed([8])) == []
