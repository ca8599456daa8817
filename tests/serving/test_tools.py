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

from edgespec.serving.requests import checked, submits_of
from edgespec.serving.schema import ChatRequest
from edgespec.serving.tools import CallReader, Said, Tool, called, grammar

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"enum": [1, 2]}},
    "required": ["city"],
    "additionalProperties": False,
}
NOW: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [Tool("weather", "of a city", CITY), Tool("now", "", NOW)]
NAMES = [tool.name for tool in TOOLS]


def read(text: str, cuts: list[int]) -> list[Said]:
    """What a reader finds in a text that comes in these pieces."""
    reader, found, at = CallReader(NAMES), [], 0
    for cut in [*sorted(cuts), len(text)]:
        found += reader.push(text[at:cut])
        at = max(at, cut)
    return [*found, *reader.flush()]


def whole(said: list[Said]) -> tuple[str, list[tuple[str, str]]]:
    """Its text, and its calls: names and arguments."""
    names = [one.name for one in said if one.name]
    calls = [(n, "".join(s.text for s in said if s.call == i)) for i, n in enumerate(names)]
    return "".join(one.text for one in said if one.call < 0), calls


TEXTS = [
    ("Hello <b> there <", []),
    (called("now", "{}"), [("now", "{}")]),
    (
        "Let me see.\n" + called("weather", '{"city": "P}a<r"}') + "\n" + called("now", "{}"),
        [("weather", '{"city": "P}a<r"}'), ("now", "{}")],
    ),
    ("<tool_call>\nnothing\n</tool_call> and so on", []),
    (called("unknown", "{}"), []),
]


@given(st.sampled_from(TEXTS), st.lists(st.integers(0, 120), max_size=12))
def test_calls_are_read_however_the_text_is_cut(
    case: tuple[str, list[tuple[str, str]]], cuts: list[int]
) -> None:
    text, calls = case
    found, made = whole(read(text, [min(cut, len(text)) for cut in cuts]))
    assert made == calls
    expected = text.partition("<tool_call>")[0] if calls else text
    assert found == (expected if expected.strip() else "")


def test_a_call_that_is_cut_off_has_what_there_was() -> None:
    text = called("weather", '{"city": "Paris"}')[:-20]
    assert whole(read(text, []))[1][0][0] == "weather"


@pytest.mark.parametrize(("must", "several"), [(True, True), (True, False), (False, True)])
def test_a_grammar_holds_calls_to_their_schemas(must: bool, several: bool) -> None:
    """Answers by chance under it are read as calls of these tools, with valid arguments."""
    schemas = {tool.name: tool.parameters for tool in TOOLS}
    held = tokenizer().grammar(grammar(TOOLS, must=must, several=several))
    (end,) = tokenizer().eos_ids
    for seed in range(4):
        chance = np.random.default_rng(seed)
        answer: list[int] = [] if must else tokenizer().encode("<tool_call>")[1:]
        for _ in range(160):
            may = np.flatnonzero(held.allowed(tuple(answer)))
            assert len(may), tokenizer().decode(answer)
            taken = end if end in may else int(chance.choice(may))
            if taken == end:
                break
            answer.append(taken)
        else:
            continue
        text, calls = whole(read(tokenizer().decode(answer), []))
        assert not must or (calls and not text)
        assert several or len(calls) == 1
        for name, arguments in calls:
            assert jsonschema_rs.validator_for(schemas[name]).is_valid(json.loads(arguments))


def test_what_was_called_and_what_came_of_it_is_told() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    asked = checked(
        ChatRequest,
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "When is it?"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "1", "content": "noon"},
            ],
            "tools": [{"type": "function", "function": {"name": "now", "parameters": NOW}}],
        },
    )
    (submit,) = submits_of(asked, 1000)
    first, _, made, came = json.loads(submit.messages)
    assert first["content"].startswith("Be brief.\n\n# Tools")
    assert json.dumps(NOW) in first["content"]
    assert made == {"role": "assistant", "content": called("now", "{}")}
    assert came == {"role": "user", "content": "<tool_response>\nnoon\n</tool_response>"}
    assert submit.grammar == ""
