"""PPD rows: trained vectors that travel below a request's guesses, and guess what comes next.

To the ring they are rows like all others: children of a node, and of each other. No real row hangs
from one, so that by the rule of visibility none sees one, and whatever they hold changes no token.
The first stage gets their vectors with the segment; the others do not know that they are special.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from edgespec.decoding.ppd_chains import ChainValues
from edgespec.policy.row_times import StepTimes
from edgespec.tree.draft_tree import DraftTree
from edgespec.tree.ledger import IntArray, Rows
from edgespec.tree.node import Advance
from edgespec.types.features import PPDTable
from edgespec.types.tensor import Tensor

if TYPE_CHECKING:
    from edgespec.decoding.request import Request


class PPDRows:
    """The PPD rows of one request on one ring: which are under way, and what came of them."""

    def __init__(self, table: PPDTable, values: ChainValues) -> None:
        """`values` outlive the request: they are learnt from all of them."""
        self._table = table
        self._values = values
        self._flying: dict[int, tuple[int, ...]] = {}  # node: its chain's rows
        self._back: dict[int, Tensor] = {}  # node: its chain's hidden rows
        self._news: tuple[int, Tensor] | None = None  # position of the node, its chain's rows
        self._anchor, self._length = -1, 0  # of the chain that was handed over last
        self._ids: set[int] = set()

    def __contains__(self, row_id: int) -> bool:
        """Whether it is, or was, one of these rows."""
        return row_id in self._ids

    # --- on their way -------------------------------------------------------------------------

    def hang(
        self, tree: DraftTree, ids: Sequence[int], own: int, last_position: int, step: StepTimes
    ) -> Rows:
        """Rows of chains below those nodes, which travel with `own` rows of their own.

        Guesses after `last_position` could not be used.
        """
        table = self._table
        ends = [_ends_here(tree, node) for node in ids]
        room = [max(last_position - tree.position(node) - 1, 0) for node in ids]
        lengths = self._values.lengths(ends, room, own, table.copies, step)
        columns: list[tuple[int, int, int, int]] = []
        for node, length, share in zip(ids, lengths, ends, strict=True):
            at = tree.position(node)
            self._values.hung(at - tree.position(tree.root), length, share)
            if not length:
                continue
            given = tree.take_ids(length * table.copies)
            self._flying[node] = given
            for index, row in enumerate(given):
                above = given[index - table.copies] if index >= table.copies else node
                columns.append((row, above, -1 - index, at + 1 + index // table.copies))
        self._ids.update(column[0] for column in columns)
        return Rows(*np.array(columns, np.int64).reshape(-1, 4).T)

    def vectors(self, tokens: IntArray) -> Tensor | None:
        """What the first stage needs for a segment's rows, by `tokens`: the vectors of its prompt
        rows, which have the tokens -1, -2, …; None if it has none."""
        deepest = -int(tokens.min(initial=0))
        return self._table.rows.take(np.arange(deepest)) if deepest else None

    def awaited(self, tree: DraftTree) -> tuple[int, ...]:
        """Rows that no stage may drop: those under way below what is alive, or was right last."""
        self._forget(tree)
        return tuple(row for chain in self._flying.values() for row in chain)

    # --- back ---------------------------------------------------------------------------------

    def arrived(self, wanted: frozenset[int], ids: IntArray, hidden: Tensor) -> None:
        """A segment of the rows `wanted` came back with `ids` and their hidden rows."""
        place = {row: at for at, row in enumerate(ids.tolist())}
        for node, chain in list(self._flying.items()):
            if chain[0] in wanted:
                del self._flying[node]
                if place.keys() >= set(chain):
                    self._back[node] = hidden.take(np.array([place[row] for row in chain]))

    def settle(self, tree: DraftTree) -> None:
        """The tree advanced, or rows came back: take up the chain of the last node that was right,
        and let the nodes that it says something about be expanded again."""
        self._forget(tree)
        rows = self._back.pop(tree.parent(tree.root), None)
        if rows is not None:
            anchor = tree.position(tree.root) - 1
            self._news = anchor, rows
            tree.reopen(anchor + rows.shape[0] // self._table.copies)

    def walked(self, step: Advance, tree: DraftTree) -> None:
        """The tree was walked along `step.tokens`: learn whether the chain handed over last had
        guessed them (a token that was `missed` was no guess), and settle."""
        newest = tree.position(tree.root)
        for position in range(newest - len(step.tokens) + 1, newest + 1):
            ahead = position - self._anchor - 1
            if self._anchor >= 0 and 1 <= ahead <= self._length:
                self._values.learn(ahead, not (step.missed and position == newest))
        self.settle(tree)

    def take(self) -> tuple[int, Tensor] | None:
        """The newest chain that was not handed over yet: its node's position, its rows."""
        news, self._news = self._news, None
        if news is not None:
            self._anchor, self._length = news[0], news[1].shape[0] // self._table.copies
        return news

    def _forget(self, tree: DraftTree) -> None:
        """What hangs from nodes that are neither alive nor the last one that was right."""
        last = tree.parent(tree.root)
        dead = [n for n in (*self._flying, *self._back) if n not in tree and n != last]
        for node in dead:
            self._flying.pop(node, None)
            self._back.pop(node, None)


def with_chains(request: Request, rows: Rows, ids: Sequence[int]) -> Rows:
    """These rows of a request, with the PPD rows that hang from nodes `ids`, if it has any."""
    if request.ppd_rows is None:
        return rows
    assert request.tree is not None
    step = request.estimates.step
    last = request.last_position
    chains = request.ppd_rows.hang(request.tree, ids, len(rows), last, step)
    request.stats.ppd_rows += len(chains)
    return rows.joined(chains)


def _ends_here(tree: DraftTree, node: int) -> float:
    """How likely a node is to be right, and none of its children."""
    below = sum(math.exp(tree.score(child)) for child in tree.children(node))
    return max(math.exp(tree.score(node)) - below, 0.0)
