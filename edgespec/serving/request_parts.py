"""Request parts: messages, tools and formats within request bodies, and how a part is checked."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Annotated, Any, Literal, get_type_hints

from msgspec import Meta, Struct

from edgespec.types.tool_forms import Tool
from edgespec.wire.client_messages import ChatMessage, ToolCall

# The pattern is in the OpenAPI document too: in Python alone "$" matches before a last line break.
ToolName = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$(?!\n)")]
FilledText = Annotated[str, Meta(min_length=1)]
Unread = Annotated[Any, Meta(description="Ignored.", extra={"values": None})]
TEXT_ONLY = "answers are text"
HALF_A_CHARACTER = "is not valid Unicode text: it has half a character"
_SURROGATE = re.compile("[\ud800-\udfff]")


def only(reason: str, *values: Any) -> Meta:
    """For a field that is not supported: it takes only `values`, which ask for nothing."""
    extra = {"reason": reason, "values": [*values, None]}
    description, schema = f"Not supported: {reason}.", {"enum": extra["values"]}
    return Meta(description=description, extra_json_schema=schema, extra=extra)


class FieldError(ValueError):
    """A field is wrong in a way that types do not show; the message continues after its name."""

    def __init__(self, name: str, message: str, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.name = name
        self.code = code


class RequestPart(Struct, kw_only=True):
    """A part of a request. For unknown keys see serving.leniency."""

    def __post_init__(self) -> None:
        rules = rules_of(type(self))
        for name in self.__struct_fields__:
            value, rule = getattr(self, name), rules.get(name)
            if rule is None:
                # A regex in the type would do, but msgspec 0.22 corrupts memory when it frees a
                # union of a text with a regex and a list.
                texts = value if isinstance(value, list) else [value]
                if any(map(has_half, texts)):
                    raise FieldError(name, HALF_A_CHARACTER)
            elif rule["values"] and not any(is_same(value, one) for one in rule["values"]):
                message = f"is not supported here ({rule['reason']}); leave it out"
                raise FieldError(name, message, "unsupported_parameter")


def has_half(value: object) -> bool:
    return isinstance(value, str) and _SURROGATE.search(value) is not None


@cache
def rules_of(part: type[RequestPart]) -> dict[str, dict[str, Any]]:
    """Of the fields that take any value, or only some: what `extra` of their type says."""
    hints = get_type_hints(part, include_extras=True)
    metas = {name: getattr(hint, "__metadata__", (Meta(),))[-1] for name, hint in hints.items()}
    return {name: meta.extra for name, meta in metas.items() if meta.extra}


def is_same(value: object, other: object) -> bool:
    """Equal, and of the same kind: true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


class TextPart(RequestPart, tag_field="type", tag="text"):
    text: str


class RefusalPart(RequestPart, tag_field="type", tag="refusal"):
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class ThinkingPart(RequestPart, tag_field="type", tag="thinking"):
    """What an assistant thought, as clients keep it that know of Anthropic's blocks."""

    thinking: str = ""

    @property
    def text(self) -> str:
        return ""


class CalledFunction(RequestPart):
    """What was called: `arguments`, or the one text that is the `input` of a custom tool."""

    name: FilledText
    arguments: str | dict[str, Any] | None = None
    input: str | None = None

    def record(self, id: object) -> ToolCall:
        """As the ring has it."""
        told = self.arguments or ({} if self.input is None else {"input": self.input})
        return ToolCall(self.name, told if isinstance(told, str) else as_text(told), str(id or ""))


def as_text(arguments: Any) -> str:
    """Arguments of a call as models write them."""
    return json.dumps(arguments, ensure_ascii=False)


class RequestCall(RequestPart):
    function: CalledFunction | None = None
    custom: CalledFunction | None = None
    id: Unread = None
    type: Unread = None
    index: Unread = None

    def record(self) -> ToolCall:
        """As the ring has it."""
        called = self.function or self.custom
        if called is None:
            raise FieldError("function", "is missing", "invalid_type")
        return called.record(self.id)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.record()


class RequestMessage(RequestPart):
    """A message of a conversation; an assistant's content may be left out, as that of a call of a
    tool is. `function` is a result in OpenAI's first form of calls, which have names and no ids."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart | RefusalPart | ThinkingPart] | None = None
    name: Unread = None
    tool_call_id: Unread = None
    reasoning_content: Annotated[
        str | None, Meta(description="What it thought; for templates that read it.")
    ] = None
    reasoning: Unread = None
    refusal: str | None = None
    audio: Annotated[Any, only(TEXT_ONLY)] = None
    tool_calls: list[RequestCall] | None = None
    function_call: CalledFunction | None = None
    annotations: Unread = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.content is None and self.role not in ("assistant", "function"):
            raise FieldError("content", "is missing", "invalid_type")
        told = self.record()  # of fields that take anything, too
        called = (text for call in told.tool_calls for text in (call.arguments, call.id))
        if any(map(has_half, (told.reasoning, told.tool_call_id, *called))):
            raise FieldError("tool_calls", HALF_A_CHARACTER)

    def record(self) -> ChatMessage:
        """As the ring has it: a content in parts is one text, and none an empty one, which
        templates can all add to a text."""
        content = self.content or self.refusal or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        if self.role in ("tool", "function"):
            of = self.tool_call_id if self.role == "tool" else self.name
            return ChatMessage("tool", text, tool_call_id=str(of or ""))
        if self.role != "assistant":
            return ChatMessage("user" if self.role == "user" else "system", text)
        made = [call.record() for call in self.tool_calls or ()]
        if self.function_call is not None:
            made.append(self.function_call.record(self.function_call.name))
        parts = () if isinstance(content, str) else content
        thoughts = "".join(part.thinking for part in parts if isinstance(part, ThinkingPart))
        thought = self.reasoning_content or self.reasoning or thoughts
        told = thought if isinstance(thought, str) else ""
        return ChatMessage("assistant", text, tuple(made), reasoning=told)


class TextFormat(RequestPart, tag_field="type", tag="text"): ...


class JsonFormat(RequestPart, tag_field="type", tag="json_object"):
    schema: Annotated[dict[str, Any] | None, Meta(description="Extension: a JSON schema.")] = None

    @property
    def held(self) -> dict[str, Any]:
        """The schema of the answer."""
        return self.schema or {"type": "object"}


class Function(RequestPart):
    name: ToolName
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, Meta(description="A JSON schema.")] = None
    strict: Annotated[
        bool | None, Meta(description="Its arguments are valid, whenever it is called.")
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            self.record()
        except ValueError as problem:
            raise FieldError("parameters", str(problem)) from None

    def record(self) -> Tool:
        """As the ring has it."""
        return Tool(self.name, self.description or "", self.parameters or {})


class FunctionTool(RequestPart):
    function: Function
    type: Annotated[Literal["function"], Meta(description="Others are left out.")] = "function"


class NamedTool(RequestPart):
    function: CalledFunction
    type: Literal["function"] = "function"


class NamedSchema(RequestPart):
    name: Unread = None
    schema: Annotated[dict[str, Any], Meta(description="A JSON schema.")] = {}
    description: Unread = None
    strict: Annotated[bool | None, Meta(description="The answer is valid by it either way.")] = None


class SchemaFormat(RequestPart, tag_field="type", tag="json_schema"):
    json_schema: NamedSchema | None = None
    schema: Annotated[
        dict[str, Any] | None, Meta(description="Extension: the same, without a name.")
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.json_schema is None and self.schema is None:
            raise FieldError("json_schema", "is missing", "invalid_type")

    @property
    def held(self) -> dict[str, Any]:
        """The schema of the answer."""
        return self.schema or {} if self.json_schema is None else self.json_schema.schema
