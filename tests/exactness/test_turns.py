"""Promise 1 across the turns of a conversation: rows that are kept give the same text as none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.local_ring import LocalRing
from support.tiers import thorough, tiered
from support.torch_rings import CONTEXT, prompts, request, tokenizer, torch_ring

from edgespec.backends.torch_backend import TorchBlock
from edgespec.decoding.effects import SendRing
from edgespec.decoding.stage import StageMachine
from edgespec.machines.events import Event
from edgespec.model.kv_cache import STEP
from edgespec.wire.segment import Segment

NEW_TOKENS = 24
QUESTIONS = (" How many are left?", " And if there were twice as many? Answer:", " Why?")


def said(ring: LocalRing, monkeypatch: pytest.MonkeyPatch) -> list[Segment]:
    """The segments that the coordinator of a ring sends from now on."""
    sent: list[Segment] = []
    handle = ring.coordinator.handle

    def noting(event: object, now: float) -> object:
        effects = handle(event, now)  # type: ignore[arg-type]
        sent.extend(e.segment for e in effects if isinstance(e, SendRing))
        return effects

    monkeypatch.setattr(ring.coordinator, "handle", noting)
    return sent


def noting_rows(machine: StageMachine, most: list[int], stage: int) -> Callable[..., object]:
    """The machine's `handle`, which keeps at `stage` of `most` how many rows it held at once."""
    handle = machine.handle

    def noting(event: Event, now: float) -> object:
        effects = handle(event, now)
        most[stage] = max(most[stage], machine.held_rows)
        return effects

    return noting


def read(sent: list[Segment]) -> int:
    """Rows of prompts in these segments."""
    return sum(len(segment.parts[0].ids) for segment in sent if segment.parts[0].committed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "temperature"),
    [
        ("flowspec", 0.0),
        ("adaptive", 0.8),
        pytest.param("autoregressive", 0.8, marks=pytest.mark.slow),
        pytest.param("adaptive", 0.0, marks=pytest.mark.slow),
    ],
)
def test_every_turn_has_the_text_of_a_ring_that_keeps_nothing(
    policy: str, temperature: float
) -> None:
    keeps, forgets = torch_ring(3, kept_rows=CONTEXT), torch_ring(3)
    text = next(iter(prompts().values()))
    for tag, question in enumerate(QUESTIONS, start=1):
        ask = request(text, policy, NEW_TOKENS, tag=tag, temperature=temperature, seed=tag)
        keeps.replies.clear()
        forgets.replies.clear()
        one, other = keeps.ask(ask), forgets.ask(ask)
        assert one.token_ids == other.token_ids
        assert one.text == other.text
        assert other.cached_tokens == 0
        if tag > 1:
            assert one.cached_tokens > 0
        text += one.text + question


@pytest.mark.parametrize(
    "draft",
    tiered(["independent", "eagle", "dspark", "hybrid:ngram+eagle3"], ["independent"]),
)
def test_the_second_turn_of_a_long_conversation_reads_only_what_is_new(
    draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand tokens, of which the model's context of 1,024 leaves a few for the answer."""
    long = "".join(prompts().values())
    ids = tokenizer().encode(long)[:985]
    text = tokenizer().decode(ids)
    first = request(text, "adaptive", 8, tag=1)
    ring = torch_ring(2, "float32", kept_rows=2 * CONTEXT, draft_name=draft)
    ring.replies.clear()
    sent = said(ring, monkeypatch)
    answer = ring.ask(first)
    before = answer.prompt_tokens
    assert before >= 950
    assert read(sent) == before
    sent.clear()
    second = request(text + answer.text + " So", "adaptive", 8, tag=2)
    again = ring.ask(second)
    assert again.cached_tokens >= before - 1
    assert read(sent) == again.prompt_tokens - again.cached_tokens <= 12
    assert sum(source.alone for source in again.sources), "the draft knows what was said"
    forgets = torch_ring(2, "float32")
    forgets.replies.clear()
    assert forgets.ask(second).token_ids == again.token_ids


@pytest.mark.parametrize("policy", tiered(["adaptive", "flowspec"], ["flowspec"]))
@pytest.mark.parametrize("head_last", [False, thorough(True)])
def test_two_chats_in_turns_hold_their_preamble_once(
    policy: str, head_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reads its new tokens alone, and has the text of a ring that keeps nothing."""
    preamble = "".join(prompts().values())[:300]
    common = len(tokenizer().encode(preamble)) - 1  # the last may be cut otherwise in a longer text
    made = torch_ring.__wrapped__(2, "float64", kept_rows=8 * CONTEXT, head_last=head_last)
    forgets = torch_ring(2, "float64", head_last=head_last)
    sent = said(made, monkeypatch)
    chats = [preamble + " The first one asks:", preamble + " But another says,"]
    rows = [0, 0]
    most = [0, 0]  # rows that a stage's block held at once, those of guesses included
    for number, machine in enumerate(made.stages):
        monkeypatch.setattr(machine, "handle", noting_rows(machine, most, number))
    for turn, question in enumerate(QUESTIONS):
        for number, text in enumerate(chats):
            ask = request(text + question, policy, 10, tag=2 * turn + number, seed=number)
            sent.clear()
            forgets.replies.clear()
            answer = made.ask(ask)
            assert answer.token_ids == forgets.ask(ask).token_ids
            new = answer.prompt_tokens - answer.cached_tokens
            assert read(sent) == new
            if turn:
                assert answer.cached_tokens >= rows[number] - 1
            elif number:
                assert answer.cached_tokens >= common
            rows[number] = answer.prompt_tokens + answer.new_tokens - 1
            chats[number] = text + question + answer.text
    shared = made.coordinator.rows.saved
    assert shared >= common
    for node, machine, rows_at_once in zip(made.nodes[1:], made.stages, most, strict=True):
        (first, second) = machine.ledgers().values()
        assert machine.held_rows == len(first) + len(second) - shared <= sum(rows) - shared
        block = node.compute._block  # type: ignore[union-attr]
        assert isinstance(block, TorchBlock)
        held, nbytes = block.held
        assert held == machine.held_rows
        one = sum(block._caches[number].layer(0)[:, :, :1].nbytes for number in machine.ledgers())
        layers = next(block._caches[number].layers for number in machine.ledgers())
        spare = 2 * (STEP + max(rows) // 8 + 1)
        assert nbytes <= one // 2 * layers * (rows_at_once + spare)
