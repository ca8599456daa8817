"""A draft source that knows the toy model and errs on purpose."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from support.growers import SoloGrower

from edgespec.drafting.base import Guesser
from edgespec.drafting.steps import at_once
from edgespec.sim.oracle import children_of
from edgespec.sim.toy_model import _mix, toy_next
from edgespec.tree.drafted import Children
from edgespec.types.features import Features
from edgespec.verify.sampling import Sampling


class FakeGuesser(Guesser):
    """A Guesser that knows the toy model.

    The right token is the best guess in a share of `accuracy` of all contexts, the second best in
    half of the rest; which contexts is a hash of the context, so that runs repeat exactly.
    """

    def __init__(self, stages: int, vocabulary: int, accuracy: float) -> None:
        super().__init__("fake")
        self.stages = stages
        self._vocabulary = vocabulary
        self._accuracy = accuracy
        self.seeds: dict[int, int] = {}
        self._contexts: dict[int, tuple[int, ...]] = {}

    def open(self, request: int, sampling: Sampling) -> None:
        """Start a request."""
        self.seeds[request] = sampling.seed

    @at_once
    def reading(self, request: int, context: Sequence[int], features: Features) -> bool:
        """Reading costs nothing."""
        self._contexts[request] = tuple(context)
        return True

    @at_once
    def guessing(self, request: int, paths: Sequence[Sequence[int]], width: int) -> Children:
        """The `width` best children of each path."""
        self.ran(len(paths), request)
        context, seed = self._contexts[request], self.seeds[request]
        return children_of([self._children([*context, *path], width, seed) for path in paths])

    def close(self, request: int) -> None:
        """Free the request."""
        super().close(request)
        self.seeds.pop(request, None)
        self._contexts.pop(request, None)

    def _children(self, path: list[int], width: int, seed: int) -> list[tuple[int, float]]:
        right = toy_next(path, self.stages, self._vocabulary, seed)
        luck = float(_mix(np.array([hash(tuple(path)) & (2**63 - 1)], np.uint64))[0]) / 2.0**64
        rank = 0 if luck < self._accuracy else 1 if luck < (1 + self._accuracy) / 2 else width
        wrong = [
            (right + 1 + i) % self._vocabulary for i in range(min(width, self._vocabulary - 1))
        ]
        tokens = [*wrong[:rank], right, *wrong[rank:]] if rank < width else wrong
        # Equal scores for neighbouring ranks: ties are the rule here, not the exception.
        return [(t, -0.5 - (i // 2)) for i, t in enumerate(tokens[:width])]


class FakeDraft(SoloGrower):
    """Trees of a FakeGuesser."""

    def __init__(self, stages: int, vocabulary: int, accuracy: float) -> None:
        self.guesser = FakeGuesser(stages, vocabulary, accuracy)
        super().__init__(self.guesser)

    @property
    def open_requests(self) -> int:
        """How many requests are held."""
        return len(self.guesser.seeds)
