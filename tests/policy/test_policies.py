"""What every policy must keep to, on random views; then each policy's own section of its paper."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from support.rings import VOCABULARY, OracleDraft

from edgespec.errors import ConfigError
from edgespec.policy.base import Decision, Deepen, Grow, Policy, Send, View
from edgespec.policy.flowspec import FlowSpec
from edgespec.policy.naive_tree import NaiveTree
from edgespec.policy.registry import POLICIES, policy_named
from edgespec.tree.draft_tree import DraftTree
from edgespec.tree.drafted import DraftedTree
from edgespec.verify.sampling import Sampling

VARIANTS: dict[str, Policy] = {
    **POLICIES,
    "naive_small": NaiveTree(nodes=7, depth=2, width=2),
    "flowspec_small": FlowSpec(
        nodes=9, depth=3, width=3, longest=3, merge_nodes=6, merge_depth=2, deepen_nodes=4
    ),
}


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS.keys())
def policy(request: pytest.FixtureRequest) -> Policy:
    """Every policy there is."""
    chosen: Policy = request.param
    return chosen


@dataclass
class Round:
    """A policy at work on one request: a tree, drafts and segments that end in any order."""

    policy: Policy
    rng: random.Random
    stages: int
    depth_left: int
    accuracy: float
    tokens: list[int] = field(default_factory=list)
    flying: list[tuple[int, ...]] = field(default_factory=list)
    verifying: list[tuple[int, ...]] = field(default_factory=list)
    draft: tuple[Grow | Deepen, int, int] | None = None
    grown: tuple[int, int] | None = None
    exhausted: bool = False

    def __post_init__(self) -> None:
        self.answer = [self.rng.randrange(VOCABULARY) for _ in range(self.depth_left + 2)]
        self.oracle = OracleDraft(self.rng, self.accuracy)
        self.oracle.tell(self.answer)
        self.oracle.open(1, Sampling())
        self.tokens = self.answer[:1]
        self.last_position = self.depth_left
        self.tree = DraftTree(0, -1, self.answer[0], 0)

    def view(self) -> View:
        return View(
            tree=self.tree,
            stages=self.stages,
            in_flight=len(self.flying),
            verifying=len(self.verifying),
            drafting=self.draft is not None,
            drafted_root=self.grown[0] if self.grown else None,
            exhausted=self.exhausted,
            depth_left=self.last_position - self.tree[self.tree.root].position,
            queued=self.queued,
            experience=self.experience,
        )

    @property
    def over(self) -> bool:
        return len(self.tokens) == len(self.answer)

    def decide(self) -> list[Decision]:
        """Ask the policy, check the answer against the contract, and carry it out."""
        view = self.view()
        before = copy.deepcopy(vars_of(self.tree))
        decisions = self.policy.decide(view)
        assert self.policy.decide(view) == decisions, "the same view, another decision"
        assert vars_of(self.tree) == before, "a policy changed what it may only look at"
        for decision in decisions:
            match decision:
                case Send(ids):
                    self._check_send(ids)
                    self.tree.send(ids)
                    self.flying.append(ids)
                case Grow() | Deepen():
                    self._check_draft(decision, view)
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

    def _check_draft(self, decision: Grow | Deepen, view: View) -> None:
        assert self.policy.drafts
        assert self.draft is None, "two drafts at once"
        levels = decision.depth if isinstance(decision, Grow) else decision.levels
        assert 0 < levels <= view.depth_left
        assert decision.keep > 0
        if isinstance(decision, Deepen):
            assert self.grown is not None
            assert self.grown[0] == self.tree.root
            self.draft = (decision, *self.grown)
        else:
            self.draft = (decision, self.tree.root, len(self.tokens))

    def happen(self) -> bool:
        """Something ends: a segment, a verification or the draft. True if it was the draft."""
        places: list[str] = ["flying"] * bool(self.flying)
        places += ["verifying"] * bool(self.verifying) + ["draft"] * bool(self.draft)
        assert places, "nothing is on its way and nothing was decided: it stands still"
        place = self.rng.choice(places)
        if place == "flying":
            self.verifying.append(self.flying.pop(0))
        elif place == "verifying":
            self._verify(self.verifying.pop(0))
        else:
            self._drafted()
        return place == "draft"

    def _verify(self, ids: tuple[int, ...]) -> None:
        live = [i for i in ids if i in self.tree]
        verdicts = []
        for node_id in live:
            node = self.tree[node_id]
            on_path = self._path(node_id) == self.answer[: node.position + 1]
            verdicts.append(self.answer[node.position + 1] if on_path else 99)
        self.tree.record(live, verdicts)
        if not self.policy.verifies_each_result and (self.flying or self.verifying):
            return
        self.tokens += self.tree.advance().tokens
        assert self.tokens == self.answer[: len(self.tokens)]

    def _path(self, node_id: int) -> list[int]:
        path = []
        while node_id != self.tree.root:
            path.append(self.tree[node_id].token)
            node_id = self.tree[node_id].parent
        return self.tokens + path[::-1]

    def _drafted(self) -> None:
        assert self.draft is not None
        decision, root, length = self.draft
        self.draft, self.grown = None, (root, length)
        if isinstance(decision, Grow):
            context = self.tokens[:length]
            drafted = self.oracle.refresh(1, context, decision.depth, decision.width)
        else:
            drafted = self.oracle.deepen(1, decision.levels, decision.width)
        only_new = isinstance(decision, Deepen)
        since = self.tokens[length:]
        added = self.tree.merge(drafted, since, decision.keep, self.last_position, only_new)
        self.exhausted = only_new and not added


def vars_of(tree: DraftTree) -> object:
    """All that a draft tree holds."""
    return tree.root, tree.newest, {i: tree[i] for i in tree.ids}


def rounds(policy: Policy, runs: int) -> Iterator[Round]:
    """Random rounds, from no accuracy to all of it."""
    for seed in range(runs):
        rng = random.Random(seed)
        accuracy = rng.choice((0.0, 0.5, 0.8, 1.0))
        yield Round(policy, rng, rng.choice((1, 2, 3, 4, 8)), rng.randint(0, 25), accuracy)


def test_the_contract_holds_and_every_answer_ends(policy: Policy) -> None:
    """Live unsent nodes only, parents first, window, purity, depth, and never a standstill."""
    for seed, game in enumerate(rounds(policy, 40)):
        try:
            game.decide()
            for _ in range(3_000):
                game.happen()
                if game.over:
                    break
                game.decide()
            assert game.over
        except BaseException:
            print(f"seed {seed}")
            raise


def test_names() -> None:
    for name, policy in POLICIES.items():
        assert policy_named(name) is policy
        assert policy.name == name
        assert policy.window(1) >= 1
    with pytest.raises(ConfigError, match="flowspec"):
        policy_named("flow_spec")


# --- helpers for the papers' sections -------------------------------------------------------------


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
    tree.merge(chain_and_fan(nodes - 1), (), nodes, 10**6)
    assert len(tree) == nodes
    return tree


def view(tree: DraftTree, stages: int = 4, **changes: object) -> View:
    """A view of a tree that was just drafted, with nothing on the ring."""
    values: dict[str, object] = {
        "in_flight": 0,
        "verifying": 0,
        "drafting": False,
        "drafted_root": tree.root,
        "exhausted": False,
        "depth_left": 100,
    }
    return View(tree=tree, stages=stages, **{**values, **changes})  # type: ignore[arg-type]


def sent(decisions: list[Decision]) -> list[tuple[int, ...]]:
    """The segments among decisions, which must all be segments."""
    segments = []
    for decision in decisions:
        assert isinstance(decision, Send)
        segments.append(decision.ids)
    return segments


def send_all(tree: DraftTree, decisions: list[Decision]) -> int:
    """Carry out what is to be sent; how many segments that were."""
    segments = [d.ids for d in decisions if isinstance(d, Send)]
    for ids in segments:
        tree.send(ids)
    return len(segments)


# --- FlowSpec -------------------------------------------------------------------------------------


def test_flowspec_3_2_starts_with_a_tree_of_80_nodes_and_depth_6() -> None:
    tree = DraftTree(0, -1, 1, 0)
    assert FlowSpec().decide(view(tree, drafted_root=None)) == [Grow(6, 10, 79)]
    assert FlowSpec().decide(view(tree, drafted_root=None, depth_left=2)) == [Grow(2, 10, 79)]


@pytest.mark.parametrize(
    ("stages", "lengths"),
    [
        (4, [16] * 5),
        (8, [9] * 8 + [8]),  # 80 nodes in 9 segments
        (7, [10] * 8),
        (2, [16] * 3),  # L_max: the rest waits
        (1, [16] * 2),
        (15, [5] * 16),
    ],
)
def test_flowspec_3_2_cuts_a_fresh_round_into_equal_segments(
    stages: int, lengths: list[int]
) -> None:
    tree = full_tree(80)
    segments = sent(FlowSpec().decide(view(tree, stages)))
    assert [len(s) for s in segments] == lengths
    rows = [i for s in segments for i in s]
    assert rows[0] == tree.root
    assert rows == sorted(rows, key=lambda i: -tree[i].score), "not in descending score"
    assert set(rows) == set(tree.unsent(len(rows)))


def test_flowspec_3_2_a_round_after_a_miss_takes_the_credits_that_are_left() -> None:
    segments = sent(FlowSpec().decide(view(full_tree(80), 4, in_flight=3)))
    assert [len(s) for s in segments] == [16, 16]
    assert FlowSpec().decide(view(full_tree(80), 4, in_flight=5)) == []


def test_flowspec_3_3_a_miss_ends_the_round_at_once() -> None:
    tree = full_tree(80)
    send_all(tree, FlowSpec().decide(view(tree)))
    drafted_root = tree.root
    tree.record([tree.root], [77_777])
    assert tree.advance().missed
    after = view(tree, in_flight=4, drafted_root=drafted_root)
    assert FlowSpec().decide(after) == [Grow(6, 10, 79)], "it waits for dead segments"


def test_flowspec_3_4_merges_a_fresh_tree_after_acceptance() -> None:
    """Context-aware: from the new root, d_exp = 6, L_exp = 64; sent in full segments."""
    tree = full_tree(80)
    send_all(tree, FlowSpec().decide(view(tree)))
    drafted_root = tree.root
    tree.record([tree.root], [0])
    assert not tree.advance().missed
    after = view(tree, in_flight=4, drafted_root=drafted_root)
    assert FlowSpec().decide(after) == [Grow(6, 10, 64)]
    assert FlowSpec().decide(view(tree, in_flight=4, drafting=True)) == []
    # The fresh tree is in: one credit is free, so one full segment of the best rows leaves.
    tree.merge(chain_and_fan(40), (), 64, 10**6)
    best = tree.unsent(16)
    assert sent(FlowSpec().decide(view(tree, in_flight=4))) == [best]
    assert len(best) == 16


def test_flowspec_3_4_grows_deeper_when_a_stage_would_idle() -> None:
    """Score-aware: nothing accepted, nothing unsent, a credit free: d_se = 2, L_se = 48."""
    tree = full_tree(16)
    send_all(tree, FlowSpec().decide(view(tree)))
    idle = {"in_flight": 4}
    assert FlowSpec().decide(view(tree, **idle)) == [Deepen(2, 10, 48)]
    assert FlowSpec().decide(view(tree, **idle, depth_left=1)) == [Deepen(1, 10, 48)]
    for reason in (
        {"in_flight": 5},  # no stage would idle
        {"exhausted": True},  # it gave nothing new
        {"verifying": 1},  # a result is about to change the tree
        {"depth_left": 0},
        {"drafting": True},
    ):
        assert FlowSpec().decide(view(tree, **{**idle, **reason})) == []


def test_flowspec_sends_the_last_root_without_a_draft() -> None:
    tree = DraftTree(0, -1, 1, 0)
    decisions = FlowSpec().decide(view(tree, drafted_root=None, depth_left=0))
    assert decisions == [Send((0,))]


# --- NaiveTree ------------------------------------------------------------------------------------


def test_naive_tree_sends_its_tree_once_in_near_equal_segments() -> None:
    for stages, lengths in ((1, [40, 40]), (4, [16] * 5), (8, [9] * 8 + [8]), (2, [27, 27, 26])):
        tree = full_tree(80)
        assert NaiveTree().decide(view(tree, stages, drafted_root=None)) == [Grow(6, 10, 79)]
        segments = sent(NaiveTree().decide(view(tree, stages)))
        assert [len(s) for s in segments] == lengths
        assert sorted(i for s in segments for i in s) == sorted(tree.ids)


def test_naive_tree_waits_until_all_is_back() -> None:
    policy = NaiveTree()
    assert not policy.verifies_each_result
    tree = full_tree(80)
    for waiting in ({"in_flight": 1}, {"verifying": 1}, {"drafting": True}):
        assert policy.decide(view(tree, drafted_root=None, **waiting)) == []
        assert policy.decide(view(tree, **waiting)) == []


def test_naive_tree_sends_the_last_root_without_a_draft() -> None:
    tree = DraftTree(0, -1, 1, 0)
    assert NaiveTree().decide(view(tree, drafted_root=None, depth_left=0)) == [Send((0,))]


def test_autoregressive_sends_one_row_and_waits() -> None:
    policy = policy_named("autoregressive")
    tree = DraftTree(0, -1, 1, 0)
    assert (policy.window(8), policy.drafts) == (1, False)
    assert policy.decide(view(tree)) == [Send((0,))]
    tree.send((0,))
    assert policy.decide(view(tree, in_flight=1)) == []
