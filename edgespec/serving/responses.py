"""Responses: the text and tool form of /v1/responses, asked and told of a chat."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from edgespec.serving.as_chats import passed, text_of
from edgespec.serving.formats import AnswerBlock, BlockFormat, Object, Reply, Served
from edgespec.serving.problems import refused
from edgespec.serving.reply_bodies import Count
from edgespec.serving.request_bodies import AskedRequest, ChatRequest, TokenLimit
from edgespec.serving.request_parts import Unread, only
from edgespec.wire.client_messages import Finished

_TEXTS = ("input_text", "output_text", "text")


class ResponsesRequest(AskedRequest, kw_only=True):
    input: Annotated[
        str | list[dict[str, Any]],
        Meta(description="A text, or messages, function_call and function_call_output items."),
    ]
    instructions: Annotated[str | None, Meta(description="The system message.")] = None
    max_output_tokens: TokenLimit = None
    tools: Annotated[
        list[dict[str, Any]] | None, Meta(description="Functions, as OpenAI has them here.")
    ] = None
    tool_choice: Annotated[Any, Meta(description="As in chats; a function by its name.")] = None
    parallel_tool_calls: Annotated[bool | None, Meta(description="As in chats.")] = None
    text: Annotated[dict[str, Any] | None, Meta(description="`format`: of the answer.")] = None
    previous_response_id: Annotated[Any, only("nothing is stored; send all of it")] = None
    conversation: Annotated[Any, only("nothing is stored; send all of it")] = None
    background: Annotated[Any, only("an answer has a reader", False)] = None
    truncation: Annotated[Any, only("no input is left out", "disabled", "auto")] = None
    reasoning: Annotated[
        dict[str, Any] | None, Meta(description="`effort`: as `reasoning_effort` of chats.")
    ] = None
    store: Unread = None
    include: Unread = None
    client_metadata: Unread = None
    service_tier: Unread = None
    safety_identifier: Unread = None
    prompt_cache_key: Unread = None

    def as_chat(self, ignored: list[str] | None = None) -> dict[str, Any]:
        """The body of the chat that asks for the same; what is left out is added to `ignored`."""
        items = self.input
        if isinstance(items, str):
            items = [{"role": "user", "content": items}]
        messages = list(_messages(items, [] if ignored is None else ignored))
        if self.instructions is not None:
            messages = [{"role": "system", "content": self.instructions}, *messages]
        body = passed(self)
        body |= {"messages": messages, "max_completion_tokens": self.max_output_tokens}
        body |= {"response_format": _format((self.text or {}).get("format"))}
        body |= {"reasoning_effort": (self.reasoning or {}).get("effort")}
        body["tools"] = [_nested(tool, "function") for tool in self.tools or ()]
        choice = self.tool_choice
        body["tool_choice"] = _nested(choice, "function") if isinstance(choice, dict) else choice
        return body


def _messages(items: Sequence[Mapping[str, Any]], ignored: list[str]) -> Iterator[Object]:
    """Items of the input as a chat's messages; what a model thought belongs to what it said next.
    Calls of tools that others' servers run are ignored."""
    thought = ""
    for item in items:
        kind = item.get("type") or "message"
        if kind == "reasoning":
            parts = item.get("content") or item.get("summary") or ()
            thought = text_of(parts)
            continue
        message = _message(kind, item)
        if message is None:
            ignored.append(f"input[{kind}]")
        else:
            if thought and message.get("role") == "assistant":
                message["reasoning_content"] = thought
            thought = ""
            yield message


def _message(kind: object, item: Mapping[str, Any]) -> Object | None:
    id = item.get("call_id")
    if kind in ("function_call", "custom_tool_call"):
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": id, "type": "function", "function": function}
        if kind == "custom_tool_call":
            call = {"id": id, "custom": {"name": item.get("name"), "input": item.get("input")}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind in ("function_call_output", "custom_tool_call_output"):
        output = item.get("output")
        told = [_part(part) for part in output] if isinstance(output, list) else output
        return {"role": "tool", "tool_call_id": id, "content": told}
    if kind != "message":
        if _OF_SERVERS.fullmatch(str(kind)):
            return None
        words = f"input items of type {kind!a:.40} are not supported"
        raise refused(words, "input", "unsupported_parameter")
    more = {k: v for k, v in item.items() if k not in ("type", "id", "status", "phase")}
    content = more.get("content")
    if isinstance(content, list):
        more["content"] = [_part(part) for part in content]
    return more


_OF_SERVERS = re.compile(r"mcp_\w+|\w+_call(_output)?")
"""Kinds of items that tell of tools which others' servers run."""


def _part(part: Any) -> Any:
    if isinstance(part, dict) and part.get("type") in _TEXTS:
        return {"type": "text", "text": part.get("text")}
    return part


def _format(given: Any) -> Any:
    return _nested(given, "json_schema") if _is(given, "json_schema") else given


def _nested(given: Any, kind: str) -> Any:
    """What stands beside "type" here stands within a field of its own in a chat."""
    if not _is(given, kind):
        return given
    return {"type": kind, kind: {k: v for k, v in given.items() if k != "type"}}


def _is(given: Any, kind: str) -> bool:
    return isinstance(given, dict) and given.get("type") == kind


# --- replies ------------------------------------------------------------------------------------


class ResponseReply(Struct, tag_field="object", tag="response"):
    """A whole answer. `created_at`: seconds since 1970."""

    id: str
    created_at: Count
    model: str
    status: Literal["in_progress", "completed", "incomplete"]
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    tools: list[dict[str, Any]]
    tool_choice: Any
    parallel_tool_calls: bool
    temperature: float | None
    top_p: float | None
    error: None = None
    instructions: None = None
    metadata: dict[str, str] = {}


class ResponseEvent(Struct):
    """A piece of it; what else it has depends on its type."""

    type: str
    sequence_number: Count


class ResponsesFormat(BlockFormat):
    """response, and its events."""

    def __init__(self, asked: ResponsesRequest, request: ChatRequest, served: Served) -> None:
        super().__init__(request, served)
        self._chat, self._asked = request, asked
        self._id = f"resp_{secrets.token_hex(12)}"
        self._ids: list[str] = []  # of the blocks' items
        self._told = 0

    def reply(self, end: Finished) -> Reply:
        return self._reply(end)

    def opening(self, prompt_tokens: int) -> list[Reply]:
        begun = self._reply(None)
        return [
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
        ]

    def closing(self, ends: Sequence[Finished]) -> list[Reply]:
        reply = self._reply(ends[0])
        return [self._event(f"response.{reply.status}", response=reply)]

    def begun(self, block: AnswerBlock) -> list[Reply]:
        self._ids.append(f"{_IDS[block.kind]}_{secrets.token_hex(12)}")
        item = self._item(self._at)
        parts = item.get("content", ())
        shown = {**item, "content": []} if parts else item
        added = self._event("response.output_item.added", output_index=self._at, item=shown)
        opened = [self._of_item("response.content_part.added", 0, part=part) for part in parts]
        return [added, *opened]

    def added(self, block: AnswerBlock, text: str) -> list[Reply]:
        return [self._of_item(f"response.{_EVENTS[block.kind]}.delta", delta=text)]

    def ended(self, block: AnswerBlock) -> list[Reply]:
        item, kind = self._item(self._at, "completed"), f"response.{_EVENTS[block.kind]}.done"
        told: Object = {"arguments" if block.kind == "call" else "text": block.text}
        found = [self._of_item(kind, **told)]
        for part in item.get("content", ()):
            found.append(self._of_item("response.content_part.done", 0, part=part))
        done = self._event("response.output_item.done", output_index=self._at, item=item)
        return [*found, done]

    @property
    def _at(self) -> int:
        return len(self._ids) - 1

    def _item(self, at: int, status: str = "in_progress") -> Object:
        """The block of that number as an item."""
        block = self.blocks[at]
        return {"id": self._ids[at], **_item(block), "status": status}

    def _of_item(self, kind: str, content: int | None = None, **more: Any) -> Reply:
        if content is not None or "_text." in kind:
            more["content_index"] = 0
        if kind.startswith("response.output_text"):
            more["logprobs"] = []
        return self._event(kind, item_id=self._ids[-1], output_index=self._at, **more)

    def _event(self, kind: str, **more: Any) -> Reply:
        self._told += 1
        return {"type": kind, "sequence_number": self._told - 1, **more}

    def _reply(self, end: Finished | None) -> ResponseReply:
        cut = end is not None and end.finish_reason == "length"
        done: Literal["completed", "incomplete"] = "incomplete" if cut else "completed"
        return ResponseReply(
            id=self._id,
            created_at=self.served.created,
            model=self.served.model,
            status=done if end is not None else "in_progress",
            output=[self._item(at, "completed") for at in range(len(self._ids))],
            usage=None if end is None else _usage(end, self.blocks),
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
            tools=self._asked.tools or [],
            tool_choice=self._asked.tool_choice or "auto",
            parallel_tool_calls=self._chat.parallel_tool_calls,
            temperature=self._chat.temperature,
            top_p=self._chat.top_p,
        )


_IDS = {"thinking": "rs", "text": "msg", "call": "fc"}
_EVENTS = {
    "thinking": "reasoning_text",
    "text": "output_text",
    "call": "function_call_arguments",
}


def _item(block: AnswerBlock) -> Object:
    """What a block is as an item, beside its id and status."""
    if block.kind == "call":
        told = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
        return {"type": "function_call", **told}
    if block.kind == "thinking":
        part: Object = {"type": "reasoning_text", "text": block.text}
        return {"type": "reasoning", "summary": [], "content": [part]}
    part = {"type": "output_text", "text": block.text, "annotations": []}
    return {"type": "message", "role": "assistant", "content": [part]}


def _usage(end: Finished, blocks: Sequence[AnswerBlock]) -> Object:
    # Tokens are not told apart by what they say: those of a thought are estimated by its length.
    said = sum(len(one.text) for one in blocks)
    thought = sum(len(one.text) for one in blocks if one.kind == "thinking")
    return {
        "input_tokens": end.prompt_tokens,
        "input_tokens_details": {"cached_tokens": end.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": end.new_tokens,
        "output_tokens_details": {"reasoning_tokens": end.new_tokens * thought // max(said, 1)},
        "total_tokens": end.prompt_tokens + end.new_tokens,
    }
