"""Request bodies: what the API is asked, as types that check it and make the OpenAPI document."""

from __future__ import annotations

import json
import re
import secrets
from functools import cache
from typing import Annotated, Any, Literal, get_type_hints

from msgspec import Meta, Struct, field

from edgespec.config import MAX_TEMPERATURE
from edgespec.decoding.admission import MOST_BIAS, MOST_PENALTY, MOST_REPETITION
from edgespec.policy.registry import POLICIES
from edgespec.types.grammar_spec import json_spec, spec
from edgespec.types.thinking import settings_for
from edgespec.types.tool_forms import Tool, ToolForm
from edgespec.verify.top_logprobs import MOST
from edgespec.wire.client_messages import (
    MOST_BIASES,
    MOST_MESSAGES,
    MOST_SETTINGS,
    MOST_TOOLS,
    ChatMessage,
    Setting,
    ToolCall,
)

MOST_INT = (1 << 31) - 1
MOST_STOPS = 64
MOST_CHOICES = 128
"""Answers to one call at most, as in OpenAI's API; the ring's queue may take fewer."""
COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions; a chat may use the rest of the context."""

Stop = Annotated[str, Meta(min_length=1, max_length=1024)]
# The pattern is in the OpenAPI document too: in Python alone "$" matches before a last line break.
ToolName = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$(?!\n)")]
FilledText = Annotated[str, Meta(min_length=1)]
TokenLimit = Annotated[
    Annotated[int, Meta(ge=1, le=MOST_INT)] | None,
    Meta(description="Tokens of the answer at most; cut to what the context holds."),
]
TopLimit = Annotated[
    Annotated[int, Meta(ge=0, le=MOST)] | None,
    Meta(description="So many of the likeliest tokens beside each token."),
]
Penalty = Annotated[float, Meta(ge=-MOST_PENALTY, le=MOST_PENALTY)]
Bias = Annotated[float, Meta(ge=-MOST_BIAS, le=MOST_BIAS)]
Unread = Annotated[Any, Meta(description="Ignored.", extra={"values": None})]


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
        rules = _rules(type(self))
        for name in self.__struct_fields__:
            value, rule = getattr(self, name), rules.get(name)
            if rule is None:
                # A regex in the type would do, but msgspec 0.22 corrupts memory when it frees a
                # union of a text with a regex and a list.
                texts = value if isinstance(value, list) else [value]
                if any(map(_has_half, texts)):
                    raise FieldError(name, HALF_A_CHARACTER)
            elif rule["values"] and not any(is_same(value, one) for one in rule["values"]):
                message = f"is not supported here ({rule['reason']}); leave it out"
                raise FieldError(name, message, "unsupported_parameter")


HALF_A_CHARACTER = "is not valid Unicode text: it has half a character"
_SURROGATE = re.compile("[\ud800-\udfff]")


def _has_half(value: object) -> bool:
    return isinstance(value, str) and _SURROGATE.search(value) is not None


@cache
def _rules(part: type[RequestPart]) -> dict[str, dict[str, Any]]:
    """Of the fields that take any value, or only some: what `extra` of their type says."""
    hints = get_type_hints(part, include_extras=True)
    metas = {name: getattr(hint, "__metadata__", (Meta(),))[-1] for name, hint in hints.items()}
    return {name: meta.extra for name, meta in metas.items() if meta.extra}


def is_same(value: object, other: object) -> bool:
    """Equal, and of the same kind: true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


_NO_FUNCTIONS = "tools have taken their place"
_TEXT_ONLY = "answers are text"
_POLICY = Meta(
    description="Extension: what the ring sends when.",
    extra_json_schema={"enum": [*sorted(POLICIES), None]},
)


class TextPart(RequestPart, tag_field="type", tag="text"):
    text: str


class RefusalPart(RequestPart, tag_field="type", tag="refusal"):
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


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
    content: str | list[TextPart | RefusalPart] | None = None
    name: Unread = None
    tool_call_id: Unread = None
    reasoning_content: Annotated[
        str | None, Meta(description="What it thought; for templates that read it.")
    ] = None
    reasoning: Unread = None
    refusal: str | None = None
    audio: Annotated[Any, only(_TEXT_ONLY)] = None
    tool_calls: list[RequestCall] | None = None
    function_call: CalledFunction | None = None
    annotations: Unread = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.content is None and self.role not in ("assistant", "function"):
            raise FieldError("content", "is missing", "invalid_type")
        told = self.record()  # of fields that take anything, too
        called = (text for call in told.tool_calls for text in (call.arguments, call.id))
        if any(map(_has_half, (told.reasoning, told.tool_call_id, *called))):
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
        thought = self.reasoning_content or self.reasoning
        told = thought if isinstance(thought, str) else ""
        return ChatMessage("assistant", text, tuple(made), reasoning=told)


class StreamOptions(RequestPart):
    include_usage: bool | None = None
    continuous_usage_stats: Annotated[
        bool | None, Meta(description="Extension: each piece has the usage so far.")
    ] = None
    include_obfuscation: Unread = None


class AskedRequest(RequestPart, kw_only=True):
    """What every kind of request has."""

    model: Annotated[str, Meta(description="As /v1/models names it.")] = ""
    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE)] | None,
        Meta(description="0: the likeliest token every time."),
    ] = None
    top_p: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        Meta(description="Sample from the likeliest tokens of this share."),
    ] = None
    seed: Annotated[
        int, Meta(ge=-(1 << 63), le=(1 << 63) - 1, description="The same one: the same text.")
    ] = field(default_factory=lambda: secrets.randbits(63))
    stream: Annotated[bool, Meta(description="Send the answer as server-sent events.")] = False
    policy: Annotated[str | None, _POLICY] = None
    wait: Annotated[bool, Meta(description="Extension: wait for a ring that is not up.")] = True
    user: Unread = None
    metadata: Unread = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.policy is not None and self.policy not in POLICIES:
            choices = ", ".join(sorted(POLICIES))
            raise FieldError("policy", f"is {self.policy!a:.80}; choose one of: {choices}")


class AnswerRequest(AskedRequest, kw_only=True):
    """What chats and completions have."""

    stop: Annotated[
        Stop | Annotated[list[Stop], Meta(max_length=MOST_STOPS)],
        Meta(description="End before these texts."),
    ] = []
    stop_token_ids: Annotated[
        list[Annotated[int, Meta(ge=0, le=MOST_INT)]],
        Meta(max_length=MOST_STOPS, description="Extension: tokens that end the answer too."),
    ] = []
    min_tokens: Annotated[
        int, Meta(ge=0, le=MOST_INT, description="Extension: no end before so many tokens.")
    ] = 0
    ignore_eos: Annotated[
        bool, Meta(description="Extension: no end but by `max_tokens` or a stop string.")
    ] = False
    top_k: Annotated[
        Annotated[int, Meta(ge=0, le=MOST_INT)] | None,
        Meta(description="Sample from so many of the likeliest; 0: all."),
    ] = None
    min_p: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        Meta(description="Leave out tokens below this share of the likeliest."),
    ] = None
    repetition_penalty: Annotated[
        Annotated[float, Meta(gt=0, le=MOST_REPETITION)] | None,
        Meta(description="Extension: for tokens that the prompt or the answer has; 1: off."),
    ] = None
    stream_options: Annotated[StreamOptions | None, Meta(description="Only with `stream`.")] = None
    n: Annotated[
        int,
        Meta(ge=1, le=MOST_CHOICES, description="Answers to each prompt, the next seed for each."),
    ] = 1
    presence_penalty: Annotated[Penalty, Meta(description="For tokens that the answer has.")] = 0.0
    frequency_penalty: Annotated[Penalty, Meta(description="For each time that it has them.")] = 0.0
    logit_bias: Annotated[
        dict[str, Bias],
        Meta(max_length=MOST_BIASES, description="By token id: what its logit gets."),
    ] = {}
    grammar: Annotated[
        FilledText | None, Meta(description="Extension: a Lark grammar for the answer.")
    ] = None
    regex: Annotated[
        FilledText | None, Meta(description="Extension: a regular expression for the answer.")
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stream_options and not self.stream:
            raise FieldError("stream_options", "needs stream to be true")
        for token in self.logit_bias:
            if not (token.isascii() and token.isdecimal() and len(token) < 10):
                raise FieldError("logit_bias", f"names {token!a:.40}; the names are token ids")
        if self.grammar is not None and self.regex is not None:
            raise FieldError("regex", "cannot be given beside grammar")
        if self.ignore_eos and (self.has_format or self._tool_grammar):
            raise FieldError("ignore_eos", "cannot be given beside what the answer has to be")

    def spec(self, form: ToolForm) -> str:
        """What the answer may be (see types.grammar_spec), of a model that calls tools in that
        form; "" for anything."""
        return self.spec_without_tools

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts before which the answer ends."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def has_format(self) -> bool:
        """Whether a format says what the answer may be."""
        return self.regex is not None or self.grammar is not None

    @property
    def is_held(self) -> bool:
        """Whether it is a call or what its format says, from the first token on."""
        return self.has_format

    @property
    def _tool_grammar(self) -> bool:
        """Whether calls are held to their schemas."""
        return False

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that the model may call."""
        return []

    @property
    def spec_without_tools(self) -> str:
        """What the answer may be by its format."""
        if self.regex is not None:
            return spec("regex", self.regex)
        return "" if self.grammar is None else spec("lark", self.grammar)

    @property
    def choices(self) -> int:
        """Answers that are asked for."""
        return self.n

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def counts_pieces(self) -> bool:
        """Whether each piece of a stream has the usage so far."""
        options = self.stream_options
        return self.with_usage and bool(options and options.continuous_usage_stats)


def passed(asked: AskedRequest) -> dict[str, Any]:
    """Of a request in another form, what a chat has by the same name."""
    names = {*asked.__struct_fields__}.intersection(ChatRequest.__struct_fields__)
    found = {name: getattr(asked, name) for name in names - _OWN}
    return {name: value for name, value in found.items() if value is not None}


_OWN = {"messages", "tools", "tool_choice", "user", "metadata"}
"""Of these every form has its own kind."""


def text_of(parts: Any) -> str:
    """The text of parts, of other forms than chats', that have some."""
    if isinstance(parts, str):
        return parts
    told = parts if isinstance(parts, list | tuple) else ()
    texts = [one.get("text") for one in told if isinstance(one, dict)]
    return "".join(text for text in texts if isinstance(text, str))


class TextFormat(RequestPart, tag_field="type", tag="text"): ...


class JsonFormat(RequestPart, tag_field="type", tag="json_object"): ...


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
    name: str
    schema: Annotated[dict[str, Any], Meta(description="A JSON schema.")] = {}
    description: Unread = None
    strict: Annotated[bool | None, Meta(description="The answer is valid by it either way.")] = None


class SchemaFormat(RequestPart, tag_field="type", tag="json_schema"):
    json_schema: NamedSchema


class ChatRequest(AnswerRequest, kw_only=True):
    messages: Annotated[
        list[RequestMessage],
        Meta(
            min_length=1,
            max_length=MOST_MESSAGES,
            description="A content that is a list is one text.",
        ),
    ]
    max_completion_tokens: TokenLimit = None
    max_tokens: TokenLimit = None
    logprobs: Annotated[bool, Meta(description="Tell how likely each token was.")] = False
    top_logprobs: TopLimit = None
    response_format: Annotated[
        TextFormat | JsonFormat | SchemaFormat | None, Meta(description="What the answer is.")
    ] = None
    tools: Annotated[
        list[FunctionTool],
        Meta(max_length=MOST_TOOLS, description="Functions that the model may call."),
    ] = []
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedTool | None,
        Meta(description="Whether it must call one, or which."),
    ] = None
    parallel_tool_calls: Annotated[bool, Meta(description="It may call several at once.")] = True
    chat_template_kwargs: Annotated[
        dict[str, Setting],
        Meta(max_length=MOST_SETTINGS, description="Extension: for the model's chat template."),
    ] = {}
    enable_thinking: Annotated[
        bool | None, Meta(description="Extension: whether the model thinks before it answers.")
    ] = None
    reasoning_effort: Annotated[
        Annotated[str, Meta(max_length=32)] | None,
        Meta(description="For the chat template; none: no thinking."),
    ] = None
    thinking_budget: Annotated[
        Annotated[int, Meta(ge=0, le=MOST_INT)] | None,
        Meta(description="Extension: tokens after which a thought ends."),
    ] = None
    functions: Annotated[Any, only(_NO_FUNCTIONS, [])] = None
    function_call: Annotated[Any, only(_NO_FUNCTIONS, "none", "auto")] = None
    modalities: Annotated[Any, only(_TEXT_ONLY, ["text"])] = None
    audio: Annotated[Any, only(_TEXT_ONLY)] = None
    prediction: Annotated[Any, only("the ring guesses by itself")] = None
    verbosity: Unread = None
    web_search_options: Annotated[Any, only("the model has no way into the web")] = None
    store: Unread = None
    service_tier: Unread = None
    safety_identifier: Unread = None
    prompt_cache_key: Unread = None
    prompt_cache_retention: Unread = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError("top_logprobs", "needs logprobs to be true")
        if super().has_format and self._has_schema:
            raise FieldError("response_format", "cannot be given beside grammar or regex")
        if any(map(_has_half, (*self.chat_template_kwargs, *self.chat_template_kwargs.values()))):
            raise FieldError("chat_template_kwargs", HALF_A_CHARACTER)
        names = [tool.function.name for tool in self.tools]
        if len({*names}) < len(names):
            raise FieldError("tools", "has two of one name")
        choice = self.tool_choice
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise FieldError(
                "tool_choice", f"names {choice.function.name!a}, which is no tool here"
            )
        if choice == "required" and not names:
            raise FieldError("tool_choice", "is required, and there are no tools")
        if self._tool_grammar and self.has_format:
            words = "cannot be given beside response_format, grammar or regex"
            raise FieldError("tools", f"with a call that has to be valid {words}")

    @property
    def settings(self) -> dict[str, Any]:
        """What the chat template is told."""
        thinks, effort = self.enable_thinking, self.reasoning_effort
        if thinks is None and effort is not None:
            thinks = effort != "none"
        told: dict[str, Any] = {} if thinks is None else {**settings_for(thinks)}
        if effort not in (None, "none"):
            told["reasoning_effort"] = effort
        return {**told, **self.chat_template_kwargs}

    @property
    def callable_tools(self) -> list[Tool]:
        if self.tool_choice == "none":
            return []
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else ""
        functions = [tool.function for tool in self.tools]
        return [one.record() for one in functions if named in ("", one.name)]

    @property
    def has_format(self) -> bool:
        return super().has_format or self._has_schema

    @property
    def _has_schema(self) -> bool:
        return isinstance(self.response_format, JsonFormat | SchemaFormat)

    @property
    def _tool_grammar(self) -> bool:
        must = self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)
        strict = any(tool.function.strict for tool in self.tools)
        return bool(self.callable_tools) and (must or strict)

    @property
    def stops(self) -> tuple[str, ...]:
        """None in a call that is held: the grammar ends it, and its arguments may have any text."""
        return () if self._must_call else super().stops

    @property
    def _must_call(self) -> bool:
        return self.tool_choice not in (None, "auto") and bool(self.callable_tools)

    @property
    def is_held(self) -> bool:
        return super().is_held or self._must_call

    def spec(self, form: ToolForm) -> str:
        if not self._tool_grammar:
            return self.spec_without_tools
        must = self.tool_choice not in (None, "auto")
        several = self.parallel_tool_calls and not isinstance(self.tool_choice, NamedTool)
        return form.grammar(self.callable_tools, must=must, several=several)

    @property
    def spec_without_tools(self) -> str:
        match self.response_format:
            case JsonFormat():
                return json_spec({"type": "object"})
            case SchemaFormat(json_schema=given):
                return json_spec(given.schema)
        return super().spec_without_tools

    @property
    def limit(self) -> int:
        """Tokens of the answer at most; 0: as many as there is room for."""
        return self.max_completion_tokens or self.max_tokens or 0

    @property
    def top(self) -> int:
        """How many of the likeliest tokens to tell; -1: no log-probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else -1


class TextRequest(AnswerRequest, kw_only=True):
    prompt: Annotated[
        FilledText | Annotated[list[FilledText], Meta(min_length=1, max_length=MOST_CHOICES)],
        Meta(description="The text to go on with; of a list, each by itself."),
    ]
    max_tokens: TokenLimit = COMPLETION_TOKENS
    logprobs: TopLimit = None
    best_of: Annotated[Any, only("no answer is thrown away", 1)] = None
    echo: Annotated[Any, only("the prompt is not repeated", False)] = None
    suffix: Annotated[Any, only("the model writes at the end of a text", "")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.choices > MOST_CHOICES:
            words = f"is {self.n} for each of {len(self.prompts)} prompts; a call has at most "
            raise FieldError("n", f"{words}{MOST_CHOICES} answers")

    @property
    def prompts(self) -> list[str]:
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt

    @property
    def choices(self) -> int:
        return self.n * len(self.prompts)

    @property
    def limit(self) -> int:
        return self.max_tokens or 0

    @property
    def top(self) -> int:
        return -1 if self.logprobs is None else self.logprobs


UNREAD = frozenset(
    name
    for kind in (ChatRequest, TextRequest)
    for name, rule in _rules(kind).items()
    if rule["values"] is None
)
"""Names of parameters that are taken and change nothing."""
