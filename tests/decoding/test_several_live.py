"""Several live requests: every text equals the request's alone, whatever happens to the others."""

from __future__ import annotations

import random

import pytest
from support.rings import Chaos, FakeRing, Faults, assert_one_end, submit
from support.tiers import thorough, tiered

from edgespec.decoding import scheduler
from edgespec.decoding.effects import SendRing
from edgespec.machines.effects import Effect
from edgespec.machines.events import MessageArrived, RingDown, RingUp
from edgespec.policy.adaptive import Adaptive
from edgespec.policy.registry import POLICIES
from edgespec.wire.client_messages import Failed, Finished, Progress, Submit
from edgespec.wire.messages import Fault
from edgespec.wire.segment import Segment

LOST = "stage 2 (nano-b, process 7) has been silent for 1.6 s"
NAMES = sorted(POLICIES)


@pytest.fixture(autouse=True)
def _small_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing costs anything, as here, the adaptive policy would guess without end."""
    monkeypatch.setitem(POLICIES, "adaptive", Adaptive(width=3, most_rows=6))


def asks(count: int, policies: list[str], rng: random.Random) -> list[Submit]:
    """So many requests, their policies by turns."""
    return [
        submit(
            tag,
            "".join(rng.choices("abcdefghij", k=rng.randint(1, 20))),
            rng.randint(1, 14),
            policies[tag % len(policies)],
            seed=rng.randint(0, 3),
        )
        for tag in range(count)
    ]


class Recorder:
    """Keeps the segments that a ring's coordinator sends."""

    def __init__(self, fake: FakeRing) -> None:
        self.segments: list[Segment] = []
        self._dispatch = fake.ring.dispatch
        fake.ring.dispatch = self.dispatch  # type: ignore[method-assign]

    def dispatch(self, number: int, effects: list[Effect]) -> None:
        if number == 0:
            self.segments += [e.segment for e in effects if isinstance(e, SendRing)]
        self._dispatch(number, effects)


def assert_answers(fake: FakeRing, wanted: list[Submit]) -> None:
    """Each got what it would have got alone."""
    for ask in wanted:
        end, right = assert_one_end(fake.ring.replies, ask.tag), fake.expected(ask)
        assert isinstance(end, Finished)
        assert (end.token_ids, end.text) == (right.token_ids, right.text), f"request {ask.tag}"


# --- the same texts -------------------------------------------------------------------------------


@pytest.mark.parametrize("head_last", [False, thorough(True)])
@pytest.mark.parametrize("count", [thorough(2), thorough(3), 5])
@pytest.mark.parametrize("policy", NAMES)
def test_every_text_is_that_of_the_request_alone(policy: str, count: int, head_last: bool) -> None:
    """In lock-step, where they take fewer steps together than one after the other."""
    steps = []
    for live in (1, count):
        rng = random.Random(f"{policy} {count}")
        fake = FakeRing(3, live=live, prefill_chunk=4, head_last=head_last)
        wanted = asks(count, [policy], rng)
        for ask in wanted:
            fake.ring.submit(ask)
        assert fake.coordinator.load() == (live, count - live)
        fake.ring.run()
        assert_answers(fake, wanted)
        fake.assert_nothing_left()
        steps.append(fake.ring.now)
    assert steps[1] < steps[0]


def play_chaos(seed: int, count: int, policies: list[str]) -> None:
    """Random timing, faults of the messages, lost rings and cancels."""
    rng = random.Random(f"several {seed} {count} {policies}")
    fake = FakeRing(
        rng.randint(1, 4),
        live=rng.choice([2, count]),
        accuracy=rng.choice([0.3, 0.7, 1.0]),
        prefill_chunk=rng.randint(1, 8),
        head_last=rng.random() < 0.3,
        kept_rows=rng.choice([0, 0, 3000]),
    )
    wanted = asks(count, policies, rng)
    faults = Faults(rng.choice([0.0, 0.3]), rng.choice([0.0, 0.3]), rng.choice([0.0, 0.3]))
    chaos = Chaos(fake, rng, faults)
    coming, cancelled, steps = list(wanted), set(), 0
    while coming or any(True for _ in fake.ring.steps()):
        if coming and rng.random() < 0.1:
            fake.ring.submit(coming.pop(0))
        elif rng.random() < 0.002 and steps:
            tag = rng.choice(wanted).tag
            cancelled.add(tag)
            fake.ring.cancel(tag)
        elif rng.random() < 0.002:
            fake.ring.lose(LOST)
            fake.ring.mend()
        chaos.step()
        fake.assert_consistent()
        steps += 1
    assert_answers(fake, [ask for ask in wanted if ask.tag not in cancelled])
    if not fake.coordinator.rows.kept:
        fake.assert_nothing_left()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("policy", tiered(NAMES, ["adaptive", "specpipe"]))
def test_texts_are_the_same_with_any_timing(policy: str, seed: int) -> None:
    play_chaos(seed, 3, [policy])


@pytest.mark.parametrize("seed", tiered(range(12), range(3)))
def test_requests_of_several_policies_are_live_together(seed: int) -> None:
    play_chaos(seed, 5, random.Random(seed).sample(NAMES, 4))


# --- lost rings -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", tiered(NAMES, ["adaptive", "flowspec"]))
def test_all_live_ones_go_on_after_a_lost_ring_in_their_order(policy: str) -> None:
    for step in (3, 20, 60, 110):
        fake = FakeRing(2, live=3, prefill_chunk=3, accuracy=0.5)
        wanted = [submit(tag, "hello" * tag, 9, policy, tag) for tag in range(1, 6)]
        for ask in wanted:
            fake.ring.submit(ask)
        fake.take_turns(step)
        live = [request.client.tag for request in fake.coordinator._scheduler.live]
        waits = [request.client.tag for request in fake.coordinator._waiting.in_order()]
        fake.ring.lose(LOST)
        assert fake.coordinator.load()[0] == 0
        again = [request.client.tag for request in fake.coordinator._waiting.in_order()]
        assert again == live + waits
        fake.ring.mend()
        assert [r.client.tag for r in fake.coordinator._scheduler.live] == (live + waits)[:3]
        fake.ring.run()
        assert_answers(fake, wanted)
        fake.assert_nothing_left()


# --- one of them ends -----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["adaptive", "flowspec", "autoregressive"])
def test_the_end_of_one_costs_the_others_nothing(policy: str) -> None:
    """Its parts of segments come back to nobody; those of the others count."""
    for step in range(0, 150, 10):
        fake = FakeRing(2, live=3, prefill_chunk=3)
        wanted = [submit(tag, "hello" * tag, 9, policy, tag) for tag in range(1, 4)]
        for ask in wanted:
            fake.ring.submit(ask)
        fake.take_turns(step)
        numbers = {r.client.tag: r.number for r in fake.coordinator._scheduler.live}
        if 2 in numbers:
            fake.tell(MessageArrived(b"stage", Fault(numbers[2], "stage 2 is out of memory")))
            assert isinstance(assert_one_end(fake.ring.replies, 2), Failed)
        fake.ring.cancel(1)
        fake.ring.run()
        assert_answers(fake, wanted[2:])
        fake.assert_nothing_left()


def test_one_that_waited_for_rows_is_not_told_of_a_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "ROOM_TO_GROW", 0)
    fake = FakeRing(2, live=2, kept_rows=700)
    wanted = [submit(tag, "hello", 230, "autoregressive", tag) for tag in (1, 2)]
    for ask in wanted:
        fake.ring.submit(ask)
    fake.ring.run()
    assert_answers(fake, wanted)
    assert assert_one_end(fake.ring.replies, 2).recoveries == 1
    told = [r.text for r in fake.ring.replies if isinstance(r, Progress)]
    assert told == ["waiting behind 1 other request(s)", "reading what there is so far"]


# --- who shares a segment -------------------------------------------------------------------------


@pytest.mark.parametrize(("stages", "live"), [(4, 5), (2, 6), (1, 8), (4, 12)])
def test_no_more_share_a_segment_than_fill_the_ring(stages: int, live: int) -> None:
    """Those that leave together come home together, and the ring's other places stay empty."""
    fake = FakeRing(stages, live=live)
    recorder = Recorder(fake)
    for tag in range(live):
        fake.ring.submit(submit(tag, "hello", 30, "autoregressive", tag))
    fake.ring.run()
    decoding = [s for s in recorder.segments if not any(p.committed for p in s.parts)]
    most = -(-live // (stages + 1))
    assert 1 < max(len(segment.parts) for segment in decoding) + (most == 1) <= most + (most == 1)


def test_requests_of_one_share_leave_in_turn() -> None:
    """Those of which nothing has left for longest go first: from when all prompts are read, none is
    a segment ahead of another by more than one."""
    fake = FakeRing(2, live=6)
    recorder = Recorder(fake)
    for tag in range(6):
        fake.ring.submit(submit(tag, "hello", 30, "autoregressive", tag))
    fake.ring.run()
    sent = dict.fromkeys(range(1, 7), 0)
    read = max(n for n, s in enumerate(recorder.segments) if any(p.committed for p in s.parts))
    for segment in recorder.segments[read + 1 : 60]:
        for part in segment.parts:
            sent[part.request] += not part.committed
        assert max(sent.values()) - min(sent.values()) <= 1


# --- prompts among answers ------------------------------------------------------------------------


@pytest.mark.parametrize(("price", "rows"), [(0.0, 64), (0.1, 32), (0.05, 40), (10.0, 8)])
def test_beside_answers_so_much_of_a_prompt_leaves_that_they_keep_a_quarter_of_their_pace(
    price: float, rows: int
) -> None:
    """A row more takes `price` of a step of one; 8 rows leave however long they take."""
    fake = FakeRing(2, live=3, prefill_chunk=64)
    fake.ring.submit(submit(1, "hello", 400, "autoregressive"))
    fake.take_turns(40)
    estimates = fake.coordinator.learnt["autoregressive"]
    for _ in range(99):
        for number in (1, 101):
            estimates.segment([(number, 1.0 + price * (number - 1))] * 2, 2)
    recorder = Recorder(fake)
    fake.ring.submit(submit(2, "a" * 300, 5, "autoregressive"))
    while not (chunks := [p for s in recorder.segments for p in s.parts if p.committed]):
        assert fake.take_turns(1)
    assert len(chunks[0].ids) == rows
    fake.ring.cancel(1)
    fake.ring.run()
    assert_answers(fake, [submit(2, "a" * 300, 5, "autoregressive")])


def test_prompts_that_start_together_are_read_by_turns() -> None:
    fake = FakeRing(2, live=4, prefill_chunk=4)
    recorder = Recorder(fake)
    for tag in range(4):
        fake.ring.submit(submit(tag, "a" * 60, 2, "autoregressive", tag))
    fake.ring.run()
    read = dict.fromkeys(range(2, 5), 0)  # the first one began alone
    for segment in recorder.segments:
        for part in segment.parts:
            if part.committed and part.request in read:
                read[part.request] += len(part.ids)
                assert max(read.values()) - min(read.values()) <= 2 * 4


# --- rows of the stages' caches -------------------------------------------------------------------


def test_a_request_starts_once_its_rows_fit_and_is_told_so() -> None:
    """What it has, and room to grow; not all that it may ask for."""
    fake = FakeRing(2, live=3, kept_rows=1100)
    recorder = Recorder(fake)
    wanted = [submit(tag, "hello" * 10, 500, "autoregressive", tag) for tag in range(3)]
    for ask in wanted:
        fake.ring.submit(ask)
    assert fake.coordinator.load() == (2, 1), "2 * (50 + 128 + 256) rows fit, 3 of them do not"
    told = [r.text for r in fake.ring.replies if isinstance(r, Progress) and r.tag == 2]
    assert told == ["waiting behind 2 other request(s)"]
    assert len({part.request for segment in recorder.segments for part in segment.parts}) <= 2
    fake.ring.cancel(0)
    assert fake.coordinator.load() == (2, 0)


def test_where_rows_run_short_the_newest_waits_again_and_goes_on_with_the_same_text() -> None:
    fake = FakeRing(2, live=3, kept_rows=900, row_limit=900)
    wanted = [submit(tag, "hello" * 10, 260, "autoregressive", tag) for tag in range(2)]
    for ask in wanted:
        fake.ring.submit(ask)
    assert fake.coordinator.load() == (2, 0)
    loads = set()
    while any(True for _ in fake.ring.steps()):
        fake.take_turns(20)
        loads.add(fake.coordinator.load())
    assert (1, 1) in loads
    assert_answers(fake, wanted)
    ends = [assert_one_end(fake.ring.replies, ask.tag) for ask in wanted]
    assert [end.recoveries for end in ends if isinstance(end, Finished)] == [0, 1]


def test_a_ring_with_more_memory_has_more_live_and_says_what_its_caches_hold() -> None:
    fake = FakeRing(2, live=3, kept_rows=1100)
    fake.tell(RingDown("stage 2 is gone"))
    fake.tell(RingUp(2, 1400))
    for tag in range(3):
        fake.ring.submit(submit(tag, "hello" * 10, 40, "autoregressive", tag))
    assert fake.coordinator.load() == (3, 0), "3 * (50 + 40 + 256) rows fit now"
    assert fake.coordinator.rows_told() == (3 * (50 + 1 + 256), 0, 1400)
    fake.ring.run()
    kept = {block.slots(n) for block in fake.blocks for n in fake.coordinator.rows.kept}
    assert kept == {50 + 40 - 1}
    assert fake.coordinator.rows_told() == (0, 3 * 89, 1400)
    assert [machine.held_rows for machine in fake.machines] == [3 * 89] * 2


# --- what they are told ---------------------------------------------------------------------------


def test_who_waits_is_told_behind_how_many() -> None:
    fake = FakeRing(2, live=2)
    for tag in range(4):
        fake.ring.submit(submit(tag, "hello", 5))
    told = {r.tag: r.text for r in fake.ring.replies if isinstance(r, Progress)}
    assert told == {
        2: "waiting behind 2 other request(s)",
        3: "waiting behind 3 other request(s)",
    }
    assert fake.coordinator.load() == (2, 2)
    assert fake.coordinator.is_working
    fake.ring.cancel(0)
    told = {r.tag: r.text for r in fake.ring.replies if isinstance(r, Progress)}
    assert told == {2: "reading the prompt", 3: "waiting behind 2 other request(s)"}
    fake.ring.run()
    fake.assert_nothing_left()


def test_a_status_tells_what_the_live_requests_have_done() -> None:
    """In the order of their starts: tokens so far, and their speed since the first one."""
    fake = FakeRing(3, live=2, prefill_chunk=4)
    for tag in range(3):
        fake.ring.submit(submit(tag, "abc", 20, "autoregressive"))
    first, second = fake.coordinator.live(fake.ring.now)
    assert (first.policy, first.prompt_tokens, first.tokens) == ("autoregressive", 3, 0)
    assert (first.number, second.number, first.tokens_per_second) == (1, 2, 0.0)
    assert fake.take_turns(80)
    (first, second), now = fake.coordinator.live(fake.ring.now), fake.ring.now
    asked = fake.coordinator.accepts(1)
    assert asked is not None
    assert asked.stats.first_token is not None
    assert first.tokens == len(asked.answer.token_ids) > 1
    since = now + 10.0 - asked.stats.first_token
    speed = fake.coordinator.live(now + 10.0)[0].tokens_per_second
    assert speed == pytest.approx((first.tokens - 1) / since)
    fake.ring.run()
    assert fake.coordinator.live(fake.ring.now) == ()
