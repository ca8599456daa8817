"""A drafted tree: guesses that a draft source grew below one root, before they get node ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

FROM_ROOT = -1
"""Parent index of a guess that follows the root itself."""


@dataclass(frozen=True, slots=True)
class _Guesses:
    """Columns that are equally long; `sources` None: all come of the one source that there is."""

    parents: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    scores: Floats
    sources: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def certain(self) -> npt.NDArray[np.bool_]:
        """bool [G]: which of them no source made."""
        found: npt.NDArray[np.bool_] = self.made_by == 0
        return found

    @property
    def made_by(self) -> npt.NDArray[np.int64]:
        """`sources`, if it is None written out."""
        return np.ones(len(self), np.int64) if self.sources is None else self.sources


@dataclass(frozen=True, slots=True)
class Children(_Guesses):
    """Guesses of what follows some paths: guess g follows path `parents[g]`.

    `parents` int64 [G]: index of the path, in ascending order; of guesses below guesses, how many
    paths there are plus the index of the guess above, which stands before. `tokens` int64 [G], the
    best first within a path. `scores` float64 [G]: each guess's own natural-log score given its
    path, not above 0. `sources` int64 [G]: bit n is set if the draft source's n-th member made the
    guess; of none, as nothing else may come by the request's grammar: it is certain. `chains`: with
    the index of a path that has such a guess, it and what is certain after it.
    """

    chains: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @staticmethod
    def none() -> Children:
        nothing = np.zeros(0, np.int64)
        return Children(nothing, nothing, np.zeros(0, np.float64))

    def further(self, paths: int) -> int:
        """Below how many guesses there are guesses; `paths`: how many paths there were."""
        return len({above for above in self.parents.tolist() if above >= paths})


@dataclass(frozen=True, slots=True)
class DraftedTree(_Guesses):
    """Guesses in topological order (a parent's index is smaller than its child's).

    `parents` int64 [G]: index of the parent guess, or FROM_ROOT. `tokens` int64 [G].
    `scores` float64 [G]: cumulative natural-log score from the root, the sum over the path of
    each guess's own log score (EAGLE-2; FlowSpec §3.2, Eq. 1), so never above the parent's.
    `sources`: as Children has them.
    """

    @staticmethod
    def empty() -> DraftedTree:
        nothing = np.zeros(0, np.int64)
        return DraftedTree(nothing, nothing, np.zeros(0, np.float64))

    def best(self, limit: int) -> DraftedTree:
        """The `limit` best-scored guesses as a connected tree (FlowSpec §3.2, top-L).

        Ties go to the smaller index, so that a parent never loses to its child.
        """
        if limit >= len(self):
            return self
        order = np.lexsort((np.arange(len(self)), -self.scores))[:limit]
        keep = np.sort(order)
        new_index = np.full(len(self) + 1, FROM_ROOT, np.int64)
        new_index[keep] = np.arange(len(keep))
        parents = np.where(
            self.parents[keep] == FROM_ROOT, FROM_ROOT, new_index[self.parents[keep]]
        )
        return DraftedTree(parents, self.tokens[keep], self.scores[keep], self.made_by[keep])

    def find(self, path: Sequence[int]) -> int | None:
        """The index of the guess at the end of a path of tokens from the root, if there is one."""
        at = FROM_ROOT
        for token in path:
            match = np.flatnonzero((self.parents == at) & (self.tokens == token))
            if not len(match):
                return None
            at = int(match[0])
        return at
