"""Ranking: the best children of each path, from a model's logits; its sharpness is learnt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from edgespec.drafting.base import TokenPath
from edgespec.drafting.judged import Judged
from edgespec.tree.drafted import Children, Floats
from edgespec.tree.ledger import IntArray
from edgespec.verify.sampling import DEFAULT_SHARPNESS, Logits, Sampling, guess_log_scores

SHARPNESSES: Floats = DEFAULT_SHARPNESS * 2.0 ** (np.arange(-8, 9) / 4)
"""What a sharpness may be: quarters of an octave around the default, which lies in the middle."""
PRIOR_LOSS = 4.0
"""Nats that observations must speak for a sharpness an octave from the default; quadratic."""
MEMORY = 2000.0
"""About so many of the newest observations count."""


class Sharpness:
    """One model's, for one way of sampling at a temperature above 0.

    Guesses are scored by the log-softmax of (logits + temperature * noise) / sharpness (see
    verify.sampling.guess_log_scores). The order inside a row does not depend on it, the weight of
    one row's guesses against another's does. It is chosen by the log-loss of the tokens taken,
    given that they were among the guesses returned: the same for any constant added to a row.
    """

    def __init__(self) -> None:
        octaves = np.log2(SHARPNESSES / DEFAULT_SHARPNESS)
        self._prior: Floats = PRIOR_LOSS * octaves**2
        self._losses: Floats = np.zeros(len(SHARPNESSES))

    @property
    def value(self) -> float:
        """The best so far."""
        return float(SHARPNESSES[np.argmin(self._prior + self._losses)])

    def learn(self, scores: Floats, used: float, right: int) -> None:
        """Of guesses with these own log scores [W], made with the sharpness `used`, the one at
        `right` was the token taken."""
        heights = scores[None, :] * (used / SHARPNESSES)[:, None]
        heights -= heights.max(axis=1, keepdims=True)
        losses = np.log(np.exp(heights).sum(axis=1)) - heights[:, right]
        self._losses += losses - self._losses / MEMORY


@dataclass(slots=True)
class _Request:
    """One request: how it samples, its sharpness (None: greedy), and guesses to be judged."""

    sampling: Sampling
    sharpness: float | None
    judged: Judged[tuple[IntArray, Floats]] = field(default_factory=Judged)


class Ranking:
    """The guesses that follow from one model's logits.

    A request keeps the sharpness that it began with, so that all scores of its tree compare.
    """

    def __init__(self) -> None:
        self._learnt: defaultdict[Sampling, Sharpness] = defaultdict(Sharpness)
        self._requests: dict[int, _Request] = {}

    def open(self, request: int, sampling: Sampling) -> None:
        """Start a request."""
        sharpness = None if sampling.greedy else self._learnt[sampling.without_seed].value
        self._requests[request] = _Request(sampling, sharpness)

    def read(self, request: int, news: Sequence[int]) -> None:
        """These tokens became committed behind the context of the guesses made last."""
        state = self._requests[request]
        if state.sharpness is None:
            return
        for (tokens, scores), token in state.judged.committed(news):
            if len(right := np.flatnonzero(tokens == token)):
                learnt = self._learnt[state.sampling.without_seed]
                learnt.learn(scores, state.sharpness, int(right[0]))

    def children(
        self,
        request: int,
        paths: Sequence[TokenPath],
        logits: Logits,
        positions: IntArray,
        width: int,
        token_ids: IntArray | None = None,
    ) -> Children:
        """The `width` best children of each path.

        `logits` [R, V], any float dtype: what the model says behind each path. `positions` int64
        [R]: of the tokens to be guessed. `token_ids` int64 [V]: the token of each column, for
        models with a vocabulary of their own; left out, column v is token v.
        """
        state = self._requests[request]
        found = guess_log_scores(
            logits, positions, state.sampling, state.sharpness, token_ids=token_ids
        )
        # A log score is never above 0, up to rounding: a child must not outrank its parent.
        found = np.minimum(found, 0.0)
        rows, columns = best_columns(found, width)
        scores = found[rows, columns]
        tokens = columns if token_ids is None else token_ids[columns]
        if state.sharpness is not None:
            ends = np.searchsorted(rows, np.arange(1, len(paths)))
            state.judged.said(
                paths, zip(np.split(tokens, ends), np.split(scores, ends), strict=True)
            )
        return Children(rows, tokens, scores)

    def close(self, request: int) -> None:
        """Forget a request; unknown ones are ignored."""
        self._requests.pop(request, None)


def best_columns(scores: Floats, width: int) -> tuple[IntArray, IntArray]:
    """The `width` best finite columns of each row of `scores` [R, V], best first.

    Returns row and column indices, rows in order. Ties go to the lower column: logits of few bits
    often tie, and a plain top-k then takes any of them.
    """
    width = min(width, scores.shape[1])
    limits = torch.topk(torch.from_numpy(scores), width, dim=1, sorted=False).values.numpy()
    # Flat, as numpy takes 20 times longer to find the few marks of a wide array by row and column.
    marks = np.flatnonzero(scores >= limits.min(axis=1, keepdims=True))
    rows, columns = np.divmod(marks, scores.shape[1])
    values = scores[rows, columns]
    order = np.lexsort((columns, -values, rows))
    rows, columns, values = rows[order], columns[order], values[order]
    # Rank within its row: how far it lies behind the first entry of that row.
    rank = np.arange(len(rows)) - np.searchsorted(rows, rows)
    kept = (rank < width) & np.isfinite(values)
    return rows[kept], columns[kept]
