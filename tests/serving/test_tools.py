"""Tools: what a model is told of them, what holds its calls, and how calls are read."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.torch_rings import tokenizer

from edgespec.serving.problems import ApiProblem
from edgespec.serving.request_bodies import ChatRequest
from edgespec.serving.requests import checked, submits_of
from edgespec.serving.tools import CallReader, Said
from edgespec.types.tool_forms import Tool, ToolForm, form_named
from edgespec.wire.codec import decode, encode

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"enum": [1, 2]}},
    "required": ["city"],
    "additionalProperties": False,
}
NOW: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [Tool("weather", "of a city", CITY), Tool("now", "", NOW)]

FORMS = [
    form_named(name)
    for name in (
        *("hermes", "llama", "mistral", "mistral-args"),
        *("xml", "deepseek", "deepseek-fenced"),
    )
]
HERMES, LLAMA, MISTRAL, ARGS, XML, DEEPSEEK, FENCED = FORMS
PARIS = ("weather", '{"city": "P}a<\\"]r"}')
NOON = ("now", "{}")


def read(form: ToolForm, text: str, cuts: list[int]) -> list[Said]:
    """What a reader finds in a text that comes in these pieces."""
    reader, found, at = CallReader(form, TOOLS), [], 0
    for cut in [*sorted(cuts), len(text)]:
        found += reader.push(text[at:cut])
        at = max(at, cut)
    return [*found, *reader.flush()]


def whole(said: list[Said]) -> tuple[str, list[tuple[str, str]]]:
    """Its text, and its calls: names and arguments."""
    names = [one.name for one in said if one.name]
    calls = [(n, "".join(s.text for s in said if s.call == i)) for i, n in enumerate(names)]
    return "".join(one.text for one in said if one.call < 0), calls


Case = tuple[ToolForm, str, str | None, list[tuple[str, str]]]
"""A form, an answer, and the text (None: all of it) and the calls that are in it."""
SAME: list[Case] = [
    case
    for form in FORMS
    for case in [
        (form, form.calls([NOON]), "", [NOON]),
        (form, "\n" + form.calls([PARIS, NOON]) + "\n", "", [PARIS, NOON]),
        (form, form.calls([PARIS]) + " Good.", " Good.", [PARIS]),
        (form, "Hello <b> [1] {2} there <", None, []),
        (form, form.calls([("unknown", "{}")]), None, []),
        (form, form.calls([NOON])[:-1].replace("now", "no"), None, []),
        (form, form.calls([("now", "[]")]), None, []),
        (form, " \n {", None, []),
    ]
]
OWN: list[Case] = [
    (HERMES, "Let me see.\n" + HERMES.calls([PARIS, NOON]), "Let me see.", [PARIS, NOON]),
    (HERMES, "<tool_call>\nnothing\n</tool_call> and so on", None, []),
    (LLAMA, '<|python_tag|>{"name": "now", "parameters": {}}', "", [NOON]),
    (LLAMA, '{"type": "function", "name":"now","arguments":{}}\n', "", [NOON]),
    (LLAMA, LLAMA.calls([NOON]) + "\n" + LLAMA.calls([PARIS]), "", [NOON, PARIS]),
    (LLAMA, "So: " + LLAMA.calls([NOON]), None, []),
    (MISTRAL, "[TOOL_CALLS] " + MISTRAL.calls([PARIS, NOON]), "", [PARIS, NOON]),
    (MISTRAL, '[{"name": "now", "arguments": {}, "id": "a1B2c3D4e"}]', "", [NOON]),
    (MISTRAL, '{"name": "now", "arguments": {}}', None, []),
    (ARGS, "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[CALL_ID]a1B2c3D4e[ARGS]{}", "", [NOON, NOON]),
    (ARGS, "nowa1B2c3D4e{}weather" + PARIS[1], "", [NOON, PARIS]),
    (ARGS, "So now{}", None, []),
    (DEEPSEEK, "Let me see." + DEEPSEEK.calls([PARIS, NOON]), "Let me see.", [PARIS, NOON]),
    (DEEPSEEK, FENCED.calls([PARIS, NOON]), "", [PARIS, NOON]),
    (FENCED, "Let me see.\n" + FENCED.calls([PARIS, NOON]), "Let me see.", [PARIS, NOON]),
    (DEEPSEEK, DEEPSEEK.first + " now{}", None, []),
]
BARE = '<parameter=city>\nP}a<"]r\n</parameter>\n'
IN_XML: list[Case] = [
    (XML, f"<tool_call>\n<function=weather>\n{BARE}</function>\n</tool_call>", "", [PARIS]),
    (XML, f"So.\n<function=weather>\n{BARE}</function>\n</tool_call> Good.", "So. Good.", [PARIS]),
    (
        XML,
        "<tool_call><function=now></function></tool_call>\n"
        f"<tool_call>\n<function=weather>{BARE}<parameter=days>2</parameter></function>\n"
        "</tool_call>",
        "",
        [NOON, ("weather", PARIS[1][:-1] + ', "days": 2}')],
    ),
    (
        XML,
        "<tool_call>\n<function=weather>\n<parameter=city>\n\n a\n\n</parameter>\n"
        "<parameter=new>\n[1, True]\n</parameter>\n</function>\n</tool_call>",
        "",
        [("weather", '{"city": "\\n a\\n", "new": "[1, True]"}')],
    ),
    (XML, "<function=nothing>\n</function>", None, []),
]


@given(st.sampled_from([*SAME, *OWN, *IN_XML]), st.lists(st.integers(0, 120), max_size=12))
def test_calls_are_read_however_the_text_is_cut(case: Case, cuts: list[int]) -> None:
    """What is no call is text, all of it."""
    form, text, plain, calls = case
    found, made = whole(read(form, text, [min(cut, len(text)) for cut in cuts]))
    assert made == calls
    assert found == (text if plain is None else plain)


def test_a_call_is_read_with_a_cut_at_any_place() -> None:
    for form, text, plain, calls in [*SAME, *OWN, *IN_XML]:
        for cut in range(len(text)):
            found = whole(read(form, text, [cut]))
            assert found == (text if plain is None else plain, calls), (form.name, text[:cut])


def test_arguments_come_as_they_are_written() -> None:
    for form in FORMS:
        text = form.calls([PARIS, NOON])
        said = read(form, text, list(range(len(text))))
        assert sum(1 for one in said if one.call == 0) > len(PARIS[1]), form.name


def test_a_call_that_is_cut_off_has_what_there_was() -> None:
    for form in FORMS:
        text = form.calls([("weather", '{"city": "Paris"}')]).partition("aris")[0]
        assert whole(read(form, text, [])) == ("", [("weather", '{"city": "P')]), form.name


def test_a_call_that_is_cut_off_before_its_arguments_is_no_text() -> None:
    """Behind one that is whole, too; an answer that ends by itself has what it wrote."""
    for form in FORMS:
        for made in ([PARIS], [NOON, PARIS]):
            text = form.calls(made)
            begun = text[: text.rindex("weather") + 3]
            reader = CallReader(form, TOOLS)
            said = [*reader.push(begun), *reader.flush(is_cut=True)]
            assert whole(said) == ("", [("now", "{}")] if len(made) > 1 else []), form.name
    reader = CallReader(HERMES, TOOLS)
    assert whole([*reader.push("<tool_"), *reader.flush()]) == ("<tool_", [])


def test_values_of_xml_are_what_the_schema_says() -> None:
    kinds: dict[str, tuple[dict[str, Any], str, Any]] = {
        "a": ({"type": "string"}, "5", "5"),
        "b": ({"type": "integer"}, "5", 5),
        "c": ({"type": "boolean"}, "True", True),
        "d": ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        "e": ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "x</p>\ny", "x</p>\ny"),
        "f": ({"type": "array"}, '[1, {"a": "</b>"}]', [1, {"a": "</b>"}]),
        "g": ({"$ref": "#/x"}, '{"h": 1}', {"h": 1}),
        "i": ({"type": "number"}, "many", "many"),
        "j": ({"enum": [1, 2]}, "2", 2),
        "k": ({}, 'if a < "b":\n\tpass', 'if a < "b":\n\tpass'),
    }
    schema = {"type": "object", "properties": {name: one[0] for name, one in kinds.items()}}
    values = [f"<parameter={name}>\n{one[1]}\n</parameter>\n" for name, one in kinds.items()]
    text = f"<tool_call>\n<function=f>\n{''.join(values)}</function>\n</tool_call>"
    for step in (1, 7, len(text)):
        reader = CallReader(XML, [Tool("f", "", schema)])
        said = [
            one for at in range(0, len(text), step) for one in reader.push(text[at : at + step])
        ]
        plain, [(_, arguments)] = whole([*said, *reader.flush()])
        assert json.loads(arguments) == {name: one[2] for name, one in kinds.items()}
        assert plain == ""
    cut = CallReader(XML, [Tool("f", "", schema)])
    said = [*cut.push(text.partition("pass")[0] + "pas"), *cut.flush()]
    assert whole(said)[1][0][1].endswith('"k": "if a < \\"b\\":\\n\\tpas')


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize(("must", "several"), [(True, True), (True, False), (False, True)])
def test_a_grammar_holds_calls_to_their_schemas(form: ToolForm, must: bool, several: bool) -> None:
    """Answers by chance under it are read as calls of these tools, with valid arguments."""
    schemas = {"weather": CITY, "now": NOW}
    held = tokenizer().grammar(form.grammar(TOOLS, must=must, several=several))
    (end,) = tokenizer().eos_ids
    begun = tokenizer().encode(form.calls([NOON]).partition("now")[0])[1:]
    ended = 0
    for seed in range(4):
        chance = np.random.default_rng(seed)
        answer: list[int] = [] if must else list(begun)
        for _ in range(160):
            may = np.flatnonzero(held.allowed(tuple(answer)))
            assert len(may), tokenizer().decode(answer)
            taken = end if end in may else int(chance.choice(may))
            if taken == end:
                break
            answer.append(taken)
        else:
            continue
        ended += 1
        text, calls = whole(read(form, tokenizer().decode(answer), []))
        assert not must or (calls and not text)
        assert several or len(calls) == 1
        for name, arguments in calls:
            assert jsonschema_rs.validator_for(schemas[name]).is_valid(json.loads(arguments))
    assert ended


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_grammar_lets_an_answer_be_a_text(form: ToolForm) -> None:
    held = tokenizer().grammar(form.grammar(TOOLS, must=False, several=True))
    answer: list[int] = []
    for token in tokenizer().encode("It rains {so} [much].")[1:]:
        assert token in np.flatnonzero(held.allowed(tuple(answer))), tokenizer().decode(answer)
        answer.append(token)
    assert tokenizer().eos_ids <= {*np.flatnonzero(held.allowed(tuple(answer))).tolist()}


ANSWER = {"type": "object", "properties": {"n": {"enum": [1]}}, "required": ["n"]}
ANSWER |= {"additionalProperties": False}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("strict", [True, False])
def test_beside_a_schema_an_answer_is_a_call_or_json(form: ToolForm, strict: bool) -> None:
    function = {"name": "weather", "parameters": CITY, "strict": strict}
    asked = {
        **ASKED,
        "tools": [{"type": "function", "function": function}],
        "response_format": {"type": "json_schema", "json_schema": {"schema": ANSWER}},
    }
    (submit,) = submits_of(checked(ChatRequest, asked), 1000, form)
    held = tokenizer().grammar(submit.grammar)
    for text, is_good in (
        ('{"n": 1}', True),
        (form.calls([("weather", '{"city": "Rome"}')]), True),
        (form.calls([("weather", '{"city": 1}')]), not strict),
        ('{"n": 2}', False),
        ("It rains.", False),
    ):
        tokens = tokenizer().encode(text)[1:]
        fits = [t in np.flatnonzero(held.allowed((*tokens[:n],))) for n, t in enumerate(tokens)]
        ends = tokenizer().eos_ids <= {*np.flatnonzero(held.allowed((*tokens,))).tolist()}
        assert (all(fits) and ends) == is_good, text
    (must,) = submits_of(checked(ChatRequest, {**asked, "tool_choice": "required"}), 1000, form)
    first = tokenizer().encode('{"n": 1}')[1:]
    held = tokenizer().grammar(must.grammar)
    fits = [t in np.flatnonzero(held.allowed((*first[:n],))) for n, t in enumerate(first)]
    assert not all(fits)


CALL = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
ASKED: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "When is it?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
    ],
    "tools": [{"type": "function", "function": {"name": "now", "parameters": NOW}}],
}


def test_what_was_called_and_what_came_of_it_is_passed_on() -> None:
    (submit,) = submits_of(checked(ChatRequest, ASKED), 1000)
    assert [one.as_json() for one in submit.messages] == [
        *ASKED["messages"][:2],
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        ASKED["messages"][3],
    ]
    assert submit.tools == (Tool("now", "", NOW),)
    assert submit.grammar == ""
    assert decode(encode(submit)) == submit
    (none,) = submits_of(checked(ChatRequest, {**ASKED, "tool_choice": "none"}), 1000)
    assert none.tools == ()


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_call_that_is_asked_for_is_held_in_the_form_of_the_model(form: ToolForm) -> None:
    named = {"type": "function", "function": {"name": "now"}}
    for choice in ("required", named):
        (submit,) = submits_of(checked(ChatRequest, {**ASKED, "tool_choice": choice}), 1000, form)
        held = tokenizer().grammar(submit.grammar)
        answer: list[int] = []
        for token in tokenizer().encode(form.calls([NOON]))[1:]:
            assert token in np.flatnonzero(held.allowed(tuple(answer))), tokenizer().decode(answer)
            answer.append(token)
        assert tokenizer().eos_ids <= {*np.flatnonzero(held.allowed(tuple(answer))).tolist()}


def test_tools_that_are_nested_too_deep_are_one_clear_error() -> None:
    for depth in (100, 5000):
        nested: dict[str, Any] = {}
        for _ in range(depth):
            nested = {"not": nested}
        tool = {"type": "function", "function": {"name": "now", "parameters": nested}}
        for choice in ("auto", "required"):
            body = {**ASKED, "tools": [tool], "tool_choice": choice}
            if depth == 100:
                (submit,) = submits_of(checked(ChatRequest, body), 1000)
                assert decode(encode(submit)) == submit
                continue
            with pytest.raises(ApiProblem, match="nested too deep") as refused:
                checked(ChatRequest, body)
            assert refused.value.status == 400
            assert refused.value.param == "tools[0].function.parameters"


def test_a_template_without_tools_is_told_of_them_in_words() -> None:
    for form in FORMS:
        (submit,) = submits_of(checked(ChatRequest, ASKED), 1000)
        messages = [one.as_json() for one in submit.messages]
        first, _, made, came = form.as_text(messages, TOOLS)
        heading = form.words.partition("\n")[0]
        assert first["content"].startswith(f"Be brief.\n\n{heading}"), form.name
        assert json.dumps(NOW) in first["content"], form.name
        assert made == {"role": "assistant", "content": form.calls([NOON])}, form.name
        assert came == {"role": "user", "content": form.result("noon")}, form.name
        assert form.as_text(messages, [])[0]["content"] == "Be brief.", form.name
