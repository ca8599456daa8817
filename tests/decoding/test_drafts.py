"""Draft jobs: what is asked of the draft source, and what becomes of what comes back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from support.cases import case
from support.rings import submit
from support.wires import Wire

from edgespec.decoding.effects import (
    Draft,
)
from edgespec.decoding.events import (
    Drafted,
)
from edgespec.errors import LocalProtocolError
from edgespec.machines.events import (
    MessageArrived,
)
from edgespec.policy.base import Decision, Deepen, Expand, Policy, Pooled, RequestView, Send
from edgespec.policy.registry import POLICIES
from edgespec.policy.row_times import RowTimes
from edgespec.tree.drafted import Children, DraftedTree
from edgespec.types.boundaries import AHEAD
from edgespec.types.features import DraftNeeds
from edgespec.wire.client_messages import Cancel
from edgespec.wire.segment import StageTime

COST = {"cost": (StageTime(5, 1.0), StageTime(5, 1.0))}
NOTHING = Children(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))


class PlainGreedy(Policy):
    """Expands all that it may and sends all that it has, whatever that costs."""

    waits_for_credit = True

    def window(self, stages: int) -> int:
        """No limit."""
        return 1_000

    def decide(self, view: RequestView) -> list[Decision]:
        """Everything at once."""
        rows = tuple(view.tree.unsent())
        ids = () if view.drafting else tuple(view.tree.frontier(view.depth_left))
        sends: list[Decision] = [Send(rows)] if rows else []
        return [*sends, Expand(ids, 3, 100)] if ids else sends


class Greedy(PlainGreedy, Pooled):
    """The same, with guesses that are calibrated."""

    def best_rows(
        self, views: Sequence[RequestView], ahead: int, roots: int, beside: int = 0
    ) -> list[tuple[int, ...]]:
        """Here is one request alone."""
        raise NotImplementedError

    def best_nodes(self, views: Sequence[RequestView]) -> list[Expand | None]:
        """Here is one request alone."""
        raise NotImplementedError


@pytest.fixture(autouse=True)
def _greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "greedy", Greedy())
    monkeypatch.setitem(POLICIES, "greedy_plain", PlainGreedy())


def rooted(policy: str = "greedy", tokens: int = 50) -> Wire:
    """A request whose root was sent and is being expanded; a second has passed."""
    wire = Wire()
    wire.submit(submit(1, "hello", tokens, policy))
    wire.now = 1.0
    wire.take_draft_of_the_prompt()
    wire.back(wire.segments.pop(), **COST)
    wire.head(7)
    return wire


def asked(wire: Wire) -> Draft:
    """The one expansion that is at work."""
    (job,) = wire.drafts
    assert isinstance(job, Draft)
    return job


def prompt_of(wire: Wire) -> tuple[int, ...]:
    """The prompt's tokens."""
    return wire.request.prompt


def test_an_expansion_names_paths_behind_the_certain_text() -> None:
    wire = rooted()
    assert (asked(wire).context, asked(wire).paths) == ((*prompt_of(wire), 7), ((),))
    assert wire.tree[wire.tree.root].expanded, "asked once"
    wire.expanded((0, 11, -0.1), (0, 12, -0.2))
    assert asked(wire).paths == ((11,), (12,))
    wire.back(wire.segments[0])
    wire.head(11)
    wire.expanded((0, 13, -0.1))
    assert asked(wire).context == (*prompt_of(wire), 7, 11)
    assert asked(wire).paths == ((13,),)


def test_guesses_come_below_the_nodes_that_they_were_asked_for() -> None:
    wire = rooted()
    wire.expanded((0, 11, -0.1), (0, 12, -0.2))
    wire.expanded((0, 21, -0.1), (1, 22, -0.1))
    paths = {wire.tree.path(i) for i in wire.tree.ids}
    assert paths == {(), (11,), (12,), (11, 21), (12, 22)}


def test_guesses_below_what_is_gone_are_left_out() -> None:
    wire = rooted()
    wire.expanded((0, 11, -0.1), (0, 12, -0.2))
    wire.back(wire.segments[0])
    wire.head(12)
    wire.expanded((0, 21, -0.1), (1, 22, -0.1))
    assert {wire.tree.path(i) for i in wire.tree.ids} == {(), (22,)}


def test_after_a_miss_nothing_of_an_old_draft_is_left_and_the_new_root_is_asked_for() -> None:
    wire = rooted()
    wire.expanded((0, 11, -0.1))
    wire.back(wire.segments[0])
    wire.head(30)
    wire.expanded((0, 21, -0.1))
    assert len(wire.tree) == 1
    assert (asked(wire).context, asked(wire).paths) == ((*prompt_of(wire), 7, 30), ((),))


def test_guesses_keep_within_the_answer() -> None:
    wire = rooted(tokens=3)  # after the first one two are left, of which the last is never run
    wire.expanded((0, 11, -0.1))
    assert len(wire.tree) == 2
    assert not wire.drafts, "what follows would be of no use"


def recorded(times: RowTimes, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float]]:
    """What is learnt of them from now on."""
    told: list[tuple[int, float]] = []
    record = times.record
    monkeypatch.setattr(times, "record", lambda *one: (told.append(one), record(*one)))
    return told


def test_the_rows_of_a_prompt_are_read_as_its_chunks_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not all of them before the first guess: the draft has nothing else to do meanwhile."""
    wire = Wire(needs=DraftNeeds(final_hidden=True), prefill_chunk=2)
    wire.submit(submit(1, "hello", 50, "greedy"))
    chunks = wire.segments[:]
    given = []
    for chunk in chunks:
        given.append(wire.drafts[0].features.rows)
        wire.take_draft_of_the_prompt()
        wire.back(chunk)
    given.append(wire.drafts[0].features.rows)
    assert given == [0, *(len(chunk.parts[0].ids) for chunk in chunks)]
    wire.take_draft_of_the_prompt()
    wire.head(7)
    assert (asked(wire).paths, asked(wire).features.rows) == (((),), 0)
    wire.expanded((0, 11, -0.1))
    wire.back(wire.segments[len(chunks)])
    wire.head(11)
    wire.now += 0.05
    wire.expanded((0, 12, -0.1))
    assert asked(wire).features.rows == 1
    told = recorded(wire.request.estimates.draft, monkeypatch)
    wire.now += 0.25
    wire.expanded((0, 13, -0.1))
    assert told == [(2, pytest.approx(0.25))], "a row was read and a guess was run"


def test_one_draft_at_a_time() -> None:
    wire = rooted()
    for token in range(11, 30):
        assert len(wire.drafts) == 1
        wire.credit(wire.segments[-1].header.seq)
        assert len(wire.drafts) == 1
        wire.expanded((0, token, -0.01))


def test_a_draft_that_nobody_waits_for_is_ignored() -> None:
    wire = rooted()
    job = asked(wire).job
    assert wire.machine.handle(Drafted(job + 100, 1, NOTHING), 2.0) == []
    wire.take(wire.machine.handle(MessageArrived(b"client", Cancel(1)), 2.0))
    assert wire.machine.handle(Drafted(job, 1, NOTHING), 2.0) == []
    assert wire.machine.handle(Drafted(job, 1, DraftedTree.empty()), 2.0) == []


def test_an_expansion_that_gives_nothing_is_not_asked_again() -> None:
    wire = rooted()
    wire.expanded()
    assert not wire.drafts
    assert len(wire.tree) == 1


def test_there_must_be_a_tree_to_deepen() -> None:
    wire = rooted()
    wire.request.drafting.grown = None
    with pytest.raises(LocalProtocolError, match="no drafted tree"):
        wire.request.carry_out(Deepen(1, 1, 1), 0.0)


# --- what they take -------------------------------------------------------------------------------


def test_drafting_is_timed() -> None:
    wire = rooted()
    known = wire.request.estimates.draft
    assert known.seconds(5) == pytest.approx(1.0), "reading the prompt"
    wire.now += 0.25
    wire.expanded((0, 11, -0.1), (0, 12, -0.2))
    assert known.seconds(1) == pytest.approx(0.25)
    wire.now += 0.5
    wire.expanded((0, 21, -0.1), (1, 22, -0.1))
    assert known.seconds(2) == pytest.approx(0.5)


def test_the_time_of_a_head_that_interrupts_a_draft_is_no_part_of_the_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The head goes first on the coordinator's device."""
    wire = rooted()
    known = wire.request.estimates
    heads = recorded(known.head, monkeypatch)
    wire.now += 0.25
    wire.expanded((0, 11, -0.1))
    wire.now += 0.1
    wire.back(wire.segments[0])  # the head begins while 11 is expanded
    wire.now += 100.0
    wire.head(11)  # and ends so, too
    wire.now += 0.15
    wire.expanded((0, 12, -0.1))
    assert known.draft.seconds(1) == pytest.approx(0.25)
    assert heads == [(1, pytest.approx(100.0))]


def test_a_head_that_waits_for_a_drafts_last_layer_is_not_at_work_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wire = rooted()
    known = wire.request.estimates
    heads = recorded(known.head, monkeypatch)
    wire.now += 0.25
    wire.expanded((0, 11, -0.1))
    wire.now += 0.2
    wire.back(wire.segments[0])
    wire.now += 0.05
    wire.expanded((0, 12, -0.1))  # the next draft waits for the head, which begins now
    wire.now += 10.0
    wire.head(11)
    wire.now += 0.25
    wire.expanded((0, 13, -0.1))
    assert known.draft.seconds(1) == pytest.approx(0.25)
    assert heads == [(1, pytest.approx(10.0))]


# --- how they count -------------------------------------------------------------------------------


def test_a_policy_that_calibrates_counts_guesses_for_what_they_are_worth() -> None:
    for policy, calibrates in (("greedy", True), ("greedy_plain", False)):
        wire = rooted(policy)
        shape = wire.request.sampling.without_seed
        for _ in range(1_000):
            wire.request.estimates.calibration(shape).learn([(math.log(0.5), False)])
        wire.expanded((0, 11, math.log(0.5)))
        (guess,) = [i for i in wire.tree.ids if i != wire.tree.root]
        share = math.exp(wire.tree.score(guess))
        assert share < 0.01 if calibrates else share == pytest.approx(0.5)
        drafted = wire.tree[guess].drafted
        assert drafted == pytest.approx(math.log(0.5)), "learnt from by its own word"


def test_guesses_stay_where_states_are_not_folded_yet() -> None:
    for folds, left in ((False, 199), (True, AHEAD)):
        wire = Wire(folds=folds, kept_rows=1000)
        wire.submit(submit(1, "hello", 200, "flowspec"))
        with case(folds):
            assert wire.request.view().depth_left == left


def test_guesses_that_grew_farther_are_left_out_until_states_are_folded() -> None:
    """A tree is deepened again and again while segments are under way: on a long ring often."""
    at = np.arange(60)
    for folds, deepest in ((False, 60), (True, AHEAD)):
        wire = Wire(folds=folds, kept_rows=1000)
        wire.submit(submit(1, "hello", 200, "flowspec"))
        wire.take_draft_of_the_prompt()
        wire.back(wire.segments[0])
        wire.head(10)
        wire.drafted(DraftedTree(at - 1, at + 11, -0.1 * (at + 1.0)))
        tree = wire.tree
        with case(folds):
            assert tree.position(max(tree.ids)) - tree.position(tree.root) == deepest
