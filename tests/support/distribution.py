"""The distribution that tokens are drawn from, for tests that compare it with what is drawn."""

from __future__ import annotations

import numpy as np

from edgespec.verify.sampling import Floats, Logits, Sampling, _blocks, _distribution, _shifted


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
            result[part] = _distribution(rows[part], sampling, part.start)
    return result.reshape(array.shape)
