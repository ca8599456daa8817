"""LocalRing in lock-step: full-size policies, many stages, one answer."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from support.rings import FakeRing, assert_one_end, submit

from edgespec.errors import RequestFailed
from edgespec.policy.registry import POLICIES
from edgespec.wire.client_messages import Finished
from edgespec.wire.messages import Retain


@pytest.mark.parametrize(
    "counts", [(1, 3), pytest.param((2, 4, 5, 6, 7, 8), marks=pytest.mark.thorough)], ids=str
)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_gives_the_plain_answer(policy: str, counts: tuple[int, ...]) -> None:
    for stages in counts:
        fake = FakeRing(stages, accuracy=0.7)
        ask = submit(1, "what is the answer?", 40, policy, seed=stages)
        end = fake.ring.ask(ask)
        assert end.token_ids == fake.expected(ask).token_ids, f"{stages} stages"
        assert end.text == fake.expected(ask).text, f"{stages} stages"
        assert_one_end(fake.ring.replies, 1)
        fake.assert_nothing_left()


@pytest.mark.thorough
def test_good_guesses_save_trips_and_bad_ones_cost_none() -> None:
    def trips(policy: str, accuracy: float) -> float:
        return FakeRing(4, accuracy=accuracy).ring.ask(submit(1, "hello", 60, policy)).trips

    plain = trips("autoregressive", 1.0)
    assert trips("flowspec", 1.0) < trips("naive_tree", 1.0) < plain / 2
    for policy in ("flowspec", "pruned", "pipedec", "specpipe", "adaptive"):
        assert trips(policy, 1.0) < plain / 2, policy
    for policy in ("flowspec", "specpipe", "adaptive"):
        assert trips(policy, 0.7) < 0.7 * plain, policy
    assert trips("flowspec", 0.0) <= 2 * plain


def test_several_requests_one_after_the_other() -> None:
    fake = FakeRing(3)
    asks = [submit(tag, "hello", 15, policy, tag) for tag, policy in enumerate(sorted(POLICIES))]
    for ask in asks:
        fake.ring.submit(ask)
    fake.ring.run()
    for ask in asks:
        assert fake.expected(ask).token_ids == getattr(
            assert_one_end(fake.ring.replies, ask.tag), "token_ids", None
        )
    fake.assert_nothing_left()


def test_a_failed_request_raises_its_one_reason() -> None:
    with pytest.raises(RequestFailed, match="empty"):
        FakeRing(1).ring.ask(submit(1, ""))


def test_steps_can_be_taken_one_by_one() -> None:
    fake = FakeRing(2)
    assert not list(fake.ring.steps())
    fake.ring.submit(submit(1, "hello", 5, "autoregressive"))
    assert [(s.kind, s.node) for s in fake.ring.steps()] == [("ring", 1)]
    ring = fake.ring
    ring.take(next(iter(ring.steps())))
    assert [(s.kind, s.node) for s in ring.steps()] == [("work", 1)]
    assert not ring.is_quiet(1)
    while not ring.waiting_control(1):
        ring.take(next(iter(ring.steps())))
    waiting = ring.waiting_control(1)
    assert isinstance(waiting[0], Retain)
    step = next(s for s in ring.steps() if s.kind == "control")
    ring.take(step, lose=True)
    assert ring.waiting_control(1) == []
    assert fake.machines[0].ledgers()[1].epoch == 0
    ring.take(replace(step, node=2), repeat=True)
    assert fake.machines[1].ledgers()[1].epoch == 1
    ring.run()
    assert_one_end(ring.replies, 1)


def test_replies_pass_through_the_codec() -> None:
    fake = FakeRing(1)
    fake.ring.submit(submit(1, "hello", 5))
    fake.ring.run()
    # A client reads plain integers, whatever numbers the machines computed with.
    end = assert_one_end(fake.ring.replies, 1)
    assert {type(t) for t in getattr(end, "token_ids", ())} == {int}


def test_prompt_chunks_overlap_along_the_ring() -> None:
    """Eight chunks over four stages take 8 + 3 steps, not 8 x 4."""
    ring = FakeRing(4, prefill_chunk=8)
    answer = ring.ring.ask(submit(prompt="x" * 64, max_new_tokens=1, policy="autoregressive"))
    assert answer.trips == (8 + 3) / 4


@pytest.mark.thorough
def test_trips_do_not_depend_on_timing() -> None:
    """In lock-step, and with everything happening in random order: the same schedule."""
    for policy in ("autoregressive", "naive_tree", "flowspec"):  # the others use what time is left
        ask = submit(max_new_tokens=40, policy=policy)
        plain = FakeRing(3).ring.ask(ask)
        for seed in range(5):
            rng = random.Random(seed)
            ring = FakeRing(3).ring
            ring.submit(ask)
            while steps := list(ring.steps()):
                ring.take(rng.choice(steps))
            (end,) = [m for m in ring.replies if isinstance(m, Finished)]
            assert (end.trips, end.rows_sent, end.accepted_histogram) == (
                plain.trips,
                plain.rows_sent,
                plain.accepted_histogram,
            ), (policy, seed)
