"""Ranking: the best children of each path, from a model's logits and a learnt temperature."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch

from edgespec.drafting.base import TokenPath
from edgespec.drafting.feedback import Feedback
from edgespec.drafting.guess_scores import DEFAULT_DRAFT_TEMPERATURE, best_guesses
from edgespec.tree.drafted import Children, Floats
from edgespec.tree.ledger import IntArray
from edgespec.verify.rules import Mask
from edgespec.verify.sampling import Sampling

DRAFT_TEMPERATURES: Floats = DEFAULT_DRAFT_TEMPERATURE * 2.0 ** (np.arange(-8, 9) / 4)
"""Candidates: quarters of an octave around the default, which lies in the middle."""
PRIOR_LOSS = 4.0
"""Nats that observations must give for a temperature an octave from the default; quadratic."""
MEMORY = 2000.0
"""About so many of the newest observations count."""

Guessed = tuple[IntArray, Floats]
"""Tokens and log scores of one path's guesses, the best first."""


class DraftTemperature:
    """One model's, for one way of sampling at a temperature above 0.

    Guesses are scored by the log-softmax of (logits + temperature * noise) / draft temperature (see
    drafting.guess_scores). The order inside a row does not depend on it, the weight of
    one row's guesses against another's does. It is chosen by the log-loss of the tokens taken,
    given that they were among the guesses returned: the same for any constant added to a row.
    """

    def __init__(self) -> None:
        octaves = np.log2(DRAFT_TEMPERATURES / DEFAULT_DRAFT_TEMPERATURE)
        self._prior: Floats = PRIOR_LOSS * octaves**2
        self._losses: Floats = np.zeros(len(DRAFT_TEMPERATURES))

    @property
    def value(self) -> float:
        return float(DRAFT_TEMPERATURES[np.argmin(self._prior + self._losses)])

    def learn(self, scores: Floats, used: float, right: int) -> None:
        """Of guesses with these own log scores [W], made with the temperature `used`, the one at
        `right` was the token taken."""
        heights = scores[None, :] * (used / DRAFT_TEMPERATURES)[:, None]
        heights -= heights.max(axis=1, keepdims=True)
        losses = np.log(np.exp(heights).sum(axis=1)) - heights[:, right]
        self._losses += losses - self._losses / MEMORY


@dataclass(slots=True)
class _RankedRequest:
    """One request: how it samples, its draft temperature (None: greedy), and its guesses so far."""

    sampling: Sampling
    draft_temperature: float | None
    feedback: Feedback[Guessed] = field(default_factory=Feedback)


class Note(Protocol):
    """Is told the positions for which guesses are taken, each from a row of logits (see
    drafting.base.Guesser.ranked)."""

    def __call__(self, positions: IntArray, sampling: Sampling, product: int | None = None) -> None:
        """Note it."""


class Unranked(NamedTuple):
    """One request's paths, whose `width` best children are to be found: the hidden rows [R, H] of
    their last tokens, and the `positions` int64 [R] of the tokens to be guessed."""

    request: int
    paths: Sequence[TokenPath]
    hidden: torch.Tensor
    positions: IntArray
    width: int


class Ranking:
    """The guesses that follow from one model's logits.

    A request keeps the draft temperature that it began with: all scores of its tree compare.
    """

    def __init__(
        self, note: Note, allowed: dict[int, Mapping[TokenPath, Mask]] | None = None
    ) -> None:
        """`allowed`: what may be guessed for some requests (see Guesser.allow)."""
        self._note = note
        self._allowed = {} if allowed is None else allowed
        self._learnt: defaultdict[Sampling, DraftTemperature] = defaultdict(DraftTemperature)
        self._requests: dict[int, _RankedRequest] = {}

    def open(self, request: int, sampling: Sampling) -> None:
        draft_temperature = None if sampling.greedy else self._learnt[sampling.without_seed].value
        self._requests[request] = _RankedRequest(sampling, draft_temperature)

    def read(self, request: int, news: Sequence[int]) -> None:
        """These tokens became committed after the context of the guesses made last."""
        state = self._requests[request]
        if state.draft_temperature is None:
            return
        for (tokens, scores), token in state.feedback.committed(news):
            if len(right := np.flatnonzero(tokens == token)):
                learnt = self._learnt[state.sampling.without_seed]
                learnt.learn(scores, state.draft_temperature, int(right[0]))

    def draft_temperature(self, request: int) -> float | None:
        """The one that a request began with; None: it is greedy."""
        return self._requests[request].draft_temperature

    def together(
        self,
        asked: Sequence[Unranked],
        logits: Callable[[torch.Tensor], torch.Tensor],
        token_ids: IntArray | None = None,
    ) -> list[Children]:
        """The best children of each request's paths, by one product for all: `logits` gives
        [R, V] of hidden rows [R, H]; see `children` for the rest."""
        rows = [len(one.positions) for one in asked]
        every = logits(
            torch.cat([one.hidden for one in asked]) if len(asked) > 1 else asked[0].hidden
        )
        found, product = [], sum(rows)
        for one, own in zip(asked, every.split(rows), strict=True):
            request, paths, _, positions, width = one
            found.append(self.children(request, paths, own, positions, width, token_ids, product))
            product = 0
        return found

    def children(
        self,
        request: int,
        paths: Sequence[TokenPath],
        logits: torch.Tensor,
        positions: IntArray,
        width: int,
        token_ids: IntArray | None = None,
        product: int | None = None,
    ) -> Children:
        """The `width` best children of each path.

        `logits` [R, V], float32 or float64: what the model says after each path. `positions` int64
        [R]: of the tokens to be guessed. `token_ids` int64 [V]: the token of each column, for
        models with a vocabulary of their own; left out, column v is token v. `product`: see
        RankedRows.
        """
        state = self._requests[request]
        if request in self._allowed:
            ids = np.arange(logits.shape[1]) if token_ids is None else token_ids
            best = self._best_allowed(request, paths, logits, positions, width, ids)
            return self.ranked(request, paths, positions, *best, product)
        rows, columns, scores = best_guesses(
            logits, positions, state.sampling, width, state.draft_temperature, token_ids
        )
        tokens = columns if token_ids is None else token_ids[columns]
        return self.ranked(request, paths, positions, rows, tokens, scores, product)

    def _best_allowed(
        self,
        request: int,
        paths: Sequence[TokenPath],
        logits: torch.Tensor,
        positions: IntArray,
        width: int,
        token_ids: IntArray,
    ) -> tuple[IntArray, IntArray, Floats]:
        """Row, token and score of the best children of each path that may come after it."""
        state, masks = self._requests[request], self._allowed[request]
        found = [(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))]
        for row, path in enumerate(paths):
            mask = masks[tuple(path)]
            may = np.flatnonzero(token_ids < len(mask))
            may = may[mask[token_ids[may]]]
            if not len(may):
                continue
            some = logits[row : row + 1, torch.from_numpy(may).to(logits.device)]
            where = positions[row : row + 1]
            heat, ids = state.draft_temperature, token_ids[may]
            rows, columns, scores = best_guesses(some, where, state.sampling, width, heat, ids)
            found.append((rows + row, ids[columns], scores))
        rows, tokens, scores = (np.concatenate(part) for part in zip(*found, strict=True))
        return rows, tokens, scores

    def ranked(
        self,
        request: int,
        paths: Sequence[TokenPath],
        positions: IntArray,
        rows: IntArray,
        tokens: IntArray,
        scores: Floats,
        product: int | None = None,
    ) -> Children:
        """These are the best children: of each path at `rows`, in order, the best first."""
        state = self._requests[request]
        self._note(positions, state.sampling, product)
        if state.draft_temperature is not None:
            ends = np.searchsorted(rows, np.arange(1, len(paths)))
            state.feedback.guessed(
                paths, zip(np.split(tokens, ends), np.split(scores, ends), strict=True)
            )
        return Children(rows, tokens, scores)

    def close(self, request: int) -> None:
        """Forget a request; unknown ones are ignored."""
        self._requests.pop(request, None)
        self._allowed.pop(request, None)
