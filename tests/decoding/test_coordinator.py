"""CoordinatorMachine: every request ends in exactly one way, whatever happens to it and when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy

import pytest
from msgspec.structs import replace
from support.cases import case
from support.local_ring import CLIENT
from support.rings import FakeRing, assert_one_end, submit
from support.tiers import thorough, tiered

from edgespec.backends.compute import CoordinatorCompute, StageCompute
from edgespec.decoding.admission import CoordinatorSettings
from edgespec.decoding.coordinator import CoordinatorMachine
from edgespec.decoding.effects import (
    Draft,
    EncodePrompt,
    OpenDraft,
    RunHead,
    SendRing,
)
from edgespec.errors import ConfigError
from edgespec.machines.effects import (
    Effect,
    RunBlock,
    SendPeer,
)
from edgespec.machines.events import (
    MessageArrived,
    PeerGone,
    RingDown,
    RingEnded,
    RingUp,
)
from edgespec.policy.adaptive import Adaptive
from edgespec.policy.registry import POLICIES
from edgespec.wire.client_messages import Cancel, Failed, Finished, Progress, Submit, Tokens
from edgespec.wire.messages import Fault

ASK = submit(1, "hello", 5)
POLICY_NAMES = sorted(POLICIES)


@pytest.fixture(autouse=True)
def _small_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing costs anything, as here, the adaptive policy would guess without end."""
    monkeypatch.setitem(POLICIES, "adaptive", Adaptive(width=3, most_rows=6))


def situation(fake: FakeRing, tag: int) -> str:
    """What a request is waiting for, in words."""
    for request in fake.coordinator._requests.values():
        if request.client.tag != tag:
            continue
        if request.number not in fake.coordinator._scheduler:
            return "queued"
        if not request.answer.token_ids:
            return "prefill at the head" if request.head_job else "prefill"
        waits = [
            "on the ring" if request.outbox.in_flight else "",
            "at the head" if request.head_job else "",
            "drafting" if request.drafting.running else "",
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


def ring_ended(fake: FakeRing) -> None:
    fake.tell(RingEnded("the ring ended"))


def moments(policy: str) -> Iterator[FakeRing]:
    """A ring with two requests as it is before every step, every place in its turn."""
    fake = FakeRing(2, prefill_chunk=3, accuracy=0.5)
    for ask in both(policy):
        fake.ring.submit(ask)
    while turn := list(fake.ring.steps()):
        for step in turn:
            yield deepcopy(fake)
            fake.ring.take(step)


def both(policy: str) -> tuple[Submit, Submit]:
    return replace(ASK, policy=policy), replace(ASK, tag=2, policy=policy, seed=1)


def play_to_an_end(fake: FakeRing, end: Callable[[FakeRing], None], policy: str) -> tuple[str, str]:
    """Now `end` happens to the ring of two requests. Returns the situation and the outcome."""
    first, second = both(policy)
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
        if end is ring_ended:
            assert isinstance(other, Failed)
            assert other.reason == "the ring ended"
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


ENDS = [cancel, fault, peer_gone, ring_ended]


@pytest.mark.parametrize(
    ("end", "policy"),
    [
        (end, policy) if policy == "flowspec" else thorough(end, policy)
        for policy in POLICY_NAMES
        for end in ENDS
    ],
)
def test_one_end_at_any_moment(end: Callable[[FakeRing], None], policy: str) -> None:
    seen: Counter[str] = Counter()
    for step, fake in enumerate(moments(policy)):
        found, outcome = play_to_an_end(fake, end, policy)
        seen[found] += 1
        if found == "over":
            assert outcome == "Finished"
            break
        expected = {cancel: "Finished", peer_gone: "gone"}.get(end, "Failed")
        assert outcome == expected, f"step {step}"
    words = {word for found in seen for word in found.split(", ")}
    assert {"prefill", "prefill at the head", "on the ring", "at the head"} <= words
    if policy == "flowspec":
        assert any("on the ring" in found and "drafting" in found for found in seen)
        assert "drafting" in seen


@pytest.mark.parametrize("end", ENDS)
def test_one_end_while_queued_or_waiting_for_the_ring(end: Callable[[FakeRing], None]) -> None:
    fake = FakeRing(2)
    fake.tell(RingDown("not yet"))
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


@pytest.mark.parametrize("kinds", [(RunHead,), (Draft,), (RunBlock,), (OpenDraft,)])
def test_failed_compute_ends_its_request_and_no_other(kinds: tuple[type, ...]) -> None:
    at = total = 0
    while True:
        fake = FakeRing(2, prefill_chunk=3)
        flaky = Flaky(kinds, at)
        for node in fake.ring.nodes:
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
        ({"max_new_tokens": -1}, "at least 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
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


def test_a_prompt_is_counted_without_an_answer() -> None:
    fake = FakeRing(2, context_length=30)
    fake.ring.submit(replace(ASK, max_new_tokens=0))
    end = assert_one_end(fake.ring.replies, 1)
    assert isinstance(end, Finished)
    assert (end.prompt_tokens, end.new_tokens, end.rows_sent) == (len(ASK.prompt), 0, 0)
    fake.assert_nothing_left()


def test_without_a_draft_only_plain_decoding_is_on_offer() -> None:
    fake = FakeRing(2)
    machine = CoordinatorMachine(CoordinatorSettings(2, 100, draft=""), fake.codec)
    machine.handle(RingUp(), 0.0)
    effects = machine.handle(MessageArrived(b"a", ASK), 0.0)
    assert len(effects) == 1
    assert isinstance(effects[0], SendPeer)
    assert "--policy autoregressive" in str(effects[0].message)
    (asked,) = machine.handle(MessageArrived(b"a", replace(ASK, policy="autoregressive")), 0.0)
    assert isinstance(asked, EncodePrompt)
    plain = machine.handle(machine.encode(asked), 0.0)
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
        fake.ring.submit(replace(ASK, tag=tag, scope=f"asker {tag}"))
    fake.ring.run()
    ends = [type(assert_one_end(fake.ring.replies, tag)) for tag in range(limit + 2)]
    assert ends == [Finished] * (limit + 1) + [Failed]


def test_one_asker_cannot_fill_the_queue() -> None:
    fake = FakeRing(2, queue_limit=16)
    asked = iter(range(1000))
    got = {}
    for asker in range(12):
        tags = [next(asked) for _ in range(20)]
        for tag in tags:
            fake.ring.submit(replace(ASK, tag=tag, scope=str(asker), max_new_tokens=2))
        refused = {r.tag: r for r in fake.ring.replies if isinstance(r, Failed)}
        got[asker] = sum(tag not in refused for tag in tags)
        assert all(refused[tag].kind == "queue" for tag in tags if tag in refused)
    # One runs; then half of what is free each time, and the last places one by one.
    assert list(got.values()) == [9, 4, 2, 1, 1, 0, 0, 0, 0, 0, 0, 0]
    fake.ring.run()
    fake.assert_nothing_left()
    fake.ring.submit(replace(ASK, tag=5000, scope="0"))
    fake.ring.run()
    assert isinstance(fake.ring.replies[-1], Finished), "its places are free again"


def test_askers_take_turns() -> None:
    fake = FakeRing(2)
    # Tag 10 of asker 1, and so on.
    for tag in (10, 11, 12, 13, 20, 21, 30):
        fake.ring.submit(replace(ASK, tag=tag, scope=str(tag // 10)))
    begun = []
    while list(fake.ring.steps()):
        fake.take_turns(1)
        begun = list(dict.fromkeys(r.tag for r in fake.ring.replies if isinstance(r, Tokens)))
        if begun == [10, 20] and not any(r.tag == 22 for r in fake.ring.replies):
            fake.ring.submit(replace(ASK, tag=22, scope="2"))
    assert begun == [10, 20, 30, 11, 21, 12, 22, 13]
    fake.assert_nothing_left()


def test_requests_are_served_in_order_and_told_what_they_wait_for() -> None:
    fake = FakeRing(2)
    for tag in range(4):
        fake.ring.submit(replace(ASK, tag=tag, seed=tag))
    fake.ring.run()
    told = {tag: told_of(fake, tag) for tag in range(4)}
    behind = [f"waiting behind {n} other request(s)" for n in range(4)]
    assert told == {
        0: [],
        1: [behind[1], "reading the prompt"],
        2: [behind[2], behind[1], "reading the prompt"],
        3: [behind[3], behind[2], behind[1], "reading the prompt"],
    }
    ends = [r for r in fake.ring.replies if isinstance(r, Finished)]
    assert [e.tag for e in ends] == [0, 1, 2, 3]
    firsts = [r.tag for r in fake.ring.replies if isinstance(r, Tokens)]
    assert firsts == sorted(firsts), "two requests at once"


def told_of(fake: FakeRing, tag: int) -> list[str]:
    """What one client has been told of what it waits for."""
    return [r.text for r in fake.ring.replies if isinstance(r, Progress) and r.tag == tag]


def test_who_waits_hears_of_a_ring_that_is_lost_and_back_and_of_every_place_once() -> None:
    fake = FakeRing(2)
    for tag in range(3):
        fake.ring.submit(replace(ASK, tag=tag))
    fake.take_turns(20)
    fake.ring.lose("stage 2 was lost")
    fake.ring.lose("stage 2 was lost")
    fake.ring.cancel(1)
    fake.ring.mend()
    lost, behind = "stage 2 was lost; waiting for it", "waiting behind {} other request(s)"
    again = "the ring is up again; reading what there is so far"
    assert told_of(fake, 0) == [lost, again]
    assert told_of(fake, 1) == [behind.format(1), lost]
    assert told_of(fake, 2) == [behind.format(2), lost, behind.format(1)]
    fake.ring.run()
    assert told_of(fake, 0) == [lost, again]
    assert told_of(fake, 2)[3:] == ["reading the prompt"]
    for tag in range(3):
        assert_one_end(fake.ring.replies, tag)


def test_requests_wait_for_the_ring() -> None:
    fake = FakeRing(2)
    machine = CoordinatorMachine(CoordinatorSettings(2, 100, "fake"), fake.codec)
    asked, told = machine.handle(MessageArrived(b"a", ASK), 0.0)
    assert isinstance(told, SendPeer)
    assert "stages" in str(told)
    assert isinstance(asked, EncodePrompt)
    assert machine.handle(machine.encode(asked), 0.5) == []
    started = machine.handle(RingUp(), 1.0)
    assert any(isinstance(effect, SendRing) for effect in started)


def test_a_client_that_goes_takes_only_its_own_requests_along() -> None:
    fake = FakeRing(2)
    for peer, tag in ((CLIENT, 1), (b"other", 1), (CLIENT, 2)):
        fake.tell(MessageArrived(peer, replace(ASK, tag=tag)))
    fake.take_turns(10)
    before = len(fake.ring.replies)
    effects = fake.coordinator.handle(PeerGone(CLIENT), 0.0)
    assert {e.segment.request for e in effects if isinstance(e, SendRing)} == {2}
    fake.ring.dispatch(0, effects)
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


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_max_new_tokens_is_exact(policy: str) -> None:
    for limit in (1, 2, 3, 7, 20):
        fake = FakeRing(3, accuracy=1.0)
        ask = submit(1, "hello", limit, policy)
        end = fake.ring.ask(ask)
        assert (end.new_tokens, end.finish_reason) == (limit, "length")
        assert end.token_ids == fake.expected(ask).token_ids, f"at most {limit}"
        assert_one_end(fake.ring.replies, 1)


@pytest.mark.parametrize("policy", ["naive_tree", "pruned", "flowspec"])
def test_the_last_token_is_guessed_like_any_other(policy: str) -> None:
    fake = FakeRing(3, accuracy=1.0)
    end = fake.ring.ask(submit(1, "hello", 5, policy))
    assert end.accepted_histogram == (0, 0, 0, 0, 1), "it took another round"


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_the_context_limits_the_answer(policy: str) -> None:
    for prompt in (1, 10, 25, 28, 29):
        with case("prompt of", prompt):
            answer_to_the_contexts_end(policy, prompt)


def answer_to_the_contexts_end(policy: str, prompt: int) -> None:
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


@pytest.mark.parametrize("policy", tiered(POLICY_NAMES, ["flowspec", "naive_tree"]))
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
