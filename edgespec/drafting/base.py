"""The draft source interface: who guesses what comes next, and what it needs to do so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from edgespec.tree.drafted import Children, DraftedTree
from edgespec.verify.sampling import Sampling


class DraftSource(Protocol):
    """Guesses what comes next; keeps its own cache for every open request.

    `needs` names what it must be given beyond tokens (nothing yet; EAGLE heads will name the
    base's hidden states). Calls come from one thread, in order.
    """

    name: str
    needs: frozenset[str]

    def open(self, request: int, sampling: Sampling) -> None:
        """Start a request; its guesses are ranked with the request's shared noise."""

    def refresh(self, request: int, context: Sequence[int], depth: int, width: int) -> DraftedTree:
        """Grow a fresh tree below the last token of `context` (all certain tokens, in order).

        `depth` levels below the root; at every level the `width` best frontier guesses get
        `width` children each (EAGLE-2; FlowSpec §3.2, initial tree generation). The contexts of
        one request only grow. Returns every candidate, at most width + (depth - 1) * width**2;
        fewer levels, or none, near the end of the draft model's own context.
        """

    def deepen(self, request: int, levels: int, width: int) -> DraftedTree:
        """Grow the last tree by `levels` more (FlowSpec §3.4, score-aware); return all of it."""

    def expand(
        self, request: int, context: Sequence[int], paths: Sequence[Sequence[int]], width: int
    ) -> Children:
        """Guess the `width` best children of each path behind `context`, in one forward pass.

        An empty path stands for the context's last token. The contexts of one request only grow
        (those of `refresh` included). Rows that were run before and still lie behind the context
        are not run again, whatever `refresh` or `expand` ran them; a path's missing ancestors are
        run with it. No children for paths past the end of the draft model's own context.
        """

    def take_work(self) -> tuple[int, ...]:
        """Rows of each forward pass since the last call, in order: what a device is charged for."""

    def close(self, request: int) -> None:
        """Free the request's cache; unknown requests are ignored."""
