"""Hybrid: the guesses of several sources in one tree, by how often each one's like were right."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np

from edgespec.drafting.base import Guesser, TokenPath, prompts_of
from edgespec.drafting.judged import Judged
from edgespec.planning.cost_model import DraftPass
from edgespec.policy.estimates import Calibration
from edgespec.tree.drafted import Children
from edgespec.types.features import Features, PPDTable, joined
from edgespec.verify.sampling import Sampling

LEAST = 128
"""So many committed tokens are watched before a member is judged, and again before the next one."""
LEAST_PAY = 1 / 32
"""A member is given up if the right guesses that it alone made are less than this share of all, for
all of the time; half of that for half of the time."""
PAUSE = 256
"""Certain tokens until a member that was given up is tried again; twice as many after every failure
in a row, up to 8 times."""
RECENT = 1 / 16
"""Weight of a new committed token in the share that was guessed of late."""

Guesses = dict[int, float]
"""Tokens with their own natural-log scores."""


@dataclass(frozen=True, slots=True)
class _Said:
    """What was said about one path: by each member that was asked, and in all.

    `merged`: the best of each token's scores; `sources`: who named it, as bits.
    """

    members: dict[int, Guesses]
    merged: Guesses
    sources: dict[int, int]


Result = TypeVar("Result")


@dataclass(slots=True)
class _Member:
    """One source: what it took, and what it brought.

    `alone`: right guesses that no other member made; `seconds`: what its guesses took; both since
    members are watched anew. `paused`: committed tokens until it is asked again, 0 while it is
    asked.
    """

    guesser: Guesser
    alone: int = 0
    seconds: float = 0.0
    paused: int = 0
    failures: int = 0


@dataclass(slots=True)
class _Request:
    """One request: how it samples, what each member guessed, and which can guess now.

    `unread`: what members that are given up were meant to read of the base's features.
    """

    sampling: Sampling
    context: tuple[int, ...] = ()
    able: tuple[int, ...] = ()
    unread: defaultdict[int, list[Features]] = field(default_factory=lambda: defaultdict(list))
    judged: Judged[_Said] = field(default_factory=Judged)


class HybridGuesser:
    """A Guesser (see drafting.base) that asks other ones and merges what they say.

    The best of a token's scores is calibrated by how often a token was right that had such a score
    and had been named by just these of the members asked (see policy.estimates). So a member that
    boasts is read as what it is, and a token that the best member does not name as the poor guess
    that it is. A member that does not pay is not asked any more, and tried again now and then, or
    as soon as the others guess less than half as well as they did.
    """

    def __init__(
        self,
        members: Sequence[Guesser],
        seconds: Callable[[tuple[DraftPass, ...]], float] | None = None,
    ) -> None:
        """`seconds`: what forward passes cost, where times are charged; else they are measured."""
        self._members = [_Member(guesser) for guesser in members]
        self._seconds = seconds
        self._requests: dict[int, _Request] = {}
        self._agreed: defaultdict[tuple[Sampling, int, int], Calibration] = defaultdict(Calibration)
        self._work: list[DraftPass] = []
        self._watched = self._right = 0  # committed tokens, and those that anybody had guessed
        self._recent = 0.0  # share of the newest committed tokens that anybody had guessed
        self._usual = 0.0  # that share when a member was given up

    @property
    def name(self) -> str:
        """With its members."""
        return "hybrid:" + "+".join(self.sources)

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of its members, in the order of the bits of Children.sources."""
        return tuple(member.guesser.name for member in self._members)

    @property
    def needs(self) -> frozenset[str]:
        """What any member needs."""
        return frozenset[str]().union(*(member.guesser.needs for member in self._members))

    @property
    def prompts(self) -> PPDTable:
        """Those of the member that needs prompt rows."""
        tables = (prompts_of(member.guesser) for member in self._members)
        return next(table for table in tables if table is not None)

    def open(self, request: int, sampling: Sampling) -> None:
        """Start a request with every member."""
        self._requests[request] = _Request(sampling)
        for member in self._members:
            member.guesser.open(request, sampling)

    def inherit(self, request: int, base: int, rows: int) -> None:
        """Every member goes on from what it read of `base`."""
        old = self._requests.get(base)
        if old is None:
            return
        for number, member in enumerate(self._members):
            if old.unread[number]:  # only now, as what a member missed would be missing for ever
                self._read(member, base, old, number)
            member.guesser.inherit(request, base, rows)

    def read(self, request: int, context: Sequence[int], features: Features) -> bool:
        """Hand committed tokens to all members that are asked; True if any of them can guess.

        A member that is given up reads them when it is tried again.
        """
        state = self._requests[request]
        for said, token in state.judged.committed(context[len(state.context) :]):
            self._judge(said, token, state.sampling.without_seed)
        self._review()
        is_prompt, state.context = not state.context, tuple(context)
        able = []
        for number, member in enumerate(self._members):
            if member.guesser.needs:
                state.unread[number].append(features)
            if member.paused:
                continue
            can, took = self._read(member, request, state, number)
            if not is_prompt:
                member.seconds += took
            if can:
                able.append(number)
        state.able = tuple(able)
        return bool(able)

    def guess(self, request: int, paths: Sequence[TokenPath], width: int) -> Children:
        """The best children of each path, whoever named them (see drafting.base)."""
        state = self._requests[request]
        shape = state.sampling.without_seed
        named: list[dict[int, Guesses]] = [{n: {} for n in state.able} for _ in paths]
        for number in state.able:
            member = self._members[number]
            guess = partial(member.guesser.guess, request, paths, width)
            children, took = self._timed(member, guess)
            member.seconds += took
            columns = children.parents.tolist(), children.tokens.tolist(), children.scores.tolist()
            for path, token, score in zip(*columns, strict=True):
                named[path][number][token] = score
        said = [self._merged(one) for one in named]
        state.judged.said(paths, said)
        found = [
            (index, *guess)
            for index, one in enumerate(said)
            for guess in self._ranked(one, shape)[:width]
        ]
        parents, tokens, scores, sources = zip(*found, strict=True) if found else ((),) * 4
        return Children(
            np.array(parents, np.int64),
            np.array(tokens, np.int64),
            np.array(scores, np.float64),
            np.array(sources, np.int64),
        )

    def take_work(self) -> tuple[DraftPass, ...]:
        """The forward passes of all members since the last call."""
        work, self._work = tuple(self._work), []
        return work

    def close(self, request: int) -> None:
        """Free the request; unknown requests are ignored."""
        self._requests.pop(request, None)
        for member in self._members:
            member.guesser.close(request)

    @staticmethod
    def _merged(members: dict[int, Guesses]) -> _Said:
        """All that the members say about one path in one."""
        merged: Guesses = {}
        sources: dict[int, int] = {}
        for number, guesses in members.items():
            for token, score in guesses.items():
                merged[token] = max(score, merged.get(token, score))
                sources[token] = sources.get(token, 0) | 1 << number
        return _Said(members, merged, sources)

    def _calibration(self, said: _Said, token: int, sampling: Sampling) -> Calibration:
        """The one for tokens that just these members named."""
        asked = sum(1 << number for number, guesses in said.members.items() if guesses)
        return self._agreed[sampling, asked, said.sources[token]]

    def _ranked(self, said: _Said, sampling: Sampling) -> list[tuple[int, float, int]]:
        """Tokens with their scores and the bits of their sources, the best first."""
        found = [
            (
                token,
                self._calibration(said, token, sampling).score(score),
                said.sources[token],
            )
            for token, score in said.merged.items()
        ]
        return sorted(found, key=lambda guess: (-guess[1], guess[0]))

    def _read(
        self, member: _Member, request: int, state: _Request, number: int
    ) -> tuple[bool, float]:
        """Have a member read what it has not read yet: whether it can guess, and the seconds."""
        features = joined(state.unread.pop(number, []))
        return self._timed(member, partial(member.guesser.read, request, state.context, features))

    def _timed(self, member: _Member, call: Callable[[], Result]) -> tuple[Result, float]:
        """Have a member do something: what comes of it, and the seconds that count for it."""
        began = time.perf_counter()
        result = call()
        measured = time.perf_counter() - began
        work = member.guesser.take_work()
        self._work += work
        return result, measured if self._seconds is None else self._seconds(work)

    # --- who pays -----------------------------------------------------------------------------

    def _judge(self, said: _Said, token: int, sampling: Sampling) -> None:
        """Learn from one committed token that had been asked about."""
        for guess, score in said.merged.items():
            self._calibration(said, guess, sampling).learn(score, guess == token)
        right = [number for number, guesses in said.members.items() if token in guesses]
        self._watched += 1
        self._right += bool(right)
        self._recent += RECENT * (bool(right) - self._recent)
        if len(right) == 1:
            self._members[right[0]].alone += 1
        for member in self._members:
            member.paused = max(member.paused - 1, 0)

    def _review(self) -> None:
        """Give up a member that does not pay; try all again once the others fail."""
        asked = [member for member in self._members if not member.paused]
        if len(asked) < len(self._members) and self._recent < self._usual / 2:
            for member in self._members:
                member.paused = 0
            self._watch_anew()
        if self._watched < LEAST:
            return
        total = sum(member.seconds for member in asked)
        for member in sorted(asked, key=lambda one: -one.seconds):
            pay = LEAST_PAY * self._right * (member.seconds / total if total else 0.0)
            if member.alone >= pay:
                member.failures = 0
            elif len(asked) > 1:
                member.paused = PAUSE << min(member.failures, 3)
                member.failures += 1
                self._usual = self._recent
                break
        self._watch_anew()

    def _watch_anew(self) -> None:
        """Forget what was counted: it was counted with other members."""
        self._watched = self._right = 0
        for member in self._members:
            member.alone, member.seconds = 0, 0.0
