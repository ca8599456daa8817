"""CoordinatorMachine: what it makes of results and drafts, one at a time, as they come back."""

from __future__ import annotations

import numpy as np
import pytest
from support.local_ring import CLIENT
from support.rings import PLENTY, FakeRing, assert_one_end, submit
from support.segments import one_part, retain_message
from support.wires import Wire

from edgespec.decoding.admission import CoordinatorSettings
from edgespec.decoding.coordinator import CoordinatorMachine
from edgespec.decoding.effects import EncodePrompt, Renew
from edgespec.decoding.events import (
    Drafted,
    HeadDone,
    SegmentArrived,
)
from edgespec.errors import LocalProtocolError
from edgespec.machines.effects import (
    SendPeer,
)
from edgespec.machines.events import (
    BlockDone,
    ComputeFailed,
    MessageArrived,
    RingDown,
    RingUp,
    Tick,
)
from edgespec.policy.adaptive import Adaptive
from edgespec.policy.base import Results
from edgespec.policy.flowspec import FlowSpec
from edgespec.policy.registry import POLICIES
from edgespec.sim.toy import VOCABULARY, ToyCodec
from edgespec.tree.drafted import DraftedTree
from edgespec.verify.sampling import Choice
from edgespec.wire.client_messages import Cancel, Failed, Finished
from edgespec.wire.messages import Fault, Retain

POLICY_NAMES = sorted(POLICIES)

# --- retained sets --------------------------------------------------------------------------------


def test_a_retained_set_names_what_is_certain_and_what_lives() -> None:
    wire = Wire()
    wire.first_token("autoregressive")
    # The first token comes of the prompt's last row, which is committed already.
    assert wire.retains.pop() == retain_message(1, 1, 5, (), (5,))
    for epoch, root in enumerate(range(5, 9), start=2):
        segment = wire.segments.pop()
        assert segment.parts[0].ids.tolist() == [root]
        assert (segment.parts[0].parents.tolist(), segment.parts[0].positions.tolist()) == (
            [root - 1],
            [root],
        )
        wire.back(segment)
        wire.head(7)
        retain = wire.retains.pop()
        # The segments went out before any stage could know: nothing is acknowledged but their own.
        assert retain == retain_message(1, epoch, root + 1, retain.keep.accepted, (root + 1,))
        assert retain.keep.accepted[-1] == root


@pytest.mark.parametrize("acknowledged", [True, False])
def test_the_accepted_list_reaches_back_to_what_all_have_applied(acknowledged: bool) -> None:
    wire = Wire()
    wire.first_token("autoregressive")
    lengths = []
    for _ in range(6):
        segment = wire.segments.pop()
        wire.back(segment, **({} if acknowledged else {"epoch": 0}))
        wire.head(7)
        lengths.append(len(wire.retains.pop().keep.accepted))
    assert lengths == ([1, 1, 1, 1, 1, 1] if acknowledged else [1, 2, 3, 4, 5, 6])


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_with_every_retained_set_lost_the_answer_is_exact_and_memory_is_bounded(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage then holds every row it ever computed, and a set all accepted rows: no more."""
    monkeypatch.setitem(POLICIES, "adaptive", Adaptive(width=3, most_rows=6))
    fake = FakeRing(3)
    ask = submit(1, "hello", 60, policy)
    fake.ring.submit(ask)
    most_rows = most_accepted = 0
    while steps := list(fake.ring.steps()):
        for step in steps:
            node = step.node if step.kind == "control" else 0
            waiting = fake.ring.waiting_control(node) if node else []
            lost = bool(waiting) and isinstance(waiting[0], Retain)
            if lost:
                assert isinstance(waiting[0], Retain)
                most_accepted = max(most_accepted, len(waiting[0].keep.accepted))
            fake.ring.take(step, lose=lost)
        held = [len(x) for m in fake.machines for x in m.ledgers().values()]
        most_rows = max(most_rows, *held, 0)
    end = assert_one_end(fake.ring.replies, 1)
    assert isinstance(end, Finished)
    assert end.token_ids == fake.expected(ask).token_ids
    assert most_accepted <= 60
    assert most_rows <= end.prompt_tokens + end.rows_sent
    assert most_accepted > 50, "nothing was lost"
    fake.assert_nothing_left()


def test_with_every_retained_set_lost_a_small_stage_says_so() -> None:
    fake = FakeRing(2, row_limit=40)
    fake.ring.submit(submit(1, "hello", 60, "autoregressive"))
    while steps := list(fake.ring.steps()):
        for step in steps:
            waiting = fake.ring.waiting_control(step.node) if step.kind == "control" else []
            fake.ring.take(step, lose=bool(waiting) and isinstance(waiting[0], Retain))
    end = assert_one_end(fake.ring.replies, 1)
    assert isinstance(end, Failed)
    assert "more than the 40 rows" in end.reason
    fake.assert_nothing_left()


# --- what cannot be -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"ids": np.array([99])},
        {"ids": np.array([6])},
        {"committed": True},
        {"hidden": None},
    ],
)
def test_a_result_that_was_not_asked_for_ends_the_ring_and_not_the_request(
    changes: dict[str, object],
) -> None:
    wire = Wire()
    wire.first_token("autoregressive")
    told = list(wire.replies)
    segment = wire.segments.pop()
    wire.back(segment, **changes)
    assert wire.renewals == ["sent rows of no segment"]
    wire.back(segment)
    assert (wire.replies, wire.heads) == (told, []), "nothing of this ring counts any more"
    wire.take(wire.machine.handle(RingDown("it was renewed"), wire.now))
    wire.take(wire.machine.handle(RingUp(), wire.now))
    again = wire.machine.accepts(2)
    assert again is not None
    assert wire.segments[-1].parts[0].tokens.tolist() == [*again.context]


@pytest.mark.parametrize(
    "changes", [{"ids": np.array([3])}, {"committed": False}, {"hidden": None}]
)
def test_a_prefill_result_that_was_not_asked_for_ends_the_ring_and_not_the_request(
    changes: dict[str, object],
) -> None:
    wire = Wire()
    wire.submit(submit(1, "hello", 5, "autoregressive"))
    wire.back(wire.segments.pop(), **changes)
    assert wire.renewals == ["sent rows of no segment"]
    assert wire.replies == []


@pytest.mark.parametrize("changes", [{"request": 2}, {"seq": 99}])
def test_a_foreign_result_ends_the_ring(changes: dict[str, int]) -> None:
    wire = Wire()
    wire.first_token("autoregressive")
    wire.back(wire.segments.pop(), **changes)
    assert wire.renewals == ["sent rows of no segment"]


def test_a_repeated_result_is_ignored() -> None:
    wire = Wire()
    wire.first_token("autoregressive")
    segment = wire.segments.pop()
    wire.back(segment)
    wire.back(segment)
    assert len(wire.heads) == 1
    assert len(wire.replies) == 1
    assert wire.renewals == []


def test_a_head_job_that_nobody_started_is_our_bug() -> None:
    wire = Wire()
    wire.first_token("autoregressive")
    choice = Choice(np.array([0]), np.array([1]), np.ones(1))
    before = repr({**vars(wire.machine), "_before": []})
    for event in (HeadDone(99, 1, choice), BlockDone(1, None)):
        with pytest.raises(LocalProtocolError):
            wire.machine.handle(event, 0.0)
    assert repr({**vars(wire.machine), "_before": []}) == before


def test_late_results_of_compute_are_ignored_after_the_end() -> None:
    wire = Wire()
    wire.first_token("flowspec")
    job = wire.drafts[0].job
    wire.take(wire.machine.handle(MessageArrived(b"client", Cancel(1)), 0.0))
    assert wire.machine.handle(Drafted(job, 1, DraftedTree.empty()), 0.0) == []
    assert wire.machine.handle(ComputeFailed(job, 1, "?"), 0.0) == []
    assert wire.machine.idle


def test_prompt_chunks_follow_each_other_within_the_window() -> None:
    wire = Wire(stages=2)
    wire.submit(submit(1, "x" * 1_000, 5, "autoregressive"))
    assert isinstance(wire.replies[-1], Failed)
    wire.submit(submit(2, "x" * 400, 5, "autoregressive"))
    flying = list(wire.segments)
    assert len(flying) == 3, "one for every stage, one more at the door"
    assert flying[0].parts[0].reserve == 400
    positions: list[int] = []
    while flying:
        segment = flying.pop(0)
        positions += segment.parts[0].positions.tolist()
        wire.segments.clear()
        assert segment.parts[0].want == (1 if len(positions) == 400 else 0)
        wire.back(segment)
        flying += wire.segments
        assert len(flying) <= 3
    assert positions == list(range(400))
    assert len(wire.heads) == 1


def test_a_draft_that_began_below_an_older_root_is_merged_below_the_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Unstepped(FlowSpec):
        results = Results.EACH

    monkeypatch.setitem(POLICIES, "flowspec", Unstepped())
    wire = Wire()
    wire.first_token("flowspec")
    wire.drafted(DraftedTree(np.array([-1]), np.array([11]), np.array([-1.0])))
    wire.back(wire.segments.pop(0))
    wire.head(11)  # a draft below 11 begins
    wire.back(wire.segments.pop(0))
    wire.head(13)  # meanwhile 13 became committed: only what follows it is of use
    wire.drafted(DraftedTree(np.array([-1, -1, 0, 1, 2]), np.arange(13, 18), -np.arange(1.0, 6.0)))
    request = wire.machine.accepts(1)
    assert request is not None
    assert request.tree is not None
    tree = request.tree
    assert tree[tree.root].token == 13
    assert sorted(tree[i].token for i in tree.ids) == [13, 15, 17]


def test_a_draft_that_gives_nothing_is_no_reason_to_stop() -> None:
    wire = Wire()
    wire.first_token("flowspec", max_new_tokens=6)
    for _ in range(PLENTY):
        if wire.drafts:
            wire.drafted(DraftedTree.empty())
        elif wire.segments:
            wire.back(wire.segments.pop(0))
        elif wire.heads:
            wire.head(VOCABULARY + 1)
        else:
            break
    assert isinstance(wire.replies[-1], Finished)
    assert wire.replies[-1].new_tokens == 6


def test_a_result_that_lacks_live_rows_ends_the_ring_unless_its_fault_comes_first() -> None:
    for fault_comes in (False, True):
        machine = CoordinatorMachine(CoordinatorSettings(2, 100, ""), ToyCodec())
        machine.handle(RingUp(), 0.0)
        ask = submit(policy="autoregressive")
        (encode,) = machine.handle(MessageArrived(CLIENT, ask), 0.0)
        assert isinstance(encode, EncodePrompt)
        machine.handle(machine.encode(encode), 0.0)
        effects = machine.handle(
            SegmentArrived(
                one_part(1, 1, 0, True, 0, 1, *(np.zeros(0, np.int64) for _ in range(4)), None)
            ),
            10.0,
        )
        assert effects == []
        limit = machine.deadline()
        assert limit is not None
        assert limit > 10.0
        assert machine.handle(Tick(), limit - 0.5) == []
        last = MessageArrived(b"", Fault(1, "no memory")) if fault_comes else Tick()
        effects = machine.handle(last, limit)
        replies = [e.message for e in effects if isinstance(e, SendPeer)]
        renewals = [e.why for e in effects if isinstance(e, Renew)]
        if fault_comes:
            assert replies == [Failed(1, "no memory")]
        else:
            assert (replies, renewals) == ([], ["rows of a request did not come back"])
        assert machine.deadline() is None


def test_a_policy_in_step_takes_up_a_result_when_its_draft_is_merged() -> None:
    """FlowSpec §3.1: verify, prune, expand, send; only then the next result."""
    wire = Wire()
    wire.first_token("flowspec")
    wire.drafted(DraftedTree(np.array([-1, 0]), np.array([11, 13]), np.array([-1.0, -2.0])))
    wire.back(wire.segments.pop(0))
    wire.head(11)  # a draft below 11 begins
    wire.back(wire.segments.pop(0))
    request = wire.machine.accepts(1)
    assert request is not None
    assert not wire.heads, "a result was taken up before the draft was merged"
    in_flight = request.outbox.in_flight
    wire.drafted(DraftedTree(np.array([-1, -1]), np.array([13, 14]), np.array([-1.0, -2.0])))
    assert wire.segments[-1].parts[0].tokens.tolist() == [14], "the new guess leaves first"
    assert wire.heads
    assert request.outbox.in_flight == in_flight  # one more left, one was taken up
