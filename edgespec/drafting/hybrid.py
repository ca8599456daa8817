"""Hybrid: the guesses of several sources in one tree, scored by how often such ones were right."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import or_
from typing import Any, TypeVar

import numpy as np

from edgespec.drafting.base import Guesser, TokenPath
from edgespec.drafting.feedback import Feedback
from edgespec.drafting.rivals import Rivals
from edgespec.drafting.steps import Call, Steps, alone
from edgespec.policy.calibration import Calibration
from edgespec.tree.drafted import Children
from edgespec.types.draft_pass import DraftPass, DraftWork
from edgespec.types.features import NO_NEEDS, Features, joined
from edgespec.verify.rules import Mask
from edgespec.verify.sampling import Sampling

LEAST = 128
"""Committed tokens that are counted before members are compared, and again before the next time;
for a member that did not pay, halved for each time in a row, down to an eighth."""
LEAST_PAY = 1 / 32
"""A member is paused if the right guesses that it alone made are less than this share of all, for
all of the time; half of that for half of the time."""
LEAST_GAIN = 1 / 100
"""... or if all together rank the tokens that come no better than the best of the others does: by
so much, of one over the rank."""
PAUSE = 256
"""Committed tokens of a request until a paused member is tried again; doubled after every failure
in a row, up to 8 times. A new request is another text: it is tried again there."""
MODEL = 2.0
"""What the log-odds of a member that runs a model count, for 1.0 of another's."""
RECENT = 1 / 16
"""Weight of a new committed token in the share that was guessed of late."""

Guesses = dict[int, float]
"""Tokens with their own natural-log scores."""


@dataclass(frozen=True, slots=True)
class _PathGuesses:
    """The guesses for one path of each member that was asked. As bits, `able`: the members that
    named any; `sources`: of each token, those that named it."""

    members: dict[int, Guesses]
    able: int
    sources: dict[int, int]


Result = TypeVar("Result")


@dataclass(slots=True)
class _Member:
    """One source: what it cost, and what it gained.

    `alone`: right guesses that no other member made; `seconds`: what its guesses took; `worth`: the
    sum of one over the rank that it gave to tokens that came; all since the last restart of the
    counts. `paused`: committed tokens until it is asked again, 0 while it is asked. `runs_model`:
    it has run one; only such members are rivals.
    """

    guesser: Guesser
    alone: int = 0
    seconds: float = 0.0
    worth: float = 0.0
    paused: int = 0
    failures: int = 0
    runs_model: bool = False


@dataclass(slots=True)
class _HybridRequest:
    """One request: how it samples, what each member guessed, and which can guess now.

    `unread`: features of the base that paused members have still to read. `free`: only members that
    run no model are asked, and nothing is learnt of any.
    """

    sampling: Sampling
    context: tuple[int, ...] = ()
    able: tuple[int, ...] = ()
    free: bool = False
    unread: defaultdict[int, list[Features]] = field(default_factory=lambda: defaultdict(list))
    feedback: Feedback[_PathGuesses] = field(default_factory=Feedback)


@dataclass(frozen=True, slots=True)
class _MembersRun:
    """What a member's calls run (see drafting.steps.Call), with its time taken."""

    hybrid: HybridGuesser
    number: int
    run: Callable[[Sequence[Any]], Sequence[Any]]

    def __call__(self, every: Sequence[tuple[Any, bool]]) -> Sequence[Any]:
        return self.hybrid.run(self, every)


class HybridGuesser(Guesser):
    """A Guesser that asks several others and merges their guesses.

    Each member's score of a token is calibrated by how often tokens with such a score, named by the
    same members, were right (see policy.estimates); the mean of their log-odds counts, a model's
    twice. So over-confident scores are calibrated down, and so are tokens that the best member does
    not name. A member that does not pay is paused. It is tried again after a while, with a new
    request, or when the others guess less than half as well as they did. Of members that cost about
    the same, one is asked at a time (see drafting.rivals).
    """

    def __init__(
        self,
        members: Sequence[Guesser],
        seconds: Callable[[tuple[DraftWork, ...]], float] | None = None,
    ) -> None:
        """`seconds`: what such work costs, where times are charged; else it is measured."""
        names = tuple(guesser.name for guesser in members)
        needs = reduce(or_, (guesser.needs for guesser in members))
        super().__init__("hybrid:" + "+".join(names), needs, names)
        self._members = [_Member(guesser) for guesser in members]
        self._seconds = seconds
        self._requests: dict[int, _HybridRequest] = {}
        self._agreed: defaultdict[tuple[Sampling, int, int, int], Calibration] = defaultdict(
            Calibration
        )
        self._watched = self._right = 0  # committed tokens, and those that any member guessed
        self._worth = 0.0  # the sum of one over the ranks that all together gave these
        self._recent = 0.0  # share of the newest committed tokens that any member guessed
        self._usual = 0.0  # that share when a member was paused last
        self._rivals = Rivals()
        self._away = 0.0  # seconds of what was let in between layers

    @property
    def one_pass(self) -> bool:
        """Whether further levels cost none of the members a pass that are asked now."""
        asked = (one.guesser for number, one in enumerate(self._members) if self._is_asked(number))
        return all(guesser.one_pass for guesser in asked)

    def let_in(self, call: Callable[[], object]) -> None:
        """What is let in counts for no member's time."""

        def timed() -> None:
            began = time.perf_counter()
            call()
            self._away += time.perf_counter() - began

        for member in self._members:
            member.guesser.let_in(timed)

    def open(self, request: int, sampling: Sampling) -> None:
        self._rivals.opens()
        if not self._requests and any(member.paused for member in self._members):
            self._ask_all()
        self._requests[request] = _HybridRequest(sampling)
        for member in self._members:
            member.guesser.open(request, sampling)

    def spare(self, request: int, free: bool) -> None:
        self._requests[request].free = free

    def allow(self, request: int, masks: Mapping[TokenPath, Mask]) -> None:
        for member in self._members:
            member.guesser.allow(request, masks)

    def fork(self, request: int, base: int, rows: int, ends: bool) -> None:
        old = self._requests.get(base)
        if old is None:
            return
        for number, member in enumerate(self._members):
            if old.unread[number]:  # later it could not be made up for
                alone(self._reading(base, old, number, counts=False))
            member.guesser.fork(request, base, rows, ends)

    def reading(self, request: int, context: Sequence[int], features: Features) -> Steps[bool]:
        """Hand committed tokens to all members that are asked; True if any of them can guess.

        A paused member reads them when it resumes.
        """
        state = self._requests[request]
        for guessed, token in state.feedback.committed(context[len(state.context) :]):
            self._learn(guessed, token, state.sampling.without_seed)
        self._review()
        is_prompt, state.context = not state.context, tuple(context)
        able = []
        for number, member in enumerate(self._members):
            if member.guesser.needs != NO_NEEDS:
                state.unread[number].append(features)
            if not (member.guesser.is_free if state.free else self._is_asked(number)):
                continue
            if (yield from self._reading(request, state, number, counts=not is_prompt)):
                able.append(number)
        state.able = tuple(able)
        return bool(able)

    def reading_part(self, request: int, context: Sequence[int], rows: int) -> Steps[None]:
        is_prompt = not self._requests[request].context
        for number, member in enumerate(self._members):
            if self._is_asked(number):
                steps = member.guesser.reading_part(request, context, rows)
                yield from self._timed(number, steps, counts=not is_prompt)

    def guessing(self, request: int, paths: Sequence[TokenPath], width: int) -> Steps[Children]:
        state = self._requests[request]
        sampling = state.sampling.without_seed
        named: list[dict[int, Guesses]] = [{n: {} for n in state.able} for _ in paths]
        for number in state.able:
            steps = self._members[number].guesser.guessing(request, paths, width)
            children = yield from self._timed(number, steps, counts=True)
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
            member.guesser.close(request)

    def _calibration(
        self, guessed: _PathGuesses, token: int, number: int, sampling: Sampling
    ) -> Calibration:
        """The calibration of a member's word for tokens that just the same members named."""
        return self._agreed[sampling, guessed.able, guessed.sources[token], number]

    def _score(self, guessed: _PathGuesses, token: int, sampling: Sampling) -> float:
        """The natural log of the probability that all who named a token give it."""
        total = weights = 0.0
        for number, guesses in guessed.members.items():
            if token in guesses:
                weight = MODEL if self._members[number].runs_model else 1.0
                odds = self._calibration(guessed, token, number, sampling).odds(guesses[token])
                total += weight * math.log(odds)
                weights += weight
        return -math.log1p(math.exp(-total / weights))

    def _ranked(self, guessed: _PathGuesses, sampling: Sampling) -> list[tuple[int, float, int]]:
        """Tokens with their scores and the bits of their sources, the best first; of a member that
        was asked alone, as it said: its scores compare without that."""
        if len(guessed.members) == 1:
            (scores,) = guessed.members.values()
        else:
            scores = {token: self._score(guessed, token, sampling) for token in guessed.sources}
        found = [(token, score, guessed.sources[token]) for token, score in scores.items()]
        return sorted(found, key=lambda guess: (-guess[1], guess[0]))

    def _reading(
        self, request: int, state: _HybridRequest, number: int, *, counts: bool
    ) -> Steps[bool]:
        """Have a member read what it has not read yet: whether it can guess."""
        features = joined(state.unread.pop(number, []))
        steps = self._members[number].guesser.reading(request, state.context, features)
        return (yield from self._timed(number, steps, counts=counts))

    def _timed(self, number: int, steps: Steps[Result], *, counts: bool) -> Steps[Result]:
        """A member's steps; if that `counts`, their time is the member's."""
        go_on: Callable[[], Call[Any]] = partial(next, steps)
        while True:
            try:
                wanted = self._charged(number, go_on, float(counts))
            except StopIteration as end:
                result: Result = end.value
                return result
            run = _MembersRun(self, number, wanted.run)
            try:
                found = yield Call(run, (wanted.given, counts), wanted.late)
            except Exception as problem:
                go_on = partial(steps.throw, problem)
            else:
                go_on = partial(steps.send, found)

    def _charged(self, number: int, call: Callable[[], Result], share: float) -> Result:
        """Call a member, and charge that share of the time to it."""
        member = self._members[number]
        began, away = time.perf_counter(), self._away
        try:
            return call()
        finally:
            measured = time.perf_counter() - began - (self._away - away)
            work = member.guesser.take_work()
            self._work += work
            member.runs_model |= any(isinstance(one, DraftPass) for one in work)
            member.seconds += share * (measured if self._seconds is None else self._seconds(work))

    def run(self, run: _MembersRun, every: Sequence[tuple[Any, bool]]) -> Sequence[Any]:
        """What a member runs for several requests; the time of those that count is the member's."""
        share = sum(counts for _, counts in every) / len(every)
        return self._charged(run.number, lambda: run.run([given for given, _ in every]), share)

    # --- what pays -----------------------------------------------------------------------------

    def _is_asked(self, number: int) -> bool:
        return not self._members[number].paused and self._rivals.asks(number)

    def _learn(self, guessed: _PathGuesses, token: int, sampling: Sampling) -> None:
        """Learn from one committed token for which guesses were made."""
        ranked = [guess for guess, _, _ in self._ranked(guessed, sampling)]
        self._worth += 1 / (1 + ranked.index(token)) if token in guessed.sources else 0.0
        for number, guesses in guessed.members.items():
            for guess, score in guesses.items():
                calibration = self._calibration(guessed, guess, number, sampling)
                calibration.learn([(score, guess == token)])
        right = [number for number, guesses in guessed.members.items() if token in guesses]
        worth = {number: _worth(guesses, token) for number, guesses in guessed.members.items()}
        times = [member.seconds if member.runs_model else 0.0 for member in self._members]
        self._rivals.learn(worth, times)
        for number, share in worth.items():
            self._members[number].worth += share
        self._watched += 1
        self._right += bool(right)
        self._recent += RECENT * (bool(right) - self._recent)
        if len(right) == 1:
            self._members[right[0]].alone += 1
        resumes = any(member.paused == 1 for member in self._members)
        for member in self._members:
            member.paused = max(member.paused - 1, 0)
        if resumes:
            self._restart_counts()

    def _review(self) -> None:
        """Pause a member that does not pay; ask all again once the others fail."""
        asked = [one for number, one in enumerate(self._members) if self._is_asked(number)]
        if any(member.paused for member in self._members) and self._recent < self._usual / 2:
            self._ask_all()
        total = sum(member.seconds for member in asked)
        for member in sorted(asked, key=lambda one: -one.seconds):
            if self._watched < LEAST >> min(member.failures, 3):
                continue
            share = LEAST_PAY * (member.seconds / total if total else 0.0)
            others = max((one.worth for one in asked if one is not member), default=0.0)
            gains = self._worth - others >= LEAST_GAIN * self._watched
            if gains and member.alone >= share * self._right:
                member.failures = 0
            elif len(asked) > 1:
                member.paused = PAUSE << min(member.failures, 3)
                member.failures += 1
                self._usual = self._recent
                self._restart_counts()
                return
        if self._watched >= LEAST:
            self._restart_counts()

    def _ask_all(self) -> None:
        """Nobody is paused any more."""
        for member in self._members:
            member.paused = 0
        self._restart_counts()

    def _restart_counts(self) -> None:
        """The counts so far were of other members."""
        self._watched = self._right = 0
        self._worth = 0.0
        for member in self._members:
            member.alone, member.seconds, member.worth = 0, 0.0, 0.0


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
