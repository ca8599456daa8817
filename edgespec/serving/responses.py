"""Responses: the text and tool form of /v1/responses, asked and told of a chat."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from edgespec.serving.formats import Format, Object, Reply
from edgespec.serving.reply_bodies import Count
from edgespec.serving.request_bodies import AskedRequest, ChatRequest, TokenLimit, Unread, only
from edgespec.serving.tools import Said
from edgespec.types.tool_forms import ToolForm
from edgespec.wire.client_messages import Finished

_TEXTS = ("input_text", "output_text", "text")
_PASSED = ("model", "temperature", "top_p", "seed", "parallel_tool_calls", "policy", "wait")


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
    truncation: Annotated[Any, only("no input is left out", "disabled")] = None
    store: Unread = None
    include: Unread = None
    reasoning: Unread = None
    service_tier: Unread = None
    safety_identifier: Unread = None
    prompt_cache_key: Unread = None

    def as_chat(self) -> dict[str, Any]:
        """The body of the chat that asks for the same."""
        items = self.input
        if isinstance(items, str):
            items = [{"role": "user", "content": items}]
        messages = [_message(item) for item in items]
        if self.instructions is not None:
            messages = [{"role": "system", "content": self.instructions}, *messages]
        body: dict[str, Any] = {name: getattr(self, name) for name in _PASSED}
        body |= {"messages": messages, "max_completion_tokens": self.max_output_tokens}
        body |= {"stream": self.stream, "response_format": _format((self.text or {}).get("format"))}
        body["tools"] = [_nested(tool, "function") for tool in self.tools or ()]
        choice = self.tool_choice
        body["tool_choice"] = _nested(choice, "function") if isinstance(choice, dict) else choice
        return {name: value for name, value in body.items() if value is not None}


def _message(item: Mapping[str, Any]) -> Object:
    """An item of the input as a chat's message."""
    kind = item.get("type", "message")
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        of = item.get("call_id")
        return {"role": "tool", "tool_call_id": of, "content": item.get("output")}
    more = {k: v for k, v in item.items() if k not in ("type", "id", "status", "phase")}
    content = more.get("content")
    if isinstance(content, list):
        more["content"] = [_part(part) for part in content]
    return more


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
    temperature: float
    top_p: float
    error: None = None
    instructions: None = None
    metadata: dict[str, str] = {}


class ResponseEvent(Struct):
    """A piece of it; what else it has depends on its type."""

    type: str
    sequence_number: Count


class ResponsesFormat(Format):
    """response, and its events."""

    prefix = "resp"

    def __init__(
        self,
        request: ChatRequest,
        asked: ResponsesRequest,
        form: ToolForm,
        model: str,
        created: int,
    ) -> None:
        super().__init__(request, form, model, created)
        self._chat, self._asked = request, asked
        self._reader = self._readers[0] if self._readers else None
        self._items: list[Object] = []
        self._told = 0

    def whole(self, ends: Sequence[Finished], log_probs: Sequence[list[Object]]) -> Reply:
        self._take(self._said(ends[0].text, ends=True))
        self._close()
        return self._reply(ends[0])

    def opening(self) -> list[Reply]:
        begun = self._reply(None)
        return [self._event("response.created", response=begun)]

    def pieces(self, index: int, text: str, log_probs: list[Object]) -> list[Reply]:
        return self._take(self._said(text))

    def endings(self, index: int, finished: Finished) -> list[Reply]:
        return [*self._take(self._said("", ends=True)), *self._close()]

    def closing(self, ends: Sequence[Finished]) -> list[Reply]:
        reply = self._reply(ends[0])
        return [self._event(f"response.{reply.status}", response=reply)]

    def _said(self, text: str, *, ends: bool = False) -> list[Said]:
        if self._reader is None:
            return [Said(text)] if text else []
        return [*self._reader.push(text), *(self._reader.flush() if ends else ())]

    def _take(self, said: Sequence[Said]) -> list[Reply]:
        """Add to the items; the events of that."""
        found: list[Reply] = []
        for one in said:
            if one.call < 0 and one.text:
                if not self._is_open("message"):
                    found += [*self._close(), *self._begin_message()]
                self._items[-1]["content"][0]["text"] += one.text
                found.append(self._of_item("response.output_text.delta", 0, delta=one.text))
            if one.name:
                found += [*self._close(), *self._begin_call(one)]
            if one.call >= 0 and one.text:
                self._items[-1]["arguments"] += one.text
                kind = "response.function_call_arguments.delta"
                found.append(self._of_item(kind, delta=one.text))
        return found

    def _is_open(self, kind: str) -> bool:
        last = self._items[-1] if self._items else {}
        return last.get("type") == kind and last["status"] == "in_progress"

    def _begin_message(self) -> list[Reply]:
        part: Object = {"type": "output_text", "text": "", "annotations": []}
        item = {"type": "message", "id": f"msg_{secrets.token_hex(12)}", "role": "assistant"}
        self._items.append({**item, "status": "in_progress", "content": [part]})
        added = self._event(
            "response.output_item.added",
            output_index=len(self._items) - 1,
            item={**self._items[-1], "content": []},
        )
        return [added, self._of_item("response.content_part.added", 0, part={**part})]

    def _begin_call(self, said: Said) -> list[Reply]:
        item = {"type": "function_call", "id": f"fc_{secrets.token_hex(12)}", "call_id": said.id}
        self._items.append({**item, "name": said.name, "arguments": "", "status": "in_progress"})
        at = len(self._items) - 1
        return [
            self._event("response.output_item.added", output_index=at, item={**self._items[-1]})
        ]

    def _close(self) -> list[Reply]:
        """The last item is complete."""
        found: list[Reply] = []
        if self._is_open("message"):
            part = self._items[-1]["content"][0]
            found.append(self._of_item("response.output_text.done", 0, text=part["text"]))
            found.append(self._of_item("response.content_part.done", 0, part={**part}))
        elif self._is_open("function_call"):
            arguments = self._items[-1]["arguments"]
            kind = "response.function_call_arguments.done"
            name = self._items[-1]["name"]
            found.append(self._of_item(kind, arguments=arguments, name=name))
        else:
            return []
        self._items[-1]["status"] = "completed"
        at, item = len(self._items) - 1, {**self._items[-1]}
        return [*found, self._event("response.output_item.done", output_index=at, item=item)]

    def _of_item(self, kind: str, content: int | None = None, **more: Any) -> Reply:
        if content is not None:
            more["content_index"] = content
        if kind.startswith("response.output_text"):
            more["logprobs"] = []
        at, item = len(self._items) - 1, self._items[-1]["id"]
        return self._event(kind, item_id=item, output_index=at, **more)

    def _event(self, kind: str, **more: Any) -> Reply:
        self._told += 1
        return {"type": kind, "sequence_number": self._told - 1, **more}

    def _reply(self, end: Finished | None) -> ResponseReply:
        cut = end is not None and end.finish_reason == "length"
        done: Literal["completed", "incomplete"] = "incomplete" if cut else "completed"
        common, chat = self._common, self._chat
        return ResponseReply(
            id=common["id"],
            created_at=common["created"],
            model=common["model"],
            status=done if end is not None else "in_progress",
            output=[{**item} for item in self._items],
            usage=None if end is None else _usage(end),
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
            tools=self._asked.tools or [],
            tool_choice=self._asked.tool_choice or "auto",
            parallel_tool_calls=chat.parallel_tool_calls,
            temperature=chat.temperature,
            top_p=chat.top_p,
        )


def _usage(end: Finished) -> Object:
    return {
        "input_tokens": end.prompt_tokens,
        "input_tokens_details": {"cached_tokens": end.cached_tokens},
        "output_tokens": end.new_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": end.prompt_tokens + end.new_tokens,
    }
