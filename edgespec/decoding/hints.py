"""Hints on the coordinator: which stages are asked, and what they say mixed with the draft's word.

A hint says which tokens may come behind a row that has not come round yet. Guesses below the row
get fresh scores, likely tokens that nobody guessed become guesses, and the policy is asked again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgespec.machines.effects import Effect, SendStages
from edgespec.policy.estimates import RingEstimates
from edgespec.policy.hint_mix import HintMix
from edgespec.policy.row_times import LONGEST_S
from edgespec.tree.draft_tree import DraftTree
from edgespec.tree.node import Advance, TreeNode
from edgespec.types.record import IntArray
from edgespec.types.tensor import NO_LAYERS, Layers
from edgespec.verify.noise import gumbel
from edgespec.verify.sampling import Sampling
from edgespec.wire.hints import Hint, Lenses
from edgespec.wire.segment import MOST_LAYERS

Floats = npt.NDArray[np.float64]

_LEFT = 1e-4
"""Neither side leaves less than this to the tokens that it does not name."""
_UNNAMED = math.log(1 / 50)
"""One of those gets this of what is left to all of them."""
_ADD = math.log(0.02)
"""Tokens that are less likely do not become guesses."""


@dataclass(frozen=True, slots=True)
class _Told:
    """The newest hint about one node: of stage `stage`, natural-log `scores` of `tokens`."""

    stage: int
    tokens: IntArray
    scores: Floats


class HintingStages:
    """The stages of a ring that can give hints, and which of them are asked."""

    def __init__(self, lenses: Lenses) -> None:
        """`lenses`: what they read their rows with."""
        self._lenses = lenses
        self._stages: tuple[int, ...] = ()
        self._count = 0

    def ring_up(self, ends: Sequence[int]) -> list[Effect]:
        """A ring is up whose stages have these layers behind their last one: give them lenses."""
        self._count, layers = len(ends), self._lenses.layers
        able = tuple(n for n, end in enumerate(ends[:-1], 1) if end in layers)
        self._stages = able[-MOST_LAYERS:]
        return [SendStages(self._lenses)] if able else []

    def that_pay(self, learnt: RingEstimates, way: Sampling) -> Layers:
        """Those whose hints about rows that leave now are worth a lens's work, by what is known of
        them for that way of sampling."""
        if not self._stages or not learnt.step.known:
            return NO_LAYERS
        step, own = learnt.step.seconds(1), learnt.own

        def pays(stage: int) -> bool:
            return learnt.hint_mix(way, stage).pays((self._count - stage) * step + own)

        return Layers(tuple(filter(pays, self._stages)))

    def could_give(self, hint: Hint) -> bool:
        """Whether it can be one of this ring's stages', and of tokens that there are."""
        known = hint.stage in self._stages
        return known and int(hint.tokens.max()) < self._lenses.up.shape[0]


class RequestHints:
    """The newest hint about each live node of one request on one ring."""

    def __init__(
        self, stages: HintingStages, estimates: RingEstimates, sampling: Sampling, last: int
    ) -> None:
        """`sampling`: of the request, and `last` the position behind which no guess is of use."""
        self._stages, self._estimates, self._sampling = stages, estimates, sampling
        self._way = sampling.without_seed
        self._last_position = last
        self._told: dict[int, _Told] = {}

    @property
    def asked(self) -> Layers:
        """The stages that shall give hints about rows that leave now."""
        return self._stages.that_pay(self._estimates, self._way)

    def take(self, hint: Hint, tree: DraftTree) -> bool:
        """Score guesses by it; False if it says nothing of use: of no live row, of rows that are
        back or of which a later stage has told."""
        if not self._stages.could_give(hint):
            return False
        self._mix(hint.stage).took(min(hint.seconds, LONGEST_S))
        count = hint.log_probs.shape[1]
        scores = np.frombuffer(hint.log_probs.data, "<f4").reshape(-1, count).astype(np.float64)
        tokens = hint.tokens.reshape(-1, count)
        used = False
        for row, node_id in enumerate(hint.ids.tolist()):
            if node_id not in tree:
                continue
            node = tree[node_id]
            if not node.sent or node.target_token is not None:
                continue
            before = self._told.get(node_id)
            is_late = before is not None and before.stage >= hint.stage
            if node.position >= self._last_position or is_late:
                continue
            self._told[node_id] = _Told(hint.stage, tokens[row], scores[row])
            self.score(tree, (node_id,))
            used = True
        return used

    def score(self, tree: DraftTree, ids: Sequence[int]) -> None:
        """Score the guesses below nodes by what is known of these; they may be new."""
        for one in ids if self._told else ():
            if one in self._told and one in tree:
                told = self._told[one]
                tokens, hinted, drafted = self._both(tree, tree[one], told)
                own = self._mix(told.stage).log_probs(hinted, drafted)[:-1]
                tree.rescore(one, dict(zip(tokens, own.tolist(), strict=True)), _ADD)

    def learn(self, step: Advance, tree: DraftTree) -> None:
        """A walk has shown what came behind the nodes that it passed."""
        for node_id, token in zip(step.passed, step.tokens, strict=True):
            told = self._told.get(node_id)
            if told is not None and step.before is not None:
                tokens, hinted, drafted = self._both(step.before, step.before[node_id], told)
                at = tokens.index(token) if token in tokens else -1
                self._mix(told.stage).learn(hinted, drafted, at)
        self._told = {one: told for one, told in self._told.items() if one in tree}

    def _mix(self, stage: int) -> HintMix:
        return self._estimates.hint_mix(self._way, stage)

    def _both(
        self, nodes: DraftTree, node: TreeNode, told: _Told
    ) -> tuple[list[int], Floats, Floats]:
        """The tokens that a hint or the draft name behind a node, and what either says of these
        and, last, of none of them: natural-log scores."""
        sampling, calibration = self._sampling, self._estimates.calibration(self._way)
        children = {token: nodes[child].drafted for token, child in node.children.items()}
        told_own = {token: own for token, own in children.items() if own is not None}
        scores = calibration.scores(np.array([*told_own.values()])).tolist()
        guessed = dict(zip(told_own, scores, strict=True))
        named = dict(zip(told.tokens.tolist(), told.scores.tolist(), strict=True))
        tokens = list(dict.fromkeys((*named, *children)))
        hinted = _with_rest(tokens, named)
        if not sampling.greedy:  # what the base will add to each; the draft's scores have it
            noise = gumbel(sampling.seed, node.position + 1, np.array(tokens))
            hinted[:-1] += sampling.temperature * noise
        return tokens, hinted, _with_rest(tokens, guessed)


def _with_rest(tokens: list[int], named: dict[int, float]) -> Floats:
    """The scores of tokens, those that are named and others, and of what is left."""
    left = math.log(max(1.0 - math.fsum(map(math.exp, named.values())), _LEFT))
    scores = [named.get(token, left + _UNNAMED) for token in tokens]
    return np.array([*scores, left])
