"""Bodies as known programs send them, by their published types: what the ring is asked for each."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.serving.messages import MessagesRequest
from edgespec.serving.ollama import OllamaChatRequest
from edgespec.serving.request_bodies import ChatRequest, TextRequest
from edgespec.serving.requests import checked, submits_of
from edgespec.serving.responses import ResponsesRequest
from edgespec.wire.client_messages import Submit
from edgespec.wire.codec import decode, encode

CONTEXT = 8192
SCHEMA = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {"command": {"type": "string", "description": "The command."}},
    "required": ["command"],
    "additionalProperties": False,
}
CACHED = {"type": "ephemeral"}
FUNCTION = {"name": "run", "description": "Run a command.", "parameters": SCHEMA}
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]

CLAUDE_CODE: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "user", "content": [
            {"type": "text", "text": "<system-reminder>..."},
            {"type": "text", "text": "list the files", "cache_control": CACHED},
        ]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "ls does.", "signature": ""},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "call_1", "name": "run", "input": {"command": "ls"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "call_1", "content": "a b", "is_error": False,
             "cache_control": CACHED},
        ]},
    ],
    "system": [
        {"type": "text", "text": "You are an agent.", "cache_control": CACHED},
        {"type": "text", "text": "The folder is /home.", "cache_control": CACHED},
    ],
    "tools": [
        {"name": "run", "description": "Run a command.", "input_schema": SCHEMA},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "metadata": {"user_id": "user_1"},
    "max_tokens": 32000,
    "temperature": 1,
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "stream": True,
}  # fmt: skip
CODEX: dict[str, Any] = {
    "model": "m",
    "instructions": "You are an agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [
            {"type": "input_text", "text": "The folder is /home."}]},
        {"type": "message", "role": "user", "content": [
            {"type": "input_text", "text": "list the files"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None},
        {"type": "function_call", "name": "run", "arguments": "{}", "call_id": "call_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": "a b"},
    ],
    "tools": [
        {"type": "function", "strict": False, **FUNCTION},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
        {"type": "namespace", "name": "mcp", "tools": []},
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "1",
    "text": {"verbosity": "medium"},
    "client_metadata": {"x": "y"},
}  # fmt: skip
HOME_ASSISTANT: dict[str, Any] = {
    "model": "m",
    "messages": [
        *ASKED,
        {"role": "assistant", "content": "", "tool_calls": [
            {"function": {"name": "run", "arguments": {"command": "ls"}}}]},
        {"role": "tool", "content": '{"success": true}'},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "stream": True,
    "think": False,
    "format": "",
    "options": {"num_ctx": 8192},
    "keep_alive": "-1s",
}  # fmt: skip
OPEN_WEBUI: dict[str, Any] = {
    "model": "m",
    "messages": ASKED,
    "stream": True,
    "stream_options": {"include_usage": True},
    "params": {},
    "tool_servers": [],
    "features": {"web_search": False},
    "chat_id": "1",
    "session_id": "2",
    "background_tasks": {},
}
SMOLAGENTS: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
    "stop": ["Observation:", "Calling tools:"],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": "required",
}
VLLM_BENCH: dict[str, Any] = {
    "model": "m",
    "prompt": "hello",
    "temperature": 0.0,
    "repetition_penalty": 1.0,
    "max_tokens": 128,
    "logprobs": None,
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "ignore_eos": True,
}
OPENCODE: dict[str, Any] = {
    "model": "m",
    "max_tokens": 32000,
    "top_p": 1,
    "messages": [*ASKED, {"role": "assistant", "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "run", "arguments": "{}"}}]}],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": "auto",
    "stream": True,
    "stream_options": {"include_usage": True},
}  # fmt: skip


def asked(kind: type[Any], body: dict[str, Any]) -> tuple[Submit, list[str]]:
    """What the ring is asked, and what of the body is ignored."""
    ignored: list[str] = []
    read = checked(kind, body, ignored)
    if kind in (MessagesRequest, ResponsesRequest, OllamaChatRequest):
        read = checked(ChatRequest, read.as_chat(), ignored)
    (submit,) = submits_of(read, CONTEXT)
    assert decode(encode(submit)) == submit
    return submit, ignored


def roles(submit: Submit) -> list[str]:
    return [one.role for one in submit.messages]


def test_claude_codes() -> None:
    submit, ignored = asked(MessagesRequest, CLAUDE_CODE)
    assert roles(submit) == ["system", "user", "assistant", "tool"]
    assert submit.messages[0].content == "You are an agent.\n\nThe folder is /home."
    assert submit.messages[2].reasoning == "ls does."
    assert [one.name for one in submit.tools] == ["run"]
    assert submit.max_new_tokens == CONTEXT
    assert (submit.settings["enable_thinking"], submit.thinking_budget) == (True, -1)
    assert ignored == ["tools[web_search_20250305]"]


def test_codex_s() -> None:
    submit, ignored = asked(ResponsesRequest, CODEX)
    assert roles(submit) == ["system", "system", "user", "assistant", "tool"]
    assert [one.name for one in submit.tools] == ["run"]
    assert submit.settings["reasoning_effort"] == "medium"
    assert ignored == ["tools[custom]", "tools[namespace]", "tools[web_search]"]


def test_home_assistants() -> None:
    submit, ignored = asked(OllamaChatRequest, HOME_ASSISTANT)
    assert roles(submit) == ["system", "user", "assistant", "tool"]
    assert submit.messages[2].tool_calls[0].arguments == '{"command": "ls"}'
    assert submit.settings["enable_thinking"] is False
    assert ignored == ["num_ctx"]


def test_open_webuis() -> None:
    submit, ignored = asked(ChatRequest, OPEN_WEBUI)
    assert roles(submit) == ["system", "user"]
    told = ["params", "tool_servers", "features", "chat_id", "session_id", "background_tasks"]
    assert ignored == told


@pytest.mark.parametrize("choice", ["required", {"function": {"name": "run"}}])
def test_smolagents_call_is_held_and_its_stop_strings_are_none_of_it(choice: Any) -> None:
    submit, _ = asked(ChatRequest, {**SMOLAGENTS, "tool_choice": choice})
    assert submit.grammar
    assert submit.stop == ()
    free, _ = asked(ChatRequest, {**SMOLAGENTS, "tool_choice": "auto"})
    assert free.stop == ("Observation:", "Calling tools:")


def test_vllms_load_generators() -> None:
    submit, ignored = asked(TextRequest, VLLM_BENCH)
    assert (submit.max_new_tokens, submit.temperature, ignored) == (128, 0.0, [])
    assert submit.min_tokens > 128


def test_opencodes() -> None:
    submit, ignored = asked(ChatRequest, OPENCODE)
    assert (submit.max_new_tokens, ignored) == (CONTEXT, [])
    assert submit.messages[2].tool_calls[0].name == "run"
