"""PPD chains: how many PPD rows each guess should carry (PPD §4, dynamic sparse trees).

A chain of k PPD rows below a node pays if the base's own path ends its run of right guesses at
that node: the chain then says what may come in the next k levels. So what matters is how likely a
node is to be the last right one, how much more a longer chain brings, and what a row costs here.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from edgespec.policy.row_times import StepTimes

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
