"""Policies without machines: views made by hand, and one request played in any order."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from support.growers import SoloOracle

from edgespec.policy.base import (
    Decision,
    Deepen,
    Expand,
    Grow,
    Policy,
    Pooled,
    RequestView,
    Results,
    Send,
)
from edgespec.policy.calibration import Calibration
from edgespec.policy.estimates import RingEstimates
from edgespec.sim.toy import VOCABULARY
from edgespec.tree.draft_tree import DraftTree
from edgespec.tree.drafted import Children, DraftedTree
from edgespec.verify.sampling import Sampling

NOBODYS_TOKEN = 99

FAR = 10**6


def learnt(
    step: dict[int, float] | None = None,
    draft: dict[int, float] | None = None,
    spread: float = 1.0,
    ranks: dict[int | None, int] | None = None,
    head: float = 0.0,
) -> RingEstimates:
    """What was learnt: seconds by rows, and how often the model's token had which rank."""
    estimates = RingEstimates()
    for rows, seconds in (step or {8: 1.0}).items():
        stages = ring_of(spread, seconds)
        estimates.segment([(rows, each) for each in stages], len(stages))
    for rows, seconds in (draft or {8: 0.5}).items():
        estimates.draft.record(rows, seconds)
    if head:
        estimates.head.record(1, head)
    estimates.ranks.update(ranks or {})
    return estimates


def ring_of(spread: float, seconds: float) -> list[float]:
    """The times of as few stages as have that spread, the slowest first; the others are alike."""
    others = math.ceil(spread) - 1
    return [seconds] + [seconds * (spread - 1.0) / max(others, 1)] * others


def view(tree: DraftTree, stages: int = 4, **changes: object) -> RequestView:
    """A view of a tree that was just drafted, with nothing on the ring."""
    values: dict[str, object] = {
        "in_flight": 0,
        "verifying": 0,
        "drafting": False,
        "drafted_root": tree.root,
        "exhausted": False,
        "depth_left": 100,
        "queued": 0,
        "ahead": 0,
        "estimates": learnt(),
    }
    return RequestView(tree=tree, stages=stages, **{**values, **changes})  # type: ignore[arg-type]


def chain_and_fan(nodes: int) -> DraftedTree:
    """`nodes` guesses, each below the one before or beside it, in descending score."""
    parents = [i - 1 if i % 3 else max(-1, i - 4) for i in range(nodes)]
    tokens = list(range(nodes))
    scores = [-0.1 * (i + 1) for i in range(nodes)]
    return DraftedTree(
        np.array(parents, np.int64), np.array(tokens, np.int64), np.array(scores, np.float64)
    )


def full_tree(nodes: int) -> DraftTree:
    """A tree of `nodes` with its root, nothing sent."""
    tree = DraftTree(0, -1, 1000, 0)
    tree.merge(chain_and_fan(nodes - 1), (), nodes, FAR)
    assert len(tree) == nodes
    return tree


def grown(tree: DraftTree, parents: Sequence[int], shares: Sequence[Sequence[float]]) -> list[int]:
    """Expand `parents`; the i-th gets one child for each of its shares. Returns the new ids."""
    tree.expand(parents)
    pairs = [(at, share) for at, below in enumerate(shares) for share in below]
    scores = np.array([math.log(share) for _, share in pairs], np.float64)
    tokens = np.arange(tree.newest + 1, tree.newest + 1 + len(pairs))
    children = Children(np.array([at for at, _ in pairs], np.int64), tokens, scores)
    before = tree.newest
    tree.attach(parents, children, len(pairs), FAR, scores)
    return list(range(before + 1, tree.newest + 1))


def sent(decisions: Sequence[Decision]) -> list[tuple[int, ...]]:
    """The segments among decisions."""
    return [d.ids for d in decisions if isinstance(d, Send)]


def send_all(tree: DraftTree, decisions: Sequence[Decision]) -> int:
    """Carry out what is to be sent; how many segments that were."""
    for ids in sent(decisions):
        tree.send(ids)
    return len(sent(decisions))


# --- one request, in any order --------------------------------------------------------------------


class _Draft(NamedTuple):
    """A draft at work; `wanted` is None while the prompt alone is read."""

    wanted: Grow | Deepen | Expand | None
    root: int
    length: int
    paths: tuple[tuple[int, ...], ...] = ()


@dataclass
class Round:
    """A policy at work on one request: drafts, credits and segments that end in any order.

    `cost`: seconds of the busiest stage by rows; the draft source takes half of it. `guessed`: for
    every segment, committed tokens when it left, and how many of its rows were guesses.
    """

    policy: Policy
    rng: random.Random
    stages: int
    depth_left: int
    oracle: SoloOracle
    estimates: RingEstimates
    cost: Callable[[int], float]
    reads_prompt: bool = False
    tokens: list[int] = field(default_factory=list)
    flying: list[tuple[int, ...]] = field(default_factory=list)
    verifying: list[tuple[int, ...]] = field(default_factory=list)
    sends: list[tuple[int, ...]] = field(default_factory=list)
    guessed: list[tuple[int, int]] = field(default_factory=list)
    draft: _Draft | None = None
    grown: tuple[int, int] | None = None
    exhausted: bool = False
    queued: int = 0
    ahead: int = 0

    def __post_init__(self) -> None:
        self.answer = [self.rng.randrange(VOCABULARY) for _ in range(self.depth_left + 2)]
        self.oracle.tell(self.answer)
        self.oracle.open(1, Sampling())
        self.tokens = self.answer[:1]
        self.last_position = self.depth_left
        self.tree = DraftTree(0, -1, self.answer[0], 0)
        self.calibration = Calibration()
        if self.policy.drafts and self.reads_prompt:
            self.draft = _Draft(None, -1, 1)

    def view(self) -> RequestView:
        root = self.tree[self.tree.root]
        return RequestView(
            tree=self.tree,
            stages=self.stages,
            in_flight=len(self.flying),
            verifying=len(self.verifying),
            drafting=self.draft is not None,
            drafted_root=self.grown[0] if self.grown else None,
            exhausted=self.exhausted,
            depth_left=self.last_position - root.position,
            queued=self.queued,
            ahead=self.ahead if root.sent else 0,
            estimates=self.estimates,
        )

    @property
    def over(self) -> bool:
        return len(self.tokens) == len(self.answer)

    def play(self, most: int = 5_000) -> None:
        """To the answer's end."""
        self.decide()
        for _ in range(most):
            what = self.happen()
            if self.over:
                return
            if what != "credit" or self.policy.waits_for_credit:
                self.decide()
        raise AssertionError("it does not end")

    # --- what is decided ----------------------------------------------------------------------

    def decide(self) -> list[Decision]:
        """Ask the policy, check the answer against the contract, and carry it out."""
        seen = self.view()
        before = copy.deepcopy(everything(seen))
        decisions = self.policy.decide(seen)
        assert self.policy.decide(seen) == decisions, "the same view, another decision"
        assert everything(seen) == before, "a policy changed what it may only look at"
        for decision in decisions:
            match decision:
                case Send(ids):
                    self._check_send(ids)
                    self._send(ids)
                case _:
                    assert self.policy.drafts
                    assert self.draft is None, "two drafts at once"
                    self.draft = self._checked_draft(decision, seen)
        assert len(self.flying) <= self.policy.window(self.stages)
        return decisions

    def _check_send(self, ids: tuple[int, ...]) -> None:
        assert ids, "an empty segment"
        assert len(set(ids)) == len(ids)
        for at, node_id in enumerate(ids):
            node = self.tree[node_id]
            assert not node.sent
            assert (
                node_id == self.tree.root or self.tree[node.parent].sent or node.parent in ids[:at]
            )
            assert node.position <= self.last_position

    def _send(self, ids: tuple[int, ...]) -> None:
        self.tree.send(ids)
        self.flying.append(ids)
        self.sends.append(ids)
        self.guessed.append((len(self.tokens), len(ids) - (self.tree.root in ids)))
        self.queued += 1
        self.ahead = len(ids)

    def _checked_draft(self, wanted: Grow | Deepen | Expand, seen: RequestView) -> _Draft:
        assert wanted.keep > 0
        assert wanted.width > 0
        if isinstance(wanted, Expand):
            return self._checked_expansion(wanted)
        levels = wanted.depth if isinstance(wanted, Grow) else wanted.levels
        assert 0 < levels <= seen.depth_left
        if isinstance(wanted, Deepen):
            assert self.grown is not None
            assert self.grown[0] == self.tree.root
            return _Draft(wanted, *self.grown)
        return _Draft(wanted, self.tree.root, len(self.tokens))

    def _checked_expansion(self, wanted: Expand) -> _Draft:
        assert wanted.ids
        assert len(set(wanted.ids)) == len(wanted.ids)
        for node_id in wanted.ids:
            assert not self.tree[node_id].expanded, "expanded before"
            assert self.tree[node_id].position < self.last_position, "of no use"
        paths = tuple(self.tree.path(i) for i in wanted.ids)
        self.tree.expand(wanted.ids)
        return _Draft(wanted, self.tree.root, len(self.tokens), paths)

    # --- what happens -------------------------------------------------------------------------

    def happen(self) -> str:
        """Something ends: a segment at the first stage or at all, a verification, a draft."""
        places = ["flying"] * bool(self.flying) + ["credit"] * bool(self.queued)
        places += ["verifying"] * bool(self.verifying) + ["draft"] * bool(self.draft)
        assert places, "nothing is on its way and nothing was decided: it stands still"
        place = self.rng.choice(places)
        if place == "flying":
            self._arrive()
        elif place == "credit":
            self.queued -= 1
        elif place == "verifying":
            self._verify(self.verifying.pop(0))
        else:
            self._drafted()
        return place

    def _arrive(self) -> None:
        ids = self.flying.pop(0)
        self.queued = min(self.queued, len(self.flying))
        busiest = self.cost(len(ids))
        self.estimates.segment([(len(ids), busiest)] * self.stages, self.stages)
        self.verifying.append(ids)

    def _verify(self, ids: tuple[int, ...]) -> None:
        live = [i for i in ids if i in self.tree]
        target_tokens = []
        for node_id in live:
            end = self.tree[node_id].position + 1
            on_path = [*self.tokens, *self.tree.path(node_id)] == self.answer[:end]
            target_tokens.append(self.answer[end] if on_path else NOBODYS_TOKEN)
        self.tree.record(live, target_tokens)
        if self.policy.results is Results.TOGETHER and (self.flying or self.verifying):
            return
        step = self.tree.advance()
        self.calibration.learn(step.outcomes)
        self.estimates.ranks.update(step.ranks)
        if step.missed:
            self.ahead = 0
        self.tokens += step.tokens
        assert self.tokens == self.answer[: len(self.tokens)]

    def _drafted(self) -> None:
        assert self.draft is not None
        draft, self.draft = self.draft, None
        wanted, context = draft.wanted, self.tokens[: draft.length]
        if wanted is None:
            self.estimates.draft.record(draft.length, self.cost(draft.length) / 2)
            return
        if isinstance(wanted, Expand):
            self._expanded(wanted, context, draft.paths)
            return
        self.grown = (draft.root, draft.length)
        if isinstance(wanted, Grow):
            drafted = self.oracle.refresh(1, context, wanted.depth, wanted.width)
        else:
            drafted = self.oracle.deepen(1, wanted.levels, wanted.width)
        only_new = isinstance(wanted, Deepen)
        since = self.tokens[draft.length :]
        added = self.tree.merge(drafted, since, wanted.keep, self.last_position, only_new)
        self.exhausted = only_new and not added

    def _expanded(
        self, wanted: Expand, context: list[int], paths: tuple[tuple[int, ...], ...]
    ) -> None:
        self.estimates.draft.record(len(paths), self.cost(len(paths)) / 2)
        children = self.oracle.expand(1, context, paths, wanted.width)
        scores = children.scores
        if isinstance(self.policy, Pooled):
            scores = self.calibration.scores(scores)
        self.tree.attach(wanted.ids, children, wanted.keep, self.last_position, scores)


def everything(seen: RequestView) -> object:
    """All that a view shows, as something that compares."""
    tree, learnt_so_far = seen.tree, seen.estimates
    nodes = {i: tree.score(i) for i in tree.ids}  # without making nodes of what waits
    to_do = tuple(tree.unsent()), tuple(tree.frontier(FAR))
    known = [each for each in (learnt_so_far.step, learnt_so_far.draft) if each.known]
    times = [each.seconds(rows) for each in known for rows in (1, 2, 4, 8, 16, 32, 64)]
    return (
        tree.root,
        tree.newest,
        nodes,
        to_do,
        times,
        learnt_so_far.ranks,
        learnt_so_far.calibrations,
    )
