"""Sampling settings, and the one rule that turns logits, seed and position into a token."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edgespec.config import MAX_TEMPERATURE
from edgespec.errors import ConfigError, EdgespecError
from edgespec.tree.ledger import Rows
from edgespec.types.draft_pass import TokenChoice
from edgespec.verify.noise import gumbel_from_keys, gumbel_row, position_keys

Floats = NDArray[np.float64]
Logits = NDArray[np.floating]
Tokens = NDArray[np.int64]

_WIDE = 1 << 12  # from so many tokens on, a position's noise is worth keeping
_FEW = 1 << 12  # tokens that hold all but little of the probability of most rows of a text
_BLOCK = 1 << 17  # elements worked on at once: a few float64 arrays of this size stay in the cache


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
        return replace(self, seed=0) if self.seed else self

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        """Whether any of top_k, top_p and min_p is on."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def way(self) -> TokenChoice:
        """What taking a token costs depends on this alone."""
        if self.greedy:
            return "greedy"
        return "filtered" if self.filtered else "sampled"


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
    """The tokens taken, one for each row that was looked at.

    rows: int64 [R], which rows these were.
    tokens: int64 [R].
    margins: float64 [R], how far the chosen token's score lies above the runner-up's: logits when
        greedy, nats of perturbed log-probability otherwise; +inf where it had no rival. A margin
        near the model's rounding error marks a near-tie: torch on a GPU might flip it in a batch of
        another shape.
    """

    rows: Tokens
    tokens: Tokens
    margins: Floats

    def behind(self, first: int) -> Choice:
        """Without the first ones."""
        return Choice(self.rows[first:], self.tokens[first:], self.margins[first:])


def choose_along(
    logits: Callable[[int], Logits],
    rows: Rows,
    sampling: Sampling,
    tokens: Callable[[int], Tokens | None] = lambda _: None,
) -> Choice:
    """Take the token after row 0, then after the row below it that stands for that token, and so
    on, until no row does: what verification of a draft tree needs, and no more.

    `logits(i)`: any float dtype, [V], of row i; asked for rows on the path alone. `tokens(i)`: see
    `choose`.

    Raises as `choose` does.
    """
    found: list[Choice] = []

    def target(row: int) -> int:
        position = rows.positions[row : row + 1] + 1
        found.append(choose(logits(row)[None], position, sampling, tokens(row)))
        return int(found[-1].tokens[0])

    path = path_of(target, rows)
    taken = np.concatenate([one.tokens for one in found])
    return Choice(path, taken, np.concatenate([one.margins for one in found]))


def path_of(target: Callable[[int], int], rows: Rows) -> Tokens:
    """Numbers, int64 [N], of the rows from the first down to where none stands for the token that
    is taken; `target(i)` is the token taken after row i."""
    pairs = zip(rows.parents.tolist(), rows.tokens.tolist(), strict=True)
    below = {pair: row for row, pair in enumerate(pairs) if row}
    ids, path = rows.ids.tolist(), [0]
    while (row := below.get((ids[path[-1]], target(path[-1])))) is not None:
        path.append(row)
    return np.array(path)


def choose(
    logits: Logits, positions: Tokens, sampling: Sampling, tokens: Tokens | None = None
) -> Choice:
    """Take one token for each row of logits: an exact sample, and a pure function of its arguments.

    `logits`: any float dtype, [R, V] with V >= 1. `positions`: integers [R], the absolute, 0-based
    index of the token being sampled (the first token after a prompt of n tokens has position n).
    Greedy takes the largest logit, the lowest id on a tie. Otherwise the token at a position is
    ``argmax_v(log P(v) + g(seed, position, v))`` with g from
    `edgespec.verify.noise` (the Gumbel-max trick, so the token is distributed exactly as P). P is
    the filtered distribution, in float64; equal logits are ordered by id, the lower one first, so
    that top-k keeps exactly k tokens (Hugging Face keeps all that tie with the last). Each row is
    computed by itself: the other rows of a call never change its token. `tokens`: which ones the
    columns stand for, int64 [top_k] in ascending order, where all others are left out already: as
    top-k comes first, nothing else depends on those.

    Raises BadLogits for NaN, +inf or a row of nothing but -inf; ValueError for a wrong shape or a
    negative position; TypeError for positions that are not integers.
    """
    rows, row_positions = _checked_rows(logits, positions)
    taken = np.empty(len(rows), dtype=np.int64)
    margins = np.empty(len(rows), dtype=np.float64)
    for part in _blocks(rows.shape):
        if sampling.greedy:
            taken[part], margins[part] = _best(_checked(rows[part], part.start))
            continue
        scores = _shifted(rows[part], part.start)
        _cool(scores, sampling)
        # P is not normalised: that moves all scores of a row by the same number.
        if sampling.filtered:
            chosen = _best_of_few(scores, sampling, row_positions[part], tokens)
        else:
            chosen = _best(_add_noise(scores, sampling.seed, row_positions[part]))
        taken[part], margins[part] = chosen
    return Choice(np.arange(len(rows)), taken, margins)


def _add_noise(scores: Floats, seed: int, positions: Tokens) -> Floats:
    """Each score with the noise of its position and token, in place."""
    width = scores.shape[1]
    if width < _WIDE:
        scores += gumbel_from_keys(position_keys(seed, positions)[:, None], np.arange(width))
        return scores
    for row, position in zip(scores, positions.tolist(), strict=True):
        row += gumbel_row(seed, position, width)
    return scores


def _best_of_few(
    scores: Floats, sampling: Sampling, positions: Tokens, tokens: Tokens | None
) -> tuple[Tokens, Floats]:
    """Each row's best token after filters and noise, and its margin."""
    rows, columns = _kept(scores, sampling, tokens is not None)
    noisy = scores[rows, columns]
    columns = columns if tokens is None else tokens[columns]
    noisy += gumbel_from_keys(position_keys(sampling.seed, positions)[rows], columns)
    starts = np.searchsorted(rows, np.arange(len(scores)))
    best = np.maximum.reduceat(noisy, starts)
    at = np.flatnonzero(noisy == best[rows])
    at = at[np.searchsorted(rows[at], np.arange(len(scores)))]  # the lowest column on a tie
    noisy[at] = -np.inf
    return columns[at], best - np.maximum.reduceat(noisy, starts)


def bad_logits(tops: Logits, first: int = 0) -> BadLogits:
    """What to raise for rows of which one has no finite maximum; `tops` [R] are their maxima, and
    the first is row `first`."""
    bad = int(np.flatnonzero(~np.isfinite(tops))[0])
    value = float(tops[bad])
    what = "nothing but -inf" if value == -math.inf else ("NaN" if value != value else "+inf")
    return BadLogits(
        f"row {first + bad} of the logits holds {what}: no token can be taken from it; "
        "the model's weights or activations are damaged, or overflow its number format"
    )


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


def _checked(rows: Logits, first: int) -> Logits:
    """These rows, each of which has a finite maximum; `first` is for the message."""
    top = rows.max(axis=-1)
    if not np.isfinite(top).all():
        raise bad_logits(top, first)
    return rows


def _shifted(rows: Logits, first: int) -> Floats:
    """The rows as new float64 with each row's maximum moved to 0; `first` is for the message."""
    scores = _checked(rows, first).astype(np.float64)
    scores -= scores.max(axis=-1, keepdims=True)
    return scores


def _cool(scores: Floats, sampling: Sampling) -> None:
    """Divide by a temperature above 0, in place."""
    if sampling.temperature != 1:
        with np.errstate(over="ignore"):
            scores /= sampling.temperature  # a tiny temperature may give -inf: probability 0


def _kept(scores: Floats, sampling: Sampling, few: bool = False) -> tuple[Tokens, Tokens]:
    """Row and column of the tokens that the filters leave of rows [R, V] whose largest score is 0;
    `few`: V is top-k.

    In the order by score, then by column, every filter leaves a run from the beginning.
    """
    count, width = scores.shape
    limits, counts = np.full((count, 1), -np.inf), np.full(count, width)
    if 0 < sampling.top_k < width or few:
        head = _largest(scores, sampling.top_k)
        counts[:] = sampling.top_k
        if sampling.top_p < 1:
            weights = np.exp(head)
            counts = _nucleus(np.cumsum(weights, axis=-1), sampling.top_p * weights.sum(axis=-1))
        limits = np.take_along_axis(head, counts[:, None] - 1, axis=-1)
    elif sampling.top_p < 1:
        for row, own in enumerate(scores):
            limits[row], counts[row] = nucleus(own, sampling.top_p)
    if sampling.min_p > 0:  # with some room: the rule itself follows below
        limits = np.maximum(limits, math.log(sampling.min_p) - 1e-9)
    # Flat, as numpy takes 20 times longer to find the few marks of a wide array by row and column.
    rows, columns = np.divmod(np.flatnonzero(scores >= limits), width)
    values = scores[rows, columns]
    kept = np.isfinite(values) & (np.exp(values) >= sampling.min_p)
    # More may tie with the last than there is room for: the lowest columns stay.
    tied = values == limits[rows, 0]
    room = counts - np.bincount(rows[~tied], minlength=count)
    before = np.cumsum(tied) - tied
    first = before[np.searchsorted(rows, np.arange(count))]
    kept &= ~tied | (before - first[rows] < room[rows])
    return rows[kept], columns[kept]


def _largest(values: Floats, count: int) -> Floats:
    """The `count` largest values of each row, in descending order."""
    width = values.shape[1]
    some = np.partition(values, width - count, axis=-1)[:, -count:] if count < width else values
    return np.sort(some, axis=-1)[:, ::-1]


def nucleus(scores: Logits, top_p: float) -> tuple[float, int]:
    """Of one row, [V], the last score of the shortest run of largest ones that holds top_p of the
    probability, and how many these are."""
    weights = np.exp(scores)
    total = weights.sum()
    # Tokens that hold less than this share of it, if they are no more than so many, hold less than
    # half of 1 - top_p together, so that few are left to sort. In most texts few hold any. 0: top_p
    # is 1 but for rounding.
    for tokens in (_FEW, len(scores), 0):
        least = (1 - top_p) / 2 * total / tokens if tokens else 0.0
        head = np.sort(scores[np.flatnonzero(weights >= least)])[::-1]
        reached = np.cumsum(np.exp(head))
        if len(head) and reached[-1] >= top_p * total:
            break
    count = int(_nucleus(reached[None], top_p * total)[0])
    return float(head[count - 1]), count


def _nucleus(reached: Floats, target: Floats | float) -> Tokens:
    """How many scores it takes until their cumulative sums [R, n] reach a target, [R] or one."""
    # A token is in when those before it fall short of the target, so the first always is.
    counts: Tokens = 1 + (reached[:, :-1] < np.reshape(target, (-1, 1))).sum(axis=-1)
    return counts


def _best(scores: Logits) -> tuple[Tokens, Floats]:
    """Column and margin of each row's largest score."""
    columns = scores.argmax(axis=-1)
    margins = np.empty(len(scores))
    for number, (row, column) in enumerate(zip(scores, columns.tolist(), strict=True)):
        rival = max(row[:column].max(initial=-np.inf), row[column + 1 :].max(initial=-np.inf))
        margins[number] = float(row[column]) - float(rival)
    return columns, margins
