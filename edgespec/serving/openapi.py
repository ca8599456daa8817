"""OpenAPI: the document of the API, generated from the types of its bodies."""

from __future__ import annotations

from functools import cache
from typing import Any

from msgspec import Struct
from msgspec.json import schema_components

from edgespec import __version__
from edgespec.serving.messages import (
    CountReply,
    MessageEvent,
    MessageProblem,
    MessageReply,
    MessagesRequest,
)
from edgespec.serving.ollama import NameRequest, OllamaChatRequest, OllamaTextRequest
from edgespec.serving.reply_bodies import (
    Chat,
    ChatChunk,
    ErrorReply,
    HealthReply,
    Model,
    ModelList,
    PromptReply,
    ReadyReply,
    TextCompletion,
    TokensReply,
)
from edgespec.serving.request_bodies import ChatRequest, TextRequest
from edgespec.serving.responses import ResponseEvent, ResponseReply, ResponsesRequest
from edgespec.serving.tokens import DetokenizeRequest, TokenizeRequest

Schema = dict[str, Any]
Body = type[Struct]

_TEXT: Schema = {"type": "string"}
_OBJECT: dict[str, Schema] = {"application/json": {"type": "object"}}
_OLLAMA: Schema = {"type": "object", "properties": {"error": _TEXT}, "required": ["error"]}
_PROBLEMS = {
    400: "The request cannot be served as it is; `param` names what is wrong.",
    401: "An API key is missing, or does not count.",
    403: "The request is not for this host, or comes from another site's page.",
    404: "There is no such model.",
    408: "The body did not come in time.",
    413: "The body is too long.",
    415: "The body is no JSON.",
    429: "Too many requests wait; `Retry-After` says when to try again.",
    500: "The ring could not go on with this request.",
    503: "The ring or the coordinator is not there; `Retry-After` says when to try again.",
}


@cache
def openapi() -> Schema:
    """The document, in OpenAPI 3.1."""
    name = {"name": "model", "in": "path", "required": True, "schema": _TEXT}
    model = {**_reads("One model.", Model, 404), "parameters": [name]}
    chat = _asks("Answer a conversation.", ChatRequest, Chat, ChatChunk)
    response = _asks("Answer a conversation.", ResponsesRequest, ResponseReply, ResponseEvent)
    completion = _asks("Go on with a text.", TextRequest, TextCompletion, TextCompletion)
    message = _asks(
        "Answer a conversation, as Anthropic has it.", MessagesRequest, MessageReply, MessageEvent
    )
    count = _asks("Count its tokens.", MessagesRequest, CountReply, None)
    tokens = {
        "/tokenize": _asks("A text's tokens.", TokenizeRequest, TokensReply, None),
        "/detokenize": _asks("The text of tokens.", DetokenizeRequest, PromptReply, None),
        "/apply-template": _asks("A conversation's text.", TokenizeRequest, PromptReply, None),
    }
    ollama = {
        "/api/chat": _lines("Answer a conversation, as Ollama has it.", OllamaChatRequest),
        "/api/generate": _lines("Answer a question, as Ollama has it.", OllamaTextRequest),
        "/api/show": _lines("The model, as Ollama has it.", NameRequest),
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "edgespec",
            "version": __version__,
            "description": "The part of OpenAI's, Anthropic's and Ollama's APIs that a ring of "
            "devices can serve.",
        },
        "paths": {
            "/v1/models": {"get": _reads("The model that is served.", ModelList)},
            "/v1/models/{model}": {"get": model},
            "/v1/chat/completions": {"post": chat},
            "/v1/completions": {"post": completion},
            "/v1/responses": {"post": response},
            "/v1/messages": {"post": message},
            "/v1/messages/count_tokens": {"post": count},
            **{path: {"post": asked} for path, asked in {**ollama, **tokens}.items()},
            **{
                f"/api/{name}": {"get": _gives("As Ollama has it.", _OBJECT, 503, error=_OLLAMA)}
                for name in ("tags", "ps", "version")
            },
            "/healthz": {"get": _reads("Whether the coordinator answers.", HealthReply)},
            "/readyz": {"get": _reads("Whether the ring is up.", ReadyReply)},
            "/metrics": {"get": _gives("Figures for Prometheus.", {"text/plain": _TEXT})},
        },
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        # Loopback needs none.
        "security": [{}, {"key": []}],
    }


def _reads(summary: str, reply: Body, *problems: int) -> Schema:
    return _gives(summary, {"application/json": _ref(reply)}, 503, *problems)


def _asks(summary: str, request: Body, reply: Body, piece: Body | None) -> Schema:
    replies = {"application/json": _ref(reply)}
    if piece is not None:
        replies["text/event-stream"] = {"description": f"Events with a {piece.__name__} each."}
    anthropic = request is MessagesRequest
    return _with_body(summary, request, replies, _ref(MessageProblem if anthropic else ErrorReply))


def _lines(summary: str, request: Body) -> Schema:
    """Of Ollama's, which stream unless they are told otherwise."""
    lines = {"application/x-ndjson": {"description": "Such an object a line."}}
    return _with_body(summary, request, {**_OBJECT, **lines}, _OLLAMA)


def _with_body(summary: str, request: Body, replies: dict[str, Schema], error: Schema) -> Schema:
    body = {"required": True, "content": {"application/json": {"schema": _ref(request)}}}
    return {**_gives(summary, replies, *_PROBLEMS, error=error), "requestBody": body}


def _gives(
    summary: str, replies: dict[str, Schema], *problems: int, error: Schema | None = None
) -> Schema:
    content = {kind: {"schema": schema} for kind, schema in replies.items()}
    responses: Schema = {"200": {"description": "Good.", "content": content}}
    refusal = {"application/json": {"schema": error or _ref(ErrorReply)}}
    for status in sorted({401, 403, *problems}):
        responses[str(status)] = {"description": _PROBLEMS[status], "content": refusal}
    return {"summary": summary, "responses": responses}


def _ref(body: Body) -> Schema:
    return {"$ref": f"#/components/schemas/{body.__name__}"}


def _schemas() -> dict[str, Schema]:
    requests = (
        *(ChatRequest, TextRequest, ResponsesRequest, MessagesRequest),
        *(OllamaChatRequest, OllamaTextRequest, NameRequest, TokenizeRequest, DetokenizeRequest),
    )
    replies = (
        MessageReply,
        MessageEvent,
        MessageProblem,
        CountReply,
        ResponseReply,
        ResponseEvent,
        Chat,
        ChatChunk,
        TextCompletion,
        Model,
        ModelList,
        TokensReply,
        PromptReply,
        HealthReply,
        ReadyReply,
        ErrorReply,
    )
    _, schemas = schema_components(
        [*requests, *replies], ref_template="#/components/schemas/{name}"
    )
    for request in (schemas[kind.__name__] for kind in requests):
        optional = set(request["properties"]).difference(request.get("required", ()))
        for field in (request["properties"][name] for name in optional):
            if "type" in field:  # null counts as left out
                field["type"] = [field["type"], "null"]
            elif field.get("default") is not None and "anyOf" in field:
                field["anyOf"].append({"type": "null"})
    return schemas
