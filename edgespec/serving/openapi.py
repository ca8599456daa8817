"""OpenAPI: the document of the API, made from the tables that requests are read with."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from edgespec import __version__
from edgespec.serving.parameters import Parameter
from edgespec.serving.requests import (
    CHAT,
    COMPLETION,
    MOST_MESSAGES,
    MOST_STOP_CHARS,
    MOST_STOPS,
    ROLES,
)

Schema = dict[str, Any]

_STRING: Schema = {"type": "string"}
_INTEGER: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number", "minimum": 0}
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
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "edgespec",
            "version": __version__,
            "description": "The part of OpenAI's API that a ring of devices can serve.",
        },
        "paths": {
            "/v1/models": {"get": _reads("The model that is served.", "ModelList")},
            "/v1/models/{model}": {"get": {**_reads("One model.", "Model", 404), **_MODEL_NAME}},
            "/v1/chat/completions": {
                "post": _asks("Answer a conversation.", "ChatRequest", "Chat", "ChatChunk")
            },
            "/v1/completions": {"post": _asks("Go on with a text.", "TextRequest", "Text", "Text")},
            "/healthz": {"get": _reads("Whether the coordinator answers.", "Health")},
            "/readyz": {"get": _reads("Whether the ring is up.", "Ready")},
            "/metrics": {"get": _plain("Figures for Prometheus.", "text/plain")},
        },
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        # Loopback needs none.
        "security": [{}, {"key": []}],
    }


_MODEL_NAME: Schema = {
    "parameters": [{"name": "model", "in": "path", "required": True, "schema": _STRING}]
}


def _reads(summary: str, schema: str, *more: int) -> Schema:
    answers = {"200": {"description": "Good.", **_json(schema)}}
    return {"summary": summary, "responses": {**answers, **_problems(401, 403, 503, *more)}}


def _plain(summary: str, kind: str) -> Schema:
    content = {kind: {"schema": _STRING}}
    answers = {"200": {"description": "Good.", "content": content}}
    return {"summary": summary, "responses": {**answers, **_problems(401, 403)}}


def _asks(summary: str, request: str, whole: str, piece: str) -> Schema:
    content = {
        **_json(whole)["content"],
        "text/event-stream": {
            "schema": {"description": f"Events with a {piece} each, then [DONE]."}
        },
    }
    return {
        "summary": summary,
        "requestBody": {"required": True, **_json(request)},
        "responses": {"200": {"description": "The answer.", "content": content}}
        | _problems(*_PROBLEMS),
    }


def _json(schema: str) -> Schema:
    return {"content": {"application/json": {"schema": _ref(schema)}}}


def _ref(schema: str) -> Schema:
    return {"$ref": f"#/components/schemas/{schema}"}


def _problems(*codes: int) -> Schema:
    return {str(c): {"description": _PROBLEMS[c], **_json("Problem")} for c in sorted(codes)}


# --- schemas ------------------------------------------------------------------------------------


def _schemas() -> dict[str, Schema]:
    return {
        "ChatRequest": _request(CHAT, "messages", _MESSAGES),
        "TextRequest": _request(COMPLETION, "prompt", _PROMPT),
        "Chat": _answer("chat.completion", {"message": _object({"content": _STRING})}),
        "ChatChunk": _answer("chat.completion.chunk", {"delta": {"type": "object"}}),
        "Text": _answer("text_completion", {"text": _STRING}),
        "Usage": _object(
            {
                "prompt_tokens": _INTEGER,
                "completion_tokens": _INTEGER,
                "total_tokens": _INTEGER,
                "prompt_tokens_details": _object({"cached_tokens": _INTEGER}),
                "edgespec": _object(
                    {
                        "policy": _STRING,
                        "seconds": _NUMBER,
                        "first_token_seconds": _NUMBER,
                        "trips": _NUMBER,
                        "rows_sent": _INTEGER,
                        "rows_wasted": _INTEGER,
                        "recoveries": _INTEGER,
                    }
                ),
            }
        ),
        "Model": _MODEL,
        "ModelList": _object({"object": {"const": "list"}, "data": _list(_ref("Model"))}),
        "Health": _object({"status": {"const": "ok"}}),
        "Ready": _object({"status": {"const": "ready"}, "stages": _INTEGER}),
        "Problem": _object({"error": _PROBLEM}),
    }


def _object(properties: dict[str, Schema]) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _request(parameters: Iterable[Parameter], name: str, schema: Schema) -> Schema:
    properties = {
        "model": {"type": ["string", "null"], "description": "As /v1/models names it."},
        name: schema,
        "stop": _STOP,
        "stream_options": _STREAM_OPTIONS,
        **{one.name: {**one.schema(), "description": one.said} for one in parameters},
    }
    return {
        "type": "object",
        "properties": properties,
        "required": [name],
        "additionalProperties": False,
    }


_STOP_STRING: Schema = {"type": "string", "minLength": 1, "maxLength": MOST_STOP_CHARS}
_STOP: Schema = {
    "anyOf": [
        _STOP_STRING,
        {**_list(_STOP_STRING), "maxItems": MOST_STOPS},
        {"type": "null"},
    ],
    "description": "End before these texts.",
}
_STREAM_OPTIONS: Schema = {
    "type": ["object", "null"],
    "properties": {
        "include_usage": {"type": ["boolean", "null"]},
        "include_obfuscation": {"description": "Not looked at."},
    },
    "additionalProperties": False,
    "description": "With `stream` alone.",
}
_TEXT_PART: Schema = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": _STRING},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_MESSAGES: Schema = {
    "type": "array",
    "minItems": 1,
    "maxItems": MOST_MESSAGES,
    "items": {
        "type": "object",
        "properties": {
            "role": {"enum": list(ROLES)},
            "content": {"anyOf": [_STRING, _list(_TEXT_PART), {"type": "null"}]},
            "name": {"description": "Not looked at."},
        },
        "required": ["role", "content"],
    },
    "description": (
        "The conversation; a content that is a list of texts is one text, and one that is null, "
        "which an assistant's may be, is empty."
    ),
}
_PROMPT: Schema = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {**_list({"type": "string", "minLength": 1}), "minItems": 1, "maxItems": 1},
    ],
    "description": "The text to go on with.",
}
_MODEL: Schema = _object(
    {
        "id": _STRING,
        "object": {"const": "model"},
        "created": _INTEGER,
        "owned_by": _STRING,
        "context_length": {**_INTEGER, "description": "Tokens of prompt and answer together."},
    }
)
_PROBLEM: Schema = _object(
    {
        "message": _STRING,
        "type": _STRING,
        "param": {"type": ["string", "null"]},
        "code": {"type": ["string", "null"]},
    }
)


def _answer(kind: str, told: dict[str, Schema]) -> Schema:
    choice = {
        "index": {"const": 0},
        **told,
        "logprobs": {"type": ["object", "null"]},
        "finish_reason": {"enum": ["stop", "length", None]},
    }
    schema = _object(
        {
            "id": _STRING,
            "object": {"const": kind},
            "created": _INTEGER,
            "model": _STRING,
            "choices": _list(_object(choice)),
        }
    )
    schema["properties"]["usage"] = {"anyOf": [_ref("Usage"), {"type": "null"}]}
    return schema
