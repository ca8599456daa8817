"""Hint mix: what a stage's hint and the draft's guesses say together, learnt from what came true.

Both give natural-log probabilities of the tokens behind a node. They are weighed log-linearly: the
odds of two tokens are those of each to the power of its weight. The weights follow the gradient of
the log-loss, node by node, so that a hint that knows nothing soon counts for nothing. Whether it
pays to ask for hints is measured too: by how much likelier they make what comes, and how long
they take.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_RATE = 0.1
_START = (0.6, 0.5, 0.0)  # of the hint, of the draft, and what speaks for none of the tokens
_MOST = 3.0
_FADE = 0.01  # weight of a new node in a mean
_ENOUGH = 64
"""Nodes that are looked at before anything is concluded."""
_AGAIN = 32
"""Of so many segments one is asked for hints where they do not pay, to find out if they do."""


class HintMix:
    """The weights of one stage's hints, for one way of sampling.

    `better`: how much more probability the token gets that comes, than of the draft's word alone;
    `seconds`: what a hint takes that stage; both are means of late ones.
    """

    def __init__(self) -> None:
        self.weights = np.array(_START)
        self._squares = np.ones(3)
        self._seen = self._passed_over = 0
        self.better = self.seconds = 0.0

    def log_probs(self, hinted: Floats, drafted: Floats) -> Floats:
        """Of tokens and, last, of none of them: what both say, natural-log probabilities."""
        scores: Floats = self.weights[0] * hinted + self.weights[1] * drafted
        scores[-1] += self.weights[2]
        scores -= scores.max()
        scores -= math.log(np.exp(scores).sum())
        return scores

    def learn(self, hinted: Floats, drafted: Floats, at: int) -> None:
        """It was the token in place `at` (-1: none of them)."""
        scores = self.log_probs(hinted, drafted)
        nothing = np.zeros(len(scores))
        nothing[-1] = 1.0
        features = np.stack((hinted, drafted, nothing))
        slope = features[:, at] - features @ np.exp(scores)
        self._squares += slope * slope
        self.weights += _RATE * slope / np.sqrt(self._squares)
        np.clip(self.weights[:2], 0.0, _MOST, out=self.weights[:2])
        self._seen += 1
        alone = math.exp(drafted[at]) / np.exp(drafted).sum()
        more = math.exp(scores[at]) - alone if at >= 0 else 0.0
        self.better += max(1 / self._seen, _FADE) * (more - self.better)

    def took(self, seconds: float) -> None:
        """A hint took the stage so long."""
        self.seconds += (_FADE if self.seconds else 1.0) * (seconds - self.seconds)

    def pays(self, saved: float) -> bool:
        """Whether to ask for a hint of the next segment. `saved`: seconds that a row comes home
        earlier which a hint is about."""
        if self._seen < _ENOUGH or self.better * saved >= self.seconds:
            return True
        self._passed_over = (self._passed_over + 1) % _AGAIN
        return not self._passed_over
