"""Policies that feed one level of the tree a step: PipeDec and SpecPipe."""

from __future__ import annotations

import math

import pytest
from support.rings import FakeRing, submit
from support.rounds import grown, learnt, sent, view

from edgespec.policy.base import Expand, Send
from edgespec.policy.pipedec import PipeDec
from edgespec.policy.registry import policy_named
from edgespec.policy.specpipe import ENOUGH, SpecPipe
from edgespec.tree.draft_tree import DraftTree

# --- PipeDec --------------------------------------------------------------------------------------


def rooted(first_id: int = 0) -> DraftTree:
    """A tree whose root was sent."""
    tree = DraftTree(first_id, -1, 1000, 0)
    tree.send((first_id,))
    return tree


def test_pipedec_4_3_1_sizes() -> None:
    for name, width in (("pipedec", 32), ("pipedec16", 16)):
        assert policy_named(name).decide(view(rooted())) == [Expand((0,), 16, width)]


def test_pipedec_3_3_4_a_miss_starts_the_tree_again_at_the_new_token() -> None:
    """The root enters alone and at once, behind what the miss made worthless."""
    for busy in ({}, {"in_flight": 4, "queued": 1, "verifying": 1}, {"drafting": True}):
        tree = rooted()
        grown(tree, [0], [[0.5, 0.3]])
        tree.record([0], [77_777])
        assert tree.advance().missed
        assert PipeDec().decide(view(tree, **busy)) == [Send((tree.root,))]
        tree.send((tree.root,))
        after = PipeDec().decide(view(tree, **busy))
        assert after == ([] if "drafting" in busy else [Expand((tree.root,), 16, 32)])


def test_pipedec_3_4_a_step_feeds_one_layer_and_predicts_the_next() -> None:
    tree = rooted()
    above = grown(tree, [0], [[0.2, 0.7]])
    best_first = (above[0], above[1])
    assert tree.score(best_first[0]) > tree.score(best_first[1])
    idle = {"in_flight": 1}
    assert PipeDec().decide(view(tree, **idle)) == [Send(best_first), Expand(best_first, 16, 32)]
    tree.send(best_first)
    below = grown(tree, best_first, [[0.3, 0.2], [0.9]])
    layer = tuple(sorted(below, key=lambda i: (-tree.score(i), i)))
    assert [round(math.exp(tree.score(i)), 3) for i in layer] == [0.21, 0.18, 0.14]
    assert PipeDec().decide(view(tree, **idle)) == [Send(layer), Expand(layer, 16, 32)]


@pytest.mark.parametrize(
    "under_way",
    [{"queued": 1, "in_flight": 2}, {"verifying": 1}, {"in_flight": 4}],
    ids=["first stage", "verification", "every stage"],
)
def test_pipedec_3_4_no_layer_enters_before_the_step_is_over_everywhere(
    under_way: dict[str, object],
) -> None:
    tree = rooted()
    layer = tuple(grown(tree, [0], [[0.7]]))
    assert PipeDec().decide(view(tree, **under_way)) == []
    tree.send(layer)  # fed already: the next one is still predicted meanwhile
    assert PipeDec().decide(view(tree, **under_way)) == [Expand(layer, 16, 32)]
    assert PipeDec().decide(view(tree, **under_way, drafting=True)) == []


def test_pipedec_3_3_keeps_w_of_all_candidates_of_a_layer() -> None:
    tree = rooted()
    above = tuple(grown(tree, [0], [[0.6, 0.4]]))
    tree.send(above)
    assert PipeDec(width=3, children=2).decide(view(tree)) == [Expand(above, 2, 3)]


def test_pipedec_predicts_nothing_past_the_answers_end() -> None:
    tree = rooted()
    layer = tuple(grown(tree, [0], [[0.7]]))
    assert PipeDec().decide(view(tree, depth_left=1)) == [Send(layer)]
    assert PipeDec().decide(view(rooted(), depth_left=0)) == []


def test_pipedec_gives_a_token_a_step_while_the_guesses_are_right() -> None:
    """§3.4: one level is verified a step, so that n tokens take about n steps, not n trips."""
    stages, tokens = 4, 40
    for policy in ("pipedec", "specpipe"):
        answer = FakeRing(stages, accuracy=1.0).ring.ask(submit(1, "hello", tokens, policy))
        steps = answer.trips * stages
        assert tokens - 1 <= steps <= tokens + 3 * stages, policy


# --- SpecPipe -------------------------------------------------------------------------------------

STEP = {4: 1.0, 8: 1.1, 16: 1.3, 32: 2.0, 64: 4.0}
RANKS: dict[int | None, int] = {0: 16, 5: 8, 12: 4, 20: 4}
"""Of 32 levels: p(4) = 1/2, p(8) = 3/4, p(16) = 7/8, p(32) = p(64) = 1."""


def wide(children: int = 64) -> DraftTree:
    """A sent root with that many children, all equally likely."""
    tree = rooted()
    grown(tree, [0], [[0.01] * children])
    return tree


def fed(tree: DraftTree, stages: int, **changes: object) -> int:
    """How many rows the next level has."""
    segments = sent(SpecPipe().decide(view(tree, stages, in_flight=1, **changes)))
    assert len(segments) == 1
    return len(segments[0])


@pytest.mark.parametrize(
    ("stages", "width"),
    [
        (1, 4),  # nothing to refill: the quickest step
        (2, 8),  # 1.5, 1.375, 1.4625, 2.0, 4.0
        (4, 16),  # 2.5, 1.925, 1.7875, 2.0, 4.0
        (8, 32),  # 4.5, 3.025, 2.4375, 2.0, 4.0
    ],
)
def test_specpipe_eq_2_chooses_the_width(stages: int, width: int) -> None:
    assert fed(wide(), stages, estimates=learnt(STEP, ranks=RANKS)) == width


def test_specpipe_eq_2_goes_by_what_a_step_takes_here() -> None:
    free = dict.fromkeys(STEP, 1.0)
    assert fed(wide(), 4, estimates=learnt(free, ranks=RANKS)) == 32, "ties go to the narrower"
    dear = {rows: float(rows) for rows in STEP}
    assert fed(wide(), 4, estimates=learnt(dear, ranks=RANKS)) == 4


def test_specpipe_has_the_papers_width_until_enough_levels_were_seen() -> None:
    few: dict[int | None, int] = {0: ENOUGH - 1}
    assert fed(wide(), 4, estimates=learnt(STEP, ranks=few)) == 64
    assert fed(wide(), 4, estimates=learnt(STEP, ranks={**few, None: 1})) == 4
    assert fed(wide(20), 4, estimates=learnt(STEP, ranks=few)) == 20


def test_specpipe_3_3_3_a_level_has_the_best_by_cumulative_score() -> None:
    tree = rooted()
    above = grown(tree, [0], [[0.7, 0.3]])
    tree.send(above)
    below = grown(tree, above, [[0.2] * 6, [0.9, 0.1]])
    estimates = learnt(STEP, ranks={0: 32})
    (level,) = sent(SpecPipe().decide(view(tree, 4, in_flight=2, estimates=estimates)))
    assert level == (below[0], *below[1:4])
    assert [round(math.exp(tree.score(i)), 2) for i in level] == [0.27, 0.14, 0.14, 0.14]


def test_specpipe_3_3_1_the_source_runs_one_level_ahead() -> None:
    tree = rooted()
    above = tuple(grown(tree, [0], [[0.7, 0.3]]))
    waits = {"in_flight": 1, "queued": 1}
    assert SpecPipe().decide(view(tree, **waits)) == [Expand(above, 16, 64)]
    below = tuple(grown(tree, above, [[0.5], [0.5]]))
    assert SpecPipe().decide(view(tree, **waits)) == [], "two levels ahead"
    assert SpecPipe().decide(view(tree, in_flight=1)) == [Send(above)]
    tree.send(above)
    assert SpecPipe().decide(view(tree, **waits)) == [Expand(below, 16, 64)]
    assert SpecPipe().decide(view(tree, **waits, drafting=True)) == []
    assert SpecPipe().decide(view(tree, **waits, depth_left=2)) == []


def test_specpipe_feeds_a_level_without_waiting_for_its_source() -> None:
    tree = rooted()
    above = tuple(grown(tree, [0], [[0.7, 0.3]]))
    assert SpecPipe().decide(view(tree, drafting=True, verifying=1, in_flight=3)) == [Send(above)]
    assert SpecPipe().decide(view(tree, drafting=True, in_flight=5)) == [], "every stage is busy"


def test_specpipe_a_row_whose_parent_was_not_fed_stays_behind() -> None:
    tree = rooted()
    above = grown(tree, [0], [[0.7, 0.3]])
    tree.send(above[:1])
    below = grown(tree, above, [[0.5], [0.9]])
    assert sent(SpecPipe().decide(view(tree, in_flight=2))) == [(below[0],)]


def test_specpipe_a_miss_refills_from_the_new_token() -> None:
    tree = rooted()
    grown(tree, [0], [[0.7]])
    tree.record([0], [77_777])
    tree.advance()
    busy = {"in_flight": 5, "queued": 2, "drafting": True}
    assert SpecPipe().decide(view(tree, **busy)) == [Send((tree.root,))]
    tree.send((tree.root,))
    assert SpecPipe().decide(view(tree, **busy)) == []
    assert SpecPipe().decide(view(tree, in_flight=5)) == [Expand((tree.root,), 16, 64)]
