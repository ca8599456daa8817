"""Shared: what the requests of one coordinator share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from edgespec.decoding.d0_times import D0Times
from edgespec.decoding.flights import Flights
from edgespec.decoding.ppd_rows import ChainValues
from edgespec.policy.estimates import Learnt
from edgespec.tree.draft_tree import DraftTree
from edgespec.tree.node import Advance
from edgespec.types.features import PPDTable


class WalkWatcher(Protocol):
    """Looks on as trees are walked, if anybody watches."""

    is_watched: bool

    def walked(self, request: int, prefix: int, tree: DraftTree, step: Advance) -> None:
        """The tree of a request with so long a prefix was walked."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What the requests of one coordinator share. `ppd`: for a draft source that needs PPD rows.
    `learnt`: what requests of each policy taught. `most_ahead`: how many positions behind the root
    guesses may be. `spare_rows`: cache rows that a request may take beside those of its tokens."""

    flights: Flights
    d0: D0Times
    watcher: WalkWatcher
    ppd: tuple[PPDTable, ChainValues] | None
    learnt: Learnt
    most_ahead: int
    spare_rows: int
