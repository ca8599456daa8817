"""Templates that know tools: they get them, calls and results; others are told in words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import structs
from support.rings import submit
from support.tool_templates import DEEPSEEK, DEEPSEEK_FENCED, MISTRAL_ARGS, OF, XML, marked
from support.torch_rings import BASE, tokenizer

from edgespec.decoding.admission import encode
from edgespec.decoding.effects import EncodePrompt
from edgespec.model.template_process import TemplateProcess
from edgespec.model.tokenizer import Tokenizer
from edgespec.types.tool_forms import Tool, form_in, form_named
from edgespec.wire.client_messages import ChatMessage, ToolCall

NOW = Tool("now", "The time.", {"type": "object", "properties": {"<|im_end|>": {}}})
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "When is it? </s>"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": f"call_{n}", "type": "function", "function": {"name": "now", "arguments": a}}
            for n, a in enumerate(['{"zone": "</s>"}', "{}"])
        ],
    },
    {"role": "tool", "tool_call_id": "call_0", "content": "noon"},
    {"role": "tool", "tool_call_id": "call_1", "content": "night"},
]
ASKED = structs.replace(
    submit(prompt=""),
    messages=(
        ChatMessage("user", "When is it? </s>"),
        ChatMessage(
            "assistant",
            "",
            (ToolCall("now", '{"zone": "</s>"}', "call_0"), ToolCall("now", "{}", "call_1")),
        ),
        ChatMessage("tool", "noon", tool_call_id="call_0"),
        ChatMessage("tool", "night", tool_call_id="call_1"),
    ),
    tools=(NOW,),
)
"""The same, as a client sends it."""


def with_template(template: str) -> Tokenizer:
    """The bundled pair's tokenizer with another template."""
    made = Tokenizer(BASE)
    made.inner.chat_template = template
    return made


def written(codec: Tokenizer, tools: list[Tool]) -> str:
    """What the model reads of the conversation, with its control tokens."""
    return str(codec.inner.decode(codec.encode_chat(TALK, tools=tools)))


@pytest.mark.parametrize("name", OF)
def test_a_template_that_knows_tools_writes_them(name: str) -> None:
    codec = with_template(OF[name])
    assert form_in(codec.chat_template) == name
    assert codec.takes_tools
    text = written(codec, [NOW])
    key = form_named(name).key
    assert text.count(json.dumps(NOW.as_json())) == 1
    assert f'"name": "now", "{key}": {{"zone": "</s>"}}' in text, "arguments are JSON, not a text"
    assert text.index("noon") > text.rindex(f'"{key}": {{}}')
    assert "# Tools" not in text
    assert json.dumps(NOW.as_json()) not in written(codec, [])


@pytest.mark.parametrize("name", OF)
def test_what_a_tool_or_its_call_spells_is_no_control_token(name: str) -> None:
    """Those that the template itself writes are."""
    codec = with_template(OF[name])
    (end,) = codec.eos_ids
    ids = codec.encode_chat(TALK, tools=[NOW])
    assert written(codec, [NOW]).count("</s>") == 2 + (name == "mistral")
    assert ids.count(end) == (name == "mistral")


def test_a_template_that_knows_no_tools_gets_words() -> None:
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    for name, more in [
        ("hermes", ""),
        ("mistral", "{# [TOOL_CALLS] #}"),
        ("hermes", "{{ tools }}"),
    ]:
        codec = with_template(plain + more)
        assert not codec.takes_tools, more
        text, form = written(codec, [NOW]), form_named(name)
        assert text.startswith(("system: # Tools", " system: # Tools")), more
        assert form.result("night") in text, more
        assert form.calls([("now", '{"zone": "</s>"}'), ("now", "{}")]) in text, more


def test_names_and_arguments_of_mistral_and_xml_stand_as_their_templates_have_them() -> None:
    for name, template, calls in [
        ("mistral-args", MISTRAL_ARGS, ["[TOOL_CALLS]now[CALL_ID]", '[ARGS]{"zone": "</s>"}']),
        ("xml", XML, ["<function=now><parameter=zone>\n</s>\n</parameter></function>"]),
    ]:
        codec = with_template(template)
        assert form_in(codec.chat_template) == name
        assert codec.takes_tools
        text = written(codec, [NOW])
        assert all(one in text for one in calls), text
        assert "now" not in written(codec, []).partition("[TOOL_CALLS]")[0].partition("<tool_c")[0]
        assert text.index("noon") < text.index("night")


def test_a_template_that_writes_calls_but_no_tools_is_told_of_those_alone() -> None:
    """DeepSeek's, which add a call's arguments to a text."""
    for name, template in (("deepseek", DEEPSEEK), ("deepseek-fenced", DEEPSEEK_FENCED)):
        codec = with_template(template)
        assert form_in(codec.chat_template) == name
        assert not codec.takes_tools
        text, form = written(codec, [NOW]).lstrip(), form_named(name)
        assert text.startswith("## Tools"), text
        assert json.dumps(NOW.as_json()) in text
        assert form.calls([("now", '{"zone": "</s>"}')]).partition(form.tail)[0] in text, text
        assert marked("<|tool_output_begin|>night<|tool_output_end|>") in text
        assert written(codec, []).lstrip().startswith(marked("<|User|>"))


def test_other_forms_are_not_taken_for_these() -> None:
    for other in ["<tool_call>f<arg_key>", "<tool_call>\n<function=f>", "<|start_header_id|>", "x"]:
        assert form_in(other) == "", other
    assert form_in(tokenizer().chat_template) == ""


@pytest.mark.thorough
def test_the_process_of_templates_writes_the_same() -> None:
    for name, template in OF.items():
        codec = with_template(template)
        right = codec.encode_chat(TALK, tools=[NOW])
        made = TemplateProcess(template, codec.special_tokens)
        try:
            other = with_template(template)
            other.render = made.render
            assert other.encode_chat(TALK, tools=[NOW]) == right, name
        finally:
            made.close()


def test_tools_that_are_nested_too_deep_are_refused() -> None:
    """At whichever step they are too deep."""
    problems = set()
    for depth in (100, 300, 500, 900):
        deep = '{"a": ' * depth + "{}" + "}" * depth
        called = ChatMessage("assistant", "", (ToolCall("now", deep, "1"),))
        asked = structs.replace(ASKED, messages=(*ASKED.messages, called))
        if depth == 100:
            asked = structs.replace(asked, tools=(Tool("now", "", json.loads(deep)),))
        else:
            with pytest.raises(ValueError, match="nested too deep"):
                Tool("now", "", json.loads(deep))
        for template in OF.values():
            done = encode(with_template(template), EncodePrompt(1, asked, 50000))
            assert bool(done.tokens) != bool(done.problem)
            assert done.kind == ("invalid" if done.problem else "")
            problems.add(done.problem.partition(":")[0])
    assert problems > {""}
    assert "tools, or the arguments of a call, are nested too deep" in problems


def test_a_request_with_tools_is_encoded_with_them() -> None:
    codec = with_template(OF["llama"])
    done = encode(codec, EncodePrompt(1, ASKED, 5000))
    assert [one.as_json() for one in ASKED.messages] == TALK
    assert done.problem == ""
    assert list(done.tokens) == codec.encode_chat(TALK, tools=[NOW])
