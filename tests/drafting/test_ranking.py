"""The learnt temperature: found again from data of a known one, and steady within a request."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edgespec.drafting.feedback import Feedback
from edgespec.drafting.guess_scores import DEFAULT_DRAFT_TEMPERATURE
from edgespec.drafting.ranking import DRAFT_TEMPERATURES, DraftTemperature, Ranking
from edgespec.verify.sampling import Sampling

WARM = Sampling(temperature=1.0, seed=3)


@pytest.mark.parametrize("truth", [0.3, 0.6, 1.2])
@pytest.mark.parametrize("used", [0.3, 0.6])
def test_the_temperature_that_tokens_were_taken_with_is_found(truth: float, used: float) -> None:
    random = np.random.default_rng(5)
    draft_temperature = DraftTemperature()
    assert draft_temperature.value == pytest.approx(DEFAULT_DRAFT_TEMPERATURE)
    for _ in range(3000):
        heights = random.normal(0, 1.5, 8)
        chances = np.exp(heights / truth)
        right = int(random.choice(8, p=chances / chances.sum()))
        scores = heights / used - random.normal()  # any constant: the row's other tokens
        draft_temperature.learn(scores, used, right)
    assert draft_temperature.value == pytest.approx(truth, rel=0.2)


def test_few_tokens_change_little() -> None:
    draft_temperature = DraftTemperature()
    for _ in range(3):
        draft_temperature.learn(np.array([-0.1, -3.0]), 0.6, 1)
    assert DRAFT_TEMPERATURES.min() < draft_temperature.value < 2 * DEFAULT_DRAFT_TEMPERATURE


def test_a_request_keeps_the_temperature_that_it_began_with() -> None:
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
    assert other.tokens.tolist() == first.tokens.tolist(), "the order stays"
    assert np.ptp(other.scores) < np.ptp(first.scores)
    ranking.open(3, Sampling())
    ranking.open(4, Sampling(temperature=0.5, seed=3))
    assert ranking._requests[3].draft_temperature is None
    assert ranking._requests[4].draft_temperature == pytest.approx(DEFAULT_DRAFT_TEMPERATURE)


def test_what_was_said_is_judged_along_the_certain_path_and_forgotten_beside_it() -> None:
    judged = Feedback[str]()
    judged.guessed([(), (1,), (2,), (1, 4), (1, 4, 5)], ["root", "one", "two", "four", "five"])
    assert list(judged.committed([1, 4])) == [("root", 1), ("one", 4)]
    assert list(judged.committed([5, 6, 7])) == [("four", 5), ("five", 6)]
    assert list(judged.committed([8])) == []
