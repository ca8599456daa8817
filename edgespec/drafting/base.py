"""The interfaces of drafting: a guesser says what may follow, a draft source grows trees of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

from edgespec.planning.cost_model import DraftPass
from edgespec.tree.drafted import Children, DraftedTree
from edgespec.types.features import NO_FEATURES, PPD_TOKENS, Features, PPDTable
from edgespec.verify.sampling import Sampling

TokenPath = Sequence[int]
"""Tokens of a guess and its ancestors, from the first behind the context on."""


class Guesser(Protocol):
    """Guesses what comes next; keeps its own cache for every open request.

    `needs`: which of types.features it must be given beyond tokens. Calls come from one thread,
    in order, and name open requests only.
    """

    @property
    def name(self) -> str:
        """What results and messages call it."""

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of its members, in the order of the bits of Children.sources; a guesser without
        members is its own."""

    @property
    def needs(self) -> frozenset[str]:
        """FINAL_HIDDEN and the like; empty if tokens are enough."""

    def open(self, request: int, sampling: Sampling) -> None:
        """Start a request, or begin one again; guesses are ranked with its shared noise."""

    def inherit(self, request: int, base: int, rows: int) -> None:
        """The first `rows` tokens of `request`, which was just opened, are those of `base`, which
        is about to be closed: what was read of them need not be read again, and their features do
        not come again. Ignored if `base` is unknown."""

    def read(self, request: int, context: Sequence[int], features: Features) -> bool:
        """Make `context` the committed tokens; it only grows. False if nothing can be guessed
        behind it, in which case the context read last stays. `features` are taken in either way."""

    def guess(self, request: int, paths: Sequence[TokenPath], width: int) -> Children:
        """The `width` best children of each path behind the context read last; width >= 1.

        An empty path stands for the context's last token. Scores are the guesses' own, given their
        path. Paths that nothing can be said about have none.
        """

    def take_work(self) -> tuple[DraftPass, ...]:
        """The forward passes since the last call, in order: what a device is charged for."""

    def close(self, request: int) -> None:
        """Free the request's cache; unknown requests are ignored."""


class Prompting(Protocol):
    """A Guesser or DraftSource that needs PPD_TOKENS."""

    @property
    def prompts(self) -> PPDTable:
        """Their vectors."""


def prompts_of(source: object) -> PPDTable | None:
    """The vectors of the prompt rows that a Guesser or DraftSource needs; None if it needs none."""
    if source is None or PPD_TOKENS not in cast("Guesser", source).needs:
        return None
    return cast("Prompting", source).prompts


class DraftSource(Protocol):
    """Grows trees of guesses; what machines and backends see of drafting.

    Calls come from one thread, in order.
    """

    @property
    def name(self) -> str:
        """What results and messages call it."""

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of its members, in the order of the bits of Children.sources; a source without
        members is its own."""

    @property
    def needs(self) -> frozenset[str]:
        """Which of types.features it must be given beyond tokens."""

    def open(self, request: int, sampling: Sampling) -> None:
        """Start a request; its guesses are ranked with the request's shared noise."""

    def inherit(self, request: int, base: int, rows: int) -> None:
        """The first `rows` tokens of `request`, which was just opened, are those of `base`, which
        is about to be closed: what was read of them need not be read again, and their features do
        not come again. Ignored if `base` is unknown."""

    def refresh(
        self,
        request: int,
        context: Sequence[int],
        depth: int,
        width: int,
        features: Features = NO_FEATURES,
    ) -> DraftedTree:
        """Grow a fresh tree below the last token of `context` (all committed tokens, in order).

        `depth` levels below the root; at every level the `width` best frontier guesses get
        `width` children each (EAGLE-2; FlowSpec §3.2, initial tree generation). The contexts of
        one request only grow. Returns every candidate, at most width + (depth - 1) * width**2;
        fewer levels, or none, where the guesser has nothing to say.
        """

    def deepen(self, request: int, levels: int, width: int) -> DraftedTree:
        """Grow the last tree by `levels` more (FlowSpec §3.4, score-aware); return all of it."""

    def expand(
        self,
        request: int,
        context: Sequence[int],
        paths: Sequence[TokenPath],
        width: int,
        features: Features = NO_FEATURES,
    ) -> Children:
        """Guess the `width` best children of each path behind `context`.

        An empty path stands for the context's last token. The contexts of one request only grow
        (those of `refresh` included). A model runs what it lacks in one forward pass, a path's
        missing ancestors included (a head that reads its own output: one for each level); rows that
        were run before and still lie behind the context are not run again, whatever `refresh` or
        `expand` ran them, unless what they read is known better by now. No children for paths that
        the guesser can say nothing about.
        """

    def take_work(self) -> tuple[DraftPass, ...]:
        """The forward passes since the last call, in order: what a device is charged for."""

    def close(self, request: int) -> None:
        """Free the request's cache; unknown requests are ignored."""
