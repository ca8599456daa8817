"""Messages: Anthropic's form, /v1/messages, asked and told of a chat."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from edgespec.serving.as_chats import passed, text_of
from edgespec.serving.formats import AnswerBlock, BlockFormat, Object, Reply, Served
from edgespec.serving.reply_bodies import Count
from edgespec.serving.request_bodies import MOST_STOPS, AskedRequest, ChatRequest, Stop, TokenLimit
from edgespec.serving.request_parts import Unread, as_text, only
from edgespec.wire.client_messages import Finished

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessagesRequest(AskedRequest, kw_only=True):
    messages: Annotated[
        list[dict[str, Any]],
        Meta(min_length=1, description="Texts, and tool_use, tool_result and thinking blocks."),
    ]
    system: Annotated[
        str | list[dict[str, Any]] | None, Meta(description="The system message.")
    ] = None
    max_tokens: TokenLimit = None
    stop_sequences: Annotated[
        Annotated[list[Stop], Meta(max_length=MOST_STOPS)] | None,
        Meta(description="End before these texts."),
    ] = None
    top_k: Annotated[int | None, Meta(description="As in chats.")] = None
    tools: Annotated[
        list[dict[str, Any]] | None, Meta(description="Of the client's own, with `input_schema`.")
    ] = None
    tool_choice: Annotated[
        dict[str, Any] | None, Meta(description="`type`: auto, any, none, or tool with a `name`.")
    ] = None
    thinking: Annotated[
        dict[str, Any] | None, Meta(description="`type`: enabled, adaptive or disabled.")
    ] = None
    output_config: Annotated[
        dict[str, Any] | None, Meta(description="`effort`, and `format` of the answer.")
    ] = None
    mcp_servers: Annotated[Any, only("the client runs its tools", [])] = None
    cache_control: Unread = None
    container: Unread = None
    context_management: Unread = None
    inference_geo: Unread = None
    service_tier: Unread = None

    def as_chat(self, ignored: list[str] | None = None) -> Object:
        """The body of the chat that asks for the same; what is left out is added to `ignored`."""
        body, left_out = passed(self), [] if ignored is None else ignored
        body["messages"] = [one for told in self.messages for one in _messages(told, left_out)]
        if self.system is not None:
            body["messages"].insert(0, {"role": "system", "content": _system(self.system)})
        body["stop"] = self.stop_sequences
        body["tools"] = [_tool(one) for one in self.tools or ()]
        choice, thinking = self.tool_choice or {}, self.thinking or {}
        kind = choice.get("type")
        if kind == "tool":
            body["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
        else:
            body["tool_choice"] = _CHOICES.get(kind, kind) if isinstance(kind, str) else kind
        body["parallel_tool_calls"] = choice.get("disable_parallel_tool_use") is not True
        if "type" in thinking:
            body["enable_thinking"] = thinking["type"] != "disabled"
            body["thinking_budget"] = thinking.get("budget_tokens")
        config = self.output_config or {}
        body["reasoning_effort"] = config.get("effort")
        if isinstance(held := config.get("format"), dict):
            schema = {"name": "answer", "schema": held.get("schema")}
            body["response_format"] = {"type": held.get("type"), "json_schema": schema}
        return body


def _system(told: str | list[Object]) -> str:
    return told if isinstance(told, str) else "\n\n".join(text_of([one]) for one in told)


def _tool(told: Object) -> Object:
    named = {name: told.get(name) for name in ("name", "description", "strict")}
    return {"type": "function", "function": {**named, "parameters": told.get("input_schema")}}


def _messages(told: Object, ignored: list[str]) -> Iterator[Object]:
    """One message of theirs: what came of calls is a message each here; blocks that tell the model
    nothing are ignored."""
    role, content = told.get("role"), told.get("content")
    if not isinstance(content, list):
        yield {"role": role, "content": content}
        return
    parts: list[Any] = []
    calls: list[Object] = []
    thought = ""
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result":
            of, came = block.get("tool_use_id"), block.get("content") or ""
            said = [_part(one) for one in came] if isinstance(came, list) else came
            yield {"role": "tool", "tool_call_id": of, "content": said}
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": as_text(block.get("input") or {})}
            calls.append({"id": block.get("id"), "function": function})
        elif kind == "thinking":
            thought += str(block.get("thinking") or "")
        elif kind in _OF_SERVERS:
            ignored.append(f"messages[].content[{kind}]")
        else:
            parts.append(_part(block))
    if role == "assistant":
        more = {"tool_calls": calls} if calls else {}
        yield {"role": role, "content": parts, "reasoning_content": thought or None, **more}
    elif parts or not content:
        yield {"role": role, "content": parts}


_OF_SERVERS = ("redacted_thinking", "server_tool_use", "web_search_tool_result")


def _part(block: Any) -> Any:
    """A block as a part of a chat's message; a document is its text, if that is what it has."""
    if not isinstance(block, dict):
        return block
    source = block.get("source")
    if (
        block.get("type") == "document"
        and isinstance(source, dict)
        and source.get("type") == "text"
    ):
        return {"type": "text", "text": source.get("data")}
    return {"type": block.get("type"), "text": block.get("text")}


# --- replies ------------------------------------------------------------------------------------


class MessageUsage(Struct):
    input_tokens: Count
    output_tokens: Count
    cache_read_input_tokens: Count = 0
    cache_creation_input_tokens: Count = 0


class MessageReply(Struct, tag_field="type", tag="message"):
    """A whole answer."""

    id: str
    model: str
    content: list[dict[str, Any]]
    stop_reason: Annotated[
        str | None,
        Meta(
            extra_json_schema={
                "enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use", None]
            }
        ),
    ]
    stop_sequence: str | None
    usage: MessageUsage
    role: Literal["assistant"] = "assistant"


class MessageEvent(Struct):
    """A piece of it; what else it has depends on its type."""

    type: str


class MessageProblem(Struct, tag_field="type", tag="error"):
    """Why there is none; `error` has a type and a message."""

    error: dict[str, str]


class CountReply(Struct):
    input_tokens: Count


class MessagesFormat(BlockFormat):
    """message, and its events."""

    done = b""

    def __init__(self, request: ChatRequest, served: Served) -> None:
        super().__init__(request, served)
        self._id = f"msg_{secrets.token_hex(12)}"

    def reply(self, end: Finished) -> MessageReply:
        reason = "stop_sequence" if end.stop else "end_turn"
        reason = "tool_use" if self.readers[0].calls and reason == "end_turn" else reason
        reason = "max_tokens" if end.finish_reason == "length" else reason
        content = [_block(one) for one in self.blocks]
        usage = _usage(end)
        return MessageReply(self._id, self.served.model, content, reason, end.stop or None, usage)

    def opening(self, prompt_tokens: int) -> list[Reply]:
        usage = MessageUsage(prompt_tokens, 0)
        begun = MessageReply(self._id, self.served.model, [], None, None, usage)
        return [{"type": "message_start", "message": begun}, {"type": "ping"}]

    def begun(self, block: AnswerBlock) -> list[Reply]:
        return [self._event("content_block_start", content_block=_block(block))]

    def added(self, block: AnswerBlock, text: str) -> list[Reply]:
        kind, name = _DELTAS[block.kind]
        return [self._event("content_block_delta", delta={"type": kind, name: text})]

    def ended(self, block: AnswerBlock) -> list[Reply]:
        stop = self._event("content_block_stop")
        if block.kind != "thinking":
            return [stop]
        delta = {"type": "signature_delta", "signature": ""}
        return [self._event("content_block_delta", delta=delta), stop]

    def closing(self, ends: Sequence[Finished]) -> list[Reply]:
        told = self.reply(ends[0])
        delta = {"stop_reason": told.stop_reason, "stop_sequence": told.stop_sequence}
        last = {"type": "message_delta", "delta": delta, "usage": told.usage}
        return [last, {"type": "message_stop"}]

    def _event(self, kind: str, **more: Any) -> Object:
        return {"type": kind, "index": len(self.blocks) - 1, **more}


_DELTAS: Mapping[str, tuple[str, str]] = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


def _block(block: AnswerBlock) -> Object:
    if block.kind == "thinking":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    called = {"id": block.call_id, "name": block.name, "input": block.arguments}
    return {"type": "tool_use", **called}


def _usage(end: Finished) -> MessageUsage:
    """Theirs leave what was read from a cache out of the tokens that were read."""
    read = end.prompt_tokens - end.cached_tokens
    return MessageUsage(read, end.new_tokens, end.cached_tokens)
