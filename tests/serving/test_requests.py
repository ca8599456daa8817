"""Reading requests: what is taken, what is refused, and which parameter the refusal names."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from edgespec.serving.leniency import header_of
from edgespec.serving.messages import MessagesRequest
from edgespec.serving.ollama import OllamaTextRequest
from edgespec.serving.problems import ApiProblem
from edgespec.serving.request_bodies import COMPLETION_TOKENS, ChatRequest, TextRequest
from edgespec.serving.requests import checked, parsed, submits_of
from edgespec.serving.responses import ResponsesRequest
from edgespec.types.grammar_spec import json_spec, leaves_out, spec
from edgespec.wire.client_messages import ChatMessage, Submit, TokenBias, ToolCall
from edgespec.wire.codec import decode, encode

MESSAGES = [{"role": "user", "content": "hello"}]


def chat(**more: Any) -> ChatRequest:
    """A chat with these parameters."""
    return checked(ChatRequest, {"messages": MESSAGES, **more})


def text(**more: Any) -> TextRequest:
    """A completion with these parameters."""
    return checked(TextRequest, {"prompt": "hello", **more})


def submitted(request: ChatRequest | TextRequest) -> Submit:
    """What the ring is asked, which has a context of 100 tokens."""
    (submit,) = submits_of(request, 100)
    return submit


def test_what_is_left_out_is_as_openai_has_it_and_the_model() -> None:
    asked = chat()
    submit = submitted(asked)
    assert (submit.temperature, submit.top_p, submit.top) == (None, None, -1)
    assert (submit.top_k, submit.min_p, submit.repetition_penalty) == (None, None, None)
    assert (asked.stream, asked.with_usage, asked.wait, asked.model) == (False, False, True, "")
    assert asked.limit is None
    assert submitted(text()).max_new_tokens == COMPLETION_TOKENS
    assert submitted(chat()).seed != submitted(chat()).seed


def test_null_is_as_if_it_was_left_out() -> None:
    names = ("temperature", "top_p", "stop", "stream", "stream_options", "n", "tools", "logprobs")
    asked = chat(seed=1, **dict.fromkeys(names))
    assert asked == chat(seed=1)


def test_all_that_the_ring_takes_arrives() -> None:
    asked = chat(
        model="m",
        max_completion_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        seed=3,
        stop=["a", "b"],
        logprobs=True,
        top_logprobs=4,
        policy="flowspec",
        stream=True,
        stream_options={"include_usage": True},
        wait=False,
        user="u",
        metadata={"k": "v"},
    )
    submit = submitted(asked)
    assert (submit.max_new_tokens, submit.temperature, submit.top_p) == (7, 0.5, 0.9)
    assert (submit.top_k, submit.min_p, submit.seed, submit.stop) == (5, 0.1, 3, ("a", "b"))
    assert (submit.top, submit.policy) == (4, "flowspec")
    assert (asked.model, asked.stream, asked.with_usage, asked.wait) == ("m", True, True, False)
    assert submit.messages == (ChatMessage("user", "hello"),)
    rules = submitted(chat(presence_penalty=1, frequency_penalty=-0.5, logit_bias={"7": -3}))
    assert (rules.presence_penalty, rules.frequency_penalty) == (1.0, -0.5)
    assert rules.logit_bias == (TokenBias(7, -3.0),)
    biased = submitted(chat(logit_bias={str(token): 1 for token in range(1024)}))
    assert decode(encode(biased)) == biased
    assert submitted(text(regex="a+")).grammar == spec("regex", "a+")
    assert submitted(text(grammar="start: /a/")).grammar == spec("lark", "start: /a/")
    schema = {"type": "integer"}
    named = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    assert submitted(chat(response_format=named)).grammar == json_spec(schema)
    any_object = submitted(chat(response_format={"type": "json_object"})).grammar
    assert any_object == json_spec({"type": "object"})
    assert submitted(chat(response_format={"type": "text"})).grammar == ""
    assert submitted(text(logprobs=0)).top == 0
    assert submitted(text(prompt=["only one"])).prompt == "only one"
    assert submitted(text(stop="x")).stop == ("x",)
    assert submitted(chat(logprobs=True)).top == 0


def test_limits_and_stops_have_several_names() -> None:
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens"):
        assert submitted(text(**{name: 7})).max_new_tokens == 7
        assert submitted(chat(**{name: 7})).max_new_tokens == 7
    assert submitted(text(stop_sequences=["!"])).stop == ("!",)
    asked = checked(ResponsesRequest, {"input": "hello", "max_tokens": 7, "n": 1, "tools": []})
    assert asked.max_output_tokens == 7


def test_what_another_form_has_is_refused_if_it_would_change_the_answer() -> None:
    for more in ({"top_k": 4}, {"stop": ["!"]}, {"regex": "a"}, {"n": 2}, {"logit_bias": {"1": 1}}):
        with pytest.raises(ApiProblem, match="would change the answer"):
            checked(ResponsesRequest, {"input": "hello", **more})
    ignored: list[str] = []
    body = {"prompt": "hello", "seed": 1, "enable_thinking": False, "store": True, "echo": False}
    assert submitted(checked(TextRequest, body, ignored)) == submitted(text(seed=1))
    assert ignored == ["enable_thinking", "store"]


def test_a_budget_of_thoughts_arrives() -> None:
    names = ("thinking_budget", "thinking_token_budget", "thinking_budget_tokens")
    assert {submitted(chat(**{name: 7})).thinking_budget for name in names} == {7}
    assert submitted(chat()).thinking_budget == -1


def test_negative_seeds_are_taken_and_differ() -> None:
    seeds = {submitted(chat(seed=seed)).seed for seed in (-2, -1, 0, 1, -(1 << 63))}
    assert len(seeds) == 5
    assert all(0 <= seed < 1 << 64 for seed in seeds)


def test_each_choice_is_a_request_with_the_next_seed() -> None:
    """The same as if it had been asked for alone with that seed."""
    asked = submits_of(text(prompt=["a", "b"], n=3, seed=-2), 100)
    alone = [submitted(text(prompt=prompt, seed=seed)) for prompt in "ab" for seed in (-2, -1, 0)]
    assert asked == alone
    assert (
        len(submits_of(chat(n=128), 100)) == len(submits_of(text(prompt=["a"] * 128), 100)) == 128
    )


def test_texts_of_a_message_are_joined_and_developers_are_the_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = chat(
        messages=[
            {"role": "developer", "content": parts, "name": "n"},
            {"role": "assistant", "content": "c", "refusal": None, "tool_calls": []},
            {"role": "assistant", "content": None, "tool_calls": None},
        ]
    )
    assert submitted(asked).messages == (
        ChatMessage("system", "ab"),
        ChatMessage("assistant", "c"),
        ChatMessage("assistant", ""),
    )


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": False}, "top_p"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.1}, "min_p"),
        ({"seed": 1 << 64}, "seed"),
        ({"seed": "1"}, "seed"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"max_completion_tokens": -2}, "max_completion_tokens"),
        ({"max_tokens": 1 << 40}, "max_tokens"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
        ({"thinking_budget": -1}, "thinking_budget"),
        ({"chat_template_kwargs": {"a": []}}, "chat_template_kwargs"),
        ({"stop": [""]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": "x" * 2000}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": "much"}, "frequency_penalty"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"one": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "response_format"),
        ({"grammar": "start: /a/", "regex": "a"}, "regex"),
        ({"regex": ""}, "regex"),
        ({"grammar": "\udfff"}, "grammar"),
        ({"tools": [{}]}, "tools[0].function"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "a\n"}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "a"}}] * 2}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"function": {"name": "f"}}}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"policy": "magic"}, "policy"),
        ({"policy": 3}, "policy"),
        ({"temprature": 1}, "temprature"),
        ({"Temperature": 1}, "Temperature"),
        ({"maxTokens": 1}, "maxTokens"),
        ({"mirostat": 2}, "mirostat"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"extra_body": {"top_k": 1}}, "extra_body"),
        ({"model": 1}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({"messages": [{"role": "functions", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": [], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "system", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages[0].audio"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": [1]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].function",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(more: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiProblem) as caught:
        chat(**more)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param.rpartition(".")[2].partition("[")[0] in str(caught.value)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, -2]}, "prompt"),
        ({"prompt": [1, [2]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a"] * 3, "n": 43}, "n"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [["a"]]}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": "\udfff"}, "prompt"),
        ({"best_of": 2}, "best_of"),
        ({"echo": "yes"}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": True}, "logprobs"),
        ({"messages": MESSAGES}, "messages"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ],
)
def test_completions_refuse_by_name_as_well(more: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiProblem) as caught:
        text(**more)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"3", b'"x"', b"\xff\xfe", b'{"a": NaN}', b'{"a": 1e999}x', b"[" * 200_000,
     b'{"prompt": "a\x00b"}', b'{"a": ' + b"9" * 10_000 + b"}"],
)  # fmt: skip
def test_a_body_that_is_no_json_object_is_told_so(raw: bytes) -> None:
    with pytest.raises(ApiProblem) as caught:
        parsed(raw)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_more_tokens_than_the_context_holds_are_as_many_as_fit() -> None:
    assert submitted(chat()).max_new_tokens == 100
    assert submitted(chat(max_tokens=100)).max_new_tokens == 100
    assert submitted(chat(max_tokens=32_000)).max_new_tokens == 100
    assert submitted(chat(max_tokens=-1)).max_new_tokens == 100
    assert submitted(text(max_tokens=-1)).max_new_tokens == 100


def test_infinity_is_no_number() -> None:
    with pytest.raises(ApiProblem, match="temperature"):
        chat(**parsed(b'{"temperature": 1e999}'))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"temperature": 2.5}, "temperature is 2.5; it must be a number of at most 2.0"),
        ({"top_p": -1}, "top_p is -1; it must be a number above 0.0"),
        ({"top_k": 1.5}, "top_k is 1.5; it must be an integer"),
        ({"stream": 1}, "stream is 1; it must be true or false"),
        (
            {"stop": ["a"] * 65},
            "stop has a length of 65; it must be a list with a length of at most 64",
        ),
        ({"stop": ["a", {}]}, "stop[1] is {}; it must be a string"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
        ({"n": 0}, "n is 0; it must be an integer of at least 1"),
    ],
)
def test_a_refusal_says_what_is_wrong_and_what_may_be(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiProblem) as caught:
        chat(**more)
    assert str(caught.value) == message


def test_a_number_that_is_whole_is_an_integer() -> None:
    assert submitted(chat(top_k=5.0, seed=-0.0, n=1.0, presence_penalty=0.0)).top_k == 5


@pytest.mark.parametrize(
    "name",
    [
        "x - at `$.temperature`",
        "x - at `$.messages[7].content[0]",
        "`",
        "é" * (1 << 20),
        " - at `$.a" * (1 << 17),
        " - at `$." + "[1]" * (1 << 19),
    ],
)
def test_no_name_of_a_parameter_is_trouble(name: str) -> None:
    for body in ({name: 1}, {"messages": [{"role": "user", "content": "x", name: 1}]}):
        ignored: list[str] = []
        checked(ChatRequest, {"messages": MESSAGES, **body}, ignored)
        assert len(ignored) == 1
        (told,) = header_of(ignored).values()
        assert told.isascii()
        assert 0 < len(told) <= 80
    for near in (f"temperatur{name[:1]}", "temprature\ud800"):
        with pytest.raises(ApiProblem) as caught:
            chat(**{near: 1})
        assert (caught.value.status, caught.value.code) == (400, "unknown_parameter")
        assert len(str(caught.value)) < 400
        assert caught.value.as_bytes()


def test_a_thought_among_the_parts_is_one_that_the_message_has() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    parts = [thought, {"type": "text", "text": "a"}]
    asked = chat(messages=[*MESSAGES, {"role": "assistant", "content": parts}, *MESSAGES])
    assert asked.messages[1].record() == ChatMessage("assistant", "a", reasoning="hm")


def test_responses_that_may_leave_input_out_are_taken() -> None:
    """Nothing is left out all the same: what is too long is refused."""
    body = {"input": "hello", "truncation": "auto"}
    assert checked(ResponsesRequest, body).as_chat()["messages"]


def test_what_changes_no_answer_is_taken_or_ignored_and_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing of it changes what the ring is asked."""
    plain = chat(seed=1)
    neutral = {
        **{"max_tokens": -1, "stop": "", "mirostat": 0},
        **{"typical_p": 1.0, "guided_json": None, "echo": False, "store": True, "verbosity": "low"},
    }
    ignored: list[str] = []
    body = {"messages": MESSAGES, "seed": 1, **neutral, "client_metadata": {}, "keep_alive": "5m"}
    asked = checked(ChatRequest, {**body, "cache_prompt": True, "id_slot": -1}, ignored)
    assert submitted(asked) == submitted(plain)
    told = ["mirostat", "typical_p", "echo", "client_metadata", "keep_alive", "cache_prompt"]
    assert ignored == [*told, "id_slot"]
    assert header_of(ignored) == {"x-edgespec-ignored": ", ".join([*told, "id_slot"])}
    with caplog.at_level(logging.INFO):
        assert header_of(["told once"]) == header_of(["told once"])
    assert [one.message for one in caplog.records] == ["ignored in a request: told once"]
    assert header_of([]) == {}
    assert header_of(["", " a,b\n", "é ", ""]) == {"x-edgespec-ignored": r"'', a b\n, \xe9"}
    likeliest, off = submitted(chat(top_p=0)).top_p, submitted(chat(top_k=-1)).top_k
    assert likeliest is not None
    assert (0 < likeliest < 1e-300, off) == (True, 0)


def test_unknown_keys_within_messages_and_tools_are_ignored_and_told() -> None:
    ignored: list[str] = []
    part = {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}
    tool = {"type": "function", "function": {"name": "f", "x": 1}, "cache_control": {}}
    body = {
        "messages": [{"role": "user", "content": [part], "id": "m1", "timestamp": 3}],
        "tools": [tool, {"type": "web_search"}, {"type": "namespace", "tools": []}],
    }
    asked = checked(ChatRequest, body, ignored)
    assert submitted(asked).messages == (ChatMessage("user", "hello"),)
    assert [tool.name for tool in submitted(asked).tools] == ["f"]
    assert ignored == [
        "tools[web_search]",
        "tools[namespace]",
        "messages[].content[].cache_control",
        "messages[].id",
        "messages[].timestamp",
        "tools[].function.x",
        "tools[].cache_control",
    ]


def test_every_message_that_openais_types_can_make_is_taken() -> None:
    """Those of openai.types.chat that are text, with each optional field left out, and with all."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    custom = {"id": "2", "type": "custom", "custom": {"name": "g", "input": "x"}}
    refusal = {"type": "refusal", "refusal": "no"}
    asked = chat(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "d"}], "name": "n"},
            {"role": "user", "content": "u", "name": "n"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "assistant", "content": None, "tool_calls": [custom], "refusal": None},
            {"role": "tool", "content": [{"type": "text", "text": "t"}], "tool_call_id": "1"},
            {"role": "assistant", "function_call": {"name": "h", "arguments": '{"a": 1}'}},
            {"role": "function", "name": "h", "content": None},
            {"role": "assistant", "content": [refusal], "reasoning_content": "hm"},
            {"role": "assistant", "refusal": "no", "annotations": [{}], "audio": None},
        ]
    )
    of_h = ToolCall("h", '{"a": 1}', "h")
    assert submitted(asked).messages == (
        ChatMessage("system", "d"),
        ChatMessage("user", "u"),
        ChatMessage("assistant", "", (ToolCall("f", "{}", "1"),)),
        ChatMessage("assistant", "", (ToolCall("g", '{"input": "x"}', "2"),)),
        ChatMessage("tool", "t", tool_call_id="1"),
        ChatMessage("assistant", "", (of_h,)),
        ChatMessage("tool", "", tool_call_id="h"),
        ChatMessage("assistant", "no", reasoning="hm"),
        ChatMessage("assistant", "no"),
    )


def test_what_load_generators_ask_for_arrives() -> None:
    asked = chat(ignore_eos=True, stop_token_ids=[3], repetition_penalty=1.1)
    submit = submitted(asked)
    assert submit.min_tokens >= 1 << 30
    assert (submit.stop_token_ids, submit.repetition_penalty) == ((3,), 1.1)
    assert submitted(chat(min_tokens=5)).min_tokens == 5
    assert decode(encode(submit)) == submit


@pytest.mark.parametrize(
    ("more", "settings"),
    [
        ({}, {}),
        ({"enable_thinking": False}, {"enable_thinking": False, "thinking": False}),
        ({"think": True}, {"enable_thinking": True, "thinking": True}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False, "thinking": False}),
        (
            {"reasoning_effort": "low"},
            {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"},
        ),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
    ],
)
def test_the_template_is_told_whether_to_think(
    more: dict[str, Any], settings: dict[str, Any]
) -> None:
    submit = submitted(chat(**more))
    assert submit.settings == settings
    assert decode(encode(submit)) == submit


@pytest.mark.parametrize(
    "more",
    [
        {"seed": "\ud800"},
        {"policy": "\ud800"},
        {"model": "\ud800"},
        {"stop": ["a", "\ud800"]},
        {"messages": [{"role": "\ud800", "content": "x"}]},
        {"messages": [{"role": "user", "content": "x", "\ud800": 1}]},
        {"messages": [{"role": "user", "content": [{"type": "\ud800", "text": "x"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]},
    ],
)
def test_half_a_character_is_refused_wherever_it_is_read(more: dict[str, Any]) -> None:
    with pytest.raises(ApiProblem) as caught:
        chat(**more)
    assert caught.value.status == 400
    assert caught.value.as_bytes()


def test_many_keys_are_refused_before_each_is_looked_at() -> None:
    with pytest.raises(ApiProblem, match="has 50001 parameters; it may have 256"):
        chat(**{f"key {number}": 1 for number in range(50_000)})


def test_of_two_words_for_one_parameter_the_one_from_here_counts() -> None:
    for body in ({"stop": "a", "stop_sequences": ["b"]}, {"stop_sequences": ["b"], "stop": "a"}):
        ignored: list[str] = []
        asked = checked(ChatRequest, {"messages": MESSAGES, **body}, ignored)
        assert (asked.stops, ignored) == (("a",), ["stop_sequences"])


def test_a_body_is_refused_that_python_could_not_write_again() -> None:
    with pytest.raises(ApiProblem, match="nested too deep"):
        parsed(b'{"messages": ' + b"[" * 250 + b"]" * 250 + b"}")


def test_a_bad_schema_beside_a_strict_tool_is_no_bug() -> None:
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {}}}
    deep: Any = []
    for _ in range(150):
        deep = [deep]
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"x": deep}}}
    assert submitted(chat(tools=[tool], response_format=schema)).grammar
    with pytest.raises(ApiProblem, match="tools with a call that has to be valid"):
        chat(tools=[tool], regex="a")


@pytest.mark.parametrize("held", [{"regex": "a+"}, {"response_format": {"type": "json_object"}}])
def test_what_its_format_ends_cannot_go_on_for_ever(held: dict[str, Any]) -> None:
    with pytest.raises(ApiProblem, match="ignore_eos cannot be given beside"):
        chat(ignore_eos=True, **held)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "a", "reasoning": "\ud800"},
        {"role": "tool", "content": "a", "tool_call_id": "\ud800"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {"a": "\ud800"}}}],
        },
    ],
)
def test_half_a_character_is_refused_in_what_takes_anything(message: dict[str, Any]) -> None:
    with pytest.raises(ApiProblem, match="half a character"):
        chat(messages=[*MESSAGES, message])


@pytest.mark.parametrize("value", [2**70, float("inf"), "\ud800"])
def test_a_setting_of_the_template_is_one_that_can_travel(value: object) -> None:
    with pytest.raises(ApiProblem, match="chat_template_kwargs"):
        chat(chat_template_kwargs={"a": value})


def test_items_of_tools_of_others_are_left_out_and_unknown_ones_refused() -> None:
    asked = [*({"type": kind} for kind in ("web_search_call", "mcp_list_tools")), *MESSAGES]
    ignored: list[str] = []
    assert len(ResponsesRequest(input=asked).as_chat(ignored)["messages"]) == 1
    assert ignored == ["input[web_search_call]", "input[mcp_list_tools]"]
    for kind in ("mesage", "item_reference"):
        with pytest.raises(ApiProblem, match=f"input items of type '{kind}' are not supported"):
            ResponsesRequest(input=[{"type": kind}]).as_chat()


def test_a_text_of_ollama_s_goes_on_to_its_end() -> None:
    def limit(**more: Any) -> int:
        asked = OllamaTextRequest(prompt="a", raw=True, **more)
        return submitted(checked(TextRequest, asked.as_chat())).max_new_tokens

    assert limit() == limit(options={"num_predict": -1}) == 100
    assert limit(options={"num_predict": 7}) == limit(options={"max_tokens": 7}) == 7
    assert limit(logprobs=False) == 100
    for wrong in ("few", 1.5):
        with pytest.raises(ApiProblem, match="num_predict") as caught:
            limit(options={"num_predict": wrong})
        assert caught.value.param == "num_predict"


def test_a_schema_needs_no_name_and_has_several_places() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    forms: list[Any] = [
        {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}},
        {"type": "json_schema", "json_schema": {"schema": schema}},
        {"type": "json_schema", "schema": schema},
        {"type": "json_object", "schema": schema},
    ]
    asked = [chat(response_format=one) for one in forms]
    assert len({submitted(one).grammar for one in asked}) == 1
    assert all(any(map(leaves_out, one.schemas)) for one in asked)
    assert "uniqueItems" not in submitted(asked[0]).grammar


def test_of_blocks_of_others_tools_the_client_is_told() -> None:
    blocks = [{"type": "text", "text": "a"}, {"type": "server_tool_use"}]
    ignored: list[str] = []
    asked = checked(MessagesRequest, {"messages": [{"role": "assistant", "content": blocks}]})
    assert len(asked.as_chat(ignored)["messages"]) == 1
    assert ignored == ["messages[].content[server_tool_use]"]


def test_an_answer_of_no_token_is_one_that_is_not_asked_for() -> None:
    assert submitted(chat(max_tokens=0)).max_new_tokens == 0
    assert submitted(chat(max_completion_tokens=0, max_tokens=4)).max_new_tokens == 0
    asked = text(prompt=[[1, 2], "a"], echo=True, logprobs=3, max_tokens=0, prompt_logprobs=1)
    one, other = submits_of(asked, 100)
    assert (one.prompt, one.prompt_ids, one.prompt_top, one.echo) == ("", (1, 2), 3, True)
    assert (other.prompt, other.prompt_ids, other.bare) == ("a", (), False)
    assert submitted(text(prompt=[7], add_special_tokens=False)).prompt_ids == (7,)
