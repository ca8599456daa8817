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
        # Of each class: guesses, with those that the draft's word counts for, how many were right,
        # how many were expected to be. Those of negative classes stand at the end.
        self._seen = [(PRIOR_WEIGHT, 0.0, 0.0)] * (2 * _LAST + 1)
        self._table: Floats | None = None  # the same as three rows, made when it is asked for

    def learn(self, outcomes: Iterable[tuple[float, bool]]) -> None:
        """Guesses with these own natural-log scores were, or were not, the model's token."""
        for score, was_right in outcomes:
            expected = _share(score)
            place = round(math.log(expected / (1.0 - expected)))
            guesses, right, total = self._seen[place]
            self._seen[place] = guesses + 1.0, right + was_right, total + expected
            self._table = None

    def scores(self, scores: Floats) -> Floats:
        """The natural logs of the calibrated probabilities; never above 0."""
        if self._table is None:
            self._table = np.array(self._seen).T
        expected = np.minimum(np.maximum(np.exp(scores), RAREST), 1.0 - RAREST)
        odds = expected / (1.0 - expected)
        classes = np.rint(np.log(odds)).astype(np.int64)
        odds = _corrected(expected, odds, *self._table.take(classes, axis=1))
        found: Floats = np.log(odds / (1.0 + odds))
        return found

    def odds(self, score: float) -> float:
        """Of the calibrated probability of one guess."""
        expected = _share(score)
        odds = expected / (1.0 - expected)
        return _corrected(expected, odds, *self._seen[round(math.log(odds))])


def _corrected(expected: Some, odds: Some, guesses: Some, right: Some, total: Some) -> Some:
    """The odds of guesses with that share expected of them: times how much better the odds of what
    was found are than those of what is usual."""
    own = PRIOR_WEIGHT * expected
    found, usual = right + own, total + own
    return odds * (found * (guesses - usual)) / (usual * (guesses - found))


def _share(score: float) -> float:
    """The probability that a natural-log score stands for."""
    return min(max(math.exp(score), RAREST), 1.0 - RAREST)
