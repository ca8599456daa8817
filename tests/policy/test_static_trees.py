"""Policies whose tree does not grow on the way: autoregressive, naive tree, pruned."""

from __future__ import annotations

import pytest
from support.rounds import full_tree, send_all, sent, view

from edgespec.policy.base import Grow, Results, Send
from edgespec.policy.naive_tree import NaiveTree
from edgespec.policy.pruned import Pruned
from edgespec.policy.registry import policy_named
from edgespec.tree.draft_tree import DraftTree


def test_autoregressive_sends_one_row_and_waits() -> None:
    policy = policy_named("autoregressive")
    tree = DraftTree(0, -1, 1, 0)
    assert (policy.window(8), policy.drafts) == (1, False)
    assert policy.decide(view(tree)) == [Send((0,))]
    tree.send((0,))
    assert policy.decide(view(tree, in_flight=1)) == []


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
    assert policy.results is Results.TOGETHER
    tree = full_tree(80)
    for waiting in ({"in_flight": 1}, {"verifying": 1}, {"drafting": True}):
        assert policy.decide(view(tree, drafted_root=None, **waiting)) == []
        assert policy.decide(view(tree, **waiting)) == []


def test_naive_tree_sends_the_last_root_without_a_draft() -> None:
    tree = DraftTree(0, -1, 1, 0)
    assert NaiveTree().decide(view(tree, drafted_root=None, depth_left=0)) == [Send((0,))]


# --- Pruned (FlowSpec, Table 2: pruning and early exit, no expansion) -----------------------------


@pytest.mark.parametrize(
    ("stages", "lengths"),
    [
        (4, [16] * 5),
        (8, [9] * 8 + [8]),
        (2, [16] * 3),  # L_max holds; the rest of the tree is not sent
    ],
)
def test_pruned_sends_its_tree_in_score_order(stages: int, lengths: list[int]) -> None:
    tree = full_tree(80)
    assert Pruned().decide(view(tree, stages, drafted_root=None)) == [Grow(6, 10, 79)]
    segments = sent(Pruned().decide(view(tree, stages)))
    assert [len(s) for s in segments] == lengths
    rows = [i for s in segments for i in s]
    assert rows[0] == tree.root
    assert rows == sorted(rows, key=lambda i: -tree.score(i))


def test_pruned_drafts_nothing_and_sends_nothing_within_a_round() -> None:
    """Whatever is accepted and pruned, and however idle the ring is."""
    policy = Pruned()
    tree = full_tree(80)
    send_all(tree, policy.decide(view(tree)))
    drafted_root = tree.root
    for in_flight in (5, 1, 0):
        assert policy.decide(view(tree, in_flight=in_flight)) == []
    tree.record([tree.root], [0])
    assert not tree.advance().missed
    assert len(tree) > 1
    assert tree.root != drafted_root
    for in_flight in (4, 0):
        for busy in ({}, {"verifying": 1}, {"exhausted": True}):
            assert policy.decide(view(tree, in_flight=in_flight, **busy)) == []


def test_pruned_ends_a_round_early_and_starts_the_next_at_once() -> None:
    policy = Pruned()
    assert policy.results is Results.EACH
    tree = full_tree(80)
    send_all(tree, policy.decide(view(tree)))
    drafted_root = tree.root
    tree.record([tree.root], [77_777])
    assert tree.advance().missed
    under_way = {"in_flight": 4, "queued": 2, "verifying": 1}
    after = view(tree, drafted_root=drafted_root, **under_way)
    assert policy.decide(after) == [Grow(6, 10, 79)], "it waits for dead segments"
    assert policy.decide(view(tree, drafted_root=drafted_root, drafting=True, **under_way)) == []
    assert policy.decide(view(tree, **under_way)) == [Send((tree.root,))], "an empty draft"


def test_pruned_starts_a_round_when_a_leaf_is_passed() -> None:
    tree = DraftTree(0, -1, 1, 0)
    tree.send((0,))
    tree.record([0], [5])  # the last of the tree: its target token cannot be in it
    assert tree.advance().missed
    assert Pruned().decide(view(tree, drafted_root=0)) == [Grow(6, 10, 79)]


def test_pruned_keeps_within_the_answer() -> None:
    tree = DraftTree(0, -1, 1, 0)
    assert Pruned().decide(view(tree, drafted_root=None, depth_left=0)) == [Send((0,))]
    assert Pruned().decide(view(tree, drafted_root=None, depth_left=2)) == [Grow(2, 10, 79)]
