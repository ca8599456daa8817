"""A tree grower that is asked about one request alone, and at once."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.drafting.base import TokenPath
from edgespec.drafting.grower import NOTHING_FURTHER, Further, TreeGrower
from edgespec.drafting.steps import alone
from edgespec.sim.oracle import Oracle
from edgespec.tree.drafted import Children, DraftedTree
from edgespec.types.features import NO_FEATURES, Features


class SoloGrower(TreeGrower):
    """`refresh`, `deepen` and `expand` are what TreeGrower's steps come to."""

    def refresh(
        self,
        request: int,
        context: Sequence[int],
        depth: int,
        width: int,
        features: Features = NO_FEATURES,
    ) -> DraftedTree:
        return alone(self.refreshing(request, context, depth, width, features))

    def deepen(self, request: int, levels: int, width: int) -> DraftedTree:
        return alone(self.deepening(request, levels, width))

    def expand(
        self,
        request: int,
        context: Sequence[int],
        paths: Sequence[TokenPath],
        width: int,
        features: Features = NO_FEATURES,
        further: Further = NOTHING_FURTHER,
    ) -> Children:
        return alone(self.expanding(request, context, paths, width, features, further))


class SoloOracle(Oracle, SoloGrower):
    """The same of an oracle."""
