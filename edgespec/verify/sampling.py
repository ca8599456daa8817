"""Sampling settings, and the one rule that turns logits, seed and position into a token."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edgespec.config import MAX_TEMPERATURE
from edgespec.errors import ConfigError, EdgespecError
from edgespec.verify.noise import gumbel_from_keys, position_keys

Floats = NDArray[np.float64]
Logits = NDArray[np.floating]
Tokens = NDArray[np.int64]
Mask = NDArray[np.bool_]

DEFAULT_DRAFT_TEMPERATURE = 0.6
_BLOCK = 1 << 18  # elements worked on at once: a few float64 arrays of this size stay in the cache
_FIRST_NUCLEUS = 512  # top-p first looks among so many tokens, then among 16 times more, then all
_OUTSIDE = 2.0  # a draft's guess outside its own filters loses this often what it lies below them
_REACH = 3.0  # nats below its filters' edge, past which no noise would bring a guess back


class BadLogits(EdgespecError):
    """Logits that no token can be taken from: NaN, +inf, or nothing but -inf in a row."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is taken from the model's distribution.

    temperature: from 0 to MAX_TEMPERATURE; 0 means greedy (the most likely token; filters change
    nothing).
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
        top = MAX_TEMPERATURE
        _check("temperature", self.temperature, 0, top, f"a number from 0 to {top:g}")
        _check("top_p", self.top_p, math.ulp(0), 1, "a number above 0 and at most 1")
        _check("min_p", self.min_p, 0, 1, "a number from 0 to 1")
        limit = "an integer of at least 0 (0 means no limit)"
        _check("top_k", self.top_k, 0, math.inf, limit, int)
        _check("seed", self.seed, 0, (1 << 64) - 1, "an integer from 0 to 2**64 - 1", int)

    @property
    def without_seed(self) -> Sampling:
        """The same without its seed: how peaked guesses are depends on this alone."""
        return replace(self, seed=0)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        """Whether any of top_k, top_p and min_p is on."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def _check(
    name: str,
    value: float,
    low: float,
    high: float,
    allowed: str,
    kinds: type | tuple[type, ...] = (int, float),
) -> None:
    good = isinstance(value, kinds) and not isinstance(value, bool) and low <= value <= high
    if not good:  # NaN is in no range
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


def choose(logits: Logits, positions: Tokens, sampling: Sampling) -> Choice:
    """Take one token for each row of logits: an exact sample, and a pure function of its arguments.

    `logits`: any float dtype, [R, V] with V >= 1. `positions`: integers [R], the absolute, 0-based
    index of the token being sampled (the first token after a prompt of n tokens has position n).
    Greedy takes the largest logit, the lowest id on a tie. Otherwise the token at a position is
    ``argmax_v(log P(v) + g(seed, position, v))`` with g from
    `edgespec.verify.noise` (the Gumbel-max trick, so the token is distributed exactly as P). P is
    the filtered distribution, in float64; equal logits are ordered by id, the lower one first, so
    that top-k keeps exactly k tokens (Hugging Face keeps all that tie with the last). Each row is
    computed by itself: the other rows of a call never change its token.

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
            log_p = _distribution(rows[part], sampling, part.start)
            keys = position_keys(sampling.seed, row_positions[part])
            if sampling.filtered:
                kept = np.nonzero(np.isfinite(log_p))
                scores = np.full(log_p.shape, -np.inf)
                scores[kept] = log_p[kept] + gumbel_from_keys(keys[kept[0]], kept[1])
            else:
                scores = log_p + gumbel_from_keys(keys[:, None], np.arange(rows.shape[1]))
            tokens[part], margins[part] = _best(scores)
            log_probs[part] = np.take_along_axis(log_p, tokens[part][:, None], axis=-1)[:, 0]
    return Choice(tokens, margins, log_probs)


def guess_log_scores(
    logits: Logits,
    positions: Tokens,
    sampling: Sampling,
    draft_temperature: float | None = None,
    *,
    token_ids: Tokens | None = None,
) -> Floats:
    """How likely a draft should think each token to be the one that `choose` will take.

    `logits`: the draft's, any float dtype, [R, V]. `positions`: integers [R], the absolute index of
    the token being guessed. `token_ids`: int64 [V], the base's token id of each column, for drafts
    with a vocabulary of their own; left out, column v is token v. Returns natural-log scores,
    float64 [R, V]; each row is a log-softmax, so scores add up along a path of the draft tree.

    At temperature 0 this is the log-softmax of the logits (EAGLE-2's confidence). Otherwise it is
    the log-softmax of ``(logits + temperature * g) / draft_temperature`` with the same noise g as
    the base will use, so that rank 1 is the draft's own choice under that noise. Tokens outside the
    draft's own top-k, top-p or min-p set stay possible, but lose twice more what they lie below its
    edge. Whatever is guessed, the base's choice stays exact.

    `draft_temperature` is about 0.65 times the standard error of the draft's logits; it changes the
    weight of one row's guesses against another's, never the order inside a row. Left out, it is
    DEFAULT_DRAFT_TEMPERATURE, and 1 at temperature 0; a given one applies at any temperature.

    Raises as `choose` does, and ValueError for a draft_temperature that is not above 0 and
    finite or token_ids of a wrong shape.
    """
    # Measured by the log-loss and the rank of the token taken, on synthetic pairs (draft = base +
    # Gaussian errors of 0.4, 0.8 or 1.4 in the logits, and the reverse; V = 2048 and 32,000; total
    # variation 0.1 to 0.5) and on an early demo pair:
    # - in units of logits the best draft temperature hardly depends on temperature (0 to 1.7): 0.3,
    #   0.6 and 0.8 for the three errors; demo pair 0.6 (with filters 0.7 to 0.8).
    # - filters on, tokens taken that were the best guess / in the best 4 / 8: filters ignored
    #   .614/.898/.952, tokens outside ruled out .675/.900/.935, held against them as here
    #   .670/.913/.951; demo pair .366/.740/.870, .437/.763/.836 and .431/.793/.893.
    # - noise for only the likeliest 1024 of 32,000 tokens: .675 in place of .767 for the best guess
    #   on flat rows at temperature 1. So all get theirs (under 1 ms a row of 150,000 tokens), but
    #   for those that the filters leave no hope.
    rows, row_positions = _checked_rows(logits, positions)
    width = rows.shape[1]
    ids = np.arange(width) if token_ids is None else np.asarray(token_ids)
    if ids.shape != (width,):
        raise ValueError(f"token_ids must have shape [{width}], not {list(ids.shape)}")
    if draft_temperature is None:
        draft_temperature = 1.0 if sampling.greedy else DEFAULT_DRAFT_TEMPERATURE
    elif not 0 < draft_temperature < math.inf:
        raise ValueError(f"draft_temperature must be above 0 and finite, not {draft_temperature!r}")
    result = np.empty(rows.shape, dtype=np.float64)
    for part in _blocks(rows.shape):
        scores = _shifted(rows[part], part.start)
        if not sampling.greedy:
            keys = position_keys(sampling.seed, row_positions[part])
            heat = sampling.temperature
            if sampling.filtered:
                inside = np.isfinite(_distribution(rows[part], sampling, part.start))
                edge = np.where(inside, scores, np.inf).min(axis=-1, keepdims=True)
                near = np.nonzero(scores >= edge - _REACH * heat)
                scores += _OUTSIDE * np.minimum(scores - edge, 0.0)
                scores[near] += heat * gumbel_from_keys(keys[near[0]], ids[near[1]])
            else:
                scores += heat * gumbel_from_keys(keys[:, None], ids)
            scores -= scores.max(axis=-1, keepdims=True)
        with np.errstate(over="ignore"):
            scores /= draft_temperature
        scores -= np.log(np.exp(scores).sum(axis=-1, keepdims=True))
        result[part] = scores
    return result


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


def _distribution(rows: Logits, sampling: Sampling, first: int) -> Floats:
    """Filtered log-probabilities of the rows, for a temperature above 0."""
    scores = _shifted(rows, first)
    if sampling.temperature != 1:
        with np.errstate(over="ignore"):
            scores /= sampling.temperature  # a tiny temperature may give -inf: probability 0
    pool = scores  # what top-p sorts
    if 0 < sampling.top_k < scores.shape[1]:
        inside = _largest(scores, sampling.top_k)
        pool = scores[inside].reshape(-1, sampling.top_k)
        scores[~inside] = -np.inf
    if sampling.top_p < 1:
        scores[~_nucleus(scores, sampling.top_p, pool)] = -np.inf
    weights = np.exp(scores)
    if sampling.min_p > 0:
        outside = weights < sampling.min_p  # the most likely token has weight 1
        scores[outside] = -np.inf
        weights[outside] = 0.0
    scores -= np.log(weights.sum(axis=-1, keepdims=True))
    return scores


def _largest(values: Floats, count: int) -> Mask:
    """Marks exactly the `count` largest values of each row; equal ones by column, lowest first."""
    limit = np.partition(values, values.shape[1] - count, axis=-1)[:, -count, None]
    return _fill_ties(values, limit, np.full(values.shape[0], count))


def _nucleus(scores: Floats, top_p: float, pool: Floats) -> Mask:
    """Marks the shortest run of largest scores, in each row, that holds top_p of the probability.

    `pool` holds each row's scores above -inf, and maybe some that are not.
    """
    width = pool.shape[1]
    target = top_p * np.exp(pool).sum(axis=-1)
    size = min(_FIRST_NUCLEUS, width)
    while True:
        head = pool if size == width else np.partition(pool, width - size, axis=-1)[:, -size:]
        head = np.sort(head, axis=-1)[:, ::-1]
        reached = np.cumsum(np.exp(head), axis=-1)
        if size == width or bool((reached[:, -1] >= target).all()):
            break
        size = min(size * 16, width)
    # A token is in when those before it fall short of the target, so the first always is.
    counts = 1 + (reached[:, :-1] < target[:, None]).sum(axis=-1)
    limit = np.take_along_axis(head, counts[:, None] - 1, axis=-1)
    return _fill_ties(scores, limit, counts)


def _fill_ties(values: Floats, limit: Floats, counts: NDArray[np.int64]) -> Mask:
    """Marks values above `limit` [R, 1], then the first that equal it, `counts` [R] in all."""
    keep = values >= limit
    for row in np.nonzero(keep.sum(axis=-1) != counts)[0]:
        tied = np.nonzero(values[row] == limit[row])[0]
        above = int((values[row] > limit[row]).sum())
        keep[row, tied[int(counts[row]) - above :]] = False
    return keep


def _best(scores: Floats) -> tuple[Tokens, Floats]:
    """Column and margin of each row's largest score; overwrites that score."""
    every = np.arange(scores.shape[0])
    column = scores.argmax(axis=-1)
    best = scores[every, column]
    scores[every, column] = -np.inf
    return column, best - scores.max(axis=-1)
