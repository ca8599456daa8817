"""Ollama: its REST API, /api/..., asked and told of a chat or of a text."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from edgespec.serving.answering import AnswerResponse, WaitingResponse
from edgespec.serving.as_chats import passed
from edgespec.serving.formats import AnswerBlock, BlockFormat, Object, Reply, Served, encoded
from edgespec.serving.problems import NO_EMBEDDINGS, ApiProblem
from edgespec.serving.request_bodies import AskedRequest, ChatRequest, TextRequest
from edgespec.serving.request_parts import RequestPart, Unread, only
from edgespec.wire.client_messages import Finished, Status

if TYPE_CHECKING:
    from edgespec.serving.app import Service

VERSION = "0.12.6"
"""Of Ollama's API as it is spoken here: some clients want a version of at least so much."""

_NO_IMAGES = "the model reads text alone"
_NANO = 1_000_000_000


class OllamaRequest(AskedRequest, kw_only=True):
    """What chats and texts have; both stream unless told otherwise. `asks`: there is a question."""

    stream: Annotated[bool, Meta(description="Send the answer in lines of JSON.")] = True
    format: Annotated[
        str | dict[str, Any] | None, Meta(description="`json`, or a schema of the answer.")
    ] = None
    options: Annotated[
        dict[str, Any] | None, Meta(description="`num_predict`, `temperature` and their like.")
    ] = None
    think: Annotated[
        bool | str | None, Meta(description="Whether the model thinks first, or how much.")
    ] = None
    logprobs: Annotated[Any, only("ask by /v1/chat/completions for them", False)] = None
    keep_alive: Unread = None

    def in_common(self) -> Object:
        """What the body of the chat, or of the text, has that asks for the same."""
        told = {**(self.options or {})}
        limit = told.pop("num_predict", told.pop("max_tokens", None))
        # Below 0 they mean: until the context, or twice it, is full.
        limit = -1 if limit is None or (isinstance(limit, int) and limit < 0) else limit
        own = {"stream": self.stream, "num_predict": limit, "n": 1, "stream_options": None}
        own |= {"logprobs": None, "top_logprobs": None}
        body = {**passed(self), **told, **own}
        if self.think is not None:
            body["enable_thinking"] = self.think is not False
        if isinstance(self.think, str):
            body["reasoning_effort"] = self.think
        if self.format == "json":
            body["response_format"] = {"type": "json_object"}
        elif isinstance(self.format, dict):
            schema = {"name": "answer", "schema": self.format}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif self.format:
            body["response_format"] = {"type": self.format}
        return body


class OllamaChatRequest(OllamaRequest, kw_only=True):
    messages: Annotated[list[dict[str, Any]] | None, Meta(description="As in chats.")] = None
    tools: Annotated[list[dict[str, Any]] | None, Meta(description="As in chats.")] = None
    raw: ClassVar = False

    @property
    def asks(self) -> bool:
        return bool(self.messages)

    def as_chat(self) -> Object:
        """The body of the chat that asks for the same."""
        messages = [_message(one) for one in self.messages or ()]
        return {**self.in_common(), "messages": messages, "tools": self.tools}


class OllamaTextRequest(OllamaRequest, kw_only=True):
    prompt: Annotated[str, Meta(description="The question, or with `raw` the text itself.")] = ""
    system: Annotated[str | None, Meta(description="The system message.")] = None
    raw: Annotated[bool, Meta(description="Go on with the text, without a template.")] = False
    suffix: Annotated[Any, only("the model writes at the end of a text", "")] = None
    images: Annotated[Any, only(_NO_IMAGES, [])] = None
    template: Annotated[Any, only("the model has its own", "")] = None
    context: Annotated[Any, only("send the conversation to /api/chat", [])] = None

    @property
    def asks(self) -> bool:
        return bool(self.prompt)

    def as_chat(self) -> Object:
        """The body of the chat, or with `raw` of the completion, that asks for the same."""
        if self.raw:
            return {**self.in_common(), "prompt": self.prompt}
        asked = [{"role": "user", "content": self.prompt}]
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {**self.in_common(), "messages": [*system, *asked]}


class NameRequest(RequestPart):
    """Of a model, under its newer or older key."""

    model: str = ""
    name: str = ""


def _message(told: Object) -> Object:
    if told.get("images"):
        words = f"messages with images cannot be answered: {_NO_IMAGES}"
        raise ApiProblem(400, words, param="messages", code="unsupported_parameter")
    found: Object = {
        name: told.get(name) for name in ("role", "content", "tool_calls") if name in told
    }
    if told.get("role") == "tool":
        found["tool_call_id"] = told.get("tool_call_id") or told.get("tool_name")
    if told.get("role") == "assistant":
        found["reasoning_content"] = told.get("thinking")
    return found


# --- replies ------------------------------------------------------------------------------------


class OllamaFormat(BlockFormat):
    """Lines of JSON, the last of which has the figures. A call is told when it is whole."""

    media, done = "application/x-ndjson", b""

    def __init__(self, is_chat: bool, request: ChatRequest | TextRequest, served: Served) -> None:
        super().__init__(request, served)
        self._is_chat = is_chat

    def reply(self, end: Finished) -> Reply:
        text, thought = (
            "".join(one.text for one in self.blocks if one.kind == kind)
            for kind in ("text", "thinking")
        )
        calls = [_call(one) for one in self.blocks if one.kind == "call"]
        return {**self._line(text, thought, calls), **_figures(end)}

    def added(self, block: AnswerBlock, text: str) -> list[Reply]:
        if block.kind == "call":
            return []
        told = ("", text) if block.kind == "thinking" else (text, "")
        return [{**self._line(*told), "done": False}]

    def ended(self, block: AnswerBlock) -> list[Reply]:
        return [{**self._line(calls=[_call(block)]), "done": False}] if block.call_id else []

    def closing(self, ends: Sequence[Finished]) -> list[Reply]:
        return [{**self._line(), **_figures(ends[0])}]

    def framed(self, replies: Sequence[Reply]) -> bytes:
        return b"".join(encoded(one) + b"\n" for one in replies)

    def waiting(self, text: str) -> bytes:
        return b""  # a line is always a piece of the answer

    def _line(self, text: str = "", thought: str = "", calls: Sequence[Object] = ()) -> Object:
        return line(self.served.model, self._is_chat, text, thought, calls)


def line(
    model: str, is_chat: bool, text: str = "", thought: str = "", calls: Sequence[Object] = ()
) -> Object:
    """A piece of an answer, as it comes now."""
    now = datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
    head: Object = {"model": model, "created_at": now}
    more: Object = {"thinking": thought} if thought else {}
    if not is_chat:
        return {**head, "response": text, **more}
    message: Object = {"role": "assistant", "content": text, **more}
    if calls:
        message["tool_calls"] = [*calls]
    return {**head, "message": message}


def _call(block: AnswerBlock) -> Object:
    return {"id": block.call_id, "function": {"name": block.name, "arguments": block.arguments}}


def _figures(end: Finished) -> Object:
    """The end of an answer: times in nanoseconds, as they were measured."""
    first = int(end.first_token_seconds * _NANO)
    total = int(end.seconds * _NANO)
    return {
        "done": True,
        "done_reason": end.finish_reason,
        "total_duration": total,
        "load_duration": 0,
        "prompt_eval_count": end.prompt_tokens,
        "prompt_eval_duration": first,
        "eval_count": end.new_tokens,
        "eval_duration": total - first,
    }


# --- routes -------------------------------------------------------------------------------------


class OllamaApi:
    """Its routes, over the service that answers them."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[BaseRoute]:
        """Of all paths that there are; what cannot be had says so."""
        refused = ("pull", "push", "create", "copy", "delete", "embed", "embeddings")
        return [
            Route("/api/chat", partial(self._answer, OllamaChatRequest), methods=["POST"]),
            Route("/api/generate", partial(self._answer, OllamaTextRequest), methods=["POST"]),
            Route("/api/tags", self.tags, methods=["GET"]),
            Route("/api/ps", self.running, methods=["GET"]),
            Route("/api/show", self.show, methods=["POST"]),
            Route("/api/version", self.version, methods=["GET"]),
            *(Route(f"/api/{name}", self.refuse, methods=["POST", "DELETE"]) for name in refused),
        ]

    async def _answer(
        self, kind: type[OllamaChatRequest | OllamaTextRequest], request: Request
    ) -> AnswerResponse | WaitingResponse | Response:
        """Answer a conversation or a question, or go on with a text."""
        ignored: list[str] = []
        asked = await self._service.asked(request, kind, ignored)
        service, is_chat = self._service, kind is OllamaChatRequest
        model = await self._bare(asked.model)
        if asked.asks:
            body = TextRequest if asked.raw else ChatRequest, {**asked.as_chat(), "model": model}
            form = partial(OllamaFormat, is_chat)
            return await service.answer(request, body, form, ignored)
        # That is how a model is loaded, or given up, where it is not there all the time.
        if asked.keep_alive in (0, "0", "0s"):
            name, reason = (await service.about(model)).model, "unload"
            if service.turns is not None:
                service.turns.give_up(name)
        else:
            async with service.held(request, model) as status:
                name, reason = status.model, "load"
        return JSONResponse({**line(name, is_chat), "done": True, "done_reason": reason})

    async def tags(self, request: Request) -> Response:
        """List all that may be asked for."""
        return JSONResponse({"models": [*map(described, await self._service.statuses())]})

    async def running(self, request: Request) -> Response:
        """List the one that is loaded, if its ring is up."""
        more: Object = {"expires_at": "9999-12-31T23:59:59Z", "size_vram": 0}
        loaded = [
            {**described(one), **more, "context_length": one.context_length}
            for one in await self._service.statuses()
            if one.ready
        ]
        return JSONResponse({"models": loaded})

    async def show(self, request: Request) -> Response:
        """Describe the model."""
        asked = await self._service.asked(request, NameRequest)
        status = await self._service.about(await self._bare(asked.model or asked.name))
        kinds = ["completion", "tools", *(["thinking"] if status.thinking else [])]
        info = {
            "general.architecture": "edgespec",
            "edgespec.context_length": status.context_length,
        }
        told = {"details": _DETAILS, "model_info": info, "capabilities": kinds}
        texts = {"license": "", "modelfile": "", "parameters": "", "template": ""}
        return JSONResponse({**texts, **told, "modified_at": _BEGAN})

    async def version(self, request: Request) -> Response:
        """Say what is spoken here."""
        return JSONResponse({"version": VERSION})

    async def _bare(self, model: str) -> str:
        """The name without the tag that Ollama's clients add to one that has none."""
        names = {one.model for one in await self._service.statuses()}
        return model if model in names else model.removesuffix(":latest")

    async def refuse(self, request: Request) -> Response:
        """Say what to do instead."""
        embeds = request.scope["path"].startswith("/api/embed")
        raise ApiProblem(501, NO_EMBEDDINGS if embeds else _MANAGE, code="unknown_url")


_MANAGE = (
    "models of a ring are not changed over HTTP; on the coordinator's machine `edgespec pull NAME` "
    "fetches one, and `edgespec init --model NAME` makes a ring of it"
)
_BEGAN = "2026-01-01T00:00:00Z"
_DETAILS = {
    "parent_model": "",
    "format": "",
    "family": "edgespec",
    "families": ["edgespec"],
    "parameter_size": "",
    "quantization_level": "",
}


def described(status: Status) -> Object:
    """The model as lists have it; what a ring does not tell is empty."""
    names = {"name": status.model, "model": status.model, "modified_at": _BEGAN}
    digest = hashlib.sha256(status.model.encode()).hexdigest()
    return {**names, "size": status.size, "digest": digest, "details": _DETAILS}
