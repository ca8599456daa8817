"""Reply bodies: what the API answers, as types that make its JSON and the OpenAPI document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]


class RingUsage(Struct):
    """An extension: what the ring did for the answer. `sampled`, `looped`: see Finished."""

    policy: str
    seconds: Seconds
    first_token_seconds: Seconds
    trips: Seconds
    rows_sent: Count
    rows_wasted: Count
    recoveries: Count
    sampled: str
    looped: str


class CachedTokens(Struct):
    cached_tokens: Count


class Usage(Struct):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokens | UnsetType = UNSET
    edgespec: RingUsage | UnsetType = UNSET


class AnswerChoice(Struct):
    index: Count
    logprobs: dict[str, Any] | None
    finish_reason: Annotated[
        str | None, Meta(extra_json_schema={"enum": ["stop", "length", "tool_calls", None]})
    ]


class MadeFunction(Struct):
    name: str
    arguments: str


class MadeCall(Struct, tag_field="type", tag="function"):
    id: str
    function: MadeFunction


class MadeMessage(Struct, tag_field="role", tag="assistant"):
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[MadeCall] | UnsetType = UNSET


class ChatChoice(AnswerChoice):
    message: MadeMessage
    token_ids: list[Count] | UnsetType = UNSET


class ChatChunkChoice(AnswerChoice):
    delta: dict[str, Any]
    token_ids: list[Count] | UnsetType = UNSET


class TextChoice(AnswerChoice):
    text: str
    prompt_logprobs: list[Any] | UnsetType = UNSET
    prompt_token_ids: list[Count] | UnsetType = UNSET
    token_ids: list[Count] | UnsetType = UNSET


class AnswerReply(Struct, tag_field="object", kw_only=True):
    """A whole answer or a piece of it. `created`: seconds since 1970."""

    id: str
    created: Count
    model: str
    choices: Sequence[AnswerChoice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET


class Chat(AnswerReply, tag="chat.completion"):
    choices: Sequence[ChatChoice]
    prompt_logprobs: list[Any] | UnsetType = UNSET
    prompt_token_ids: list[Count] | UnsetType = UNSET


class ChatChunk(AnswerReply, tag="chat.completion.chunk"):
    choices: Sequence[ChatChunkChoice]
    prompt_token_ids: list[Count] | UnsetType = UNSET


class TextCompletion(AnswerReply, tag="text_completion"):
    choices: Sequence[TextChoice]


class Model(Struct, tag_field="object", tag="model"):
    id: str
    created: Count
    owned_by: str
    context_length: Annotated[int, Meta(ge=0, description="Tokens of prompt and answer together.")]


class ModelList(Struct, tag_field="object", tag="list"):
    data: list[Model]


class TokensReply(Struct):
    """A text, or a conversation, as tokens."""

    tokens: list[Count]
    count: Count
    max_model_len: Count


class PromptReply(Struct):
    """The text that tokens, or a conversation, are for the model; under both names that servers
    give it."""

    prompt: str
    content: str


class HealthReply(Struct, tag_field="status", tag="ok"): ...


class ReadyReply(Struct, tag_field="status", tag="ready"):
    stages: Count


class ErrorDetail(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Struct):
    error: ErrorDetail
