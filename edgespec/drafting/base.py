"""The draft source interface: who guesses what comes next, and what it needs to do so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from edgespec.tree.drafted import DraftedTree
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

    def close(self, request: int) -> None:
        """Free the request's cache; unknown requests are ignored."""
