"""Credits of the first stage, and what the coordinator learns of its ring, over requests too."""

from __future__ import annotations

import numpy as np
import pytest
from support.rings import submit
from support.wires import Wire

from edgespec.machines.events import (
    MessageArrived,
    RingDown,
    RingUp,
)
from edgespec.policy.adaptive import Adaptive
from edgespec.policy.registry import POLICIES
from edgespec.tree.drafted import DraftedTree
from edgespec.types.tensor import Tensor
from edgespec.wire.client_messages import Cancel, Progress
from edgespec.wire.segment import StageTime

COST = {"cost": (StageTime(5, 1.0), StageTime(5, 1.0))}


class LateAdaptive(Adaptive):
    """Guesses from the first token on."""

    starts_with_prompt = False


@pytest.fixture(autouse=True)
def _starts_with_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "adaptive", LateAdaptive(width=3))


def queued(wire: Wire) -> set[int]:
    """Segments that the first stage is believed to have."""
    return wire.machine._flights._queued


def rooted(policy: str = "adaptive") -> Wire:
    """A request whose first root is on its way, while the draft source expands it."""
    wire = Wire()
    wire.submit(submit(1, "hello", 50, policy))
    wire.now = 1.0
    if wire.drafts:
        wire.take_draft_of_the_prompt()
    wire.back(wire.segments.pop(), **COST)
    wire.head(7)
    return wire


def test_a_policy_that_waits_for_the_first_stage_sends_on_its_credit() -> None:
    wire = rooted()
    (root,) = wire.segments
    assert queued(wire) == {root.header.seq}
    wire.expanded((0, 11, -0.1), (0, 12, -3.0))
    assert len(wire.segments) == 1, "the first stage is busy"
    wire.credit(root.header.seq)
    assert [s.parts[0].tokens.tolist()[0] for s in wire.segments] == [7, 11]
    assert queued(wire) == {wire.segments[-1].header.seq}


def test_a_result_is_a_credit_too() -> None:
    """Its own credit may come behind it, on another channel, or be lost."""
    wire = rooted()
    (root,) = wire.segments
    wire.expanded((0, 11, -0.1))
    wire.back(root)
    assert queued(wire) == set()
    wire.head(11)
    sent = len(wire.segments)
    wire.credit(root.header.seq)
    assert len(wire.segments) == sent, "an old credit"


@pytest.mark.parametrize("seq", [0, 99, 2**63])
def test_a_credit_for_nothing_is_ignored(seq: int) -> None:
    wire = rooted()
    wire.expanded((0, 11, -0.1))
    before = repr(vars(wire.machine))
    wire.credit(seq)
    assert repr(vars(wire.machine)) == before
    assert len(wire.segments) == 1


def test_a_credit_counts_once() -> None:
    wire = rooted()
    wire.expanded((0, 11, -0.1))
    for _ in range(3):
        wire.credit(wire.segments[0].header.seq)
    assert len(wire.segments) == 2


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_only_a_policy_that_waits_for_credits_is_asked_on_one(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlowSpec and the like go on when a result is verified; how fast credits are is no news."""
    wire = rooted(policy)
    asked: list[str] = []
    real = type(POLICIES[policy]).decide
    monkeypatch.setattr(
        type(POLICIES[policy]), "decide", lambda self, view: asked.append("") or real(self, view)
    )
    while not queued(wire) and wire.drafts:
        wire.drafted(_chain(3))
        asked.clear()
    wire.credit(min(queued(wire)))
    assert bool(asked) == POLICIES[policy].waits_for_credit


def test_a_credit_of_a_request_that_is_over_serves_the_next_one() -> None:
    wire = rooted()
    (old,) = wire.segments
    wire.take(wire.machine.handle(MessageArrived(b"client", Cancel(1)), 2.0))
    wire.submit(submit(2, "hello", 50, "adaptive"))
    prompt = wire.segments[-1]
    assert queued(wire) == {old.header.seq, prompt.header.seq}
    wire.credit(old.header.seq)
    wire.credit(prompt.header.seq)
    assert queued(wire) == set()


def test_a_ring_that_is_gone_holds_nothing() -> None:
    wire = rooted()
    (old,) = wire.segments
    wire.take(wire.machine.handle(RingDown("stage 1 is gone"), 2.0))
    assert isinstance(wire.replies[-1], Progress)
    assert queued(wire) == set()
    wire.take(wire.machine.handle(RingUp(), 3.0))
    busy = set(queued(wire))
    assert busy, "the request goes on"
    assert old.header.seq not in busy
    wire.credit(old.header.seq)
    wire.back(old)
    assert queued(wire) == busy


def test_a_policy_in_step_sends_nothing_on_a_credit_within_its_step() -> None:
    """FlowSpec §3.1: a result is verified and its draft merged before anything else leaves."""
    wire = Wire()
    wire.first_token("flowspec")
    wire.drafted(_chain(70))
    segments = list(wire.segments)
    assert len(segments) == 3
    wire.back(segments[0])
    wire.credit(segments[0].header.seq)
    wire.credit(segments[1].header.seq)
    assert wire.segments == segments, "a segment left before the result was verified"
    assert len(wire.heads) == 1


def _chain(length: int) -> DraftedTree:
    at = np.arange(length)
    return DraftedTree(at - 1, at + 10, -0.1 * (at + 1.0))


# --- what is learnt -------------------------------------------------------------------------------


def test_what_is_learnt_outlives_its_request_and_its_ring() -> None:
    wire = rooted()
    estimates = wire.request.estimates
    assert estimates.step.seconds(5) == 1.0
    assert estimates.step.spread == 2.0
    assert estimates.draft.seconds(5) == 1.0
    wire.take(wire.machine.handle(RingDown("stage 1 is gone"), 2.0))
    wire.take(wire.machine.handle(RingUp(), 3.0))
    again = wire.machine.accepts(2)
    assert again is not None
    assert again.estimates is estimates
    assert estimates.step.seconds(5) == 1.0


def test_policies_learn_apart() -> None:
    """So that a comparison does not depend on its order."""
    wire = rooted()
    assert wire.machine.learnt["adaptive"].step.known
    assert not wire.machine.learnt["specpipe"].step.known


def test_a_repeated_result_and_one_of_a_ring_that_is_gone_teach_nothing() -> None:
    wire = rooted()
    (root,) = wire.segments
    slow = {"cost": (StageTime(1, 9.0),)}
    wire.back(root, cost=(StageTime(1, 1.0), StageTime(1, 1.0)))
    known = wire.request.estimates.step.seconds(1)
    wire.back(root, **slow)
    assert wire.request.estimates.step.seconds(1) == known


def test_a_stage_that_tells_of_more_rows_than_were_sent_is_not_believed() -> None:
    wire = rooted()
    (root,) = wire.segments
    estimates = wire.request.estimates
    wire.back(root, cost=(StageTime(2, 9.0), StageTime(1, 1.0)))
    assert estimates.step.seconds(5) == 1.0
    assert wire.renewals == ["sent rows of no segment"]


def test_guesses_teach_what_scores_are_worth() -> None:
    wire = rooted()
    wire.expanded((0, 11, -0.1), (0, 12, -3.0))
    wire.back(wire.segments[0])
    wire.head(12)
    estimates = wire.request.estimates
    assert dict(estimates.ranks) == {1: 1}
    calibration = estimates.calibration(wire.request.sampling.without_seed)
    named, less_likely = calibration.scores(np.array([-0.1, -3.0]))
    assert named < -0.1
    assert less_likely > -3.0


def test_an_emptied_result_never_reaches_the_head() -> None:
    """It gives its credit back and is verified as nothing."""
    wire = rooted()
    wire.expanded((0, 11, -0.1))
    wire.credit(wire.segments[0].header.seq)
    root, guess = wire.segments
    wire.back(root)
    wire.head(12)  # the guess was wrong: its row is dropped on the way
    nothing = np.zeros(0, np.int64)
    wire.back(
        guess,
        ids=nothing,
        parents=nothing,
        positions=nothing,
        hidden=Tensor("float32", (0, 1), b""),
    )
    assert not wire.heads
    assert wire.request.outbox.in_flight == 1, "the new root"
