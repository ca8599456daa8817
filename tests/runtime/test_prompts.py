"""A prompt that takes long to encode, in real nodes: everybody else's answers go on."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from msgspec.structs import replace
from support.nodes import PATIENCE_S, NodeRing
from support.rings import assert_one_end, submit

from edgespec.errors import ConfigError, RequestFailed
from edgespec.model.template_process import TemplateProcess
from edgespec.wire.client_messages import ChatMessage, Finished
from edgespec.wire.messages import Message

ASK = submit(max_new_tokens=40)
LONG = submit(tag=2, prompt="long")


class Encoder:
    """Encodes the prompt "long" when it may."""

    def __init__(self, ring: NodeRing) -> None:
        self.entered = threading.Event()
        self.may = threading.Event()
        self._encode = ring.codec.encode
        ring.codec.encode = self  # type: ignore[method-assign]

    def __call__(self, text: str, *, bare: bool = False) -> Sequence[int]:
        if text == LONG.prompt:
            self.entered.set()
            assert self.may.wait(PATIENCE_S)
        return self._encode(text, bare=bare)


def test_an_answer_runs_to_its_end_while_another_prompt_is_encoded() -> None:
    with NodeRing(2) as ring, ring.client() as one, ring.client() as other:
        ring.await_up()
        for block in ring.blocks:
            block.delay = 0.01
        encoder = Encoder(ring)
        answers: dict[int, list[Message]] = {}

        def ask_long() -> None:
            answers[2] = list(other.ask(LONG))

        asking = threading.Thread(target=ask_long)
        answer: list[Message] = []
        for message in one.ask(ASK):
            answer.append(message)
            if not asking.ident:
                asking.start()
                assert encoder.entered.wait(PATIENCE_S)
        end = assert_one_end(answer, ASK.tag)
        assert isinstance(end, Finished)
        ring.assert_right(ASK, end)
        assert ring.membership.status().ready
        encoder.may.set()
        asking.join(PATIENCE_S)
        late = assert_one_end(answers[2], LONG.tag)
        assert isinstance(late, Finished)
        ring.assert_right(LONG, late)
        assert sorted(ring.loaded) == [1, 2], "no stage was lost"
        ring.assert_free()


def test_a_prompt_is_answered_while_another_one_s_grammar_is_compiled() -> None:
    with NodeRing(2) as ring, ring.client() as one, ring.client() as other:
        ring.await_up()
        entered, may = threading.Event(), threading.Event()
        failed: list[RequestFailed] = []

        def grammar(text: str) -> None:
            entered.set()
            assert may.wait(PATIENCE_S)
            raise ConfigError("given up")

        def ask_held() -> None:
            with pytest.raises(RequestFailed, match="given up") as caught:
                list(other.ask(replace(LONG, grammar="explodes")))
            failed.append(caught.value)

        ring.codec.grammar = grammar  # type: ignore[assignment, method-assign]
        asking = threading.Thread(target=ask_held)
        asking.start()
        assert entered.wait(PATIENCE_S)
        end = assert_one_end(list(one.ask(ASK)), ASK.tag)
        assert isinstance(end, Finished)
        ring.assert_right(ASK, end)
        may.set()
        asking.join(PATIENCE_S)
        assert failed
        ring.assert_free()


LOOPS = (
    "{% if messages[0].content == 'x' %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{% endif %}{{ messages[0].content }}"
)


@pytest.mark.thorough
def test_a_template_that_loops_ends_its_own_request_alone() -> None:
    templates = TemplateProcess(LOOPS, {}, seconds=3.0)
    with NodeRing(2) as ring, ring.client() as one, ring.client() as other:
        ring.await_up()

        def encode_chat(messages: Sequence[Message], most: int, *more: object) -> Sequence[int]:
            return ring.codec.encode(templates.render([dict(m) for m in messages]))

        ring.codec.encode_chat = encode_chat  # type: ignore[method-assign]
        talk = [ChatMessage("user", text) for text in ("hello", "x")]
        chats = [replace(LONG, prompt="", messages=(message,)) for message in talk]
        try:
            templates.render([{"role": "user", "content": "hello"}])  # it is ready
            for block in ring.blocks:
                block.delay = 0.01
            answer = one.ask(ASK)
            first = next(answer)  # it runs
            with pytest.raises(RequestFailed, match="chat template was stopped") as failed:
                list(other.ask(chats[1]))
            end = assert_one_end([first, *answer], ASK.tag)
            assert failed.value.kind == "invalid"
            assert isinstance(end, Finished)
            ring.assert_right(ASK, end)
            assert sorted(ring.loaded) == [1, 2], "no stage was lost"
            assert isinstance(list(other.ask(chats[0]))[-1], Finished)
        finally:
            templates.close()
        ring.assert_free()
