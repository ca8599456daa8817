"""Guess scores: how likely a draft should think each token to be the one that the base will take.

It works in torch where the draft's logits are, in their number format, and gives out the best
guesses alone: at a vocabulary of 150,000 tokens every pass over all of it counts.
"""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import torch

from edgespec.tree.drafted import Floats
from edgespec.tree.ledger import IntArray
from edgespec.verify.noise import KEPT_ROWS, gumbel_from_keys, gumbel_row, position_keys
from edgespec.verify.sampling import Sampling, bad_logits, nucleus

DEFAULT_DRAFT_TEMPERATURE = 0.6
_BLOCK = 1 << 18  # elements worked on at once on a CPU, so that they stay in its cache
_COLUMNS = 256  # a block of which the maximum is looked at first
_OUTSIDE = 2.0  # a draft's guess outside its own filters loses this often what it lies below them
_REACH = 3.0  # nats below its filters' edge, past which no noise would bring a guess back


def best_guesses(
    logits: torch.Tensor,
    positions: IntArray,
    sampling: Sampling,
    width: int,
    draft_temperature: float | None = None,
    token_ids: IntArray | None = None,
) -> tuple[IntArray, IntArray, Floats]:
    """The `width` columns of each row that are most likely the token which `choose` will take.

    `logits`: the draft's, float32 or float64, [R, V], on any device. `positions`: int64 [R], the
    absolute index of the token being guessed. `token_ids`: int64 [V], the base's token id of each
    column, for drafts with a vocabulary of their own; left out, column v is token v. Returns the
    guesses' rows and columns, int64, rows in order and the best first, and their natural-log
    scores, float64. Scores of a whole row are a log-softmax, so they add up along a path of the
    draft tree. Ties go to the lower column; impossible tokens are left out.

    At temperature 0 the scores are the log-softmax of the logits (EAGLE-2's confidence). Otherwise
    they are the log-softmax of ``(logits + temperature * g) / draft_temperature`` with the same
    noise g as the base will use, so that rank 1 is the draft's own choice under that noise. Tokens
    outside the draft's own top-k, top-p or min-p set lose twice more what they lie below its edge,
    and are left out from three nats below it on. Whatever is guessed, the base's choice stays
    exact.

    `draft_temperature` is about 0.65 times the standard error of the draft's logits; it changes the
    weight of one row's guesses against another's, never the order inside a row. Left out, it is
    DEFAULT_DRAFT_TEMPERATURE, and 1 at temperature 0; a given one applies at any temperature.

    Raises BadLogits for rows that nothing can be taken from, and ValueError for a draft_temperature
    that is not above 0 and finite.
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
    #   on flat rows at temperature 1. So all get theirs, but for those that the filters leave no
    #   hope.
    if draft_temperature is None:
        draft_temperature = 1.0 if sampling.greedy else DEFAULT_DRAFT_TEMPERATURE
    elif not 0 < draft_temperature < math.inf:
        raise ValueError(f"draft_temperature must be above 0 and finite, not {draft_temperature!r}")
    look = _inside if sampling.filtered and not sampling.greedy else _among_all
    found = []
    step = len(logits) if logits.is_cuda else max(1, _BLOCK // logits.shape[1])
    for first in range(0, len(logits), step):
        block, where = logits[first : first + step], positions[first : first + step]
        rows, columns, scores = look(block, where, sampling, width, draft_temperature, token_ids)
        found.append((rows + first, columns, scores))
    rows, columns, scores = (np.concatenate(part) for part in zip(*found, strict=True))
    rows, columns, scores = _first_of_rows(rows, columns, scores, width)
    # A log score is never above 0, up to rounding: a child must not outrank its parent.
    return rows, columns, np.minimum(scores, 0.0)


def _first_of_rows(
    rows: IntArray, columns: IntArray, scores: Floats, width: int
) -> tuple[IntArray, IntArray, Floats]:
    """The `width` best scores of each row, best first, without those of -inf.

    Rows come in order. Ties go to the lower column: logits of few bits often tie, and a plain top-k
    then takes any of them.
    """
    order = np.lexsort((columns, -scores, rows))
    rows, columns, scores = rows[order], columns[order], scores[order]
    # Rank within its row: how far it lies after the first entry of that row.
    rank = np.arange(len(rows)) - np.searchsorted(rows, rows)
    kept = (rank < width) & np.isfinite(scores)
    return rows[kept], columns[kept], scores[kept]


# --- where all tokens count -------------------------------------------------------------------


def _among_all(
    logits: torch.Tensor,
    positions: IntArray,
    sampling: Sampling,
    width: int,
    draft_temperature: float,
    token_ids: IntArray | None,
) -> tuple[IntArray, IntArray, Floats]:
    """Row, column and log score of each row's `width` best tokens, and of few others."""
    heights = _with_noise(logits, positions, sampling, token_ids)
    limits, top = _least_of_best(heights, width)
    tops = _finite(top)
    rows, columns, found = _at_least(heights, limits)
    if draft_temperature != 1:
        own = heights if heights is not logits else heights.clone()
        heights = own.sub_(top).div_(draft_temperature)
        with np.errstate(over="ignore"):
            found = (found - tops[rows]) / draft_temperature
        tops = np.zeros(len(tops))
    # The largest log-probability says what all come to: one fused pass.
    totals = tops - heights.log_softmax(1).amax(1).double().cpu().numpy()
    return rows, columns, found - totals[rows]


def _with_noise(
    logits: torch.Tensor, positions: IntArray, sampling: Sampling, token_ids: IntArray | None
) -> torch.Tensor:
    """The rows plus temperature times noise; the rows themselves where there is none."""
    if sampling.greedy:
        return logits
    ids = None if token_ids is None else torch.from_numpy(token_ids).to(logits.device)
    last = logits.shape[1] - 1 if token_ids is None else int(token_ids.max())
    noisy = torch.empty_like(logits)
    for row, out, position in zip(logits, noisy, positions.tolist(), strict=True):
        noise = _noise(sampling.seed, position, last + 1, logits.dtype, logits.device)
        own = noise if ids is None else noise[ids]
        torch.add(row, own, alpha=sampling.temperature, out=out)
    return noisy


@functools.lru_cache(maxsize=KEPT_ROWS)
def _noise(
    seed: int, position: int, width: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The noise of a position, [width], where and in the number format in which it is used."""
    return torch.tensor(gumbel_row(seed, position, width), dtype=dtype, device=device)


def _least_of_best(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A bound [R, 1] that the `count` best values of each row reach, and few others; their maximum.

    The bound is the count-th best of the maxima of blocks of columns: one quick pass instead of a
    top-k.
    """
    blocks = values.shape[1] // _COLUMNS
    if blocks < 2 * count:
        best = torch.topk(values, min(count, values.shape[1]), dim=1).values
        return best[:, -1:], best[:, :1]
    whole = blocks * _COLUMNS
    maxima = values[:, :whole].unflatten(1, (blocks, _COLUMNS)).amax(2)
    best = torch.topk(maxima, count, dim=1).values
    top = torch.maximum(best[:, :1], values[:, whole - 1 :].amax(1, keepdim=True))
    return best[:, -1:], top


# --- where filters leave few ------------------------------------------------------------------


def _inside(
    logits: torch.Tensor,
    positions: IntArray,
    sampling: Sampling,
    width: int,
    draft_temperature: float,
    token_ids: IntArray | None,
) -> tuple[IntArray, IntArray, Floats]:
    """Row, column and log score of the best of those tokens that filters and noise may leave."""
    top = logits.amax(1, keepdim=True)
    _finite(top)
    scores = logits - top
    edges = _edges(scores, sampling)
    rows, columns, heights = _at_least(scores, edges - _REACH * sampling.temperature)
    below = heights - edges[:, 0].double().cpu().numpy()[rows]
    heights += _OUTSIDE * np.minimum(below, 0.0)
    keys = position_keys(sampling.seed, positions)[rows]
    ids = columns if token_ids is None else token_ids[columns]
    heights += sampling.temperature * gumbel_from_keys(keys, ids)
    heights /= draft_temperature
    best = np.zeros(len(heights), bool)
    ends = np.searchsorted(rows, np.arange(len(scores) + 1)).tolist()
    for start, end in itertools.pairwise(ends):
        own = heights[start:end]  # of one row
        least = np.partition(own, -width)[-width] if len(own) > width else -math.inf
        best[start:end] = own >= least
        tallest = own.max()
        own -= tallest + math.log(np.exp(own - tallest).sum())
    return rows[best], columns[best], heights[best]


def _edges(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The lowest score [R, 1] that the filters leave of rows [R, V] whose largest score is 0."""
    heat, width = sampling.temperature, scores.shape[1]
    edges = torch.full_like(scores[:, :1], -math.inf)
    pool = scores
    if 0 < sampling.top_k < width:
        pool = _largest(scores, sampling.top_k)
        edges = pool[:, -1:]
    if sampling.top_p < 1:
        edges = torch.maximum(edges, _nucleus_edges(pool / heat, sampling.top_p) * heat)
    if sampling.min_p > 0:
        edges = edges.clamp(min=math.log(sampling.min_p) * heat)
    return edges


def _nucleus_edges(pool: torch.Tensor, top_p: float) -> torch.Tensor:
    """The lowest [R, 1] of the largest scores that together hold top_p of the probability."""
    if not pool.is_cuda:
        edges = [nucleus(row, top_p)[0] for row in pool.numpy()]
        return torch.tensor(edges, dtype=pool.dtype)[:, None]
    head = pool.sort(dim=1, descending=True).values
    reached = head.exp().cumsum(1)
    # A token is in when those before it fall short of the target, so the first always is.
    last = (reached[:, :-1] < top_p * reached[:, -1:]).sum(1, keepdim=True)
    return head.gather(1, last)


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` largest values of each row, in descending order."""
    if values.is_cuda:
        return torch.topk(values, count, dim=1).values
    some = np.partition(values.numpy(), values.shape[1] - count, axis=1)[:, -count:]
    return torch.from_numpy(some).sort(dim=1, descending=True).values


# --- both -------------------------------------------------------------------------------------


def _finite(top: torch.Tensor) -> Floats:
    """The rows' maxima [R, 1] as float64 [R]. Raises BadLogits if one is not finite."""
    known: Floats = top[:, 0].double().cpu().numpy()
    if not np.isfinite(known).all():
        raise bad_logits(known)
    return known


def _at_least(values: torch.Tensor, limits: torch.Tensor) -> tuple[IntArray, IntArray, Floats]:
    """Row and column of the values that reach their row's limit [R, 1], and the values, float64."""
    if values.is_cuda:
        at = torch.nonzero(values >= limits)
        found = values[at[:, 0], at[:, 1]].double().cpu().numpy()
        return at[:, 0].cpu().numpy(), at[:, 1].cpu().numpy(), found
    # numpy is ten times quicker than torch to find few marks among many on a CPU.
    wide = values.numpy()
    rows, columns = np.divmod(np.flatnonzero(wide >= limits.numpy()), wide.shape[1])
    return rows, columns, wide[rows, columns].astype(np.float64)
