"""Log-probabilities and conversations through the machines: once a token, and in order."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support import rings
from support.rings import Chaos, FakeRing, Faults, assert_one_end, submit
from support.tiers import tiered

from edgespec.backends.base import Walk
from edgespec.policy.adaptive import Adaptive
from edgespec.policy.registry import POLICIES
from edgespec.sim.toy import VOCABULARY, text_of
from edgespec.sim.toy_model import FakeHead
from edgespec.tree.ledger import Rows
from edgespec.verify.sampling import Choice
from edgespec.verify.top_logprobs import TopLogprobs
from edgespec.wire.client_messages import ChatMessage, Failed, Finished, Submit, Tokens


@pytest.fixture(autouse=True)
def _small_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing costs anything, as here, the adaptive policy would guess without end."""
    monkeypatch.setitem(POLICIES, "adaptive", Adaptive(width=3, most_rows=6))


class TellingHead(FakeHead):
    """Says of every token something that follows from the token and its position."""

    def choose(self, walks: Sequence[Walk]) -> list[tuple[Choice, TopLogprobs | None]]:
        """The toy's own tokens."""
        chosen = super().choose(walks)
        return [
            (choice, self._told(walk.rows, choice, walk.top) if walk.top >= 0 else None)
            for walk, (choice, _) in zip(walks, chosen, strict=True)
        ]

    def _told(self, rows: Rows, choice: Choice, top: int) -> TopLogprobs:
        pairs = zip(choice.tokens, rows.positions[choice.rows] + 1, strict=True)
        log_probs = np.array([told(t, int(p)) for t, p in pairs])
        best = (choice.tokens[:, None] + np.arange(top)) % VOCABULARY
        return TopLogprobs(log_probs, best, log_probs[:, None] - np.arange(top))


def told(token: int, position: int) -> float:
    """What TellingHead says of a token."""
    return -float(token) - position / 1000


def telling_ring(stages: int) -> FakeRing:
    """A ring with that head."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rings, "FakeHead", TellingHead)
        return FakeRing(stages)


def entries(fake: FakeRing, tag: int) -> list[dict[str, Any]]:
    """What was told, token by token; each message tells of just its own tokens."""
    found: list[dict[str, Any]] = []
    for message in fake.ring.replies:
        if isinstance(message, Tokens) and message.tag == tag:
            listed = json.loads(message.log_probs)
            assert [one["id"] for one in listed] == list(message.token_ids)
            found += listed
    return found


def assert_told(fake: FakeRing, ask: Submit, top: int) -> None:
    """Every token of the answer, with its own values."""
    end = assert_one_end(fake.ring.replies, ask.tag)
    assert isinstance(end, Finished)
    start = len(fake.codec.encode(ask.prompt))
    listed = entries(fake, ask.tag)
    assert len(listed) == len(end.token_ids)
    for number, (one, token) in enumerate(zip(listed, end.token_ids, strict=True)):
        value = told(token, start + number)
        assert (one["token"], one["bytes"]) == (text_of(token), list(text_of(token).encode()))
        assert one["logprob"] == value
        ids = [(token + n) % VOCABULARY for n in range(top)]
        assert [rival["id"] for rival in one["top_logprobs"]] == ids
        assert [rival["logprob"] for rival in one["top_logprobs"]] == [
            value - n for n in range(top)
        ]


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("top", tiered([0, 1, 20], [20]))
def test_every_token_is_told_once_with_its_own_values(policy: str, top: int) -> None:
    fake = telling_ring(3)
    ask = replace(submit(policy=policy, max_new_tokens=30), top=top)
    assert fake.ring.ask(ask).token_ids == fake.expected(ask).token_ids
    assert_told(fake, ask, top)


def test_nothing_is_told_to_who_did_not_ask() -> None:
    fake = telling_ring(2)
    fake.ring.ask(submit())
    news = [m for m in fake.ring.replies if isinstance(m, Tokens)]
    assert news
    assert all(one.log_probs == "" for one in news)


@pytest.mark.parametrize("seed", tiered(range(12), range(3)))
def test_whatever_the_timing_and_with_a_lost_ring(seed: int) -> None:
    rng = random.Random(seed)
    fake = telling_ring(3)
    ask = replace(submit(policy=rng.choice(sorted(POLICIES)), max_new_tokens=25), top=3)
    fake.ring.submit(ask)
    chaos = Chaos(fake, rng, Faults(lose_retain=0.2, repeat=0.2, reorder=0.3))
    for _ in range(rng.randrange(5, 120)):
        chaos.step()
    if not fake.coordinator.idle:
        fake.ring.lose("stage 2 is gone")
        fake.ring.mend()
    while chaos.step():
        continue
    assert_told(fake, ask, 3)


def failure(fake: FakeRing, ask: Submit) -> Failed:
    """The bad end that a request has at once."""
    fake.ring.submit(ask)
    fake.ring.run()
    end = assert_one_end(fake.ring.replies, ask.tag)
    assert isinstance(end, Failed)
    return end


@pytest.mark.parametrize("top", [-2, 21, 1 << 40])
def test_as_many_as_there_may_not_be_are_refused(top: int) -> None:
    end = failure(FakeRing(1), replace(submit(), top=top))
    assert (end.kind, "top_logprobs" in end.reason) == ("invalid", True)


def test_a_conversation_is_answered_as_its_template_has_it() -> None:
    messages = ChatMessage("user", "hel"), ChatMessage("assistant", "lo")
    fake = FakeRing(2)
    ask = replace(submit(prompt=""), messages=messages)
    plain = fake.expected(submit(prompt="hello"))
    assert fake.ring.ask(ask).token_ids == plain.token_ids


def test_a_conversation_of_nothing_is_refused() -> None:
    asked = replace(submit(prompt=""), messages=(ChatMessage("user", " "),))
    assert failure(FakeRing(1), asked).kind == "invalid"


def test_each_kind_of_refusal_has_its_name() -> None:
    fake = FakeRing(1, context_length=20, queue_limit=1)
    assert failure(fake, submit(1, "x" * 20)).kind == "context"
    assert failure(fake, submit(2, "")).kind == "invalid"
    fake.ring.submit(submit(3))
    fake.ring.submit(submit(4))
    fake.ring.submit(submit(5))
    fake.ring.run()
    end = assert_one_end(fake.ring.replies, 5)
    assert isinstance(end, Failed)
    assert end.kind == "queue"
    assert isinstance(assert_one_end(fake.ring.replies, 4), Finished)
