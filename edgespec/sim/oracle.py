"""Oracle: a draft source that is told the answers, and errs as often as it should."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from edgespec.drafting.base import Guesser
from edgespec.drafting.grower import TreeGrower
from edgespec.drafting.steps import at_once
from edgespec.errors import LocalProtocolError
from edgespec.sim.toy import VOCABULARY
from edgespec.tree.drafted import Children
from edgespec.types.features import Features
from edgespec.verify.sampling import Sampling

_WIDEST = 3
_LOSSES = (0.0, 0.5, 1.0)


class OracleGuesser(Guesser):
    """A Guesser that names the true next token for a share of `accuracy` of the paths.

    Scores are drawn from few values, so that ties are common. It checks what it is asked: a
    request must be open, and its contexts must only grow and lie on an answer that was told.
    """

    def __init__(self, rng: random.Random, accuracy: float) -> None:
        super().__init__("oracle")
        self._rng = rng
        self._accuracy = accuracy
        self.answers: list[tuple[int, ...]] = []
        self.contexts: dict[int, tuple[int, ...]] = {}

    def open(self, request: int, sampling: Sampling) -> None:
        if request in self.contexts:
            raise LocalProtocolError(f"request {request} is open on the draft already")
        self.contexts[request] = ()

    def fork(self, request: int, base: int, rows: int, ends: bool) -> None:
        self.contexts[request] = self.contexts.get(base, ())[:rows]

    @at_once
    def reading(self, request: int, context: Sequence[int], features: Features) -> bool:
        """Raises LocalProtocolError for a context that is no committed text."""
        old, new = self.contexts[request], tuple(context)
        if new[: len(old)] != old:
            raise LocalProtocolError(f"the context of request {request} did not grow")
        if not any(answer[: len(new)] == new for answer in self.answers):
            raise LocalProtocolError(f"the context of request {request} is no committed text")
        if len(new) > len(old):
            self.ran(len(new) - len(old), request)
        self.contexts[request] = new
        return True

    @at_once
    def guessing(self, request: int, paths: Sequence[Sequence[int]], width: int) -> Children:
        if rows := sum(1 for path in paths if path):
            self.ran(rows, request)
        context = self.contexts[request]
        return children_of([self.children((*context, *path), width) for path in paths])

    def children(self, path: tuple[int, ...], width: int) -> list[tuple[int, float]]:
        """Up to `width` tokens that may follow `path`, with their scores, the best first."""
        rng = self._rng
        guesses = rng.sample(range(VOCABULARY), rng.randint(1, min(width, _WIDEST)))
        size = len(path)
        right = next((a[size] for a in self.answers if len(a) > size and a[:size] == path), None)
        if right is not None and right not in guesses and rng.random() < self._accuracy:
            guesses[rng.randrange(len(guesses))] = right
        losses = sorted(rng.choice(_LOSSES) for _ in guesses)
        return [(token, -loss) for token, loss in zip(guesses, losses, strict=True)]

    def close(self, request: int) -> None:
        super().close(request)
        self.contexts.pop(request, None)


class Oracle(TreeGrower):
    """Trees of an OracleGuesser."""

    def __init__(self, rng: random.Random, accuracy: float) -> None:
        self.guesser = OracleGuesser(rng, accuracy)
        super().__init__(self.guesser)

    @property
    def open_requests(self) -> int:
        """How many requests are held."""
        return len(self.guesser.contexts)

    def tell(self, whole: Sequence[int]) -> None:
        """A prompt with what follows it."""
        self.guesser.answers.append(tuple(whole))


def children_of(guesses: Sequence[Sequence[tuple[int, float]]]) -> Children:
    """The guesses (token, score) of each path as one value."""
    parents = [index for index, found in enumerate(guesses) for _ in found]
    tokens = [token for found in guesses for token, _ in found]
    scores = [score for found in guesses for _, score in found]
    return Children(
        np.array(parents, np.int64), np.array(tokens, np.int64), np.array(scores, np.float64)
    )
