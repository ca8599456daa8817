"""Ranking: the best children of each path, from a model's logits and a learnt temperature."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import starmap
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from edgespec.drafting.base import TokenPath
from edgespec.drafting.guess_scores import DEFAULT_DRAFT_TEMPERATURE, best_guesses
from edgespec.policy.estimates import used
from edgespec.tree.drafted import Children, Floats
from edgespec.tree.ledger import IntArray
from edgespec.verify.noise import gumbel_from_keys, position_keys
from edgespec.verify.rules import Mask
from edgespec.verify.sampling import Sampling

DRAFT_TEMPERATURES: Floats = DEFAULT_DRAFT_TEMPERATURE * 2.0 ** (np.arange(-8, 9) / 4)
"""Candidates: quarters of an octave around the default, which lies in the middle."""
WEIGHTS: Floats = np.arange(10, 16) / 10
"""Candidates of what the model's word counts against the noise."""
PRIOR_LOSS = 4.0
"""Nats that observations must give for a temperature an octave from the default; quadratic."""
PRIOR_LOSS_OF_WEIGHT = 40.0
"""The same for a weight an octave from 1."""
MEMORY = 2000.0
"""About so many of the newest observations count."""


What = TypeVar("What")


class Feedback(Generic[What]):
    """What was guessed for the children of paths after one request's context."""

    def __init__(self) -> None:
        self._guessed: dict[tuple[int, ...], What] = {}

    def guessed(self, paths: Iterable[TokenPath], what: Iterable[What]) -> None:
        """Remember the newest guesses of each path."""
        for path, one in zip(paths, what, strict=True):
            self._guessed[tuple(path)] = one

    def committed(self, news: Sequence[int]) -> Iterator[tuple[What, int]]:
        """These tokens became committed: for each that was asked about, what was guessed and the
        token itself. Guesses of other paths are forgotten."""
        news = tuple(news)
        for at, token in enumerate(news):
            if (guessed := self._guessed.get(news[:at])) is not None:
                yield guessed, token
        cut = len(news)
        self._guessed = {
            path[cut:]: guessed for path, guessed in self._guessed.items() if path[:cut] == news
        }


class Sharpness(NamedTuple):
    """How guesses of one model are scored: see drafting.guess_scores for the draft temperature;
    the noise has the base's temperature divided by `weight`."""

    draft_temperature: float
    weight: float = 1.0


class Guessed(NamedTuple):
    """One path's guesses, the best first: tokens and log scores; `position`: of those tokens."""

    tokens: IntArray
    scores: Floats
    position: int


class LearntSharpness:
    """One model's, for one way of sampling at a temperature above 0.

    Guesses are scored by the log-softmax of (logits + temperature / weight * noise) / draft
    temperature. The weight decides the order inside a row; the draft temperature does not, but
    what one row's guesses count against another's. Both are chosen by the log-loss of the tokens
    taken, given that they were among the guesses returned: the same for any constant added to a
    row.
    """

    def __init__(self, temperature: float) -> None:
        self._heats: Floats = (temperature / WEIGHTS)[:, None]
        octaves = np.log2(DRAFT_TEMPERATURES / DEFAULT_DRAFT_TEMPERATURE)[:, None]
        self._prior: Floats = PRIOR_LOSS * octaves**2 + PRIOR_LOSS_OF_WEIGHT * np.log2(WEIGHTS) ** 2
        self._losses: Floats = np.zeros_like(self._prior)

    @property
    def value(self) -> Sharpness:
        total = self._prior + self._losses
        best, weight = np.unravel_index(np.argmin(total), total.shape)
        return Sharpness(float(DRAFT_TEMPERATURES[best]), float(WEIGHTS[weight]))

    def learn(self, scores: Floats, noise: Floats, used: Sharpness, right: int) -> None:
        """Of guesses with these own log scores [W] and this noise [W], scored with `used`, the one
        at `right` was the token taken."""
        heat = self._heats[used.weight == WEIGHTS]
        logits = scores * used.draft_temperature - heat[0] * noise
        heights = (logits + self._heats * noise) / DRAFT_TEMPERATURES[:, None, None]
        heights -= heights.max(axis=2, keepdims=True)
        losses = np.log(np.exp(heights).sum(axis=2)) - heights[:, :, right]
        self._losses += losses - self._losses / MEMORY


@dataclass(slots=True)
class _RankedRequest:
    """One request: how it samples, how its guesses are scored, and which there are so far."""

    sampling: Sampling
    sharpness: Sharpness
    feedback: Feedback[Guessed] = field(default_factory=Feedback)

    @property
    def scoring(self) -> tuple[Sampling, float]:
        heat, weight = self.sharpness
        return replace(self.sampling, temperature=self.sampling.temperature / weight), heat


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

    A request keeps the sharpness that it began with: all scores of its tree compare.
    """

    def __init__(
        self, note: Note, allowed: dict[int, Mapping[TokenPath, Mask]] | None = None
    ) -> None:
        """`allowed`: what may be guessed for some requests (see Guesser.allow)."""
        self._note = note
        self._allowed = {} if allowed is None else allowed
        self._learnt: dict[Sampling, LearntSharpness] = {}
        self._requests: dict[int, _RankedRequest] = {}

    def open(self, request: int, sampling: Sampling) -> None:
        sharpness = Sharpness(1.0) if sampling.greedy else self._learnt_of(sampling).value
        self._requests[request] = _RankedRequest(sampling, sharpness)

    def read(self, request: int, news: Sequence[int]) -> None:
        """These tokens became committed after the context of the guesses made last."""
        state = self._requests[request]
        for (tokens, scores, position), token in state.feedback.committed(news):
            if len(right := np.flatnonzero(tokens == token)):
                noise = gumbel_from_keys(position_keys(state.sampling.seed, position), tokens)
                learnt = self._learnt_of(state.sampling)
                learnt.learn(scores, noise, state.sharpness, int(right[0]))

    def scoring(self, request: int) -> tuple[Sampling, float]:
        """The sampling and the draft temperature that a request's guesses are scored with."""
        return self._requests[request].scoring

    def _learnt_of(self, sampling: Sampling) -> LearntSharpness:
        way = sampling.without_seed
        return used(self._learnt, way, lambda: LearntSharpness(way.temperature))

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
        sampling, heat = state.scoring
        rows, columns, scores = best_guesses(logits, positions, sampling, width, heat, token_ids)
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
        masks = self._allowed[request]
        sampling, heat = self.scoring(request)
        found = [(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))]
        for row, path in enumerate(paths):
            mask = masks[tuple(path)]
            may = np.flatnonzero(token_ids < len(mask))
            may = may[mask[token_ids[may]]]
            if not len(may):
                continue
            some = logits[row : row + 1, torch.from_numpy(may).to(logits.device)]
            where, ids = positions[row : row + 1], token_ids[may]
            rows, columns, scores = best_guesses(some, where, sampling, width, heat, ids)
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
        if not state.sampling.greedy:
            ends = np.searchsorted(rows, np.arange(1, len(paths)))
            parts = np.split(tokens, ends), np.split(scores, ends), positions.tolist()
            state.feedback.guessed(paths, starmap(Guessed, zip(*parts, strict=True)))
        return Children(rows, tokens, scores)

    def close(self, request: int) -> None:
        """Forget a request; unknown ones are ignored."""
        self._requests.pop(request, None)
