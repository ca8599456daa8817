"""Hints on the coordinator: which stages are asked, and what they say mixed with the draft's word.

A hint says which tokens may come behind a row that has not come round yet. Guesses below the row
get fresh scores, likely tokens that nobody guessed become guesses, and the policy is asked again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgespec.machines.effects import Effect, SendStages
from edgespec.policy.hint_mix import HintMix
from edgespec.policy.row_times import LONGEST_S
from edgespec.tree.draft_tree import DraftTree
from edgespec.tree.node import Advance, TreeNode
from edgespec.types.record import IntArray
from edgespec.types.tensor import NO_LAYERS, Layers
from edgespec.verify.noise import gumbel
from edgespec.wire.hints import Hint, Lenses
from edgespec.wire.segment import MOST_LAYERS

if TYPE_CHECKING:
    from edgespec.decoding.request import Request

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


def _count_for(request: Request) -> bool:
    """Whether hints are of use to it: stages know nothing of an answer's rules."""
    return request.policy.pool is not None and not request.rules


class HintingStages:
    """The stages of a ring that can give hints, and which of them are asked."""

    def __init__(self, lenses: Lenses | None) -> None:
        """`lenses`: what they read their rows with; None: there are no hints."""
        self._lenses = lenses
        self._stages: tuple[int, ...] = ()
        self._count = 0

    def ring_up(self, ends: Sequence[int]) -> list[Effect]:
        """A ring is up whose stages have these layers behind their last one: give them lenses."""
        if self._lenses is None:
            return []
        self._count, layers = len(ends), self._lenses.layers
        able = tuple(n for n, end in enumerate(ends[:-1], 1) if end in layers)
        self._stages = able[-MOST_LAYERS:]
        return [SendStages(self._lenses)] if able else []

    def asked(self, request: Request) -> Layers:
        """Those that shall give hints about rows of this request that leave now."""
        if not self._stages or not _count_for(request) or not request.estimates.step.known:
            return NO_LAYERS
        learnt, sampling = request.estimates, request.sampling.without_seed
        step, own = learnt.step.seconds(1), learnt.own

        def pays(stage: int) -> bool:
            return learnt.hint_mix(sampling, stage).pays((self._count - stage) * step + own)

        return Layers(tuple(filter(pays, self._stages)))

    def fits(self, hint: Hint) -> bool:
        """Whether it can be one of this ring's stages', and of tokens that there are."""
        if self._lenses is None or hint.stage not in self._stages:
            return False
        return int(hint.tokens.max()) < self._lenses.up.shape[0]


class RequestHints:
    """The newest hint about each live node of one request on one ring."""

    def __init__(self) -> None:
        self._told: dict[int, _Told] = {}

    def take(self, request: Request, hint: Hint) -> bool:
        """Score guesses by it; False if it says nothing of use: of no live row, of rows that are
        back or of which a later stage has told."""
        tree, last = request.tree, request.last_position
        if tree is None or not _count_for(request) or not request.hinting.fits(hint):
            return False
        self._mix(request, hint.stage).took(min(hint.seconds, LONGEST_S))
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
            if node.position >= last or (before is not None and before.stage >= hint.stage):
                continue
            self._told[node_id] = _Told(hint.stage, tokens[row], scores[row])
            self.score(request, (node_id,))
            used = True
        return used

    def score(self, request: Request, ids: Sequence[int]) -> None:
        """Score the guesses below nodes by what is known of these; they may be new."""
        tree = request.tree
        assert tree is not None
        for one in ids if self._told else ():
            if one in self._told and one in tree:
                told = self._told[one]
                both = _Both(request, tree, tree[one], told)
                own = self._mix(request, told.stage).log_probs(both.hinted, both.drafted)[:-1]
                tree.rescore(one, dict(zip(both.tokens, own.tolist(), strict=True)), _ADD)

    def learn(self, request: Request, step: Advance) -> None:
        """A walk has shown what came behind the nodes that it passed."""
        for node_id, token in zip(step.passed, step.tokens, strict=True):
            told = self._told.get(node_id)
            if told is not None and step.before is not None:
                both = _Both(request, step.before, step.before[node_id], told)
                at = both.tokens.index(token) if token in both.tokens else -1
                mix = self._mix(request, told.stage)
                mix.learn(both.hinted, both.drafted, at)
        if request.tree is not None:
            tree = request.tree
            self._told = {one: told for one, told in self._told.items() if one in tree}

    @staticmethod
    def _mix(request: Request, stage: int) -> HintMix:
        return request.estimates.hint_mix(request.sampling.without_seed, stage)


class _Both:
    """What a hint and the draft say of the `tokens` behind a node and, last, of none of them:
    natural-log scores `hinted` and `drafted`."""

    def __init__(
        self,
        request: Request,
        nodes: DraftTree,
        node: TreeNode,
        told: _Told,
    ) -> None:
        sampling = request.sampling
        calibration = request.estimates.calibration(sampling.without_seed)
        children = {token: nodes[child].drafted for token, child in node.children.items()}
        told_own = {token: own for token, own in children.items() if own is not None}
        scores = calibration.scores(np.array([*told_own.values()])).tolist()
        guessed = dict(zip(told_own, scores, strict=True))
        named = dict(zip(told.tokens.tolist(), told.scores.tolist(), strict=True))
        self.tokens = list(dict.fromkeys((*named, *children)))
        self.hinted = _with_rest(self.tokens, named)
        self.drafted = _with_rest(self.tokens, guessed)
        if not sampling.greedy:  # what the base will add to each; the draft's scores have it
            noise = gumbel(sampling.seed, node.position + 1, np.array(self.tokens))
            self.hinted[:-1] += sampling.temperature * noise


def _with_rest(tokens: list[int], named: dict[int, float]) -> Floats:
    """The scores of tokens, those that are named and others, and of what is left."""
    left = math.log(max(1.0 - math.fsum(map(math.exp, named.values())), _LEFT))
    scores = [named.get(token, left + _UNNAMED) for token in tokens]
    return np.array([*scores, left])
