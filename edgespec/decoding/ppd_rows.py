"""PPD rows: trained vectors that travel below a request's guesses, and guess what comes next.

To the ring they are rows like all others: children of a node, and of each other. No real row hangs
from one, so that by the rule of visibility none sees one, and whatever they hold changes no token.
The first stage gets their vectors with the segment; the others do not know that they are special.

How many each guess should carry (PPD §4, dynamic sparse trees): a chain of k rows below a node pays
if the base's own path ends its run of right guesses at that node: the chain then says what may come
in the next k levels. So what matters is how likely a node is to be the last right one, how much
more a longer chain brings, and what a row costs here.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np

from edgespec.policy.row_times import StepTimes
from edgespec.tree.draft_tree import DraftTree
from edgespec.tree.ledger import IntArray, Rows
from edgespec.tree.node import Advance
from edgespec.types.features import PPDTable
from edgespec.types.tensor import Tensor

MOST_ROWS = 48
"""Prompt rows of one segment, so that a wrong first idea of the costs stays cheap."""

LEAST_GAIN = 1 / 64
"""Expected tokens that a prompt row must bring, however little it costs."""

PRIOR_SHARES = (0.78, 0.59)
"""How often the right token is among the guesses 1, 2, … tokens ahead, before anything is known
(top 5 of Vicuna-7B's: PPD, Figure on accuracy by distance); each one further ahead is as much worse
than the one before as the second is than the first."""

PRIOR_WEIGHT = 16.0
"""Guesses that this counts for."""

PATIENCE = 16
"""Segments in a row without a chain, as none paid, before one has a chain all the same."""


class ChainValues:
    """What chains of 1, 2, … prompt rows are worth, learnt from what became of their guesses."""

    def __init__(self, depth: int) -> None:
        """Chains have at most `depth` rows."""
        prior = list(PRIOR_SHARES)
        while len(prior) < depth:
            prior.append(prior[-1] * PRIOR_SHARES[1] / PRIOR_SHARES[0])
        self._tried = [PRIOR_WEIGHT] * depth
        self._right = [PRIOR_WEIGHT * share for share in prior[:depth]]
        self._without = 0  # segments in a row that got no chain
        # Lengths of late of the chains at the root, one level below, …: what a round may end with.
        self._lengths = [float(depth)] * (depth + 1)

    @property
    def depth(self) -> int:
        """The longest chain."""
        return len(self._tried)

    def learn(self, ahead: int, was_right: bool) -> None:
        """The token so many ahead of a chain's node, from 1, was, or was not, among the guesses."""
        self._tried[ahead - 1] += 1.0
        self._right[ahead - 1] += was_right

    def hung(self, level: int, length: int, share: float) -> None:
        """A node so many levels below the root, 0 for itself, where a run ends with probability
        `share`, got a chain of that length."""
        if level < len(self._lengths):
            self._lengths[level] += (length - self._lengths[level]) * share / 8

    def gains(self) -> tuple[list[float], float]:
        """What the first, second, … row of a chain adds to the tokens of the round that begins with
        it, and what an average round commits beside the base's own token.

        A round that begins with a chain of k rows has guesses k levels deep, runs until one is
        wrong, and the next begins with the chain of the node where it ended. Those are the states
        of PPD's dynamic tree (§4.2). A run that ends at the root itself goes on with the root's
        chain, which its code leaves out. With v, the value of a state beyond the average round,
        now and later, v = f - R + P v.
        """
        size = self.depth + 1
        # How often the guesses so many tokens ahead hold the right one, those before it right.
        shares = [right / tried for right, tried in zip(self._right, self._tried, strict=True)]
        reached = np.cumprod([1.0, *shares])  # of level d, if the guesses go that far
        made = np.cumsum([0.0, *reached[1:]])
        goes_on = np.zeros((size, size))
        for length in range(size):
            for level in range(length + 1):
                ends = reached[level] - (reached[level + 1] if level < length else 0.0)
                goes_on[length, round(self._lengths[level])] += ends
        # Unknown: the values of all states but the first, which is 0, and R in its place.
        system = np.eye(size) - goes_on
        system[:, 0] = 1.0
        average = float(np.linalg.lstsq(system, made, rcond=None)[0][0])
        return reached[1:].tolist(), max(average, 0.0)

    def lengths(
        self, ends: Sequence[float], longest: Sequence[int], rows: int, copies: int, step: StepTimes
    ) -> list[int]:
        """How long a chain each node of a segment should have.

        `ends`: how likely each node is to be the last right one; `longest`: what its place allows;
        `rows`: the segment's own; `copies`: prompt rows of one link. Links are added in the order
        of what they bring, as long as the tokens a step that one adds outweigh the time that it
        adds to a step (hardware-aware size, PPD §4.3, at the margin).
        """
        gains, made = self.gains()
        chains = [0] * len(ends)
        best = max(range(len(ends)), key=ends.__getitem__, default=0)
        self._without += 1
        if ends and self._without > PATIENCE:  # the shares are old by now: learn them again
            self._without = 0
            chains[best] = min(longest[best], len(gains))
            return chains
        heap = [(-share * gains[0], node) for node, share in enumerate(ends) if longest[node] > 0]
        heapq.heapify(heap)
        total = rows
        while heap and total + copies <= rows + MOST_ROWS:
            loss, node = heapq.heappop(heap)
            if -loss < LEAST_GAIN or not _pays(-loss / (1.0 + made), total, copies, step):
                continue
            chains[node] += 1
            total += copies
            if chains[node] < min(longest[node], len(gains)):
                heapq.heappush(heap, (-ends[node] * gains[chains[node]], node))
        if any(chains):
            self._without = 0
        return chains


def _pays(share: float, rows: int, more: int, step: StepTimes) -> bool:
    """Whether so much more of a step's tokens outweighs what `more` rows add to its time."""
    if not step.sloped:
        return True
    now = step.seconds(max(rows, 1))
    return share * now >= step.seconds(rows + more) - now


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

    def chains_back(self, wanted: frozenset[int], ids: IntArray, hidden: Tensor) -> None:
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


def _ends_here(tree: DraftTree, node: int) -> float:
    """How likely a node is to be right, and none of its children."""
    below = sum(math.exp(tree.score(child)) for child in tree.children(node))
    return max(math.exp(tree.score(node)) - below, 0.0)
