"""Nodes of a draft tree, and what a walk along target tokens committed of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgespec.tree.draft_tree import DraftTree


@dataclass(frozen=True, slots=True)
class TreeNode:
    """One guessed (or, at the root, committed) token at an absolute position, as it is now.

    `score`: cumulative, as the tree counts it. `drafted`: its own natural-log score as the draft
    source gave it, if it came of an expansion. `rank`: how many guesses of that expansion were
    better, 0 for the best. `expanded`: its children have been, or are being, asked of the draft
    source. `sources`: which of the draft source's members guessed it, as bits (see tree.drafted);
    none for a token that no source guessed. `children`: ids by token.
    """

    id: int
    parent: int
    token: int
    position: int
    score: float
    drafted: float | None
    rank: int
    sources: int
    sent: bool
    expanded: bool
    children: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Advance:
    """What verification committed: new tokens, the nodes passed on the way, hit or miss.

    `passed` are the ids whose target tokens were used, in order; the i-th gave `tokens[i]`.
    `missed`: the last token was not in the tree, so that nothing else of it is left. `outcomes`:
    for every guess (of an expansion) below the nodes passed, its own score and whether it was
    right: what scores can be calibrated by. `ranks`: for every node passed that had been expanded,
    the rank of the guess that was right, None if none was. `sources`: for every token, who had
    guessed it (see TreeNode). `before`: the tree before it was pruned, until it is walked again;
    None if nothing was passed.
    """

    tokens: tuple[int, ...]
    passed: tuple[int, ...]
    missed: bool
    outcomes: tuple[tuple[float, bool], ...] = ()
    ranks: tuple[int | None, ...] = ()
    sources: tuple[int, ...] = ()
    before: DraftTree | None = field(default=None, repr=False, compare=False)
