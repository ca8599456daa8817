"""Flights: what is remembered of a segment on the ring, and whether its result can be right."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.tree.draft_tree import DraftTree
from edgespec.wire.messages import Segment


@dataclass(frozen=True, slots=True)
class InFlight:
    """A segment on the ring: whose it is, and when it entered (stage steps, see RingClock).

    `wanted`: ids of the rows that may come back, of `rows` in all.
    """

    request: int
    entered: int
    committed: bool
    wanted: frozenset[int]
    rows: int

    def fits(self, result: Segment) -> bool:
        """Whether `result` can be what a stage made of this segment."""
        ids = result.ids.tolist()
        return (
            result.committed == self.committed
            and self.wanted.issuperset(ids)
            and (result.hidden is not None or not ids)
            and all(time.rows <= self.rows for time in result.ran)
        )

    def lacks_live_rows(self, result: Segment, tree: DraftTree | None) -> bool:
        """Whether a stage dropped rows that no retained set has dropped: it could not go on.

        Live nodes are in every retained set, so that only a failing stage can lose them.
        """
        missing = self.wanted.difference(result.ids.tolist())
        return any(tree is None or i in tree for i in missing)
