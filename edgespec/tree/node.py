"""Nodes of a draft tree, and what a walk along target tokens committed of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from edgespec.tree.ledger import Rows
from edgespec.tree.waiting import Expansion


@dataclass(slots=True)
class TreeNode:
    """One guessed (or, at the root, committed) token at an absolute position.

    `drafted`: its own natural-log score as the draft source gave it, if it came of an expansion.
    `rank`: how many guesses of that expansion were better, 0 for the best. `expanded`: its children
    have been, or are being, asked of the draft source. `sources`: which of the draft source's
    members guessed it, as bits (see tree.drafted); none for a token that no source guessed.
    `children`: ids of its nodes by token; `waiting`: what the newest expansion of it brought.
    """

    id: int
    parent: int
    token: int
    position: int
    score: float
    drafted: float | None = None
    rank: int = 0
    expanded: bool = False
    sources: int = 0
    sent: bool = False
    target_token: int | None = None
    children: dict[int, int] = field(default_factory=dict)
    waiting: Expansion | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Advance:
    """What verification committed: new tokens, the nodes passed on the way, hit or miss.

    `passed` are the ids whose target tokens were used, in order; the i-th gave `tokens[i]`.
    `missed`: the last token was not in the tree, so that nothing else of it is left. `outcomes`:
    for every guess (of an expansion) below the nodes passed, its own score and whether it was
    right: what scores can be calibrated by. `ranks`: for every node passed that had been expanded,
    the rank of the guess that was right, None if none was. `sources`: for every token, who had
    guessed it (see TreeNode). `before`: the tree's nodes by id before it was pruned, for watchers.
    """

    tokens: tuple[int, ...]
    passed: tuple[int, ...]
    missed: bool
    outcomes: tuple[tuple[float, bool], ...] = ()
    ranks: tuple[int | None, ...] = ()
    sources: tuple[int, ...] = ()
    before: Mapping[int, TreeNode] = field(default_factory=dict, repr=False, compare=False)


def rows_of(nodes: Sequence[TreeNode]) -> Rows:
    """The rows that nodes travel as."""
    return Rows(
        np.array([n.id for n in nodes], np.int64),
        np.array([n.parent for n in nodes], np.int64),
        np.array([n.token for n in nodes], np.int64),
        np.array([n.position for n in nodes], np.int64),
    )
