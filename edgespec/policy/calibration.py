"""Calibration: how often guesses of a committed score turned out right, so what scores are worth.

The draft's own word counts too, so that a draft that is new is believed, and less and less the more
is known of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Some = TypeVar("Some", float, Floats)

PRIOR_WEIGHT = 8.0
"""How many observations a draft source's own word counts for in a class of scores."""

RAREST = 1e-4
"""Shares below this, and those as near to 1, are not told apart."""

_LAST = round(math.log((1.0 - RAREST) / RAREST))
"""Classes are numbered from minus this to this."""


class Calibration:
    """How often guesses of a committed score turned out right, given that their parent was.

    Scores fall into classes of one unit of log-odds. In each, the share that was right, against
    what the draft had expected, says how far the log-odds of its guesses are off; the draft's own
    word counts for PRIOR_WEIGHT observations. So guesses of one class still differ as they did.
    """

    def __init__(self) -> None:
        # Of each class: guesses, how many were right, how many were expected to be.
        self._seen = [(0.0, 0.0, 0.0)] * (2 * _LAST + 1)
        self._table: Floats | None = None  # the same, one of each three a row

    def learn(self, outcomes: Iterable[tuple[float, bool]]) -> None:
        """Guesses with these own natural-log scores were, or were not, the model's token."""
        for score, was_right in outcomes:
            expected = _share(score)
            place = _class_of(expected)
            guesses, right, total = self._seen[place]
            self._seen[place] = guesses + 1.0, right + was_right, total + expected
            self._table = None

    def scores(self, scores: Floats) -> Floats:
        """The natural logs of the calibrated probabilities; never above 0."""
        if self._table is None:
            self._table = np.array(self._seen).T
        expected = np.minimum(np.maximum(np.exp(scores), RAREST), 1.0 - RAREST)
        classes = np.rint(np.log(_odds(expected))).astype(np.int64) + _LAST
        odds = _corrected(expected, *self._table.take(classes, axis=1))
        found: Floats = np.log(odds / (1.0 + odds))
        return found

    def odds(self, score: float) -> float:
        """Of the calibrated probability of one guess."""
        expected = _share(score)
        return _corrected(expected, *self._seen[_class_of(expected)])


def _corrected(expected: Some, guesses: Some, right: Some, total: Some) -> Some:
    """The odds of guesses with that share expected of them."""
    weight = guesses + PRIOR_WEIGHT
    own = PRIOR_WEIGHT * expected
    found = (right + own) / weight
    usual = (total + own) / weight
    return _odds(expected) * _odds(found) / _odds(usual)


def _share(score: float) -> float:
    """The probability that a natural-log score stands for."""
    return min(max(math.exp(score), RAREST), 1.0 - RAREST)


def _odds(share: Some) -> Some:
    return share / (1.0 - share)


def _class_of(share: float) -> int:
    return round(math.log(_odds(share))) + _LAST
