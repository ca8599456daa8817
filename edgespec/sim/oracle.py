"""Oracle: a draft source that is told the answers, and errs as often as it should."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from edgespec.errors import LocalProtocolError
from edgespec.planning.cost_model import DraftPass
from edgespec.sim.toy import VOCABULARY
from edgespec.tree.drafted import FROM_ROOT, Children, DraftedTree
from edgespec.types.features import NO_FEATURES, Features
from edgespec.verify.sampling import Sampling

_WIDEST = 3
_LOSSES = (0.0, 0.5, 1.0)


class Oracle:
    """Random trees that hold the true next token at a share of `accuracy` of their nodes.

    Scores are drawn from few values, so that ties are common. What it is asked is checked: a
    request must be open, and its contexts must only grow and lie on an answer that was told.
    """

    name = "oracle"
    sources = ("oracle",)
    needs: frozenset[str] = frozenset()

    def __init__(self, rng: random.Random, accuracy: float) -> None:
        self._rng = rng
        self._accuracy = accuracy
        self._answers: list[tuple[int, ...]] = []
        self._contexts: dict[int, tuple[int, ...]] = {}
        self._trees: dict[int, _Growing] = {}
        self._work: list[int] = []

    @property
    def open_requests(self) -> int:
        """How many requests are held."""
        return len(self._contexts)

    def tell(self, whole: Sequence[int]) -> None:
        """A prompt with what follows it."""
        self._answers.append(tuple(whole))

    def open(self, request: int, sampling: Sampling) -> None:
        """Start a request."""
        if request in self._contexts:
            raise LocalProtocolError(f"request {request} is open on the draft already")
        self._contexts[request] = ()

    def inherit(self, request: int, base: int, rows: int) -> None:
        """What was read of the base need not be read again."""
        self._contexts[request] = self._contexts.get(base, ())[:rows]

    def close(self, request: int) -> None:
        """Free the request."""
        self._contexts.pop(request, None)
        self._trees.pop(request, None)

    def refresh(
        self,
        request: int,
        context: Sequence[int],
        depth: int,
        width: int,
        features: Features = NO_FEATURES,
    ) -> DraftedTree:
        """A fresh tree."""
        self._read(request, context)
        self._trees[request] = _Growing(tuple(context))
        return self.deepen(request, depth, width)

    def deepen(self, request: int, levels: int, width: int) -> DraftedTree:
        """The last tree with more levels."""
        tree = self._trees[request]
        for _ in range(levels):
            self._work.append(len(tree.frontier))
            tree.grow([self._guess(path, width) for path in tree.leaves()], self._rng, width)
        return tree.drafted()

    def expand(
        self,
        request: int,
        context: Sequence[int],
        paths: Sequence[Sequence[int]],
        width: int,
        features: Features = NO_FEATURES,
    ) -> Children:
        """Children of each path behind `context`."""
        self._read(request, context)
        self._work.append(len(paths))
        parents: list[int] = []
        tokens: list[int] = []
        scores: list[float] = []
        for index, path in enumerate(paths):
            for token, score in self._guess((*context, *path), width):
                parents.append(index)
                tokens.append(token)
                scores.append(score)
        return Children(
            np.array(parents, np.int64), np.array(tokens, np.int64), np.array(scores, np.float64)
        )

    def take_work(self) -> tuple[DraftPass, ...]:
        """The passes since the last call."""
        work, self._work = self._work, []
        return tuple(DraftPass(rows, self.name) for rows in work)

    def _read(self, request: int, context: Sequence[int]) -> None:
        old, new = self._contexts.get(request), tuple(context)
        if old is None:
            raise LocalProtocolError(f"request {request} is not open on the draft")
        if new[: len(old)] != old:
            raise LocalProtocolError(f"the context of request {request} did not grow")
        if not any(answer[: len(new)] == new for answer in self._answers):
            raise LocalProtocolError(f"the context of request {request} is no committed text")
        if len(new) > len(old):
            self._work.append(len(new) - len(old))
        self._contexts[request] = new

    def _guess(self, path: tuple[int, ...], width: int) -> list[tuple[int, float]]:
        """Up to `width` tokens behind a path with their scores, the best first."""
        rng = self._rng
        guesses = rng.sample(range(VOCABULARY), rng.randint(1, min(width, _WIDEST)))
        size = len(path)
        right = next((a[size] for a in self._answers if len(a) > size and a[:size] == path), None)
        if right is not None and right not in guesses and rng.random() < self._accuracy:
            guesses[rng.randrange(len(guesses))] = right
        losses = sorted(rng.choice(_LOSSES) for _ in guesses)
        return [(token, -loss) for token, loss in zip(guesses, losses, strict=True)]


class _Growing:
    """A tree that grows level by level below one context."""

    def __init__(self, context: tuple[int, ...]) -> None:
        self._context = context
        self._paths: list[tuple[int, ...]] = []
        self._parents: list[int] = []
        self._scores: list[float] = []
        self.frontier: list[int] = [FROM_ROOT]

    def leaves(self) -> list[tuple[int, ...]]:
        """The whole paths that the next level hangs from."""
        return [self._context if at == FROM_ROOT else self._paths[at] for at in self.frontier]

    def grow(
        self, guesses: Sequence[list[tuple[int, float]]], rng: random.Random, width: int
    ) -> None:
        """One level more: the guesses behind each leaf; the `width` best of it go on."""
        level: list[int] = []
        for at, path, children in zip(self.frontier, self.leaves(), guesses, strict=True):
            score = 0.0 if at == FROM_ROOT else self._scores[at]
            for token, own in children:
                level.append(len(self._paths))
                self._paths.append((*path, token))
                self._parents.append(at)
                self._scores.append(score + own)
        rng.shuffle(level)
        self.frontier = sorted(level, key=lambda i: -self._scores[i])[:width]

    def drafted(self) -> DraftedTree:
        """All guesses so far."""
        return DraftedTree(
            np.array(self._parents, np.int64),
            np.array([path[-1] for path in self._paths], np.int64),
            np.array(self._scores, np.float64),
        )
