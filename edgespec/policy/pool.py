"""Pool: which rows of all requests pay, and which of their guesses to expand.

The rows of several requests share a step of the ring, and their guesses a pass of the draft source.
All of them compete: they are taken in descending probability of being on their model's path, as
long as the expected gain of one covers the time that it adds, which all in a step pay. So
one request alone gets deep trees, several get shallower ones, and of many only the roots are left:
plain decoding with a full pipeline.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from itertools import islice

from edgespec.policy.base import RequestView
from edgespec.policy.estimates import RingEstimates
from edgespec.tree.nodes import Key

LEAST_SHARE = 1 / 32
"""Nothing is started, neither a segment nor a forward pass of the draft, for guesses that are
less likely than this to be on the model's path (of a segment, all its rows together; of a forward
pass, the best node)."""

LEAST_NODE = 1 / 144
PART_OF_ROW = 1 / 4
"""No node is expanded, beside the first, that is less likely than the one, or than this part of
what a row must be to pay in a segment of two: its guesses would hardly ever leave."""

Chosen = list[tuple[int, ...]]
"""Nodes of each request, the best first."""

Offer = tuple[float, int, int]
"""A node that competes: the negative score, the request's place, the node."""


def rows_that_pay(
    views: Sequence[RequestView], ahead: int, most: int, share: int, beside: int = 0
) -> Chosen:
    """The best unsent rows of these requests, `most` in all, as long as each one's gain covers its
    cost. At most `share` requests send a new root, those that stand first.

    Gain: a row that is right comes home earlier than if it waited for the next segment, by one
    step of the pipeline or by D0's work for a segment if that takes longer. Cost: the time that
    it adds to a step, for all that follow. While the segment is no longer than the one `ahead` of
    it, it waits for that one at every stage anyway; beyond, a row adds its time to this
    segment's own way at each stage that it reaches.

    `beside`: rows of a prompt that leave with them. They make the step longer, and each counts as a
    token that it gives: it takes as much of a step whenever it is read. (Where the rows before a
    prompt's were chosen as if alone, 64 requests at once gave 0.93 of what they give without a
    draft.)
    """
    estimates = views[0].estimates
    step, own = estimates.step, estimates.own
    taken: list[list[int]] = [[] for _ in views]
    stay: set[int] = set()  # requests whose roots do not leave, nor may any row go before them
    count, total, roots = beside, float(beside), 0
    for score, index, node in _in_order([view.tree.unsent_keys() for view in views]):
        chance = math.exp(-score)
        if index in stay:
            continue
        if node == views[index].tree.root:
            if roots == share:
                stay.add(index)
                continue
            roots += 1
        elif count:
            longer = step.seconds(count + 1)
            added = longer - step.seconds(count)
            times = estimates.reach if count >= ahead else 1.0
            cost = added * times * paid_by(total, chance, len(views))
            if chance * max(longer, own) < cost:
                break
        taken[index].append(node)
        count += 1
        total += chance
        if count == beside + most:
            break
    return list(map(tuple, taken)) if total - beside >= LEAST_SHARE else [() for _ in views]


def nodes_that_pay(views: Sequence[RequestView], most: int) -> Chosen:
    """The best nodes of these requests to expand in one pass, `most` in all, as long as each one's
    gain covers the time that it adds.

    Gain as above: the children of a node that is right can leave in the next segment. They are
    not guessed before the next pass ends if not in this one. No root and no head waits for a pass,
    so that the time is paid by the next pass alone, however many requests there are.
    """
    estimates = views[0].estimates
    draft = estimates.draft
    taken: list[list[int]] = [[] for _ in views]
    pace = max(estimates.step.seconds(1), estimates.own)
    shorter = draft.seconds(1) if draft.known else 0.0
    # Beside a stage of D0's own what is not guessed before the root leaves may never be.
    least = 0.0 if views[0].own_stage else _least_node(estimates)
    queues = [view.tree.frontier_keys(view.depth_left) for view in views]
    for count, (score, index, node) in enumerate(islice(_in_order(queues), most)):
        chance = math.exp(-score)
        if count == 0:
            worth = chance >= LEAST_SHARE or not draft.known
        elif draft.known:
            longer = draft.seconds(count + 1)
            worth = chance >= least and chance * pace >= longer - shorter
            shorter = longer
        else:
            worth = False  # one, to find out what it takes
        if not worth:
            break
        taken[index].append(node)
    return list(map(tuple, taken))


def _in_order(queues: Sequence[Iterator[Key]]) -> Iterator[Offer]:
    """The nodes that each request offers in turn, the best of all first."""

    def offers(index: int, keys: Iterator[Key]) -> Iterator[Offer]:
        return ((score, index, node) for score, node in keys)

    if len(queues) == 1:
        return offers(0, queues[0])
    return heapq.merge(*map(offers, range(len(queues)), queues))


def _least_node(estimates: RingEstimates) -> float:
    """The least chance with which a node is worth expanding at the price of a row now."""
    step = estimates.step
    two = max(step.seconds(2), estimates.own)
    if not step.sloped or not two:
        return LEAST_NODE
    return max(LEAST_NODE, PART_OF_ROW * (step.seconds(2) - step.seconds(1)) / two)


def least_that_pays(estimates: RingEstimates, count: int) -> float:
    """The least chance with which a node more is worth expanding in a pass for `count` of them; 0
    as long as it is not known what one more takes."""
    draft = estimates.draft
    if not draft.known or not count:
        return 0.0
    added = draft.seconds(count + 1) - draft.seconds(count)
    pace = max(estimates.step.seconds(1), estimates.own)
    return min(max(LEAST_SHARE, added / pace if pace else 0.0), 1.0)


def paid_by(yields: float, chance: float, requests: int) -> float:
    """How many tokens wait for the time that a row adds: of one request alone, one. Of several, the
    pass as it is would give `yields`, with the row `chance` more; nothing is gained by a row that
    gives fewer tokens a second than they do together."""
    return max(1.0, yields + chance) if requests > 1 else 1.0
