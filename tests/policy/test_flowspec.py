"""FlowSpec against its paper's sections, rule by rule."""

from __future__ import annotations

from itertools import islice

import pytest
from support.rounds import chain_and_fan, full_tree, send_all, sent, view

from edgespec.policy.base import Deepen, Grow, Send
from edgespec.policy.flowspec import FlowSpec
from edgespec.tree.draft_tree import DraftTree


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
    assert set(rows) == set(islice(tree.unsent(), len(rows)))


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
    """Context-aware: from the new root, d_exp = 6; all of it is one segment (A.1, L_exp = -1)."""
    tree = full_tree(80)
    send_all(tree, FlowSpec().decide(view(tree)))
    drafted_root = tree.root
    tree.record([tree.root], [0])
    assert not tree.advance().missed
    after = view(tree, in_flight=4, drafted_root=drafted_root)
    assert FlowSpec().decide(after) == [Grow(6, 10, 64)]
    assert FlowSpec().decide(view(tree, in_flight=4, drafting=True)) == []
    # The fresh tree is in: one credit is free, and all that is new leaves, the best first.
    tree.merge(chain_and_fan(40), (), 64, 10**6)
    new = tuple(tree.unsent())
    assert sent(FlowSpec().decide(view(tree, in_flight=4))) == [new]
    assert len(new) > FlowSpec().longest
    # On a ring too short for the paper's tree, whose rest waits, segments are no longer.
    assert sent(FlowSpec().decide(view(tree, 3, in_flight=3))) == [new[:16]]


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
