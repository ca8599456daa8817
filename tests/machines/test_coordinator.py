"""CoordinatorMachine: every request ends in exactly one way, whatever happens to it and when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from support.rings import PLENTY, VOCABULARY, FakeRing, ToyCodec, assert_one_end, submit

from edgespec.backends.compute import CoordinatorCompute, StageCompute
from edgespec.errors import ConfigError, LocalProtocolError
from edgespec.machines.admission import Ring
from edgespec.machines.coordinator import CoordinatorMachine
from edgespec.machines.effects import (
    DeepenDraft,
    Effect,
    OpenDraft,
    RunBlock,
    RunDraft,
    RunHead,
    SendPeer,
    SendRing,
    SendStages,
)
from edgespec.machines.events import (
    BlockDone,
    ComputeFailed,
    Drafted,
    HeadDone,
    MessageArrived,
    PeerGone,
    RingDown,
    RingUp,
    SegmentArrived,
    Tick,
)
from edgespec.policy.flowspec import FlowSpec
from edgespec.policy.registry import POLICIES
from edgespec.runtime.local import CLIENT
from edgespec.tree.drafted import DraftedTree
from edgespec.verify.sampling import Choice
from edgespec.wire.messages import (
    Cancel,
    End,
    Failed,
    Fault,
    Finished,
    Message,
    Progress,
    Retain,
    Segment,
    Submit,
    Tokens,
)
from edgespec.wire.tensor import Tensor

ASK = submit(1, "hello", 5)


def situation(fake: FakeRing, tag: int) -> str:
    """What a request is waiting for, in words."""
    for request in fake.coordinator._requests.values():
        if request.tag != tag:
            continue
        if fake.coordinator._active != request.number:
            return "queued"
        if request.tree is None:
            return "prefill at the head" if request.verifying else "prefill"
        waits = [
            "on the ring" if request.in_flight else "",
            "at the head" if request.verifying else "",
            "drafting" if request.draft else "",
        ]
        return ", ".join(filter(None, waits))
    return "over"


# --- an end at any moment -------------------------------------------------------------------------


def cancel(fake: FakeRing) -> None:
    fake.ring.cancel(1)


def fault(fake: FakeRing) -> None:
    fake.tell(MessageArrived(b"stage", Fault(1, "stage 2 is out of memory")))


def peer_gone(fake: FakeRing) -> None:
    fake.tell(PeerGone(CLIENT))


def ring_down(fake: FakeRing) -> None:
    fake.tell(RingDown("stage 2 is gone"))


def play_with_an_end_at(step: int, end: Callable[[FakeRing], None], policy: str) -> tuple[str, str]:
    """Two requests; after `step` steps `end` happens. Returns the situation and the outcome."""
    fake = FakeRing(2, prefill_chunk=3, accuracy=0.5)
    first, second = replace(ASK, policy=policy), replace(ASK, tag=2, policy=policy, seed=1)
    fake.ring.submit(first)
    fake.ring.submit(second)
    fake.take_turns(step)
    found = situation(fake, 1)
    end(fake)
    fake.ring.run()
    replies = fake.ring.replies
    if end is peer_gone:
        assert not any(isinstance(r, Finished | Failed) and r.tag == 2 for r in replies)
        outcome = "gone" if found != "over" else assert_one_end(replies, 1).__class__.__name__
    else:
        outcome = type(assert_one_end(replies, 1)).__name__
        other = assert_one_end(replies, 2)
        if end is ring_down:
            assert isinstance(other, Failed)
            assert other.reason == "stage 2 is gone"
        else:
            assert isinstance(other, Finished)
            assert other.token_ids == fake.expected(second).token_ids
    if found != "over" and outcome == "Finished":
        told = assert_one_end(replies, 1)
        assert isinstance(told, Finished)
        assert told.finish_reason == "cancelled"
        assert fake.expected(first).token_ids[: told.new_tokens] == told.token_ids
    fake.assert_nothing_left()
    return found, outcome


@pytest.mark.parametrize("end", [cancel, fault, peer_gone, ring_down])
@pytest.mark.parametrize("policy", ["autoregressive", "naive_tree", "flowspec"])
def test_one_end_at_any_moment(end: Callable[[FakeRing], None], policy: str) -> None:
    seen: Counter[str] = Counter()
    step = 0
    while True:
        found, outcome = play_with_an_end_at(step, end, policy)
        seen[found] += 1
        if found == "over":
            assert outcome == "Finished"
            break
        expected = {cancel: "Finished", peer_gone: "gone"}.get(end, "Failed")
        assert outcome == expected
        step += 1
    words = {word for found in seen for word in found.split(", ")}
    assert {"prefill", "prefill at the head", "on the ring", "at the head"} <= words
    if policy == "flowspec":
        assert any("on the ring" in found and "drafting" in found for found in seen)
        assert "drafting" in seen


@pytest.mark.parametrize("end", [cancel, fault, peer_gone, ring_down])
def test_one_end_while_queued_or_waiting_for_the_ring(end: Callable[[FakeRing], None]) -> None:
    fake = FakeRing(2)
    fake.tell(RingDown("not yet"))
    fake.coordinator._down = None  # as before the first RingUp
    fake.ring.submit(ASK)
    assert situation(fake, 1) == "queued"
    end(fake)
    assert fake.coordinator.idle
    fake.tell(RingUp())
    fake.ring.run()
    if end is not peer_gone:
        told = assert_one_end(fake.ring.replies, 1)
        assert isinstance(told, Finished if end is cancel else Failed)
    fake.assert_nothing_left()


class Flaky:
    """Compute that fails at the n-th effect of some kinds."""

    def __init__(self, kinds: tuple[type, ...], at: int) -> None:
        self.kinds = kinds
        self.left = at
        self.failed = False

    def wrap(self, compute: CoordinatorCompute | StageCompute) -> None:
        real = compute.perform

        def perform(effect: Effect, stop: Callable[[], bool]) -> object:
            if isinstance(effect, self.kinds):
                self.left -= 1
                if self.left == -1:
                    self.failed = True
                    raise ConfigError("the device is on fire")
            return real(effect, stop)

        compute.perform = perform  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("kinds", [(RunHead,), (RunDraft, DeepenDraft), (RunBlock,), (OpenDraft,)])
def test_failed_compute_ends_its_request_and_no_other(kinds: tuple[type, ...]) -> None:
    at = total = 0
    while True:
        fake = FakeRing(2, prefill_chunk=3)
        flaky = Flaky(kinds, at)
        for node in fake.ring._nodes:
            flaky.wrap(node.compute)
        fake.ring.submit(ASK)
        fake.ring.submit(replace(ASK, tag=2))
        fake.ring.run()
        ends = [assert_one_end(fake.ring.replies, tag) for tag in (1, 2)]
        failures = [e for e in ends if isinstance(e, Failed)]
        # What fails for a request that is over already is nobody's failure.
        assert len(failures) <= flaky.failed
        total += len(failures)
        assert all("on fire" in e.reason for e in failures)
        fake.assert_nothing_left()
        if not flaky.failed:
            break
        at += 1
    assert total >= 2


# --- admission ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt": ""}, "empty"),
        ({"prompt": "   "}, "no tokens"),
        ({"prompt": "x" * 30}, "30 tokens"),
        ({"prompt": "x" * 99}, "99 tokens"),
        ({"max_new_tokens": 0}, "at least 1"),
        ({"max_new_tokens": -5}, "at least 1"),
        ({"policy": "magic"}, "autoregressive"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"stop": ("x", "")}, "empty"),
    ],
)
def test_what_cannot_be_answered_is_refused_at_once(
    changes: dict[str, object], reason: str
) -> None:
    fake = FakeRing(2, context_length=30)
    fake.ring.submit(replace(ASK, **changes))  # type: ignore[arg-type]
    end = assert_one_end(fake.ring.replies, 1)
    assert isinstance(end, Failed)
    assert reason in end.reason
    fake.assert_nothing_left()


def test_without_a_draft_only_plain_decoding_is_on_offer() -> None:
    fake = FakeRing(2)
    machine = CoordinatorMachine(Ring(2, 100, draft=""), fake.codec)
    machine.handle(RingUp(), 0.0)
    effects = machine.handle(MessageArrived(b"a", ASK), 0.0)
    assert len(effects) == 1
    assert isinstance(effects[0], SendPeer)
    assert "--policy autoregressive" in str(effects[0].message)
    plain = machine.handle(MessageArrived(b"a", replace(ASK, policy="autoregressive")), 0.0)
    assert all(isinstance(e, SendRing) for e in plain)


def test_a_tag_is_taken_while_its_request_runs() -> None:
    fake = FakeRing(2)
    fake.ring.submit(ASK)
    fake.ring.submit(ASK)
    failures = [r for r in fake.ring.replies if isinstance(r, Failed)]
    assert "still running" in failures[0].reason
    fake.tell(MessageArrived(b"another client", ASK))
    fake.ring.run()
    finished = [r for r in fake.ring.replies if isinstance(r, Finished)]
    assert len(finished) == 2
    fake.ring.submit(ASK)
    fake.ring.run()
    assert isinstance(fake.ring.replies[-1], Finished), "the tag is free again"
    fake.assert_nothing_left()


@pytest.mark.parametrize("limit", [0, 2])
def test_the_queue_has_a_limit(limit: int) -> None:
    fake = FakeRing(2, queue_limit=limit)
    for tag in range(limit + 2):
        fake.ring.submit(replace(ASK, tag=tag))
    fake.ring.run()
    ends = [type(assert_one_end(fake.ring.replies, tag)) for tag in range(limit + 2)]
    assert ends == [Finished] * (limit + 1) + [Failed]


def test_requests_are_served_in_order_and_told_what_they_wait_for() -> None:
    fake = FakeRing(2)
    for tag in range(4):
        fake.ring.submit(replace(ASK, tag=tag, seed=tag))
    fake.ring.run()
    told = [(r.tag, r.text) for r in fake.ring.replies if isinstance(r, Progress)]
    assert [tag for tag, _ in told] == [1, 2, 3]
    assert "behind 2 other" in told[1][1]
    ends = [r for r in fake.ring.replies if isinstance(r, Finished)]
    assert [e.tag for e in ends] == [0, 1, 2, 3]
    firsts = [r.tag for r in fake.ring.replies if isinstance(r, Tokens)]
    assert firsts == sorted(firsts), "two requests at once"


def test_requests_wait_for_the_ring() -> None:
    fake = FakeRing(2)
    machine = CoordinatorMachine(Ring(2, 100, "fake"), fake.codec)
    effects = machine.handle(MessageArrived(b"a", ASK), 0.0)
    assert [type(e) for e in effects] == [SendPeer]
    assert "stages" in str(effects[0])
    started = machine.handle(RingUp(), 1.0)
    assert isinstance(started[0], SendRing)


def test_a_ring_that_is_down_refuses_until_it_is_up_again() -> None:
    fake = FakeRing(2)
    fake.ring.submit(ASK)
    fake.take_turns(9)
    fake.tell(RingDown("stage 1 is gone"))
    fake.ring.submit(replace(ASK, tag=2))
    for tag in (1, 2):
        end = assert_one_end(fake.ring.replies, tag)
        assert isinstance(end, Failed)
        assert end.reason == "stage 1 is gone"
    fake.ring.run()
    fake.tell(RingUp())
    fake.ring.submit(replace(ASK, tag=3))
    fake.ring.run()
    assert isinstance(assert_one_end(fake.ring.replies, 3), Finished)
    fake.assert_nothing_left()


def test_a_client_that_goes_takes_only_its_own_requests_along() -> None:
    fake = FakeRing(2)
    for peer, tag in ((CLIENT, 1), (b"other", 1), (CLIENT, 2)):
        fake.tell(MessageArrived(peer, replace(ASK, tag=tag)))
    fake.take_turns(10)
    before = len(fake.ring.replies)
    effects = fake.coordinator.handle(PeerGone(CLIENT), 0.0)
    assert {e.segment.request for e in effects if isinstance(e, SendRing)} == {2}
    fake.ring._dispatch(0, effects)
    fake.ring.run()
    after = fake.ring.replies[before:]
    assert sum(isinstance(r, Finished) for r in after) == 1
    fake.assert_nothing_left()


def test_a_cancel_of_nobody_is_ignored() -> None:
    fake = FakeRing(1)
    fake.ring.cancel(5)
    fake.ring.submit(ASK)
    fake.tell(MessageArrived(b"somebody else", Cancel(1)))
    fake.ring.run()
    end = assert_one_end(fake.ring.replies, 1)
    assert isinstance(end, Finished)
    assert end.finish_reason == "length"


def test_cancelled_while_queued_has_waited_no_longer_than_it_did() -> None:
    fake = FakeRing(1)
    fake.ring.now = 1_000_000.0
    fake.ring.submit(ASK)
    fake.ring.submit(replace(ASK, tag=2))
    fake.ring.now += 2.0
    fake.ring.cancel(2)
    end = assert_one_end(fake.ring.replies, 2)
    assert isinstance(end, Finished)
    assert (end.seconds, end.new_tokens, end.finish_reason) == (2.0, 0, "cancelled")


# --- the answer's end -----------------------------------------------------------------------------

POLICY_NAMES = ["autoregressive", "naive_tree", "flowspec"]


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("limit", [1, 2, 3, 7, 20])
def test_max_new_tokens_is_exact(policy: str, limit: int) -> None:
    fake = FakeRing(3, accuracy=1.0)
    ask = submit(1, "hello", limit, policy)
    end = fake.ring.ask(ask)
    assert (end.new_tokens, end.finish_reason) == (limit, "length")
    assert end.token_ids == fake.expected(ask).token_ids
    assert_one_end(fake.ring.replies, 1)


@pytest.mark.parametrize("policy", ["naive_tree", "flowspec"])
def test_the_last_token_is_guessed_like_any_other(policy: str) -> None:
    fake = FakeRing(3, accuracy=1.0)
    end = fake.ring.ask(submit(1, "hello", 5, policy))
    assert end.accepted_histogram == (0, 0, 0, 0, 1), "it took another round"


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("prompt", [1, 10, 25, 28, 29])
def test_the_context_limits_the_answer(policy: str, prompt: int) -> None:
    fake = FakeRing(2, context_length=30, accuracy=1.0)
    positions: list[int] = []
    for block in fake.blocks:
        real = block.run

        def run(job: RunBlock, stop: Callable[[], bool], real: object = real) -> object:
            positions.extend(job.rows.positions.tolist())
            return real(job, stop)  # type: ignore[operator]

        block.run = run  # type: ignore[method-assign, assignment]
    end = fake.ring.ask(submit(1, "x" * prompt, 1_000, policy))
    assert end.prompt_tokens + end.new_tokens == 30
    assert end.finish_reason == "length"
    # The last token itself is never run, and nothing behind it is guessed.
    assert max(positions) == 28


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_never_a_token_behind_the_end(policy: str) -> None:
    """EOS and stop strings, one of them or both at once, wherever they fall in a walk."""
    reasons: Counter[str] = Counter()
    for seed in range(12):
        for eos, stop in (((3, 14, 25), ()), ((), ("ab", "c", "ddd")), ((3, 14), ("e", "fg"))):
            fake = FakeRing(2, accuracy=1.0, eos_ids=eos)
            ask = submit(1, "hello", 24, policy, seed, stop)
            end, expected = fake.ring.ask(ask), fake.expected(ask)
            assert end.token_ids == expected.token_ids
            assert (end.text, end.finish_reason) == (expected.text, expected.finish_reason)
            assert_one_end(fake.ring.replies, 1)
            fake.assert_nothing_left()
            reasons[end.finish_reason] += 1
    assert set(reasons) == {"stop", "length"}


def test_a_stop_string_completed_by_the_last_flush_is_a_stop() -> None:
    fake = FakeRing(1)
    ask = submit(1, "hello", 50)
    whole = fake.expected(ask).token_ids
    # The stream holds the text of a token divisible by three back until the answer's end.
    at = next(i for i, t in enumerate(whole) if t % 3 == 0 and i > 2)
    letter = chr(ord("a") + whole[at] % 10)
    before = [chr(ord("a") + t % 10) for t in whole[:at]]
    stop = "".join(before[-2:]) + letter
    ask = replace(ask, max_new_tokens=at + 1, stop=(stop,))
    end = fake.ring.ask(ask)
    assert (end.finish_reason, end.new_tokens) == ("stop", at + 1)
    assert end.text == "".join(before[:-2])


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_figures(policy: str) -> None:
    fake = FakeRing(4, accuracy=1.0)
    end = fake.ring.ask(submit(1, "hello", 40, policy))
    assert (end.policy, end.stages, end.prompt_tokens) == (policy, 4, 5)
    assert end.draft == ("none" if policy == "autoregressive" else "fake")
    assert end.smallest_margin == 1.0
    assert end.rows_sent - end.rows_wasted == 39
    if policy == "autoregressive":
        assert end.rows_wasted == 0
        assert end.accepted_histogram == (0, 39)
        # A trip a token: four steps each, and the prompt's one chunk before.
        assert end.trips == 40.0
    else:
        assert end.trips < 40.0


# --- retained sets --------------------------------------------------------------------------------


class Wire:
    """A coordinator alone, with everything it sends in view."""

    def __init__(self, stages: int = 2) -> None:
        self.fake = FakeRing(stages)
        self.machine = CoordinatorMachine(Ring(stages, 1000, "fake"), self.fake.codec)
        self.segments: list[Segment] = []
        self.heads: list[RunHead] = []
        self.drafts: list[RunDraft | DeepenDraft] = []
        self.retains: list[Retain] = []
        self.replies: list[Message] = []
        self.ends: list[int] = []
        self.take(self.machine.handle(RingUp(), 0.0))

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendRing(segment):
                    self.segments.append(segment)
                case RunHead():
                    self.heads.append(effect)
                case RunDraft() | DeepenDraft():
                    self.drafts.append(effect)
                case SendStages(Retain() as retain):
                    self.retains.append(retain)
                case SendStages(End(request)):
                    self.ends.append(request)
                case SendPeer(_, message):
                    self.replies.append(message)

    def submit(self, ask: Submit) -> None:
        self.take(self.machine.handle(MessageArrived(b"client", ask), 0.0))

    def back(self, segment: Segment, **changes: object) -> None:
        """A segment comes back from the ring with the last `wanted` rows."""
        rows = segment.wanted if segment.certain else len(segment.ids)
        first = len(segment.ids) - rows
        result = replace(
            segment,
            ids=segment.ids[first:],
            parents=segment.parents[first:],
            positions=segment.positions[first:],
            tokens=np.zeros(0, np.int64),
            hidden=Tensor("float32", (rows, 1), bytes(4 * rows)),
        )
        self.take(self.machine.handle(SegmentArrived(replace(result, **changes)), 0.0))  # type: ignore[arg-type]

    def head(self, *tokens: int) -> None:
        """The oldest head job ends."""
        job = self.heads.pop(0)
        choice = Choice(np.array(tokens), np.ones(len(tokens)), np.zeros(len(tokens)))
        self.take(self.machine.handle(HeadDone(job.job, choice), 0.0))

    def drafted(self, tree: DraftedTree) -> None:
        """The oldest draft job ends."""
        self.take(self.machine.handle(Drafted(self.drafts.pop(0).job, tree), 0.0))

    def first_token(self, policy: str, max_new_tokens: int = 50) -> None:
        """A request whose first token is there."""
        self.submit(submit(1, "hello", max_new_tokens, policy))
        self.back(self.segments.pop())
        if self.drafts:
            self.drafted(DraftedTree.empty())
        self.head(7)


def test_a_retained_set_names_what_is_certain_and_what_lives() -> None:
    wire = Wire()
    wire.first_token("autoregressive")
    for epoch, root in enumerate(range(5, 9), start=1):
        segment = wire.segments.pop()
        assert segment.ids.tolist() == [root]
        assert (segment.parents.tolist(), segment.positions.tolist()) == ([root - 1], [root])
        wire.back(segment)
        wire.head(7)
        retain = wire.retains.pop()
        # The segments went out before any stage could know: nothing is acknowledged but their own.
        assert retain == Retain(1, epoch, root + 1, retain.accepted, (root + 1,))
        assert retain.accepted[-1] == root


@pytest.mark.parametrize("acknowledged", [True, False])
def test_the_accepted_list_reaches_back_to_what_all_have_applied(acknowledged: bool) -> None:
    wire = Wire()
    wire.first_token("autoregressive")
    lengths = []
    for _ in range(6):
        segment = wire.segments.pop()
        wire.back(segment, **({} if acknowledged else {"epoch": 0}))
        wire.head(7)
        lengths.append(len(wire.retains.pop().accepted))
    assert lengths == ([1, 1, 1, 1, 1, 1] if acknowledged else [1, 2, 3, 4, 5, 6])


def test_with_every_retained_set_lost_the_answer_is_exact_and_memory_is_bounded() -> None:
    """A stage then holds every row it ever computed, and a set all accepted rows: no more."""
    for policy in POLICY_NAMES:
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
                    most_accepted = max(most_accepted, len(waiting[0].accepted))
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
    assert "more than 40 rows" in end.reason
    fake.assert_nothing_left()


# --- what cannot be -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"ids": np.array([99])},
        {"ids": np.array([6])},
        {"certain": True},
        {"hidden": None},
    ],
)
def test_a_result_that_was_not_asked_for_ends_the_request(changes: dict[str, object]) -> None:
    wire = Wire()
    wire.first_token("autoregressive")
    wire.back(wire.segments.pop(), **changes)
    assert isinstance(wire.replies[-1], Failed)
    assert wire.ends == [1]
    assert wire.machine.idle


@pytest.mark.parametrize("changes", [{"ids": np.array([3])}, {"certain": False}, {"hidden": None}])
def test_a_prefill_result_that_was_not_asked_for_ends_the_request(
    changes: dict[str, object],
) -> None:
    wire = Wire()
    wire.submit(submit(1, "hello", 5, "autoregressive"))
    wire.back(wire.segments.pop(), **changes)
    assert isinstance(wire.replies[-1], Failed)
    assert wire.machine.idle


def test_repeated_and_foreign_results_are_ignored() -> None:
    wire = Wire()
    wire.first_token("autoregressive")
    segment = wire.segments.pop()
    wire.back(segment, request=2)
    wire.back(segment, seq=99)
    assert not wire.heads
    wire.back(segment)
    wire.back(segment)
    assert len(wire.heads) == 1
    assert len(wire.replies) == 1


def test_a_head_job_that_nobody_started_is_our_bug() -> None:
    wire = Wire()
    wire.first_token("autoregressive")
    choice = Choice(np.array([1]), np.ones(1), np.zeros(1))
    before = repr(vars(wire.machine))
    for event in (HeadDone(99, choice), BlockDone(1, None)):
        with pytest.raises(LocalProtocolError):
            wire.machine.handle(event, 0.0)
    assert repr(vars(wire.machine)) == before


def test_late_results_of_compute_are_ignored_after_the_end() -> None:
    wire = Wire()
    wire.first_token("flowspec")
    job = wire.drafts[0].job
    wire.take(wire.machine.handle(MessageArrived(b"client", Cancel(1)), 0.0))
    assert wire.machine.handle(Drafted(job, DraftedTree.empty()), 0.0) == []
    assert wire.machine.handle(ComputeFailed(job, 1, "?"), 0.0) == []
    assert wire.machine.idle


def test_prompt_chunks_follow_each_other_within_the_window() -> None:
    wire = Wire(stages=2)
    wire.submit(submit(1, "x" * 1_000, 5, "autoregressive"))
    assert isinstance(wire.replies[-1], Failed)
    wire.submit(submit(2, "x" * 400, 5, "autoregressive"))
    flying = list(wire.segments)
    assert len(flying) == 3, "one for every stage, one more at the door"
    assert flying[0].reserve > 405
    positions: list[int] = []
    while flying:
        segment = flying.pop(0)
        positions += segment.positions.tolist()
        wire.segments.clear()
        assert segment.wanted == (1 if len(positions) == 400 else 0)
        wire.back(segment)
        flying += wire.segments
        assert len(flying) <= 3
    assert positions == list(range(400))
    assert len(wire.heads) == 1


def test_a_draft_that_began_below_an_older_root_is_merged_below_the_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(POLICIES, "flowspec", FlowSpec(drafts_in_step=False))
    wire = Wire()
    wire.first_token("flowspec")
    wire.drafted(DraftedTree(np.array([-1]), np.array([11]), np.array([-1.0])))
    wire.back(wire.segments.pop(0))
    wire.head(11)  # a draft below 11 begins
    wire.back(wire.segments.pop(0))
    wire.head(13)  # meanwhile 13 became certain: only what follows it is of use
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
            wire.head(*[VOCABULARY + 1] * len(wire.heads[0].positions))
        else:
            break
    assert isinstance(wire.replies[-1], Finished)
    assert wire.replies[-1].new_tokens == 6


def test_a_result_that_lacks_live_rows_fails_the_request_unless_its_fault_comes_first() -> None:
    for fault_comes in (False, True):
        machine = CoordinatorMachine(Ring(2, 100, ""), ToyCodec())
        machine.handle(RingUp(), 0.0)
        machine.handle(MessageArrived(CLIENT, submit(policy="autoregressive")), 0.0)
        assert machine.deadline() is None
        effects = machine.handle(
            SegmentArrived(
                Segment(1, 1, 0, True, 0, 1, *(np.zeros(0, np.int64) for _ in range(4)), None)
            ),
            10.0,
        )
        assert effects == []
        limit = machine.deadline()
        assert limit is not None
        assert limit > 10.0
        assert machine.handle(Tick(), limit - 0.5) == []
        last = MessageArrived(b"", Fault(1, "no memory")) if fault_comes else Tick()
        replies = [e.message for e in machine.handle(last, limit) if isinstance(e, SendPeer)]
        wanted = "no memory" if fault_comes else "a stage lost rows of this request"
        assert replies == [Failed(1, wanted)]
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
    in_flight = request.in_flight
    wire.drafted(DraftedTree(np.array([-1, -1]), np.array([13, 14]), np.array([-1.0, -2.0])))
    assert wire.segments[-1].tokens.tolist() == [14], "the new guess leaves first"
    assert wire.heads
    assert request.in_flight == in_flight  # one more left, one was taken up
