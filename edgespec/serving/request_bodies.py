"""Request bodies: what the API is asked, as types that check it and make the OpenAPI document."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal

from msgspec import Meta, field
from msgspec.structs import replace

from edgespec.config import MAX_TEMPERATURE
from edgespec.decoding.admission import MOST_BIAS, MOST_PENALTY, MOST_REPETITION
from edgespec.policy.registry import POLICIES
from edgespec.serving.request_parts import (
    HALF_A_CHARACTER,
    TEXT_ONLY,
    FieldError,
    FilledText,
    FunctionTool,
    JsonFormat,
    NamedTool,
    RequestMessage,
    RequestPart,
    SchemaFormat,
    TextFormat,
    Unread,
    has_half,
    only,
    rules_of,
)
from edgespec.types.grammar_spec import json_spec, spec
from edgespec.types.record import MOST_NUMBERS
from edgespec.types.thinking import settings_for
from edgespec.types.tool_forms import Tool, ToolForm
from edgespec.verify.top_logprobs import MOST
from edgespec.wire.client_messages import (
    MOST_BIASES,
    MOST_MESSAGES,
    MOST_SETTINGS,
    MOST_TOOLS,
    Setting,
)

MOST_INT = (1 << 31) - 1
MOST_STOPS = 64
MOST_CHOICES = 128
"""Answers to one call at most, as in OpenAI's API; the ring's queue may take fewer."""
COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions; a chat may use the rest of the context."""

Stop = Annotated[str, Meta(min_length=1, max_length=1024)]
TokenLimit = Annotated[
    Annotated[int, Meta(ge=0, le=MOST_INT)] | None,
    Meta(description="Tokens of the answer at most; cut to what the context holds. 0: no answer."),
]
TopLimit = Annotated[
    Annotated[int, Meta(ge=0, le=MOST)] | None,
    Meta(description="So many of the likeliest tokens beside each token."),
]
Penalty = Annotated[float, Meta(ge=-MOST_PENALTY, le=MOST_PENALTY)]
Bias = Annotated[float, Meta(ge=-MOST_BIAS, le=MOST_BIAS)]
TokenId = Annotated[int, Meta(ge=0, le=MOST_INT)]

_NO_FUNCTIONS = "tools have taken their place"
_POLICY = Meta(
    description="Extension: what the ring sends when.",
    extra_json_schema={"enum": [*sorted(POLICIES), None]},
)


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
    ] = field(default_factory=list)
    stop_token_ids: Annotated[
        list[TokenId],
        Meta(max_length=MOST_STOPS, description="Extension: tokens that end the answer too."),
    ] = field(default_factory=list)
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
    ] = field(default_factory=dict)
    grammar: Annotated[
        FilledText | None, Meta(description="Extension: a Lark or GBNF grammar for the answer.")
    ] = None
    regex: Annotated[
        FilledText | None, Meta(description="Extension: a regular expression for the answer.")
    ] = None
    prompt_logprobs: Annotated[
        TopLimit, Meta(description="Extension: of the prompt's tokens, with so many rivals each.")
    ] = None
    return_token_ids: Annotated[
        bool, Meta(description="Extension: tell the tokens of prompt and answer as ids.")
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt_logprobs is not None and self.stream:
            raise FieldError("prompt_logprobs", "cannot be given with stream")
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
    def schemas(self) -> list[dict[str, Any]]:
        """All that hold the answer, or calls in it."""
        return []

    @property
    def choices(self) -> int:
        """Answers that are asked for."""
        return self.n

    @property
    def tells_prompt(self) -> bool:
        """Whether the reply has the prompt, as text or as tokens."""
        return self.return_token_ids

    @property
    def prompt_top(self) -> int:
        """How many of the likeliest tokens to tell of each place in the prompt; -1: nothing."""
        return -1 if self.prompt_logprobs is None else self.prompt_logprobs

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def counts_pieces(self) -> bool:
        """Whether each piece of a stream has the usage so far."""
        options = self.stream_options
        return self.with_usage and bool(options and options.continuous_usage_stats)


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
    ] = field(default_factory=list)
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedTool | None,
        Meta(description="Whether it must call one, or which."),
    ] = None
    parallel_tool_calls: Annotated[bool, Meta(description="It may call several at once.")] = True
    chat_template_kwargs: Annotated[
        dict[str, Setting],
        Meta(max_length=MOST_SETTINGS, description="Extension: for the model's chat template."),
    ] = field(default_factory=dict)
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
    modalities: Annotated[Any, only(TEXT_ONLY, ["text"])] = None
    audio: Annotated[Any, only(TEXT_ONLY)] = None
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
        if any(map(has_half, (*self.chat_template_kwargs, *self.chat_template_kwargs.values()))):
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
        if self._tool_grammar and super().has_format:
            words = "cannot be given beside grammar or regex"
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
        tools = self.callable_tools
        if not tools or not (self._tool_grammar or self._has_schema):
            return self.spec_without_tools
        if not self._tool_grammar:  # a call or what the format says
            tools = [replace(one, parameters={}) for one in tools]
        several = self.parallel_tool_calls and not isinstance(self.tool_choice, NamedTool)
        schema = self._schema if self._has_schema else None
        return form.grammar(tools, must=self._must_call, several=several, answer=schema)

    @property
    def spec_without_tools(self) -> str:
        return json_spec(self._schema) if self._has_schema else super().spec_without_tools

    @property
    def _schema(self) -> dict[str, Any]:
        """Of the answer, if it has one."""
        asked = self.response_format
        return asked.held if isinstance(asked, JsonFormat | SchemaFormat) else {}

    @property
    def schemas(self) -> list[dict[str, Any]]:
        held = self.callable_tools if self._tool_grammar else ()
        return [self._schema, *(tool.parameters for tool in held)]

    @property
    def limit(self) -> int | None:
        """Tokens of the answer at most; None: as many as there is room for."""
        told = self.max_completion_tokens
        return self.max_tokens if told is None else told

    @property
    def top(self) -> int:
        """How many of the likeliest tokens to tell; -1: no log-probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else -1


class TextRequest(AnswerRequest, kw_only=True):
    prompt: Annotated[
        FilledText
        | Annotated[
            list[FilledText | TokenId | Annotated[list[TokenId], Meta(min_length=1)]],
            Meta(min_length=1, max_length=MOST_NUMBERS),
        ],
        Meta(description="The text, or the tokens, to go on with; of a list, each by itself."),
    ]
    max_tokens: TokenLimit = COMPLETION_TOKENS
    logprobs: TopLimit = None
    best_of: Annotated[Any, only("no answer is thrown away", 1)] = None
    echo: Annotated[bool, Meta(description="The prompt stands before the answer.")] = False
    add_special_tokens: Annotated[
        bool, Meta(description="Extension: a text is read with what the tokenizer puts around it.")
    ] = True
    suffix: Annotated[Any, only("the model writes at the end of a text", "")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.prompt, list) and len({isinstance(one, int) for one in self.prompt}) > 1:
            raise FieldError("prompt", "has token ids beside texts or lists")
        if len(self.prompts) > MOST_CHOICES:
            raise FieldError("prompt", f"has {len(self.prompts)} prompts; at most {MOST_CHOICES}")
        if self.choices > MOST_CHOICES:
            words = f"is {self.n} for each of {len(self.prompts)} prompts; a call has at most "
            raise FieldError("n", f"{words}{MOST_CHOICES} answers")

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each a text, or tokens."""
        given = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        tokens = [one for one in given if isinstance(one, int)]
        return [tokens] if tokens else [one for one in given if not isinstance(one, int)]

    @property
    def choices(self) -> int:
        return self.n * len(self.prompts)

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def top(self) -> int:
        return -1 if self.logprobs is None else self.logprobs

    @property
    def tells_prompt(self) -> bool:
        return self.echo or super().tells_prompt

    @property
    def prompt_top(self) -> int:
        return max(super().prompt_top, self.top if self.echo else -1)


UNREAD = frozenset(
    name
    for kind in (ChatRequest, TextRequest)
    for name, rule in rules_of(kind).items()
    if rule["values"] is None
)
"""Names of parameters that are taken and change nothing."""
