"""Hybrid: n-grams' guesses beside those of a model, scored by how often such ones were right."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

import numpy as np

from edgespec.drafting.base import Guesser, TokenPath
from edgespec.drafting.ranking import Feedback
from edgespec.drafting.steps import Steps, alone
from edgespec.policy.calibration import Calibration
from edgespec.policy.estimates import MOST_CALIBRATIONS, used
from edgespec.tree.drafted import Children
from edgespec.types.draft_pass import DraftWork
from edgespec.types.features import NO_NEEDS, Features, joined
from edgespec.verify.rules import Mask
from edgespec.verify.sampling import Sampling

MODEL = 2.0
"""What the log-odds of a member that runs a model count, for 1.0 of another's."""
LEAST_GAIN = 0.01
"""By which all together must rank the tokens that come better than the model alone, of one over the
rank, or its guesses stay as they are: others' would take the places of better ones."""
RECENT = 1 / 64
"""Weight of a new committed token in what that gain was of late."""

MOST_AGREED = 16 * MOST_CALIBRATIONS
"""Calibrations that are kept: a way of sampling has one for each way in which members agree."""

Guesses = dict[int, float]
"""Tokens with their own natural-log scores."""


@dataclass(frozen=True, slots=True)
class _PathGuesses:
    """The guesses for one path of each member that was asked. As bits, `able`: the members that
    named any; `sources`: of each token, those that named it."""

    members: dict[int, Guesses]
    able: int
    sources: dict[int, int]


@dataclass(slots=True)
class _HybridRequest:
    """One request: how it samples, what each member guessed, and which can guess now.

    `unread`: features of the base that members which are not asked have still to read. `free`: only
    members that run no model are asked, and nothing is learnt of any.
    """

    sampling: Sampling
    context: tuple[int, ...] = ()
    able: tuple[int, ...] = ()
    free: bool = False
    unread: defaultdict[int, list[Features]] = field(default_factory=lambda: defaultdict(list))
    feedback: Feedback[_PathGuesses] = field(default_factory=Feedback)


class HybridGuesser(Guesser):
    """A Guesser that asks several others and merges their guesses; one of them may be a model: two
    name much the same tokens, and the ring would wait for both.

    Each member's score of a token is calibrated by how often tokens with such a score, named by the
    same members, were right (see policy.calibration); the mean of their log-odds counts, a model's
    twice. So over-confident scores are calibrated down, and so are tokens that the model does not
    name. Where that ranks the tokens that come no better than the model alone, it is left alone.
    """

    def __init__(self, members: Sequence[Guesser]) -> None:
        names = tuple(member.name for member in members)
        needs = reduce(or_, (member.needs for member in members))
        super().__init__("hybrid:" + "+".join(names), needs, names)
        self._members = tuple(members)
        models = [number for number, member in enumerate(members) if member.is_model]
        assert len(models) <= 1, "drafting.choice refuses a hybrid of several"
        self._model = models[0] if models else None
        self._gain = 2 * LEAST_GAIN
        self._requests: dict[int, _HybridRequest] = {}
        self._agreed: dict[tuple[Sampling, int, int, int], Calibration] = {}

    @property
    def one_pass(self) -> bool:
        """Whether further levels cost none of the members a pass."""
        return all(member.one_pass for member in self._members)

    def let_in(self, call: Callable[[], object]) -> None:
        for member in self._members:
            member.let_in(call)

    def take_work(self) -> tuple[DraftWork, ...]:
        return tuple(work for member in self._members for work in member.take_work())

    def open(self, request: int, sampling: Sampling) -> None:
        self._requests[request] = _HybridRequest(sampling)
        for member in self._members:
            member.open(request, sampling)

    def spare(self, request: int, free: bool) -> None:
        self._requests[request].free = free

    def allow(self, request: int, masks: Mapping[TokenPath, Mask]) -> None:
        for member in self._members:
            member.allow(request, masks)

    def fork(self, request: int, base: int, rows: int, ends: bool) -> None:
        old = self._requests.get(base)
        if old is None:
            return
        for number, member in enumerate(self._members):
            if old.unread[number]:  # later it could not be made up for
                alone(self._reading(base, old, number))
            member.fork(request, base, rows, ends)

    def reading(self, request: int, context: Sequence[int], features: Features) -> Steps[bool]:
        """Hand committed tokens to all members that are asked; True if any of them can guess.

        Another one reads them when it is asked again.
        """
        state = self._requests[request]
        for guessed, token in state.feedback.committed(context[len(state.context) :]):
            self._learn(guessed, token, state.sampling.without_seed)
        state.context = tuple(context)
        able = []
        for number, member in enumerate(self._members):
            if member.needs != NO_NEEDS:
                state.unread[number].append(features)
            if self._is_asked(state, number) and (yield from self._reading(request, state, number)):
                able.append(number)
        state.able = tuple(able)
        return bool(able)

    def reading_part(self, request: int, context: Sequence[int], rows: int) -> Steps[None]:
        for number, member in enumerate(self._members):
            if self._is_asked(self._requests[request], number):
                yield from member.reading_part(request, context, rows)

    def guessing(self, request: int, paths: Sequence[TokenPath], width: int) -> Steps[Children]:
        state = self._requests[request]
        sampling = state.sampling.without_seed
        named: list[dict[int, Guesses]] = [{n: {} for n in state.able} for _ in paths]
        for number in state.able:
            children = yield from self._members[number].guessing(request, paths, width)
            columns = children.parents.tolist(), children.tokens.tolist(), children.scores.tolist()
            for path, token, score in zip(*columns, strict=True):
                named[path][number][token] = score
        guessed = [_joined(one) for one in named]
        if not state.free:
            state.feedback.guessed(paths, guessed)
        found = [
            (index, *guess)
            for index, one in enumerate(guessed)
            for guess in self._ranked(one, sampling)[:width]
        ]
        parents, tokens, scores, sources = zip(*found, strict=True) if found else ((),) * 4
        return Children(
            np.array(parents, np.int64),
            np.array(tokens, np.int64),
            np.array(scores, np.float64),
            np.array(sources, np.int64),
        )

    def close(self, request: int) -> None:
        self._requests.pop(request, None)
        for member in self._members:
            member.close(request)

    def _is_asked(self, state: _HybridRequest, number: int) -> bool:
        return self._members[number].is_free or not state.free

    def _reading(self, request: int, state: _HybridRequest, number: int) -> Steps[bool]:
        """Have a member read what it has not read yet: whether it can guess."""
        features = joined(state.unread.pop(number, []))
        return self._members[number].reading(request, state.context, features)

    def _learn(self, guessed: _PathGuesses, token: int, sampling: Sampling) -> None:
        """Learn from one committed token for which guesses were made."""
        for number, guesses in guessed.members.items():
            for guess, score in guesses.items():
                calibration = self._calibration(guessed, guess, number, sampling)
                calibration.learn([(score, guess == token)])
        worth = {number: _worth(guesses, token) for number, guesses in guessed.members.items()}
        if self._model in worth and len(worth) > 1:
            together = _worth(self._merged(guessed, sampling), token)
            self._gain += RECENT * (together - worth[self._model] - self._gain)

    def _calibration(
        self, guessed: _PathGuesses, token: int, number: int, sampling: Sampling
    ) -> Calibration:
        """The calibration of a member's word for tokens that just the same members named."""
        key = sampling, guessed.able, guessed.sources[token], number
        return used(self._agreed, key, Calibration, MOST_AGREED)

    def _ranked(self, guessed: _PathGuesses, sampling: Sampling) -> list[tuple[int, float, int]]:
        """Tokens with their scores and the bits of their sources, the best first; of a member that
        alone named any, or that others hardly help, as it said: its scores compare without that."""
        named = [number for number, guesses in guessed.members.items() if guesses]
        if self._model in guessed.members and self._gain < LEAST_GAIN:
            named = [self._model]
        only = guessed.members[named[0]] if len(named) == 1 else None
        scores = self._merged(guessed, sampling) if only is None else only
        found = [(token, score, guessed.sources[token]) for token, score in scores.items()]
        return sorted(found, key=lambda guess: (-guess[1], guess[0]))

    def _merged(self, guessed: _PathGuesses, sampling: Sampling) -> Guesses:
        """The score that all who named a token give it."""
        return {token: self._score(guessed, token, sampling) for token in guessed.sources}

    def _score(self, guessed: _PathGuesses, token: int, sampling: Sampling) -> float:
        """The natural log of the probability that all who named a token give it."""
        total = weights = 0.0
        for number, guesses in guessed.members.items():
            if token in guesses:
                weight = MODEL if number == self._model else 1.0
                odds = self._calibration(guessed, token, number, sampling).odds(guesses[token])
                total += weight * math.log(odds)
                weights += weight
        return -math.log1p(math.exp(-total / weights))


def _joined(members: dict[int, Guesses]) -> _PathGuesses:
    able, sources = 0, dict[int, int]()
    for number, guesses in members.items():
        able |= bool(guesses) << number
        for token in guesses:
            sources[token] = sources.get(token, 0) | 1 << number
    return _PathGuesses(members, able, sources)


def _worth(guesses: Guesses, token: int) -> float:
    """One over the rank of a token among guesses, 0 if it is none of them."""
    score = guesses.get(token)
    return 1 / sum(other >= score for other in guesses.values()) if score is not None else 0.0
