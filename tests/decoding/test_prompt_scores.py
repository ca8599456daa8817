"""Log-probabilities of prompts: each token's own, once, whatever the ring and beside whomever."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.rings import Chaos, FakeRing, Faults, assert_one_end, submit
from support.tiers import tiered

from edgespec.policy.adaptive import Adaptive
from edgespec.policy.registry import POLICIES
from edgespec.sim.toy import VOCABULARY, ToyCodec
from edgespec.sim.toy_model import FakeHead, toy_hidden
from edgespec.types.record import MOST_CHARS
from edgespec.types.tensor import Tensor
from edgespec.wire.client_messages import Echoed, Failed, Finished, Submit, Tokens
from edgespec.wire.codec import decode, encode

PROMPT = "what the ring reads it reads in chunks"


@pytest.fixture(autouse=True)
def _small_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing costs anything, as here, the adaptive policy would guess without end."""
    monkeypatch.setitem(POLICIES, "adaptive", Adaptive(width=3, most_rows=6))


def scored(tag: int = 1, prompt: str = PROMPT, tokens: int = 0, **more: Any) -> Submit:
    """A prompt whose tokens' log-probabilities are wanted."""
    return replace(submit(tag, prompt, tokens, **more), prompt_top=1)


def expected(fake: FakeRing, prompt: str) -> list[float | None]:
    """The toy's numbers by plain evaluation."""
    tokens = list(fake.codec.encode(prompt))
    hidden = toy_hidden(tokens, fake.stages)[:-1]
    rows = Tensor("uint64", (len(hidden), 1), hidden.tobytes())
    told = FakeHead(VOCABULARY).score(rows, np.array(tokens[1:], np.int64), 1)
    return [None, *told.log_probs.tolist()]


def assert_scored(fake: FakeRing, ask: Submit) -> None:
    """The prompt was told before the answer, whole and once, with the toy's own numbers."""
    end = assert_one_end(fake.ring.replies, ask.tag)
    assert isinstance(end, Finished)
    mine = [m for m in fake.ring.replies if getattr(m, "tag", None) == ask.tag]
    told = [m for m in mine if isinstance(m, Echoed)]
    first = next((n for n, m in enumerate(mine) if isinstance(m, Tokens)), len(mine))
    assert all(mine.index(m) < first for m in told)
    tokens = tuple(fake.codec.encode(ask.prompt))
    assert told[0].token_ids == tokens
    assert told[0].text == fake.codec.spelt(tokens)
    listed = [one for m in told[1:] for one in json.loads(m.log_probs)]
    assert [one["id"] for one in listed] == list(tokens)
    assert [one["logprob"] for one in listed] == expected(fake, ask.prompt)
    assert [len(one["top_logprobs"]) for one in listed] == [0] + [1] * (len(tokens) - 1)


@pytest.mark.parametrize("head_last", [False, True])
@pytest.mark.parametrize("stages", [1, 3])
def test_the_same_over_stages_chunks_and_heads(stages: int, head_last: bool) -> None:
    for chunk in (1, 4, 7, 100):
        fake = FakeRing(stages, prefill_chunk=chunk, head_last=head_last)
        ask = scored()
        fake.ring.ask(ask)
        assert_scored(fake, ask)
        end = fake.ring.replies[-1]
        assert isinstance(end, Finished)
        assert (end.token_ids, end.text, end.finish_reason) == ((), "", "length")
        fake.assert_nothing_left()


@pytest.mark.parametrize("head_last", [False, True])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_answer_behind_them_is_the_same(policy: str, head_last: bool) -> None:
    fake = FakeRing(2, head_last=head_last)
    for top in (-1, 0):
        ask = replace(scored(tokens=9, policy=policy, seed=3), top=top)
        fake.ring.replies.clear()
        assert fake.ring.ask(ask).token_ids == fake.expected(ask).token_ids
        assert_scored(fake, ask)
        told = [m.log_probs for m in fake.ring.replies if isinstance(m, Tokens)]
        assert all(bool(text) == (top == 0) for text in told)
        assert not [one for text in told if text for one in json.loads(text) if one["top_logprobs"]]


@pytest.mark.parametrize("seed", tiered(range(12), range(3)))
def test_whatever_the_timing_beside_others_and_with_a_lost_ring(seed: int) -> None:
    rng = random.Random(seed)
    fake = FakeRing(3, live=3, kept_rows=4000, head_last=seed % 2 == 1)
    asks = [
        scored(1, tokens=rng.choice([0, 1, 12]), policy=rng.choice(sorted(POLICIES))),
        scored(2, PROMPT + " and more", policy="adaptive"),
        submit(3, PROMPT, 14, policy=rng.choice(sorted(POLICIES))),
    ]
    for ask in asks:
        fake.ring.submit(ask)
    chaos = Chaos(fake, rng, Faults(lose_retain=0.2, repeat=0.2, reorder=0.3))
    for _ in range(rng.randrange(5, 120)):
        chaos.step()
    if not fake.coordinator.idle:
        fake.ring.lose("stage 2 is gone")
        fake.ring.mend()
    while chaos.step():
        continue
    for ask in asks[:2]:
        assert_scored(fake, ask)
    end = assert_one_end(fake.ring.replies, 3)
    assert isinstance(end, Finished)
    assert end.token_ids == fake.expected(asks[2]).token_ids


def test_kept_rows_are_no_use_to_scores_but_what_they_leave_is_to_others() -> None:
    fake = FakeRing(2, kept_rows=4000)
    long = 4 * PROMPT
    asks = submit(1, long, 3), scored(2, long), submit(3, long, 3)
    for number, ask in enumerate(asks):
        end = fake.ring.ask(ask)
        assert bool(end.cached_tokens) == (number == 2)
    assert_scored(fake, asks[1])


def test_a_prompt_of_tokens_is_read_as_it_stands() -> None:
    fake = FakeRing(2)
    tokens = tuple(fake.codec.encode(PROMPT))
    ask = replace(submit(prompt="", max_new_tokens=5), prompt_ids=tokens, echo=True)
    assert fake.ring.ask(ask).token_ids == fake.expected(submit(prompt=PROMPT)).token_ids[:5]
    (told,) = (m for m in fake.ring.replies if isinstance(m, Echoed))
    assert (told.token_ids, told.log_probs) == (tokens, "")


def test_what_is_only_told_runs_no_ring() -> None:
    fake = FakeRing(2)
    fake.ring.ask(replace(submit(max_new_tokens=0), echo=True))
    fake.ring.ask(replace(scored(2, "a")))  # its one token has no score
    assert fake.ring.now == 0 or not any(block.open_requests for block in fake.blocks)
    assert [len(m.token_ids) for m in fake.ring.replies if isinstance(m, Echoed)] == [5, 1, 0]


def test_long_tokens_are_told_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    long = "x" * (MOST_CHARS // 20)
    monkeypatch.setattr(ToyCodec, "token", lambda self, token: (long, None))
    fake = FakeRing(1, prefill_chunk=100)
    ask = scored()
    fake.ring.ask(ask)
    told = [m for m in fake.ring.replies if isinstance(m, Echoed)][1:]
    assert len(told) > 2
    assert all(decode(encode(message)) == message for message in told)
    listed = [one for message in told for one in json.loads(message.log_probs)]
    assert [one["id"] for one in listed] == list(fake.codec.encode(PROMPT))


def test_a_text_too_long_to_be_told_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToyCodec, "spelt", lambda self, tokens: "x" * (MOST_CHARS + 1))
    fake = FakeRing(1)
    fake.ring.submit(replace(submit(), echo=True))
    fake.ring.run()
    end = assert_one_end(fake.ring.replies, 1)
    assert isinstance(end, Failed)
    assert (end.kind, "characters" in end.reason) == ("invalid", True)


@pytest.mark.parametrize(
    ("change", "word"),
    [({"prompt_top": 21}, "prompt_logprobs"), ({"prompt_ids": (1, VOCABULARY)}, "token 40")],
)
def test_what_cannot_be_is_refused(change: dict[str, Any], word: str) -> None:
    fake = FakeRing(1)
    ask = replace(submit(), **change)
    fake.ring.submit(ask)
    fake.ring.run()
    end = assert_one_end(fake.ring.replies, ask.tag)
    assert isinstance(end, Failed)
    assert (end.kind, word in end.reason) == ("invalid", True)
