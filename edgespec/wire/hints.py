"""Messages of hints: what a stage expects behind rows that are on their way, and what it reads them
with."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated

import numpy as np
from msgspec import Meta

from edgespec.types.record import IntArray, Seconds, Whole, take_arrays
from edgespec.types.tensor import Layers, Tensor
from edgespec.wire.messages import Message, require

MOST_HINTED = 64
"""Tokens that a stage may name behind one row."""

MOST_LENSES = 128
"""Of one base."""


class Lenses(Message, tag=10, frozen=True):
    """To every stage when a ring is up: how a stage whose block ends at one of `layers` reads its
    rows (see drafting.lens), `downs` [L, K, H] one by one, `up` [V, K] and `bias` [V], float16."""

    layers: Annotated[Layers, Meta(max_length=MOST_LENSES)]
    downs: Tensor
    up: Tensor
    bias: Tensor

    def check(self) -> None:
        layers, shapes = (0, *self.layers), (self.downs.shape, self.up.shape, self.bias.shape)
        require(all(a < b for a, b in pairwise(layers)), "layers are not ascending")
        require([len(shape) for shape in shapes] == [3, 2, 1], "matrices of another form")
        (count, rank, _), (tokens, columns), (entries,) = shapes
        fits = count == len(self.layers) and rank == columns and tokens == entries
        require(fits and min(self.downs.shape) > 0 and tokens > 0, "matrices that do not fit")
        kinds = {self.downs.dtype, self.up.dtype, self.bias.dtype}
        require(kinds == {"float16"}, "matrices of another dtype")


class Hint(Message, tag=29, frozen=True):
    """What stage number `stage` expects behind rows of a request: behind row `ids[i]` the tokens
    `tokens[i * M]` to `tokens[i * M + M - 1]`, the likeliest first, with natural-log probabilities
    `log_probs[i]`, float32 [R, M]. It took that stage `seconds`. It may be wrong: it only changes
    what is guessed and sent."""

    request: Whole
    stage: Whole
    seconds: Seconds
    ids: IntArray
    tokens: IntArray
    log_probs: Tensor

    def __post_init__(self) -> None:
        take_arrays(self, "ids", "tokens")

    def check(self) -> None:
        rows, scores = len(self.ids), self.log_probs
        fits = scores.dtype == "float32" and len(scores.shape) == 2 and scores.shape[0] == rows
        require(rows > 0 and fits, "log_probs are not some numbers a row")
        require(0 < scores.shape[1] <= MOST_HINTED, "too many tokens a row, or none")
        require(len(self.tokens) == rows * scores.shape[1], "tokens and log_probs differ")
        require(min(int(self.ids.min()), int(self.tokens.min())) >= 0, "a negative id or token")
        values = np.frombuffer(scores.data, "<f4")
        fits = bool(np.isfinite(values).all()) and float(values.max()) <= 0.0
        require(fits, "no log-probability")
