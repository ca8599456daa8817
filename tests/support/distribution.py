"""The distribution that tokens are drawn from, and scores of all guesses, to compare with."""

from __future__ import annotations

import numpy as np
import torch

from edgespec.drafting.guess_scores import best_guesses
from edgespec.verify.sampling import (
    Floats,
    Logits,
    Sampling,
    Tokens,
    _blocks,
    _cool,
    _kept,
    _shifted,
)


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
    result = np.full(rows.shape, -np.inf)
    for part in _blocks(rows.shape):
        scores = _shifted(rows[part], part.start)
        if sampling.greedy:
            np.put_along_axis(result[part], scores.argmax(axis=-1)[:, None], 0.0, axis=-1)
            continue
        _cool(scores, sampling)
        at = _kept(scores, sampling) if sampling.filtered else np.nonzero(scores > -np.inf)
        result[part][at] = scores[at]
        result[part] -= np.log(np.exp(result[part]).sum(axis=-1, keepdims=True))
    return result.reshape(array.shape)


def guess_log_scores(
    logits: Logits,
    positions: Tokens,
    sampling: Sampling,
    draft_temperature: float | None = None,
    *,
    token_ids: Tokens | None = None,
) -> Floats:
    """What `best_guesses` says of all tokens, float64 [R, V]; -inf where it leaves one out."""
    scores = np.full(logits.shape, -np.inf)
    rows, columns, found = best_guesses(
        torch.from_numpy(logits), positions, sampling, logits.shape[1], draft_temperature, token_ids
    )
    scores[rows, columns] = found
    return scores
