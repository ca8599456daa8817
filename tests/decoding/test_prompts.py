"""Prompts are encoded beside the loop: whatever happens meanwhile, every request has one end."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from msgspec import structs
from support.cases import case
from support.rings import assert_one_end, submit

from edgespec.decoding.admission import CoordinatorSettings, encode
from edgespec.decoding.coordinator import CoordinatorMachine
from edgespec.decoding.effects import (
    EncodePrompt,
    OpenDraft,
    SendRing,
)
from edgespec.decoding.events import (
    PromptEncoded,
)
from edgespec.errors import CapacityError
from edgespec.machines.effects import (
    Effect,
    SendPeer,
)
from edgespec.machines.events import (
    ComputeFailed,
    Event,
    MessageArrived,
    PeerGone,
    RingDown,
    RingEnded,
    RingUp,
)
from edgespec.sim.toy import ToyCodec
from edgespec.wire.client_messages import (
    Cancel,
    ChatMessage,
    Failed,
    Finished,
    Progress,
    Submit,
)
from edgespec.wire.messages import Message

ASK = submit(1, "hello", 5)
CLIENT, OTHER = b"client", b"other"


class Shortest(ToyCodec):
    """Takes no more characters than tokens."""

    def check_length(self, text: str, most: int) -> None:
        """Counts them."""
        if len(text) > most:
            raise CapacityError(f"{len(text)} characters cannot fit")

    def encode(self, text: str, *, bare: bool = False) -> Sequence[int]:
        """Never of what cannot fit."""
        assert len(text) < 100
        return super().encode(text)


class Desk:
    """A coordinator whose prompts are encoded when the test says so."""

    def __init__(self, queue_limit: int = 64, recovery: float = 60.0) -> None:
        ring = CoordinatorSettings(2, 100, "fake", queue_limit=queue_limit, recovery=recovery)
        self.machine = CoordinatorMachine(ring, Shortest())
        self.asked: list[EncodePrompt] = []
        self.started: list[int] = []
        self.sent: list[SendRing] = []
        self.replies: dict[bytes, list[Message]] = {CLIENT: [], OTHER: []}
        self.now = 0.0
        self.tell(RingUp())

    def tell(self, event: Event) -> list[Effect]:
        effects = self.machine.handle(event, self.now)
        for effect in effects:
            match effect:
                case EncodePrompt():
                    self.asked.append(effect)
                case OpenDraft(request):
                    self.started.append(request)
                case SendRing():
                    self.sent.append(effect)
                case SendPeer(peer, message):
                    self.replies[peer].append(message)
        return effects

    def submit(self, ask: Submit, peer: bytes = CLIENT) -> None:
        self.tell(MessageArrived(peer, ask))

    def encode(self) -> EncodePrompt:
        """The prompt that is being encoded is."""
        (effect,) = self.asked
        self.asked.clear()
        self.tell(self.machine.encode(effect))
        return effect

    def end(self, tag: int = 1, peer: bytes = CLIENT) -> Finished | Failed:
        return assert_one_end(self.replies[peer], tag)


def test_a_prompt_is_encoded_outside_and_starts_when_it_is() -> None:
    desk = Desk()
    desk.submit(ASK)
    assert [e.asked.prompt for e in desk.asked] == ["hello"]
    assert not desk.sent
    assert not desk.replies[CLIENT], "it is the next: there is nothing to wait for"
    assert desk.machine.load() == (0, 1)
    assert not desk.machine.idle
    desk.encode()
    assert desk.sent
    assert desk.machine.load() == (1, 0)


def test_one_prompt_is_encoded_at_a_time_and_they_start_in_order() -> None:
    desk = Desk()
    for tag in (1, 2, 3):
        desk.submit(structs.replace(ASK, tag=tag, prompt=f"prompt {tag}"))
    said = []
    while desk.asked:
        said.append(desk.encode().asked.prompt)
    assert said == ["prompt 1", "prompt 2", "prompt 3"]
    assert desk.started == [1]
    for tag in (1, 2):
        desk.tell(MessageArrived(CLIENT, Cancel(tag)))
    assert desk.started == [1, 2, 3]


def test_who_comes_behind_a_prompt_that_is_encoded_is_told_so_and_waits_for_it() -> None:
    desk = Desk()
    desk.submit(ASK)
    desk.submit(structs.replace(ASK, tag=2), OTHER)
    (told,) = desk.replies[OTHER]
    assert isinstance(told, Progress)
    assert "waiting behind 1 other" in told.text


@pytest.mark.parametrize("limit", [0, 2])
def test_prompts_that_are_encoded_count_in_the_queue(limit: int) -> None:
    desk = Desk(queue_limit=limit)
    for tag in range(limit + 3):
        desk.submit(structs.replace(ASK, tag=tag, scope=str(tag)))  # each for somebody else
    refused = [
        tag for tag in range(limit + 3) if any(_is_end(m, tag) for m in desk.replies[CLIENT])
    ]
    assert refused == [limit + 1, limit + 2]
    assert all(isinstance(desk.end(tag), Failed) for tag in refused)


def _is_end(message: Message, tag: int) -> bool:
    return isinstance(message, Failed | Finished) and message.tag == tag


def test_what_is_cancelled_meanwhile_ends_once_and_its_tokens_are_nobodys() -> None:
    desk = Desk()
    desk.submit(ASK)
    desk.submit(structs.replace(ASK, tag=2))
    desk.tell(MessageArrived(CLIENT, Cancel(1)))
    end = desk.end(1)
    assert isinstance(end, Finished)
    assert (end.finish_reason, end.token_ids, end.prompt_tokens) == ("cancelled", (), 0)
    assert not desk.sent, "the next one's prompt is not encoded yet"
    desk.encode()
    assert not desk.sent
    desk.encode()
    assert desk.started == [2]
    desk.end(1)


def test_what_is_cancelled_before_its_turn_is_never_encoded() -> None:
    desk = Desk()
    for tag in (1, 2, 3):
        desk.submit(structs.replace(ASK, tag=tag, prompt=f"prompt {tag}"))
    desk.tell(MessageArrived(CLIENT, Cancel(2)))
    said = []
    while desk.asked:
        said.append(desk.encode().asked.prompt)
    assert said == ["prompt 1", "prompt 3"]


def test_a_client_that_goes_meanwhile_gets_nothing_and_holds_up_nobody() -> None:
    desk = Desk()
    desk.submit(ASK)
    desk.submit(ASK, OTHER)
    desk.tell(PeerGone(CLIENT))
    desk.encode()
    desk.encode()
    assert desk.started == [2]
    assert not desk.replies[CLIENT]


def test_a_ring_that_is_lost_and_comes_back_meanwhile() -> None:
    desk = Desk()
    desk.submit(ASK)
    desk.tell(RingDown("stage 2 was lost"))
    assert isinstance(desk.replies[CLIENT][-1], Progress)
    desk.encode()
    assert not desk.sent
    desk.tell(RingUp())
    assert desk.started == [1]


def test_a_ring_that_is_up_before_the_prompt_is_encoded() -> None:
    desk = Desk()
    desk.submit(ASK)
    desk.tell(RingDown("stage 2 was lost"))
    desk.tell(RingUp())
    assert not desk.sent
    desk.encode()
    assert desk.started == [1]


@pytest.mark.parametrize("event", [RingEnded("it ends"), RingDown("stage 2 was lost")])
def test_a_ring_that_does_not_come_back_meanwhile(event: Event) -> None:
    desk = Desk(recovery=0.0)
    desk.submit(ASK)
    desk.tell(event)
    end = desk.end()
    assert isinstance(end, Failed)
    assert end.kind == "lost"
    desk.encode()
    desk.end()
    assert desk.machine.idle


def test_a_prompt_that_the_tokenizer_refuses_or_that_leaves_no_room_fails_alone() -> None:
    desk = Desk()
    desk.submit(structs.replace(ASK, messages=(ChatMessage("user", ""),), prompt=""))
    desk.submit(structs.replace(ASK, tag=2, prompt="  "))
    desk.submit(structs.replace(ASK, tag=3))
    for _ in range(3):
        desk.encode()
    kinds = [(end.kind, end.tag) for end in (desk.end(1), desk.end(2)) if isinstance(end, Failed)]
    assert kinds == [("invalid", 1), ("invalid", 2)]
    assert desk.started == [3]
    desk.submit(structs.replace(ASK, tag=4, prompt="x" * 99))
    desk.tell(PromptEncoded(desk.asked[-1].request, (1,) * 100))
    end = desk.end(4)
    assert isinstance(end, Failed)
    assert end.kind == "context"


def test_an_encoder_that_fails_ends_its_request_alone() -> None:
    desk = Desk()
    desk.submit(ASK)
    desk.submit(structs.replace(ASK, tag=2))
    desk.tell(ComputeFailed(-1, desk.asked.pop().request, "KeyError: 1"))
    end = desk.end(1)
    assert isinstance(end, Failed)
    assert end.reason == "KeyError: 1"
    desk.encode()
    assert desk.started == [2]


def test_a_grammar_that_is_compiled_holds_up_no_other_prompt() -> None:
    desk = Desk()
    desk.submit(structs.replace(ASK, grammar="long"))
    desk.submit(structs.replace(ASK, tag=2))
    held, free = desk.asked
    desk.tell(PromptEncoded(free.request, (1, 2)))
    assert desk.started == [free.request], "it begins before the one that came first"
    desk.submit(structs.replace(ASK, tag=3))
    desk.tell(PromptEncoded(held.request, (1, 2)))
    desk.tell(MessageArrived(CLIENT, Cancel(2)))
    assert desk.started == [free.request, held.request], "once it is compiled it has its turn"


@pytest.mark.parametrize("grammar", ["", "long"])
def test_who_asks_without_end_keeps_no_other_from_being_encoded(grammar: str) -> None:
    """Also if none of its requests ever begins."""
    desk = Desk()
    for tag in (1, 2):
        desk.submit(structs.replace(ASK, tag=tag, scope="many", grammar=grammar))
    for tag, name in enumerate(("one", "other")):
        desk.submit(structs.replace(ASK, tag=tag, scope=name, grammar=grammar), peer=OTHER)
    taken = []
    for tag in range(3, 7):
        effect = desk.asked.pop()
        taken.append(effect.request)
        desk.submit(structs.replace(ASK, tag=tag, scope="many", grammar=grammar))
        desk.tell(ComputeFailed(-1, effect.request, "no"))
    assert {3, 4} <= {*taken[:3]}


def test_what_cannot_fit_is_refused_by_its_characters_at_once() -> None:
    desk = Desk()
    desk.submit(structs.replace(ASK, prompt="9" * (1 << 20)))
    end = desk.end()
    assert isinstance(end, Failed)
    assert (end.kind, desk.asked) == ("context", [])


@pytest.mark.parametrize("template", ["", "{{ messages }}"])
def test_a_question_is_a_conversation_where_the_model_has_a_template(template: str) -> None:
    codec = ToyCodec(chat_template=template)
    asked = structs.replace(ASK, prompt="bare", messages=(ChatMessage("user", "hi"),))
    done = encode(codec, EncodePrompt(1, asked, 10))
    assert done.tokens == tuple(codec.encode("hi" if template else "bare"))
    alone = encode(codec, EncodePrompt(1, structs.replace(asked, prompt=""), 10))
    assert alone.tokens == tuple(codec.encode("hi")), "a conversation alone is for the template"


def test_whatever_happens_meanwhile_each_request_ends_once() -> None:
    for seed in range(100):
        with case("seed", seed):
            play_at_random(random.Random(seed))


def play_at_random(rng: random.Random) -> None:
    """Requests, cancels and a ring that comes and goes: in the end each request has ended once."""
    desk = Desk(queue_limit=4, recovery=rng.choice((0.0, 60.0)))
    tags = 0
    gone = False
    for _ in range(30):
        match rng.randrange(8):
            case 0 | 1 | 2:
                tags += 1
                desk.submit(structs.replace(ASK, tag=tags, prompt=rng.choice(("hello", " ", ""))))
            case 3 | 4 if desk.asked:
                desk.encode()
            case 5 if tags:
                desk.tell(MessageArrived(CLIENT, Cancel(rng.randint(1, tags))))
            case 6:
                desk.tell(RingDown("stage 1 was lost"))
            case 7:
                desk.tell(RingUp())
    if rng.random() < 0.3:
        gone = True
        desk.tell(PeerGone(CLIENT))
    desk.tell(RingEnded("the ring ended"))
    while desk.asked:
        desk.encode()
    assert desk.machine.idle
    if not gone:
        for tag in range(1, tags + 1):
            desk.end(tag)
