"""Templates of models that think: they are told whether to; a prompt may end within a thought."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs
from support.rings import submit
from support.tool_templates import THINKING
from support.torch_rings import BASE, tokenizer

from edgespec.decoding.admission import encode
from edgespec.decoding.effects import EncodePrompt
from edgespec.decoding.events import PromptEncoded
from edgespec.model.template_process import TemplateProcess
from edgespec.model.tokenizer import Tokenizer
from edgespec.types.thinking import settings_for, thinking_in
from edgespec.wire.client_messages import ChatMessage

ASKED = structs.replace(
    submit(prompt=""),
    messages=(
        ChatMessage("user", "When?"),
        ChatMessage("assistant", "Noon.", reasoning="The sun is high."),
        ChatMessage("user", "Sure?"),
    ),
)


@pytest.fixture(scope="module")
def codec() -> Tokenizer:
    made = Tokenizer(BASE)
    made.inner.chat_template = THINKING
    return made


def encoded(codec: Tokenizer, settings: dict[str, Any]) -> PromptEncoded:
    """That question, with these settings of the template."""
    return encode(codec, EncodePrompt(1, structs.replace(ASKED, settings=settings), 5000))


def test_a_template_is_told_whether_to_think(codec: Tokenizer) -> None:
    history = "When?\n<think>The sun is high.</think>Noon.\nSure?\n"
    thinks, told = encoded(codec, {}), encoded(codec, settings_for(True))
    assert thinks == told
    assert thinks.thinks
    assert codec.decode(thinks.tokens).strip() == f"{history}<think>"
    does_not = encoded(codec, {**settings_for(False), "effort": "low"})
    assert not does_not.thinks
    assert codec.decode(does_not.tokens).strip() == f"{history}low<think>\n\n</think>"


def test_a_name_that_the_template_has_already_is_refused(codec: Tokenizer) -> None:
    done = encoded(codec, {"messages": "x"})
    assert (done.tokens, done.kind) == ((), "invalid")
    assert "messages" in done.problem
    bos = next(iter(codec.special_tokens))
    assert encoded(codec, {bos: "x"}).tokens == encoded(codec, {}).tokens


@pytest.mark.thorough
def test_the_process_of_templates_is_told_too(codec: Tokenizer) -> None:
    settings = settings_for(False)
    right = encoded(codec, settings)
    made = TemplateProcess(THINKING, codec.special_tokens)
    here, codec.render = codec.render, made.render
    try:
        assert encoded(codec, settings) == right
        assert "messages" in encoded(codec, {"messages": "x"}).problem
    finally:
        codec.render = here
        made.close()


def test_a_model_that_does_not_think_is_seen(codec: Tokenizer) -> None:
    assert thinking_in(tokenizer().chat_template) == ""
    assert not encode(tokenizer(), EncodePrompt(1, ASKED, 5000)).thinks
    for tag in ("think", "seed:think"):
        assert thinking_in(THINKING.replace("think>", f"{tag}>")) == tag
    assert thinking_in("<think>") == ""
