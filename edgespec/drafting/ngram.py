"""N-gram guesses: what followed the last tokens where they stood before (prompt look-up)."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from edgespec.drafting.base import Guesser, TokenPath
from edgespec.drafting.steps import at_once
from edgespec.policy.estimates import used
from edgespec.tree.drafted import Children
from edgespec.types.features import Features
from edgespec.verify.noise import gumbel
from edgespec.verify.sampling import Sampling

PRIORS = {6: 0.75, 4: 0.65, 3: 0.55, 2: 0.45, 1: 0.3}
"""Lengths of a match that are looked for, the longest first, each with how often its best guess is
taken to be right before anything is known (prompt look-up decoding tries 3, 2 and 1)."""
PRIOR_WEIGHT = 4.0
"""How many observations a prior counts for."""
RANKS = 4
"""A path's guesses are counted apart up to this rank; those after are one class."""
_PLACES = 32  # of a match the newest so many are looked at
_CANDIDATES = 8  # shorter matches are looked up until there are so many
_MEAN_NOISE = 0.5772156649015329  # of the Gumbel distribution


class _Successes:
    """How often guesses were right, by the length of their match and their rank."""

    def __init__(self) -> None:
        self._seen: Counter[tuple[int, int]] = Counter()
        self._right: Counter[tuple[int, int]] = Counter()

    def learn(self, length: int, rank: int, was_right: bool) -> None:
        key = length, min(rank, RANKS)
        self._seen[key] += 1
        self._right[key] += was_right

    def share(self, length: int, rank: int) -> float:
        """The estimated probability, above 0 and below 1."""
        key = length, min(rank, RANKS)
        prior = PRIORS[length] / (3 * min(rank, RANKS) + 1)
        return (self._right[key] + PRIOR_WEIGHT * prior) / (self._seen[key] + PRIOR_WEIGHT)


@dataclass(slots=True)
class _IndexedText:
    """The committed tokens of one request, and where each n-gram of them was followed by what."""

    sampling: Sampling
    tokens: list[int] = field(default_factory=list)
    places: defaultdict[tuple[int, ...], list[int]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def add(self, token: int) -> None:
        """One more committed token, which follows those that end the text so far."""
        for length in PRIORS:
            if length <= len(self.tokens):
                self.places[tuple(self.tokens[-length:])].append(len(self.tokens))
        self.tokens.append(token)

    def candidates(self, path: TokenPath) -> list[tuple[int, int]]:
        """What followed the last tokens of `path` before: tokens with the length of their match.

        The longest match first, then what came most often, then what came last.
        """
        longest = max(PRIORS)
        missing = max(longest - len(path), 0)
        tail = (*(self.tokens[-missing:] if missing else ()), *path)[-longest:]
        found: dict[int, int] = {}
        for length in PRIORS:
            places = self.places.get(tail[-length:]) if length <= len(tail) else None
            if places:
                newest = Counter(self.tokens[at] for at in reversed(places[-_PLACES:]))
                for token, _ in newest.most_common():
                    found.setdefault(token, length)
            if len(found) >= _CANDIDATES:
                break
        return list(found.items())


class NgramGuesser(Guesser):
    """A Guesser (see drafting.base) without a model: prompt and answer are all it looks at.

    Several matches give several guesses. A guess is scored by how often guesses of its kind were
    right in answers so far, for each way of sampling; at temperatures above 0 the candidates' order
    takes the request's shared noise into account, with what no candidate says as one more.
    """

    def __init__(self) -> None:
        super().__init__("ngram")
        self._requests: dict[int, _IndexedText] = {}
        self._successes: dict[Sampling, _Successes] = {}

    @property
    def one_pass(self) -> bool:
        return True  # it has none at all

    def open(self, request: int, sampling: Sampling) -> None:
        self._requests[request] = _IndexedText(sampling)

    @at_once
    def reading(self, request: int, context: Sequence[int], features: Features) -> bool:
        """Take new committed tokens; those after the first context tell which were right."""
        state = self._requests[request]
        answering = bool(state.tokens)
        successes = self._successes_of(state.sampling)
        for token in context[len(state.tokens) :]:
            if answering:
                for rank, (guess, length) in enumerate(state.candidates(())):
                    successes.learn(length, rank, guess == token)
            state.add(token)
        return True

    @at_once
    def guessing(self, request: int, paths: Sequence[TokenPath], width: int) -> Children:
        state = self._requests[request]
        successes = self._successes_of(state.sampling)
        parents: list[int] = []
        tokens: list[int] = []
        scores: list[float] = []
        positions = len(state.tokens) + np.array([len(path) for path in paths], np.int64)
        self.ranked(positions, state.sampling)
        for index, path in enumerate(paths):
            candidates = state.candidates(path)
            shares = [successes.share(n, rank) for rank, (_, n) in enumerate(candidates)]
            guesses = [token for token, _ in candidates]
            if not state.sampling.greedy:
                shares = _with_noise(guesses, shares, state.sampling.seed, int(positions[index]))
            best = sorted(range(len(guesses)), key=lambda at: -shares[at])[:width]
            parents += [index] * len(best)
            tokens += [guesses[at] for at in best]
            scores += [math.log(shares[at]) for at in best]
        return Children(
            np.array(parents, np.int64), np.array(tokens, np.int64), np.array(scores, np.float64)
        )

    def close(self, request: int) -> None:
        """Forget a request's tokens; what was learnt stays. Unknown requests are ignored."""
        super().close(request)
        self._requests.pop(request, None)

    def _successes_of(self, sampling: Sampling) -> _Successes:
        return used(self._successes, sampling.without_seed, _Successes)


def _with_noise(
    tokens: Sequence[int], shares: list[float], seed: int, position: int
) -> list[float]:
    """The shares of `tokens` once the noise that the base adds at `position` is known.

    What the shares leave over is one more candidate, whose noise is not known: its mean stands in.
    """
    if not tokens:
        return shares
    rest = max(1.0 - sum(shares), 1e-3)
    noise = gumbel(seed, position, np.array(tokens, np.int64))
    heights = np.array([*np.log(shares) + noise, math.log(rest) + _MEAN_NOISE])
    weights = np.exp(heights - heights.max())
    found: list[float] = np.maximum(weights / weights.sum(), 1e-9)[:-1].tolist()
    return found
