"""The forms of answers, OpenAI's, Anthropic's and Ollama's, by their published types: one text.

The types here are those of the packages anthropic and ollama (`types/`, `_types.py`), with every
field that has no default there; openai's own package is used in test_clients.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

import httpx
import pytest
from msgspec import Struct, convert
from msgspec.structs import replace
from support.apis import api
from support.nodes import NodeRing
from support.rings import submit

from edgespec.runtime.access_policy import CLIENT
from edgespec.serving.formats import ChatFormat, Format, Served, encoded
from edgespec.serving.messages import MessagesFormat, MessagesRequest
from edgespec.serving.ollama import OllamaChatRequest, OllamaFormat, OllamaTextRequest
from edgespec.serving.request_bodies import ChatRequest
from edgespec.serving.requests import checked, submits_of
from edgespec.serving.responses import ResponsesFormat, ResponsesRequest
from edgespec.types.thinking import ThoughtReader
from edgespec.types.tool_forms import HERMES
from edgespec.wire.client_messages import Finished, Submit, Tokens

# --- what Anthropic's clients read ----------------------------------------------------------------


class Strict(Struct, forbid_unknown_fields=True, kw_only=True):
    """No field but these."""


class MessageUsage(Strict):
    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class TextBlock(Strict, tag_field="type", tag="text"):
    text: str
    citations: None = None


class ThinkingBlock(Strict, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(Strict, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class Message(Strict, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"]
    content: list[Block]
    model: str
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageStart(Strict, tag_field="type", tag="message_start"):
    message: Message


class BlockStart(Strict, tag_field="type", tag="content_block_start"):
    index: int
    content_block: Block


class TextDelta(Strict, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(Strict, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(Strict, tag_field="type", tag="signature_delta"):
    signature: str


class JsonDelta(Strict, tag_field="type", tag="input_json_delta"):
    partial_json: str


class BlockDelta(Strict, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | JsonDelta


class BlockStop(Strict, tag_field="type", tag="content_block_stop"):
    index: int


class Stopped(Strict):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Strict, tag_field="type", tag="message_delta"):
    delta: Stopped
    usage: MessageUsage


class MessageStop(Strict, tag_field="type", tag="message_stop"): ...


class Ping(Strict, tag_field="type", tag="ping"): ...


Event = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping


def events_of(told: str) -> list[Event]:
    """Of a stream, each with its type as its name."""
    found = []
    for part in told.strip().split("\n\n"):
        if not part.startswith(":"):
            name, data = part.split("\n")
            value = json.loads(data.removeprefix("data: "))
            assert name == f"event: {value['type']}"
            found.append(convert(value, Event))
    return found


def message_of(events: list[Event]) -> tuple[list[Block], MessageDelta]:
    """The blocks that a client makes of a stream's events, and their end."""
    first, ping, *middle, last, stop = events
    assert isinstance(first, MessageStart)
    assert (first.message.content, first.message.stop_reason) == ([], None)
    assert isinstance(ping, Ping)
    assert isinstance(last, MessageDelta)
    assert isinstance(stop, MessageStop)
    blocks: list[Block] = []
    parts: list[str] = []
    for one in middle:
        match one:
            case BlockStart(index=index, content_block=block):
                assert index == len(blocks)
                blocks.append(block)
                parts = []
            case BlockDelta(index=index, delta=delta):
                assert index == len(blocks) - 1
                match blocks[-1], delta:
                    case TextBlock(), TextDelta(text=text):
                        blocks[-1].text += text
                    case ThinkingBlock(), ThinkingDelta(thinking=text):
                        blocks[-1].thinking += text
                    case ThinkingBlock(), SignatureDelta():
                        pass
                    case ToolUseBlock(), JsonDelta(partial_json=text):
                        parts.append(text)
                    case _:
                        raise AssertionError((blocks[-1], delta))
            case BlockStop(index=index):
                assert index == len(blocks) - 1
                if isinstance(blocks[-1], ToolUseBlock):
                    blocks[-1].input = json.loads("".join(parts))
            case _:
                raise AssertionError(one)
    return blocks, last


# --- what Ollama's clients read -------------------------------------------------------------------


class CalledFunction(Strict):
    name: str
    arguments: dict[str, Any]


class OllamaCall(Strict):
    function: CalledFunction
    id: str


class OllamaMessage(Strict):
    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None


class Line(Strict):
    """GenerateResponse and ChatResponse; the last one has the figures."""

    model: str
    created_at: str
    done: bool
    message: OllamaMessage | None = None
    response: str | None = None
    thinking: str | None = None
    done_reason: Literal["stop", "length", "load", "unload"] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None

    def check_end(self) -> None:
        assert self.done
        assert self.done_reason
        times = (self.load_duration, self.prompt_eval_duration, self.eval_duration)
        assert self.total_duration == sum(one or 0 for one in times)
        assert self.prompt_eval_count
        assert self.eval_count


def lines_of(told: str) -> list[Line]:
    """Of a stream."""
    assert told.endswith("\n")
    found = [convert(json.loads(one), Line) for one in told.splitlines()]
    assert [one.done for one in found] == [False] * (len(found) - 1) + [True]
    found[-1].check_end()
    return found


# --- one text in all forms, over a ring -----------------------------------------------------------

SETTINGS = {"temperature": 0, "seed": 0, "policy": "flowspec"}
ASKED = [{"role": "user", "content": "hello"}]
NEW = 12


def openai(http: httpx.Client, stream: bool, **more: Any) -> str:
    body = {"messages": ASKED, **SETTINGS, "max_tokens": NEW, **more, "stream": stream}
    told = http.post("/v1/chat/completions", json=body)
    if not stream:
        return told.json()["choices"][0]["message"]["content"]
    parts = [json.loads(p.removeprefix("data: ")) for p in told.text.split("\n\n") if "{" in p]
    return "".join(p["choices"][0]["delta"].get("content", "") for p in parts)


def responses(http: httpx.Client, stream: bool) -> str:
    body = {"input": ASKED, **SETTINGS, "max_output_tokens": NEW, "stream": stream}
    told = http.post("/v1/responses", json=body)
    if not stream:
        (item,) = told.json()["output"]
        return item["content"][0]["text"]
    parts = [json.loads(p.partition("data: ")[2]) for p in told.text.split("\n\n") if "{" in p]
    return "".join(p["delta"] for p in parts if p["type"] == "response.output_text.delta")


def anthropic(http: httpx.Client, stream: bool, **more: Any) -> str:
    body = {"messages": ASKED, **SETTINGS, "max_tokens": NEW, **more, "stream": stream}
    told = http.post("/v1/messages", json=body)
    if stream:
        blocks, last = message_of(events_of(told.text))
        assert last.usage.output_tokens == NEW
    else:
        message = convert(told.json(), Message)
        assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", NEW)
        blocks = message.content
    (block,) = blocks
    assert isinstance(block, TextBlock)
    return block.text


def ollama(http: httpx.Client, stream: bool, path: str, **body: Any) -> str:
    options = {"temperature": 0, "seed": 0, "num_predict": NEW, "num_ctx": 4096}
    told = http.post(
        path, json={**body, "policy": "flowspec", "options": options, "stream": stream}
    )
    assert told.headers["x-edgespec-ignored"] == "num_ctx"
    lines = lines_of(told.text + "\n" * (not stream))
    assert (len(lines) > 1) == stream
    return "".join(one.message.content if one.message else str(one.response) for one in lines)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "ask",
    [
        openai,
        responses,
        anthropic,
        lambda http, stream: ollama(http, stream, "/api/chat", messages=ASKED),
        lambda http, stream: ollama(http, stream, "/api/generate", prompt="hello"),
        lambda http, stream: ollama(http, stream, "/api/generate", prompt="hello", raw=True),
    ],
    ids=["openai", "responses", "anthropic", "ollama", "ollama-generate", "ollama-raw"],
)
def test_the_text_is_the_same_in_all_forms(
    http: httpx.Client, toy_ring: NodeRing, ask: Callable[..., str], stream: bool
) -> None:
    assert ask(http, stream) == toy_ring.expected(submit(max_new_tokens=NEW)).text


def test_a_stop_sequence_is_named(http: httpx.Client, toy_ring: NodeRing) -> None:
    text = toy_ring.expected(submit(max_new_tokens=NEW)).text
    body = {"messages": ASKED, **SETTINGS, "max_tokens": NEW, "stop_sequences": ["!", text[4:6]]}
    message = convert(http.post("/v1/messages", json=body).json(), Message)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", text[4:6])
    assert [one.text for one in message.content if isinstance(one, TextBlock)] == [
        text[: text.index(text[4:6])]
    ]


def test_tokens_are_counted_without_an_answer(http: httpx.Client, toy_ring: NodeRing) -> None:
    told = http.post("/v1/messages/count_tokens", json={"messages": ASKED})
    assert told.json() == {"input_tokens": 5}
    toy_ring.assert_free()
    for body, status in (
        ({"messages": [{"role": "user"}]}, 400),
        ({"messages": ASKED, "model": "x"}, 404),
        ({"messages": [{"role": "user", "content": " "}]}, 400),
    ):
        refused = http.post("/v1/messages/count_tokens", json=body)
        assert (refused.status_code, refused.json()["type"]) == (status, "error")


def test_a_limit_beyond_the_context_is_cut_and_told(http: httpx.Client) -> None:
    body = {"prompt": "hello", **SETTINGS, "max_tokens": 32_000, "keep_alive": 0}
    told = http.post("/v1/completions", json={**body, "stream": True, "stop": list("abcdefghij")})
    assert told.headers["x-edgespec-ignored"] == "keep_alive, max_tokens above 400"
    assert told.status_code == 200


def test_each_piece_has_the_usage_so_far_if_it_is_wanted(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "hello", **SETTINGS, "max_tokens": NEW, "stream": True}
    told = http.post("/v1/completions", json={**body, "stream_options": options}).text
    usages = [json.loads(p[6:])["usage"] for p in told.split("\n\n") if p.startswith("data: {")]
    counts = [one["completion_tokens"] for one in usages]
    assert counts == sorted(counts)
    assert counts[-1] == NEW
    assert {one["prompt_tokens"] for one in usages} == {5}


@pytest.mark.parametrize(
    ("path", "body", "status", "error"),
    [
        ("/v1/messages", {}, 400, {"type": "invalid_request_error"}),
        ("/v1/messages", {"messages": ASKED, "model": "x"}, 404, {"type": "not_found_error"}),
        ("/v1/messages/batches", {}, 404, {"type": "not_found_error"}),
        ("/api/chat", {"messages": ASKED, "model": "x"}, 404, "there is no model 'x' here"),
        ("/api/chat", {"messages": [{"role": "user", "content": 3}]}, 400, "messages[0].content"),
        ("/api/chat", {"messages": [{"role": "user", "images": ["x"]}]}, 400, "text alone"),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, 400, "suffix"),
        ("/api/pull", {"model": "x"}, 501, "edgespec pull"),
        ("/api/embed", {"model": "x", "input": "y"}, 501, "embedding model"),
        ("/api/nothing", {}, 404, "openapi.json"),
    ],
)
def test_errors_have_the_shape_of_who_asks(
    http: httpx.Client, path: str, body: dict[str, Any], status: int, error: Any
) -> None:
    reply = http.post(path, json=body)
    assert reply.status_code == status
    told = reply.json()
    if isinstance(error, str):
        assert set(told) == {"error"}
        assert error in told["error"]
    else:
        assert (set(told), told["type"]) == ({"type", "error"}, "error")
        assert told["error"] == {**error, "message": told["error"]["message"]}


def test_anthropics_key_is_taken(toy_ring: NodeRing) -> None:
    who = toy_ring.keys.add("keyed for Anthropic", CLIENT)
    with (
        api(toy_ring.address, who, accepts="right".__eq__, timing=toy_ring.timing) as base,
        httpx.Client(base_url=base) as http,
    ):
        body = {"messages": ASKED, **SETTINGS, "max_tokens": 2}
        assert http.post("/v1/messages", json=body, headers={"x-api-key": "right"}).is_success
        refused = http.post("/v1/messages", json=body, headers={"x-api-key": "wrong"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (
            401,
            "authentication_error",
        )


def test_ollamas_manual_asks_by_curl_without_a_type(http: httpx.Client) -> None:
    """As a form of another site's page would, which says where it comes from."""
    form = {"content-type": "application/x-www-form-urlencoded"}
    body = json.dumps({"prompt": "hello", "options": {"num_predict": 2}})
    assert lines_of(http.post("/api/generate", content=body, headers=form).text)
    page = {**form, "origin": "http://evil.example"}
    assert http.post("/api/generate", content=body, headers=page).status_code == 403


def test_ollamas_clients_find_the_model(http: httpx.Client) -> None:
    """By the name that they give it, with a tag; loading and giving it up is no work."""
    (listed,) = http.get("/api/tags").json()["models"]
    assert {"name", "model", "modified_at", "size", "digest", "details"} == set(listed)
    (running,) = http.get("/api/ps").json()["models"]
    assert running["context_length"] == 400
    assert {**running, **listed} == running
    shown = http.post("/api/show", json={"model": "toy:latest"}).json()
    assert shown["capabilities"] == ["completion", "tools"]
    assert shown["model_info"]["edgespec.context_length"] == 400
    assert http.get("/api/version").json()["version"]
    loaded = convert(http.post("/api/generate", json={"model": "toy:latest"}).json(), Line)
    assert (loaded.done, loaded.done_reason, loaded.response) == (True, "load", "")
    body = {"model": "toy", "messages": [], "keep_alive": 0}
    given_up = convert(http.post("/api/chat", json=body).json(), Line)
    assert given_up.done_reason == "unload"


# --- thoughts, texts and calls, without a ring ----------------------------------------------------

TOOL = {"name": "now", "description": "", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>'
SAID = f"<think>\nIt is noon?\nLook.\n</think>\n\nI look. {CALL}"
END = Finished(
    *(0, SAID, tuple(range(30)), "stop", "flowspec", "none", 2, 7, 30, 3.0, 1.0, 9.0),
    *((), 9, 3, 0, 0.0),
)


def form_of(kind: str) -> Format:
    """A form of answers to one question with a tool, of a model that thinks."""
    tools = [{"type": "function", "function": TOOL}]
    chat = checked(ChatRequest, {"messages": ASKED, "tools": tools})
    served = Served(HERMES, "think", "m", 1)
    if kind == "openai":
        return ChatFormat(chat, served)
    if kind == "anthropic":
        return MessagesFormat(chat, served)
    if kind == "ollama":
        return OllamaFormat(True, chat, served)
    return ResponsesFormat(checked(ResponsesRequest, {"input": "hello"}), chat, served)


def streamed(kind: str, step: int, end: Finished) -> bytes:
    """The stream of an answer that comes so many characters at a time."""
    form = form_of(kind)
    pieces = [end.text[at : at + step] for at in range(0, len(end.text), step)]
    tokens = [Tokens(0, (n,), text, "", 7, end.thinks) for n, text in enumerate(pieces)]
    told = [form.framed(form.opening(tokens[0].prompt_tokens))]
    told += [form.framed(form.pieces(0, one)) for one in tokens]
    told += [form.framed(form.endings(0, end)), form.framed(form.closing([end])), form.done]
    return b"".join(told)


Parts = tuple[str, str, list[tuple[str, dict[str, Any]]]]
"""What a client has of an answer: the thought, the text, and the calls."""

PARTS: Parts = ("It is noon?\nLook.", "I look.", [("now", {"zone": "UTC"})])


def parts_of(kind: str, whole: Any) -> Parts:
    """Of a whole answer, read by the form's types."""
    if kind == "openai":
        (choice,) = whole["choices"]
        assert choice["finish_reason"] == "tool_calls"
        message = choice["message"]
        assert message["reasoning"] == message["reasoning_content"]
        calls = [one["function"] for one in message["tool_calls"]]
        made = [(one["name"], json.loads(one["arguments"])) for one in calls]
        return message["reasoning_content"], message["content"], made
    if kind == "responses":
        thought, text, *made = whole["output"]
        assert [one["status"] for one in whole["output"]] == ["completed"] * 3
        said = [one["content"][0]["text"] for one in (thought, text)]
        return said[0], said[1], [(one["name"], json.loads(one["arguments"])) for one in made]
    if kind == "anthropic":
        blocks = convert(whole, Message)
        assert blocks.stop_reason == "tool_use"
        return blocks_of(blocks.content)
    line = convert(whole, Line)
    line.check_end()
    assert line.message
    calls = [one.function for one in line.message.tool_calls or ()]
    made = [(one.name, one.arguments) for one in calls]
    return line.message.thinking or "", line.message.content, made


def blocks_of(blocks: list[Block]) -> Parts:
    thought, text, *calls = blocks
    assert isinstance(thought, ThinkingBlock)
    assert isinstance(text, TextBlock)
    made = [(one.name, one.input) for one in calls if isinstance(one, ToolUseBlock)]
    return thought.thinking, text.text, made


def gathered(kind: str, told: str) -> Parts:
    """Of a stream."""
    if kind == "anthropic":
        blocks, last = message_of(events_of(told))
        assert last.delta.stop_reason == "tool_use"
        return blocks_of(blocks)
    if kind == "ollama":
        messages = [one.message for one in lines_of(told) if one.message]
        calls = [one.function for message in messages for one in message.tool_calls or ()]
        thought = "".join(one.thinking or "" for one in messages)
        made = [(one.name, one.arguments) for one in calls]
        return thought, "".join(one.content for one in messages), made
    parts = [json.loads(p.partition("data: ")[2]) for p in told.split("\n\n") if "{" in p]
    if kind == "responses":
        assert [one["sequence_number"] for one in parts] == list(range(len(parts)))
        assert [one["type"] for one in parts[:2]] == ["response.created", "response.in_progress"]
        return parts_of(kind, parts[-1]["response"])
    deltas = [one["choices"][0]["delta"] for one in parts]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    name = "".join(one["function"].get("name", "") for one in calls)
    arguments = "".join(one["function"]["arguments"] for one in calls)
    said = ["".join(d.get(of, "") for d in deltas) for of in ("reasoning_content", "content")]
    return said[0], said[1], [(name, json.loads(arguments))]


KINDS = ("openai", "responses", "anthropic", "ollama")
OF_ITEM = {"item_id", "output_index"}
OF_EVENTS = {
    "response.created": {"response"},
    "response.in_progress": {"response"},
    "response.output_item.added": {"item", "output_index"},
    "response.content_part.added": {*OF_ITEM, "content_index", "part"},
    "response.reasoning_text.delta": {*OF_ITEM, "content_index", "delta"},
    "response.reasoning_text.done": {*OF_ITEM, "content_index", "text"},
    "response.output_text.delta": {*OF_ITEM, "content_index", "delta", "logprobs"},
    "response.output_text.done": {*OF_ITEM, "content_index", "logprobs", "text"},
    "response.content_part.done": {*OF_ITEM, "content_index", "part"},
    "response.function_call_arguments.delta": {*OF_ITEM, "delta"},
    "response.function_call_arguments.done": {*OF_ITEM, "arguments"},
    "response.output_item.done": {"item", "output_index"},
    "response.completed": {"response"},
}
"""Fields of openai's events of an answer that thinks, says and calls, beside type and number."""
OF_ITEMS = {
    "reasoning": {"id", "type", "summary", "content", "status"},
    "message": {"id", "type", "role", "content", "status"},
    "function_call": {"id", "type", "call_id", "name", "arguments", "status"},
}
OF_DELTAS = {"role", "content", "reasoning", "reasoning_content", "tool_calls"}


def test_openais_events_have_the_fields_of_its_types() -> None:
    told = streamed("responses", 3, END).decode()
    seen = [json.loads(part.partition("data: ")[2]) for part in told.split("\n\n") if "{" in part]
    assert {one["type"] for one in seen} == {*OF_EVENTS}
    for one in seen:
        assert {*one} == {"type", "sequence_number"} | OF_EVENTS[one["type"]], one
    items = [one["item"] for one in seen if one["type"] == "response.output_item.done"]
    assert [{*one} for one in items] == list(OF_ITEMS.values())
    assert items == seen[-1]["response"]["output"]
    chunks = streamed("openai", 3, END).decode().split("\n\n")
    for one in (json.loads(part.partition("data: ")[2]) for part in chunks if "{" in part):
        assert {*one} == {"id", "object", "created", "model", "choices", "system_fingerprint"}
        (choice,) = one["choices"]
        assert {*choice} == {"index", "delta", "logprobs", "finish_reason"}
        assert {*choice["delta"]} <= OF_DELTAS


@pytest.mark.parametrize("kind", KINDS)
def test_thoughts_texts_and_calls_come_apart(kind: str) -> None:
    assert parts_of(kind, json.loads(encoded(form_of(kind).whole([END], [[]])))) == PARTS
    for step in (1, 3, 7, len(SAID)):
        assert gathered(kind, streamed(kind, step, END).decode()) == PARTS


@pytest.mark.parametrize("kind", KINDS)
def test_a_thought_that_the_prompt_began_goes_on(kind: str) -> None:
    end = replace(END, text=SAID.removeprefix("<think>\n"), thinks=True)
    assert parts_of(kind, json.loads(encoded(form_of(kind).whole([end], [[]])))) == PARTS
    for step in (1, 5):
        assert gathered(kind, streamed(kind, step, end).decode()) == PARTS


@pytest.mark.parametrize(
    ("text", "thinks", "thought", "rest"),
    [
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        (" \n<think>a <b>\n</thin\n</think>b", False, "a <b>\n</thin", "b"),
        ("a\n</think>\nb</think>", True, "a", "b</think>"),
        ("\n Yes. <think>", False, "", "\n Yes. <think>"),
        ("<think>never ends", False, "never ends", ""),
        ("<thin", False, "", "<thin"),
        ("", True, "", ""),
    ],
)
def test_a_thought_is_read_with_a_cut_at_any_place(
    text: str, thinks: bool, thought: str, rest: str
) -> None:
    for at in range(len(text) + 1):
        reader = ThoughtReader("thinking", "think")
        pieces = [*reader.push(text[:at], thinks=thinks), *reader.push(text[at:], thinks=thinks)]
        pieces += reader.flush()
        said = [
            "".join(one for one, is_thought in pieces if is_thought is of) for of in (True, False)
        ]
        assert said == [thought, rest], text[:at]
    assert ThoughtReader().push(text) == ([(text, False)] if text else [])


@pytest.mark.parametrize("given", ['{"a": NaN}', '{"a": 1e999}', '{"a": ', '{"a":' * 5000])
def test_a_call_whose_arguments_are_no_json_has_none(given: str) -> None:
    """Where they are told as an object; a text is what the model wrote."""
    end = replace(END, text=CALL.replace('{"zone": "UTC"}', given))
    blocks = convert(json.loads(encoded(form_of("anthropic").whole([end], [[]]))), Message)
    assert [one.input for one in blocks.content if isinstance(one, ToolUseBlock)] == [{}]
    line = convert(json.loads(encoded(form_of("ollama").whole([end], [[]]))), Line)
    assert line.message
    assert [one.function.arguments for one in line.message.tool_calls or ()] == [{}]


def test_a_held_answer_has_no_thought() -> None:
    """Its grammar has no room for one, whatever the prompt left open."""
    body = {"messages": ASKED, "response_format": {"type": "json_object"}}
    form = ChatFormat(checked(ChatRequest, body), Served(HERMES, "think", "m", 1))
    end = replace(END, text="{}", thinks=True)
    (choice,) = json.loads(encoded(form.whole([end], [[]])))["choices"]
    assert choice["message"] == {"role": "assistant", "content": "{}", "refusal": None}


# --- one question in all forms --------------------------------------------------------------------


def asked_as(kind: type[Any], body: dict[str, Any]) -> Submit:
    """What the ring is asked, for a body of that kind."""
    asked = checked(kind, body)
    chat = asked if kind is ChatRequest else checked(ChatRequest, asked.as_chat())
    (submit,) = submits_of(chat, 1000)
    return submit


def test_one_question_asks_the_ring_for_the_same_in_all_forms() -> None:
    """With a system message, a call and its result, thoughts, and settings."""
    arguments = '{"zone": "UTC"}'
    settings = {"temperature": 0.5, "top_p": 0.9, "seed": 3}
    made = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": arguments}}
    chat = {
        **{"messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "When is it?"},
            {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [made]},
            {"role": "tool", "tool_call_id": "c1", "content": "noon"},
        ]},
        **{"tools": [{"type": "function", "function": TOOL}], "max_tokens": 9, **settings},
        **{"top_k": 4, "stop": ["!"], "reasoning_effort": "low"},
    }  # fmt: skip
    responses = {
        "instructions": "Be brief.",
        "input": [
            {"type": "message", "role": "user", "content": "When is it?"},
            {"type": "reasoning", "summary": [], "content": [
                {"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c1", "name": "now", "arguments": arguments},
            {"type": "web_search_call", "status": "completed"},
            {"type": "function_call_output", "call_id": "c1", "output": [
                {"type": "input_text", "text": "noon"}]},
        ],
        **{"tools": [{"type": "function", **TOOL}, {"type": "web_search"}], **settings},
        **{"max_output_tokens": 9, "reasoning": {"effort": "low", "summary": "auto"}},
    }  # fmt: skip
    use = {"type": "tool_use", "id": "c1", "name": "now", "input": {"zone": "UTC"}}
    result = {
        "type": "tool_result",
        "tool_use_id": "c1",
        "content": [{"type": "text", "text": "noon"}],
    }
    anthropic = {
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "When is it?"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""}, use]},
            {"role": "user", "content": [result]},
        ],
        "tools": [
            {"name": "now", "description": "", "input_schema": {"type": "object"}},
            {"type": "web_search_20250305", "name": "web_search"},
        ],
        **{"max_tokens": 9, **settings, "top_k": 4, "stop_sequences": ["!"]},
        **{"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}},
    }  # fmt: skip
    ollama = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "When is it?"},
            {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [
                {"id": "c1", "function": {"name": "now", "arguments": {"zone": "UTC"}}}]},
            {"role": "tool", "tool_name": "now", "tool_call_id": "c1", "content": "noon"},
        ],
        "tools": [{"type": "function", "function": TOOL}],
        "options": {**settings, "num_predict": 9, "top_k": 4, "stop": ["!"], "num_ctx": 4096},
        "think": "low",
    }  # fmt: skip
    right = asked_as(ChatRequest, chat)
    assert asked_as(MessagesRequest, anthropic) == right
    assert asked_as(OllamaChatRequest, ollama) == right
    without = {name: value for name, value in chat.items() if name not in ("top_k", "stop")}
    assert asked_as(ResponsesRequest, responses) == asked_as(ChatRequest, without)


@pytest.mark.parametrize(
    ("body", "format"),
    [
        ({"format": "json"}, {"type": "json_object"}),
        (
            {"format": {"type": "integer"}},
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}},
        ),
    ],
)
def test_ollamas_format_holds_the_answer(body: dict[str, Any], format: dict[str, Any]) -> None:
    asked = {**body, "prompt": "hello", "options": {"seed": 1}}
    chat = {"messages": ASKED, "response_format": format, "seed": 1}
    assert asked_as(OllamaTextRequest, asked) == asked_as(ChatRequest, chat)


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto"),
        ({"type": "tool", "name": "now"}, {"type": "function", "function": {"name": "now"}}),
    ],
)
def test_anthropics_choice_of_a_tool_is_that_of_a_chat(given: Any, choice: Any) -> None:
    tool = {"name": "now", "description": "", "input_schema": {"type": "object"}}
    body = {"messages": ASKED, "tools": [tool], "tool_choice": given, "seed": 1}
    chat = {"messages": ASKED, "tools": [{"function": TOOL}], "tool_choice": choice, "seed": 1}
    chat["parallel_tool_calls"] = "disable_parallel_tool_use" not in given
    assert asked_as(MessagesRequest, body) == asked_as(ChatRequest, chat)
