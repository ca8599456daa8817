"""The coordinator machine when its ring is lost: it pauses, goes on, or says once why it cannot."""

from __future__ import annotations

import numpy as np
import pytest
from support.local_ring import CLIENT
from support.rings import FakeRing, assert_one_end, submit
from support.stages import REQUEST, Stage, draft, opened, opening, runs, sent, with_tree
from support.tiers import tiered
from support.wires import Wire

from edgespec.decoding.effects import (
    AbortBlock,
    CloseCache,
    OpenCache,
)
from edgespec.decoding.events import (
    Drafted,
    HeadDone,
)
from edgespec.errors import LocalProtocolError
from edgespec.machines.effects import (
    RunBlock,
)
from edgespec.machines.events import (
    BlockDone,
    ComputeFailed,
    Hold,
    MessageArrived,
    PeerGone,
    RingDown,
    RingProgress,
    RingUp,
    Tick,
)
from edgespec.policy.adaptive import Adaptive
from edgespec.policy.registry import POLICIES
from edgespec.tree.drafted import DraftedTree
from edgespec.verify.sampling import Choice
from edgespec.wire.client_messages import Cancel, Failed, Finished, Progress
from edgespec.wire.messages import Credit, Fault

LOST = "stage 2 (nano-b, process 7) has been silent for 1.6 s"
ASK = submit(1, "hello", 6)


@pytest.fixture(autouse=True)
def _small_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing costs anything, as here, the adaptive policy would guess without end."""
    monkeypatch.setitem(POLICIES, "adaptive", Adaptive(width=3, most_rows=6))


# --- the same text, whenever it happens -----------------------------------------------------------


def play_with_a_loss_at(step: int, policy: str) -> bool:
    """One request whose ring is lost after `step` steps; False if it was over by then."""
    fake = FakeRing(2, prefill_chunk=3, accuracy=0.5)
    ask = submit(1, "hello", 6, policy)
    fake.ring.submit(ask)
    fake.take_turns(step)
    was_open = bool(fake.coordinator._requests)
    fake.ring.lose(LOST)
    fake.take_turns(step % 5)  # what was at work may end now, or on the next ring
    fake.ring.mend()
    fake.ring.run()
    end = assert_one_end(fake.ring.replies, 1)
    assert isinstance(end, Finished)
    right = fake.expected(ask)
    assert (end.token_ids, end.text) == (right.token_ids, right.text), f"lost at step {step}"
    assert end.recoveries == was_open
    assert end.new_tokens - 1 - was_open <= end.rows_sent - end.rows_wasted <= end.new_tokens - 1
    fake.assert_nothing_left()
    return was_open


@pytest.mark.parametrize("policy", tiered(sorted(POLICIES), ["flowspec"]))
def test_an_answer_is_the_same_at_whatever_step_its_ring_is_lost(policy: str) -> None:
    step = 0
    while play_with_a_loss_at(step, policy):
        step += 1
    assert step > 20


def test_a_ring_that_is_lost_again_and_again_loses_no_token() -> None:
    fake = FakeRing(3, prefill_chunk=2, accuracy=0.8)
    ask = submit(1, "hello", 40)
    fake.ring.submit(ask)
    for steps in (40, 150, 5, 150, 90):
        assert fake.take_turns(steps), "it was over before"
        fake.ring.lose(LOST)
        fake.ring.mend()
    fake.ring.run()
    end = assert_one_end(fake.ring.replies, 1)
    assert isinstance(end, Finished)
    assert end.token_ids == fake.expected(ask).token_ids
    assert end.recoveries == 5
    fake.assert_nothing_left()


# --- what it says, and what it forgets ------------------------------------------------------------


def lose(wire: Wire, now: float, reason: str = LOST) -> None:
    """The ring is lost."""
    wire.now = now
    wire.take(wire.machine.handle(RingDown(reason), now))


def test_a_ring_whose_devices_get_other_layers_lets_nobody_wait_in_vain() -> None:
    """However long they load: nothing is lost, and a loss would be told."""
    wire = Wire(recovery=10.0)
    wire.take(wire.machine.handle(RingDown("shared out again", lost=False), 5.0))
    wire.submit(submit(1, "hello", 50))
    assert wire.replies == [
        Progress(1, "shared out again; waiting until they have loaded their layers")
    ]
    assert wire.machine.deadline() is None
    wire.take(wire.machine.handle(RingUp(3), 500.0))
    assert wire.segments
    lose(wire, 600.0)
    assert wire.machine.deadline() == 610.0, "that of a loss is as it was"


def test_while_it_holds_no_further_request_begins_and_who_waits_is_told() -> None:
    wire = Wire()
    wire.first_token("flowspec")
    wire.submit(submit(2, "hello", 50))
    wire.replies.clear()
    wire.take(wire.machine.handle(Hold("not now"), 5.0))
    assert wire.replies == [Progress(2, "not now")], "the first one runs on"
    assert wire.machine.load() == (1, 1)
    wire.submit(submit(3, "hello", 50))
    wire.take(wire.machine.handle(PeerGone(b"nobody"), 6.0))
    wire.take(wire.machine.handle(MessageArrived(b"client", Cancel(1)), 7.0))
    assert wire.machine.load() == (0, 2)
    wire.take(wire.machine.handle(Hold(""), 8.0))
    assert wire.machine.load() == (1, 1)


def test_everybody_is_told_why_they_wait_and_the_oldest_goes_on_first() -> None:
    wire = Wire()
    wire.first_token("flowspec")
    wire.submit(submit(2, "hello", 50))
    wire.replies.clear()
    lose(wire, 5.0)
    wire.submit(submit(3, "hello", 50))
    why = f"{LOST}; waiting for it"
    assert wire.replies == [Progress(tag, why) for tag in (1, 2, 3)]
    wire.segments.clear()
    wire.take(wire.machine.handle(RingUp(), 9.0))
    (again,) = wire.segments
    assert again.parts[0].tokens.tolist()[-1] == 7, (
        "the prompt and the token that came before the loss"
    )
    assert len(again.parts[0].ids) == 6
    assert again.parts[0].reserve


def test_what_is_late_of_the_lost_ring_changes_nothing() -> None:
    wire = Wire()
    wire.first_token("flowspec")
    drafted, request = wire.drafts.pop(), wire.request
    lose(wire, 5.0)
    wire.take(wire.machine.handle(RingUp(), 6.0))
    (prompt,) = wire.segments
    wire.back(prompt)
    job = wire.heads.pop()
    lose(wire, 7.0)
    wire.segments.clear()
    wire.take(wire.machine.handle(RingUp(), 8.0))
    before = (wire.segments[:], wire.replies[:], wire.drafts[:])
    late = (
        Drafted(drafted.job, drafted.request, DraftedTree.empty()),
        ComputeFailed(drafted.job, 1, "late"),
        MessageArrived(b"stage", Fault(1, "late")),
        MessageArrived(b"stage", Fault(2, "late")),
        MessageArrived(b"stage", Credit(prompt.header.seq)),
        HeadDone(job.job, job.request, Choice(np.array([0]), np.array([9]), np.ones(1))),
    )
    for event in late:
        wire.take(wire.machine.handle(event, 9.0))
    wire.back(prompt)
    assert (wire.segments, wire.replies, wire.drafts) == before
    assert not wire.heads
    assert (request.number, request.answer.token_ids, request.recoveries) == (3, [7], 2)


@pytest.mark.parametrize("end", ["cancel", "gone"])
def test_a_request_that_ends_while_it_waits_is_forgotten(end: str) -> None:
    fake = FakeRing(2)
    fake.ring.submit(submit(1, "hello", 30))
    fake.take_turns(40)
    fake.ring.lose(LOST)
    if end == "cancel":
        fake.ring.cancel(1)
        told = assert_one_end(fake.ring.replies, 1)
        assert isinstance(told, Finished)
        assert told.finish_reason == "cancelled"
        assert told.new_tokens
    else:
        fake.tell(PeerGone(CLIENT))
    fake.ring.mend()
    fake.ring.run()
    fake.assert_nothing_left()


# --- in time or one clear error -------------------------------------------------------------------


def come_on(wire: Wire, now: float, doing: str) -> None:
    """A stage that the ring waits for."""
    wire.now = now
    wire.take(wire.machine.handle(RingProgress(doing), now))


def test_the_time_does_not_run_out_while_the_replacement_comes_on() -> None:
    wire = Wire(recovery=10.0)
    wire.first_token("flowspec")
    lose(wire, 5.0)
    new = "stage 2 (nano-c, process 9) is still"
    come_on(wire, 12.0, f"{new} receiving the block: 10 %")
    assert wire.machine.deadline() == 22.0
    come_on(wire, 21.0, f"{new} compiling rows.c")
    wire.take(wire.machine.handle(Tick(), 30.9))
    assert not any(isinstance(r, Failed) for r in wire.replies)
    wire.take(wire.machine.handle(Tick(), 31.0))
    late = f"{new} compiling rows.c (10 s), and the ring did not come back within 26 s"
    assert wire.replies[-1] == Failed(1, f"{LOST}; {late}", "lost")


def test_a_replacement_that_comes_on_for_ever_is_not_waited_for_for_ever() -> None:
    wire = Wire(recovery=10.0)
    wire.first_token("flowspec")
    lose(wire, 5.0)
    for step in range(14):
        come_on(wire, 6.0 + 7.0 * step, f"loading {step}")
    assert wire.machine.deadline() == 105.0, "ten times as long"
    wire.take(wire.machine.handle(Tick(), 105.0))
    assert isinstance(wire.replies[-1], Failed)


def test_what_a_replacement_did_that_is_lost_too_is_not_told() -> None:
    wire = Wire(recovery=10.0)
    wire.first_token("flowspec")
    lose(wire, 5.0)
    come_on(wire, 12.0, "stage 2 (nano-c, process 9) is still loading")
    lose(wire, 13.0, "stage 2 (nano-c, process 9) left")
    wire.take(wire.machine.handle(Tick(), 22.0))
    reason = "stage 2 (nano-c, process 9) left; it did not come back within 17 s"
    assert wire.replies[-1] == Failed(1, reason, "lost")
    wire.submit(submit(2, "hello", 50))
    wire.take(wire.machine.handle(RingUp(), 23.0))
    lose(wire, 24.0)
    assert wire.machine.deadline() == 34.0, "that is over"


def test_after_the_time_each_fails_once_with_the_reason() -> None:
    wire = Wire(recovery=10.0)
    wire.first_token("flowspec")
    lose(wire, 5.0)
    wire.now = 8.0
    wire.submit(submit(2, "hello", 50))
    assert wire.machine.deadline() == 15.0
    wire.take(wire.machine.handle(Tick(), 14.9))
    assert not any(isinstance(r, Failed) for r in wire.replies)
    lose(wire, 14.9, "stage 1 (nano-a, process 3) left")  # no reason to wait for longer
    wire.take(wire.machine.handle(Tick(), 15.0))
    reason = "stage 1 (nano-a, process 3) left; it did not come back within 10 s"
    assert wire.replies[-1] == Failed(1, reason, "lost")
    assert wire.machine.deadline() == 18.0
    wire.take(wire.machine.handle(Tick(), 18.0))
    assert wire.replies[-1] == Failed(2, reason, "lost")
    assert wire.machine.deadline() is None
    wire.submit(submit(3, "hello", 50))
    wire.take(wire.machine.handle(RingUp(), 20.0))
    assert len([r for r in wire.replies if isinstance(r, Failed)]) == 2


def test_a_ring_that_was_never_up_is_waited_for_without_an_end() -> None:
    fake = FakeRing(2)
    fake.coordinator._state.is_up = False
    fake.ring.submit(ASK)
    assert fake.coordinator.deadline() is None


def test_without_time_to_recover_a_loss_is_an_error_at_once() -> None:
    wire = Wire(recovery=0.0)
    wire.first_token("flowspec")
    lose(wire, 5.0)
    wire.submit(submit(2, "hello", 50))
    assert wire.replies[-2:] == [Failed(1, LOST, "lost"), Failed(2, LOST, "lost")]
    assert wire.machine.idle
    wire.take(wire.machine.handle(RingUp(), 6.0))
    wire.submit(submit(3, "hello", 50))
    assert wire.machine.accepts(2) is not None


# --- a stage in the next ring ---------------------------------------------------------------------


def test_a_stage_forgets_the_ring_before() -> None:
    stage = with_tree()
    assert stage.machine.ledgers()
    assert stage.machine.reset() == [CloseCache(REQUEST)]
    assert not stage.machine.ledgers()
    assert OpenCache(REQUEST, 64) in stage.segment(opening()), "numbers begin again"


@pytest.mark.parametrize("end", ["done", "aborted", "failed"])
def test_a_block_that_still_runs_is_stopped_and_its_result_is_for_nobody(end: str) -> None:
    stage = Stage()
    job = runs(stage.segment(opening())).job
    stage.segment(draft(2, (2, 1, 2)))  # it waits, and is forgotten
    assert stage.machine.reset() == [AbortBlock(job), CloseCache(REQUEST)]
    stage.running = None  # in the next ring
    effects = stage.segment(opening())
    assert runs(effects).job != job
    late = ComputeFailed(job, REQUEST, "late") if end == "failed" else BlockDone(job, None)
    assert stage.machine.handle(late, 0.0) == []
    effects = stage.done()
    assert sent(effects).parts[0].ids.tolist() == [0, 1]
    assert not any(isinstance(e, RunBlock) for e in effects)
    with pytest.raises(LocalProtocolError):
        stage.machine.handle(late, 0.0)


def test_a_stage_may_get_another_place_for_its_block() -> None:
    stage = opened()
    stage.machine.take_place(is_first=False, is_last=True, row_limit=5)
    stage.machine.reset()
    stage.segment(opening())
    assert sent(stage.done()).parts[0].ids.tolist() == [1], (
        "the last stage sends what is wanted alone"
    )
