"""Llama 3's rotary frequencies: the settings behind the divisors that a GGUF file holds."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_ACCURACY = 1e-4
"""Of a factor, relative: those in files were rounded to float32 from float32 frequencies."""
_MOST_PAIRS = 1000
"""Of factors that are tried; the heads of models have some hundred."""


class Llama3(NamedTuple):
    """The settings as config.json has them (transformers' `llama3` of ROPE_INIT_FUNCTIONS)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def divisor(self, wave: float) -> float:
        """What the frequency of a wave length (in tokens) is divided by."""
        turns = self.original_max_position_embeddings / wave
        if turns > self.high_freq_factor:
            return 1.0
        if turns < self.low_freq_factor:
            return self.factor
        share = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return 1.0 / ((1.0 - share) / self.factor + share)


def llama3_settings(divisors: Sequence[float], theta: float) -> Llama3 | None:
    """Settings that make just these divisors of the frequencies; None if none do."""
    size = 2 * len(divisors)
    waves = [2 * math.pi * theta ** (2 * i / size) for i in range(len(divisors))]
    for found in _candidates(divisors, waves):
        pairs = zip(waves, divisors, strict=True)
        if all(abs(found.divisor(wave) - one) <= _ACCURACY * one for wave, one in pairs):
            return found
    return None


def _candidates(divisors: Sequence[float], waves: Sequence[float]) -> Iterator[Llama3]:
    factor = max(divisors)
    yield Llama3(factor, 1.0, 4.0, 8192)  # those of every Llama 3.1 to 3.3
    if factor <= 1.0 + _ACCURACY:
        return
    between = [
        (1 / wave, (1 / divisor - 1 / factor) / (1 - 1 / factor))
        for wave, divisor in zip(waves, divisors, strict=True)
        if 1.0 + _ACCURACY < divisor < factor * (1.0 - _ACCURACY)
    ]
    # A share is slope / wave - base: only low / high and length / low show in it, so low is 1.
    # Of a pair that is far apart little is lost by rounding.
    pairs = itertools.combinations(between, 2)
    far = heapq.nlargest(_MOST_PAIRS, pairs, key=lambda pair: abs(pair[0][0] - pair[1][0]))
    for (x, share), (y, other) in far:
        slope = (share - other) / (x - y)
        base = slope * x - share
        if base > 0:
            yield Llama3(factor, 1.0, round(1 + 1 / base), round(slope / base))
    for x, share in between:
        yield Llama3(factor, 1.0, 4.0, round((3 * share + 1) / x))
    if not between:  # the waves on both sides of the step say all that there is to know
        short = max((w for w, d in zip(waves, divisors, strict=True) if d < factor / 2), default=0)
        long = min(w for w, d in zip(waves, divisors, strict=True) if d > factor / 2)
        if 0 < short < long:
            step = (long / short) ** (1 / 3)
            yield Llama3(factor, 1.0, step, round(short * step * step))
