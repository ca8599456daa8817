"""How long the coordinator's work on logits takes: choosing tokens, ranking guesses, noise."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from edgespec.daemon.layer_times import settled
from edgespec.daemon.timing import Sample, timed
from edgespec.drafting.guess_scores import best_guesses
from edgespec.planning.profile import Figure, LogitTime, LogitTimes
from edgespec.types.draft_pass import Way
from edgespec.verify.noise import gumbel_row
from edgespec.verify.sampling import Sampling, choose

NARROW, WIDE = 1 << 12, 1 << 17
"""Tokens of the two vocabularies that give what a call and what its logits cost."""
ROWS = 8
"""Rows that are ranked at once."""
WAYS: dict[Way, Sampling] = {
    "greedy": Sampling(),
    "sampled": Sampling(1.0),
    "filtered": Sampling(0.8, top_p=0.95),
}
_GUESSES = 8
_LEVEL = 4  # rows that share a position, as those of a tree's level do

_Key = tuple[str, str, int]


def measure_logits(
    device: torch.device, conditions: str, seconds: float
) -> tuple[LogitTimes, LogitTimes, Figure]:
    """Choosing, ranking and noise, for a profile; `conditions`: the beginning of each origin."""
    works: dict[_Key, Callable[[], object]] = {}
    for way, sampling in WAYS.items():
        for rows, width in ((1, NARROW), (ROWS, WIDE)):
            logits = torch.from_numpy(_logits(rows, width)).to(device)
            works["choosing", way, width] = partial(_choose, logits, sampling)
            works["ranking", way, width] = partial(_rank, logits, sampling)
    fresh = itertools.count()
    works["noise", "", WIDE] = lambda: torch.tensor(
        gumbel_row(1, next(fresh), WIDE), dtype=torch.float32, device=device
    )
    found = timed(works, seconds)
    noise = found["noise", "", WIDE]
    return (
        _times("choosing", 1, found, f"{conditions}: the token after a row of logits"),
        _times("ranking", ROWS, found, f"{conditions}: the {_GUESSES} best guesses of each row"),
        Figure(
            _tidy(noise.median * 1e6 / WIDE),
            f"{conditions}: the noise of a position for {WIDE} tokens ({noise})",
        ),
    )


def _times(kind: str, rows: int, found: dict[_Key, Sample], what: str) -> LogitTimes:
    """The line through one row of NARROW tokens and so many of WIDE, for each way."""
    times = {}
    for way in WAYS:
        short, long = (found[kind, way, width].median for width in (NARROW, WIDE))
        each = max(0.0, long - short) / (rows * WIDE - NARROW)
        times[way] = LogitTime(_tidy(max(0.0, short - each * NARROW)), _tidy(each * 1e6))
    long_one = found[kind, "sampled", WIDE]
    return LogitTimes(
        **times,
        origin=f"{what}, of logits as of a text: from 1 row of {NARROW} tokens and {rows} of "
        f"{WIDE}, noise made before; the latter at temperature 1: {long_one}",
    )


def _choose(logits: torch.Tensor, sampling: Sampling) -> None:
    """As the head does: a row leaves the device, then its token is taken."""
    choose(logits[0].cpu().numpy()[None], np.array([1]), sampling)


def _rank(logits: torch.Tensor, sampling: Sampling) -> None:
    positions = 1 + np.arange(len(logits)) // _LEVEL
    best_guesses(logits, positions, sampling, _GUESSES)
    settled(logits.device)


def _logits(rows: int, width: int) -> np.ndarray:
    """Float32 [rows, width], by falling frequency as words have them, with some noise."""
    random = np.random.default_rng(0)
    heights = -1.5 * np.log(np.arange(1, width + 1)) + random.standard_normal((rows, width))
    return np.ascontiguousarray(heights[:, random.permutation(width)], np.float32)


def _tidy(value: float) -> float:
    return float(f"{value:.4g}")
