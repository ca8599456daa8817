"""App: the routes of the APIs, put together: OpenAI's, Anthropic's, Ollama's, and our own."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

from msgspec import Struct
from msgspec.structs import replace
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgespec.errors import EdgespecError, PeerLost
from edgespec.planning.catalogue import MODELS, NAMES, squeezed
from edgespec.runtime.async_client import AsyncClient
from edgespec.serving.answering import AnswerResponse, WaitingResponse, waits
from edgespec.serving.formats import ChatFormat, CompletionFormat, Format, Served, encoded
from edgespec.serving.guard import ASKER, Door, Guard
from edgespec.serving.leniency import header_of
from edgespec.serving.limits import STATUS_AGE_S, HttpLimits
from edgespec.serving.messages import CountReply, MessagesFormat, MessagesRequest
from edgespec.serving.metrics import Metrics
from edgespec.serving.ollama import OllamaApi
from edgespec.serving.openapi import openapi
from edgespec.serving.problems import NO_EMBEDDINGS, OLLAMA, ApiProblem, problem_of
from edgespec.serving.reply_bodies import HealthReply, Model, ModelList, ReadyReply
from edgespec.serving.request_bodies import MOST_INT, ChatRequest, TextRequest
from edgespec.serving.requests import Body, Kind, checked, submits_of
from edgespec.serving.responses import ResponsesFormat, ResponsesRequest
from edgespec.serving.tokens import TokensApi
from edgespec.serving.turns import MOST_WAIT_S, ModelTurns
from edgespec.types.grammar_spec import LEFT_OUT, leaves_out
from edgespec.types.tool_forms import form_named
from edgespec.wire.client_messages import Echoed, Finished, Status, Submit

Answering = AnswerResponse | WaitingResponse

SMALL_BODY = 64 << 10
"""Bytes of each body that do not count towards the limit of all bodies together."""


class Service:
    """The API over one connection to a coordinator."""

    def __init__(
        self,
        client: AsyncClient,
        limits: HttpLimits | None = None,
        aliases: frozenset[str] = frozenset(),
        turns: ModelTurns | None = None,
    ) -> None:
        """`aliases`: further names by which the model may be asked for. `turns`: of several models;
        None: the coordinator has its one all the time."""
        self.client = client
        self.turns = turns
        self.limits = limits or HttpLimits()
        self._aliases = aliases
        self.answers = 0
        """Answers that clients wait for or read."""
        self._bodies = 0  # bytes of bodies that are being read, without SMALL_BODY of each
        self.metrics = Metrics()
        self._started = int(time.time())

    def routes(self) -> list[BaseRoute]:
        """The routes of the API, for an application."""
        return [
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{model:path}", self.model, methods=["GET"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completion, methods=["POST"]),
            Route("/v1/responses", self.response, methods=["POST"]),
            Route("/v1/messages", self.message, methods=["POST"]),
            Route("/v1/messages/count_tokens", self.count, methods=["POST"]),
            *OllamaApi(self).routes(),
            *TokensApi(self).routes(),
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            Route("/metrics", self.figures, methods=["GET"]),
            Route("/openapi.json", self.document, methods=["GET"]),
            *(Route(path, self.health, methods=["GET"]) for path in ("/healthz", "/health")),
            Route("/readyz", self.readiness, methods=["GET"]),
        ]

    async def models(self, request: Request) -> Response:
        """List all that may be asked for."""
        return _json(ModelList([self._model(one) for one in await self.statuses()]))

    async def model(self, request: Request) -> Response:
        """Describe one model."""
        return _json(self._model(await self.about(request.path_params["model"])))

    async def chat(self, request: Request) -> Answering:
        """Answer a conversation."""
        return await self.answer(request, (ChatRequest, await self._body(request)), ChatFormat)

    async def response(self, request: Request) -> Answering:
        """Answer a conversation, in the form of OpenAI's Responses."""
        ignored: list[str] = []
        asked = await self.asked(request, ResponsesRequest, ignored)
        chat = ChatRequest, asked.as_chat(ignored)
        return await self.answer(request, chat, partial(ResponsesFormat, asked), ignored)

    async def message(self, request: Request) -> Answering:
        """Answer a conversation, in Anthropic's form."""
        ignored: list[str] = []
        asked = await self.asked(request, MessagesRequest, ignored)
        chat = ChatRequest, asked.as_chat(ignored)
        return await self.answer(request, chat, MessagesFormat, ignored)

    async def count(self, request: Request) -> Response:
        """Count the tokens of a conversation as the model reads it."""
        asked = await self.asked(request, MessagesRequest)
        prompt, _ = await self.prompt_of(request, ChatRequest, asked.as_chat())
        return _json(CountReply(len(prompt.token_ids)))

    async def prompt_of(
        self, request: Request, kind: type[ChatRequest | TextRequest], body: Body
    ) -> tuple[Echoed, int]:
        """The prompt of such a body as the model reads it, and the tokens that the model's context
        holds. Raises ApiProblem."""
        asked, prompt = checked(kind, body), Echoed(0)
        async with self.held(request, asked.model) as status:
            (submit,) = await self._submits(request, asked, status)
            told = self.client.ask(replace(submit, max_new_tokens=0, grammar="", echo=True))
            try:
                async with contextlib.aclosing(told):
                    async for message in told:
                        prompt = message if isinstance(message, Echoed) else prompt
            except EdgespecError as error:
                raise problem_of(error) from None
        return prompt, status.context_length

    async def completion(self, request: Request) -> Answering:
        """Continue a text."""
        body = TextRequest, await self._body(request)
        return await self.answer(request, body, CompletionFormat)

    async def embeddings(self, request: Request) -> Response:
        """Say what to use."""
        raise ApiProblem(404, NO_EMBEDDINGS, code="unknown_url")

    async def health(self, request: Request) -> Response:
        """Say whether this process works and reaches its coordinator, if there is to be one."""
        if self.turns is None:
            await self.status()
        return _json(HealthReply())

    async def readiness(self, request: Request) -> Response:
        """Say whether requests are answered, and if not, what is missing: with several models, of
        which none is loaded, the next request has one loaded."""
        turns = self.turns
        if turns is not None and not (turns.loaded or turns.is_loading or turns.closing):
            return _json(ReadyReply(0))
        status = await self.status(age=0.0)
        if why := status.leaving or (turns.closing if turns is not None else ""):
            raise ApiProblem(503, why, code="ring_not_ready")
        if status.ready:
            return _json(ReadyReply(status.stages))
        problem = _not_ready(status)
        body = {**problem.as_json(), "status": "not ready", "missing": _missing(status)}
        return JSONResponse(body, problem.status, problem.headers)

    async def figures(self, request: Request) -> Response:
        """Serve Prometheus; also without a coordinator."""
        try:
            status = await self.status()
        except ApiProblem:
            status = None
        return Response(self.metrics.text(status), media_type=CONTENT_TYPE_LATEST)

    async def document(self, request: Request) -> Response:
        """Serve the OpenAPI document."""
        return JSONResponse(openapi())

    async def status(self, age: float = STATUS_AGE_S) -> Status:
        """The ring's status, at most `age` seconds old. Raises ApiProblem."""
        if self.turns is not None and (why := self.turns.absence):
            raise ApiProblem(503, why, code="model_not_loaded")
        try:
            return await self.client.status(age)
        except EdgespecError as error:
            raise problem_of(error) from None

    async def statuses(self) -> list[Status]:
        """What is known of each model; it is `ready` if its ring is up. Raises ApiProblem."""
        if self.turns is None:
            return [await self.status()]
        found = {one.model: one for one in self.turns.models}
        with contextlib.suppress(ApiProblem):
            status = await self.status()
            found[status.model] = status  # another one may be on its way since it was asked
        return [*found.values()]

    async def about(self, name: str) -> Status:
        """What is known of that model. Raises ApiProblem, also if there is none."""
        statuses = await self.statuses()
        if self.turns is None:
            self._check_model(name, statuses)
            return statuses[0]
        own = self._named(name)
        return next(one for one in statuses if one.model == own)

    @contextlib.asynccontextmanager
    async def held(self, request: Request, name: str) -> AsyncIterator[Status]:
        """The ring's status while it has that model ("": any), for which it may have to wait.
        Raises ApiProblem, and ClientDisconnect if the client leaves meanwhile."""
        if self.turns is not None:
            own = self._named(name)
            self._check_room(self.turns.waiting + 1)
            turn = self.turns.take(own)
            try:
                async for _ in waits(turn, request.receive, MOST_WAIT_S):
                    pass
                yield await self.status()
            finally:
                turn.end()
            return
        status = await self.status()
        if name:
            self._check_model(name, [status])
        yield status

    def _named(self, name: str) -> str:
        """Which of several models that is. Raises ApiProblem if it is none."""
        assert self.turns is not None
        found = self.turns.named("" if name in self._aliases else name)
        if not found:
            self._check_model(name, self.turns.models)
        return found

    def _model(self, status: Status) -> Model:
        return Model(status.model, self._started, "edgespec", status.context_length)

    def _check_model(self, name: str, known: Sequence[Status]) -> None:
        """Raise ApiProblem for a name that is none of these models'."""
        names = {squeezed(one) for status in known for one in (status.model, *status.names)}
        if name not in self._aliases and squeezed(name) not in names:
            asked, listed = ascii(name)[:200], NAMES.get(squeezed(name), "")
            served = " and ".join(repr(status.model) for status in known)
            is_one = "the one that is served is" if len(known) == 1 else "those that are served are"
            words = (
                f"there is no model {asked} here; {is_one} {served}. "
                f"Where a client has a fixed name, start the API with --alias {asked}"
            )
            if listed in MODELS:
                words += (
                    f"; to have {listed} instead, on the coordinator's machine `edgespec init "
                    f"--model {listed}`, or with `--add {listed}` to have it too, and start "
                    "`edgespec serve` again"
                )
            raise ApiProblem(404, words, param="model", code="model_not_found")

    async def asked(
        self, request: Request, kind: type[Kind], ignored: list[str] | None = None
    ) -> Kind:
        """The body as a request of that kind; what of it is ignored is added. Raises ApiProblem."""
        return checked(kind, await self._body(request), ignored)

    async def _body(self, request: Request) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        # The examples of Ollama's manual give none: curl then says that it is a form.
        if kind and kind != "application/json" and not request.scope["path"].startswith(OLLAMA):
            words = f"the body is {kind[:80]}; send application/json"
            raise ApiProblem(415, words, code="unsupported_media_type")
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self.limits.body:
            raise self._too_long()
        try:
            return await asyncio.wait_for(self._read(request), self.limits.body_seconds)
        except asyncio.TimeoutError:
            words = f"the body did not come within {self.limits.body_seconds:g} s"
            raise ApiProblem(408, words, code="request_timeout") from None

    async def _read(self, request: Request) -> bytes:
        body, held = bytearray(), 0
        try:
            async for chunk in request.stream():
                body += chunk
                if len(body) > self.limits.body:
                    raise self._too_long()
                more = max(len(body) - SMALL_BODY, 0) - held
                if self._bodies + more > self.limits.bodies:
                    words = "other long requests take up all the room; try again later"
                    raise ApiProblem(503, words, code="too_many_bodies")
                held += more
                self._bodies += more
            return bytes(body)
        finally:
            self._bodies -= held

    def _too_long(self) -> ApiProblem:
        words = f"the body is longer than {self.limits.body} bytes"
        return ApiProblem(413, words, code="body_too_large")

    async def answer(
        self,
        request: Request,
        body: tuple[type[ChatRequest | TextRequest], bytes | Body],
        form: Callable[[Any, Served], Format],
        ignored: Sequence[str] = (),
    ) -> Answering:
        """Ask the ring for what a body of that kind asks for, to be told in that form; `ignored`:
        of the body that it was made from. Raises ApiProblem."""
        left_out = [*ignored]
        asked: ChatRequest | TextRequest = checked(*body, left_out)
        if self.turns is None:
            status = await (self.status() if asked.wait else self.status(age=0.0))
            if asked.model:
                self._check_model(asked.model, [status])
            return await self._answer_now(request, asked, form, left_out, status)
        name = self._named(asked.model)
        self._check_room(self.turns.waiting + asked.choices)
        like = Served(form_named(""), "", name, int(time.time()))
        told = form(asked, like) if asked.stream else None
        if not asked.wait and self.turns.loaded != name:  # nor is another one given up for it
            raise ApiProblem(503, self.turns.waited_for(name), code="model_not_loaded")
        turn = self.turns.take(name)
        if not (asked.wait or turn.given.done()):
            words = turn.words
            turn.end()
            raise ApiProblem(503, words, code="model_not_loaded")

        async def answer() -> AnswerResponse:
            return await self._answer_now(request, asked, form, left_out, await self.status())

        return WaitingResponse(
            *(turn, told, header_of(left_out), self.limits.pause_seconds),
            *(answer, self.metrics.refused),
        )

    def _check_room(self, more: int) -> None:
        """Raise ApiProblem if so many answers more are too many."""
        if self.answers + more > self.limits.answers:
            words = f"{self.answers} requests are being answered already; try again later"
            raise ApiProblem(429, words, code="too_many_requests")

    async def _answer_now(
        self,
        request: Request,
        asked: ChatRequest | TextRequest,
        form: Callable[[Any, Served], Format],
        left_out: list[str],
        status: Status,
    ) -> AnswerResponse:
        if not status.ready and not asked.wait:
            raise _not_ready(status)
        self._check_room(asked.choices)
        if status.context_length < (asked.limit or 0) < MOST_INT:
            left_out.append(f"max_tokens above {status.context_length}")
        submits = await self._submits(request, asked, status)
        left_out += [f"{LEFT_OUT} of a JSON schema"] if any(map(leaves_out, asked.schemas)) else []
        served = Served(form_named(status.tools), status.thinking, status.model, int(time.time()))
        told = form(asked, served)
        for _ in submits:
            self.answers += 1
            self.metrics.began()
        answers = [self.client.ask(submit) for submit in submits]
        pause = self.limits.pause_seconds
        return AnswerResponse(answers, told, asked.stream, pause, self, header_of(left_out))

    async def _submits(
        self, request: Request, asked: ChatRequest | TextRequest, status: Status
    ) -> list[Submit]:
        asker = request.scope.get(ASKER, "")
        told = submits_of(asked, status.context_length, form_named(status.tools))
        return [replace(one, scope=asker) for one in told]

    def tokens(self, count: int) -> None:
        self.metrics.tokens(count)

    def ended(self, end: Finished | ApiProblem | None) -> None:
        self.answers -= 1
        self.metrics.ended(end)

    async def refuse(self, request: Request, problem: Exception) -> Response:
        """Say why a request is not answered; count it if it asked the ring."""
        assert isinstance(problem, ApiProblem)
        if request.method == "POST":
            self.metrics.refused(problem)
        return problem.response(request.scope["path"])

    def end(self) -> None:
        """The process is ending: fail the open answers."""
        self.client.end(PeerLost("the HTTP API is ending; ask again when it is back"))


class RequestIds:
    """ASGI middleware: every answer has an id, the client's own if it sent one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-request-id", id)]}
            await send(message)

        sent = next((v for k, v in scope.get("headers", ()) if k == b"x-request-id"), b"")
        id = sent if _ID.fullmatch(sent) else f"req_{secrets.token_hex(12)}".encode()
        await self._app(scope, receive, told)


_ID = re.compile(rb"[!-~]{1,128}")


def application(
    service: Service,
    accepts: Callable[[str], bool],
    door: Door,
    more: Sequence[BaseRoute] = (),
) -> Starlette:
    """The ASGI application. `accepts`, `door`: see Guard. `more`: further routes."""

    @contextlib.asynccontextmanager
    async def connected(app: Starlette) -> AsyncIterator[None]:
        async with service.client:
            if service.turns is not None:
                service.turns.begin()
            yield
            if service.turns is not None:
                await service.turns.aclose()

    middleware = [Middleware(RequestIds), Middleware(Guard, accepts, service.limits.header, door)]
    if door.origins:  # first of all: a browser asks whether it may ask, without a key
        shown = ("retry-after", "x-edgespec-ignored", "x-request-id")
        pages = Middleware(
            CORSMiddleware,
            allow_origins=[*door.origins],
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=shown,
        )
        middleware.insert(0, pages)
    app = Starlette(
        routes=[*service.routes(), *more],
        middleware=middleware,
        exception_handlers={
            ApiProblem: service.refuse,
            HTTPException: _on_http,
            ClientDisconnect: _on_left,
            Exception: _on_bug,
        },
        lifespan=connected,
    )
    app.router.redirect_slashes = False  # it would send clients to where their Host header says
    return app


def _json(body: Struct) -> Response:
    return Response(encoded(body), media_type="application/json")


_WITHOUT_V1 = {"/models", "/chat/completions", "/completions", "/responses", "/messages"}


async def _on_http(request: Request, error: Exception) -> Response:
    """An unknown path, or a method that the path does not have."""
    assert isinstance(error, HTTPException)
    path = ascii(request.scope["path"])[:200]
    there = "see /openapi.json for what there is"
    if request.scope["path"] in _WITHOUT_V1:
        there = "it is below /v1, with which a client's base URL ends"
    words = f"{request.method} {path}: {error.detail}; {there}"
    problem = ApiProblem(error.status_code, words, code="unknown_url")
    response = problem.response(request.scope["path"])
    response.headers.update(error.headers or {})
    return response


async def _on_left(request: Request, _: Exception) -> Response:
    """The client left in the middle of its body, so it does not read this."""
    return Response(status_code=400)


async def _on_bug(request: Request, _: Exception) -> Response:
    words = "this server has a bug; its log says more"
    return ApiProblem(500, words, code="internal_error").response(request.scope["path"])


def _not_ready(status: Status) -> ApiProblem:
    missing = ", ".join(_missing(status)) or "it is being put together"
    words = f"the ring of {status.stages} stage(s) is not up: {missing}"
    return ApiProblem(503, words, code="ring_not_ready")


def _missing(status: Status) -> list[str]:
    """The places whose stages are not ready, with their states."""
    return [f"V{n.stage} is {n.state}" for n in status.nodes if n.stage and n.state != "ready"]
