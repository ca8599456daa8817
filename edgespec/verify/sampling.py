"""Sampling settings, and the one rule that turns logits, seed and position into a token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ConfigError, EdgespecError
from edgespec.verify.noise import gumbel_from_keys, position_keys, uniform_from_keys

Floats = NDArray[np.float64]
Logits = NDArray[np.floating]
Tokens = NDArray[np.int64]
Mask = NDArray[np.bool_]

DEFAULT_SHARPNESS = 0.5
_BLOCK = 1 << 18  # elements worked on at once: a few float64 arrays of this size stay in the cache
_SMALL = 256  # up to this vocabulary, computing all noise is faster than avoiding it
_FIRST_NUCLEUS = 512  # top-p first looks among so many tokens, then among 16 times more, then all


class BadLogits(EdgespecError):
    """Logits that no token can be taken from: NaN, +inf, or nothing but -inf in a row."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is taken from the model's distribution.

    temperature: finite, >= 0; 0 means greedy (the most likely token; the filters change nothing).
    top_k: keep the k most likely tokens; 0 means no such limit.
    top_p: in (0, 1]; keep the smallest set of most likely tokens that holds this probability.
    min_p: in [0, 1]; drop tokens less likely than this fraction of the most likely one.
    seed: in [0, 2**64); the same seed gives the same text.

    Filters apply in this order, after the temperature, as in Hugging Face's `generate`. Raises
    ConfigError, naming field, value and range, for anything else, bool and NaN included.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, "a finite number of at least 0", 0.0)
        _check_number(
            "top_p", self.top_p, "a number above 0 and at most 1", 0.0, 1.0, open_low=True
        )
        _check_number("min_p", self.min_p, "a number from 0 to 1", 0.0, 1.0)
        _check_integer("top_k", self.top_k, "an integer of at least 0 (0 means no limit)", None)
        _check_integer("seed", self.seed, "an integer from 0 to 2**64 - 1", 1 << 64)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        """Whether any of top_k, top_p and min_p is on."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def _check_number(
    name: str,
    value: object,
    allowed: str,
    low: float,
    high: float = math.inf,
    *,
    open_low: bool = False,
) -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if good:
        try:
            number = float(value)  # type: ignore[arg-type]
        except OverflowError:
            number = math.inf
        good = math.isfinite(number) and low <= number <= high and not (open_low and number == low)
    if not good:
        raise ConfigError(f"{name} is {value!r}; it must be {allowed}")


def _check_integer(name: str, value: object, allowed: str, end: int | None) -> None:
    good = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if good and end is not None:
        good = isinstance(value, int) and value < end
    if not good:
        raise ConfigError(f"{name} is {value!r}; it must be {allowed}")


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """The tokens taken, one a row.

    tokens: int64 [R].
    margins: float64 [R], how far the chosen token's score lies above the runner-up's: logits when
        greedy, nats of perturbed log-probability otherwise; +inf where it had no rival. A margin
        near the model's rounding error marks a near-tie that another batch shape might flip.
    log_probs: float64 [R], natural log-probability of the token: under the filtered distribution it
        was drawn from, or when greedy under the plain softmax of the logits.
    """

    tokens: Tokens
    margins: Floats
    log_probs: Floats


def filtered_log_probs(logits: Logits, sampling: Sampling) -> Floats:
    """The distribution that `sampling` draws from, as natural log-probabilities.

    `logits`: any float dtype, shape [..., V] with V >= 1. Returns float64 of the same shape: after
    temperature, top-k, top-p and min-p (in the order of Hugging Face's `generate`), with -inf for
    filtered tokens, renormalised. Greedy gives 0 for the token taken and -inf elsewhere. All of it
    is computed in float64. Tokens of equal logit are ordered by id, the lower one first, so that
    top-k keeps exactly k tokens (Hugging Face keeps all that tie with the last). Top-p keeps the
    shortest run of tokens, most likely first, whose probability reaches top_p; never less than one.

    Raises BadLogits for NaN, +inf or a row of nothing but -inf; ValueError for a wrong shape.
    """
    array = np.asarray(logits)
    if array.ndim == 0 or array.shape[-1] == 0:
        raise ValueError(f"logits must have shape [..., V] with V >= 1, not {list(array.shape)}")
    rows = array.reshape(-1, array.shape[-1])
    result = np.empty(rows.shape, dtype=np.float64)
    for part in _blocks(rows.shape):
        if sampling.greedy:
            block = _shifted(rows[part], part.start)
            result[part] = -np.inf
            np.put_along_axis(result[part], block.argmax(axis=-1)[:, None], 0.0, axis=-1)
        else:
            result[part] = _distribution(rows[part], sampling, part.start)[0]
    return result.reshape(array.shape)


def choose(logits: Logits, positions: Tokens, sampling: Sampling) -> Choice:
    """Take one token for each row of logits: an exact sample, and a pure function of its arguments.

    `logits`: any float dtype, [R, V] with V >= 1. `positions`: integers [R], the absolute, 0-based
    index of the token being sampled (the first token after a prompt of n tokens has position n).
    Greedy takes the largest logit, the lowest id on a tie. Otherwise the token at a position is
    ``argmax_v(log P(v) + g(seed, position, v))`` with P from `filtered_log_probs` and g from
    `edgespec.verify.noise` (the Gumbel-max trick, so the token is distributed exactly as P). Each
    row is computed by itself: the other rows of a call never change its token.

    Raises BadLogits for NaN, +inf or a row of nothing but -inf; ValueError for a wrong shape or a
    negative position; TypeError for positions that are not integers.
    """
    rows, row_positions = _checked_rows(logits, positions)
    count = rows.shape[0]
    tokens = np.empty(count, dtype=np.int64)
    margins = np.empty(count, dtype=np.float64)
    log_probs = np.empty(count, dtype=np.float64)
    for part in _blocks(rows.shape):
        if sampling.greedy:
            scores = _shifted(rows[part], part.start)
            chances = -np.log(np.exp(scores).sum(axis=-1))  # the largest score is 0
            tokens[part], margins[part] = _best(scores)
            log_probs[part] = chances
        else:
            log_p, weights = _distribution(rows[part], sampling, part.start)
            keys = position_keys(sampling.seed, row_positions[part])
            rivals = np.isfinite(log_p) if sampling.filtered else _contenders(weights, keys)
            where = np.nonzero(rivals)
            scores = np.full(log_p.shape, -np.inf)
            scores[where] = log_p[where] + gumbel_from_keys(keys[where[0]], where[1])
            tokens[part], margins[part] = _best(scores)
            log_probs[part] = np.take_along_axis(log_p, tokens[part][:, None], axis=-1)[:, 0]
    return Choice(tokens, margins, log_probs)


def guess_log_scores(
    logits: Logits,
    positions: Tokens,
    sampling: Sampling,
    sharpness: float = DEFAULT_SHARPNESS,
    *,
    filters: str = "none",
    candidates: int = 0,
) -> Floats:
    rows, row_positions = _checked_rows(logits, positions)
    if sampling.greedy:
        plain = Sampling(temperature=1.0)
    else:
        plain = Sampling(temperature=sampling.temperature)
    out = np.empty(rows.shape)
    for part in _blocks(rows.shape):
        use = sampling if filters == "hard" and not sampling.greedy else plain
        log_q = _distribution(rows[part], use, part.start)[0]
        if not sampling.greedy:
            if candidates:
                kth = np.partition(log_q, -candidates, axis=-1)[:, -candidates]
                log_q[log_q < kth[:, None]] = -np.inf
            if filters == "soft":
                hard = _distribution(rows[part], sampling, part.start)[0]
                log_q[np.isneginf(hard)] -= SOFT
            keys = position_keys(sampling.seed, row_positions[part])
            log_q = (log_q + gumbel_from_keys(keys[:, None], np.arange(rows.shape[1]))) / sharpness
            log_q -= log_q.max(axis=-1, keepdims=True)
            log_q -= np.log(np.exp(log_q).sum(axis=-1, keepdims=True))
        out[part] = log_q
    return out


SOFT = 3.0


def _checked_rows(logits: Logits, positions: Tokens) -> tuple[Logits, Tokens]:
    """Logits [R, V] and positions [R] of a call, their shapes and signs checked."""
    rows = np.asarray(logits)
    row_positions = np.asarray(positions)
    if rows.ndim != 2 or rows.shape[1] == 0:
        raise ValueError(f"logits must have shape [R, V] with V >= 1, not {list(rows.shape)}")
    if row_positions.shape != rows.shape[:1]:
        raise ValueError(
            f"positions must have shape [{rows.shape[0]}], one a row of logits, "
            f"not {list(row_positions.shape)}"
        )
    if row_positions.dtype.kind not in "iu":
        raise TypeError(f"positions must be integers, not {row_positions.dtype}")
    if row_positions.size and row_positions.min() < 0:
        raise ValueError(f"positions must not be negative, and one is {row_positions.min()}")
    return rows, row_positions.astype(np.int64, copy=False)


def _blocks(shape: tuple[int, ...]) -> list[slice]:
    """Rows to work on together, so that the intermediate arrays stay in the processor's cache."""
    step = max(1, _BLOCK // shape[1])
    return [slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]


def _shifted(rows: Logits, first: int) -> Floats:
    """The rows as new float64 with each row's maximum moved to 0; `first` is for the message."""
    scores = rows.astype(np.float64)
    top = scores.max(axis=-1, keepdims=True)
    bad = np.nonzero(~np.isfinite(top[:, 0]))[0]
    if bad.size:
        value = float(top[bad[0], 0])
        what = "nothing but -inf" if value == -math.inf else ("NaN" if value != value else "+inf")
        raise BadLogits(
            f"row {first + int(bad[0])} of the logits holds {what}: no token can be taken from it; "
            "the model's weights or activations are damaged, or overflow its number format"
        )
    scores -= top
    return scores


def _distribution(rows: Logits, sampling: Sampling, first: int) -> tuple[Floats, Floats]:
    """Filtered log-probabilities of the rows, and weights: the probabilities times a constant."""
    scores = _shifted(rows, first)
    if sampling.temperature != 1:
        with np.errstate(over="ignore", under="ignore"):
            scores /= sampling.temperature  # a tiny temperature may give -inf: probability 0
    if 0 < sampling.top_k < scores.shape[1]:
        scores[~_largest(scores, sampling.top_k)] = -np.inf
    weights = np.exp(scores)
    if sampling.top_p < 1:
        outside = ~_nucleus(weights, sampling)
        scores[outside] = -np.inf
        weights[outside] = 0.0
    if sampling.min_p > 0:
        outside = weights < sampling.min_p  # the most likely token has weight 1
        scores[outside] = -np.inf
        weights[outside] = 0.0
    scores -= np.log(weights.sum(axis=-1, keepdims=True))
    return scores, weights


def _largest(values: Floats, count: int) -> Mask:
    """Marks exactly the `count` largest values of each row; equal ones by column, lowest first."""
    limit = np.partition(values, values.shape[1] - count, axis=-1)[:, -count, None]
    return _fill_ties(values, limit, np.full(values.shape[0], count))


def _nucleus(weights: Floats, sampling: Sampling) -> Mask:
    """Marks the shortest run of largest weights, in each row, that reaches top_p of their sum."""
    width = weights.shape[1]
    target = sampling.top_p * weights.sum(axis=-1)
    size = sampling.top_k if 0 < sampling.top_k < width else _FIRST_NUCLEUS
    while True:
        size = min(size, width)
        head = weights if size == width else np.partition(weights, width - size, axis=-1)[:, -size:]
        head = np.sort(head, axis=-1)[:, ::-1]
        reached = np.cumsum(head, axis=-1)
        if size == width or bool((reached[:, -1] >= target).all()):
            break
        size *= 16
    # A token is in when those before it fall short of the target; rounding never drops the first.
    counts = 1 + (reached[:, :-1] < target[:, None]).sum(axis=-1)
    limit = np.take_along_axis(head, counts[:, None] - 1, axis=-1)
    return _fill_ties(weights, limit, counts)


def _fill_ties(values: Floats, limit: Floats, counts: NDArray[np.int64]) -> Mask:
    """Marks values above `limit` [R, 1], then the first that equal it, `counts` [R] in all."""
    keep = values >= limit
    for row in np.nonzero(keep.sum(axis=-1) != counts)[0]:
        tied = np.nonzero(values[row] == limit[row])[0]
        above = int((values[row] > limit[row]).sum())
        keep[row, tied[int(counts[row]) - above :]] = False
    return keep


def _contenders(weights: Floats, keys: NDArray[np.uint64]) -> Mask:
    """Marks the few tokens of each row that could have the best or second-best perturbed score.

    The largest ``log w - log(-log u)`` is the smallest ``-log(u) / w``, and ``-log(u) >= 1 - u``. So
    ``(1 - u) / w`` bounds every token from below without a logarithm, and only tokens whose bound
    is under the second best of two exact values can matter: usually a handful of 100,000.
    """
    count, width = weights.shape
    if width <= _SMALL:
        return np.ones(weights.shape, dtype=np.bool_)
    uniform = uniform_from_keys(keys[:, None], np.arange(width))
    every = np.arange(count)
    with np.errstate(divide="ignore", over="ignore"):
        bounds = (1.0 - uniform) / weights
        worst = np.zeros(count)
        kept = []
        for _ in range(2):
            column = bounds.argmin(axis=-1)
            exact = -np.log(uniform[every, column]) / weights[every, column]
            kept.append((column, bounds[every, column]))
            bounds[every, column] = np.inf
            worst = np.maximum(worst, exact)
        for column, bound in reversed(kept):
            bounds[every, column] = bound
    return bounds <= (worst * (1.0 + 1e-9))[:, None]


def _best(scores: Floats) -> tuple[Tokens, Floats]:
    """Column and margin of each row's largest score; overwrites that score."""
    every = np.arange(scores.shape[0])
    column = scores.argmax(axis=-1)
    best = scores[every, column]
    scores[every, column] = -np.inf
    return column, best - scores.max(axis=-1)
