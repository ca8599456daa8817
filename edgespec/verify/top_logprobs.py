"""Alternatives: how likely the model itself held a token, and which others it held likelier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgespec.verify.sampling import Floats, Logits, Tokens

MOST = 20
"""As many as OpenAI's API gives."""


@dataclass(frozen=True, slots=True, eq=False)
class TopLogprobs:
    """Of R tokens, by the model's own distribution: temperature 1, no filter, no noise.

    log_probs: float64 [R], natural log-probability of each token that was taken.
    top: int64 [R, K], the K most likely tokens, best first, ties by id.
    top_log_probs: float64 [R, K], theirs.
    """

    log_probs: Floats
    top: Tokens
    top_log_probs: Floats

    def part(self, rows: slice, count: int = MOST) -> TopLogprobs:
        """Of these rows alone, with the first `count` of the likeliest."""
        some = slice(max(count, 0))
        return TopLogprobs(
            self.log_probs[rows], self.top[rows, some], self.top_log_probs[rows, some]
        )


def top_logprobs(logits: Logits, tokens: Tokens, count: int) -> TopLogprobs:
    """The `count` most likely tokens of each row of logits [R, V], beside those taken [R]."""
    rows = np.asarray(logits, np.float64)
    rows = rows - rows.max(axis=-1, keepdims=True)
    rows = rows - np.log(np.exp(rows).sum(axis=-1, keepdims=True))
    top = _best(rows, min(count, rows.shape[-1]))
    taken = np.take_along_axis(rows, tokens[:, None], axis=-1)[:, 0]
    return TopLogprobs(taken, top, np.take_along_axis(rows, top, axis=-1))


def joined(parts: Sequence[TopLogprobs]) -> TopLogprobs:
    """Those of all rows, one part's after the other's."""
    if len(parts) == 1:
        return parts[0]
    columns = zip(*((one.log_probs, one.top, one.top_log_probs) for one in parts), strict=True)
    return TopLogprobs(*(np.concatenate(column) for column in columns))


def _best(rows: Floats, count: int) -> NDArray[np.int64]:
    if not count:
        return np.empty((len(rows), 0), np.int64)
    # Sorting all of a large vocabulary would take longer than the head: first those that can be in.
    edge = np.partition(rows, -count, axis=-1)[:, -count]
    found = np.empty((len(rows), count), np.int64)
    for number, (row, least) in enumerate(zip(rows, edge, strict=True)):
        near = np.flatnonzero(row >= least)
        found[number] = near[np.argsort(-row[near], kind="stable")[:count]]
    return found
