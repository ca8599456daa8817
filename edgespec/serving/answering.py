"""Answering: carries one answer from the ring to one HTTP client, whole or as events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from msgspec import Struct
from starlette.types import Receive, Scope, Send

from edgespec.errors import EdgespecError
from edgespec.runtime.async_client import Answer, with_pauses
from edgespec.serving.formats import Format, Object, comment, encoded, event, log_probs_of
from edgespec.serving.problems import ApiProblem, problem_of
from edgespec.wire.client_messages import Finished, Progress, Tokens

DONE = b"data: [DONE]\n\n"
WAITING = "waiting for the next token"


class Writer:
    """Writes one HTTP response."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_started = False

    async def whole(self, status: int, headers: dict[str, str], body: bytes) -> None:
        """A response in one piece, of JSON."""
        await self._start(status, {**headers, "content-type": "application/json"}, len(body))
        await self._send({"type": "http.response.body", "body": body})

    async def events(self) -> None:
        """The head of a stream of events."""
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # a proxy would keep pieces back
        }
        await self._start(200, headers, None)

    async def piece(self, data: bytes, *, is_last: bool = False) -> None:
        """The next part of a stream."""
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})

    async def _start(self, status: int, headers: dict[str, str], length: int | None) -> None:
        if length is not None:
            headers = {**headers, "content-length": str(length)}
        self.has_started = True
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})


class AnswerListener(Protocol):
    """Is told what becomes of an answer."""

    def tokens(self, count: int) -> None:
        """`count` more tokens came."""

    def ended(self, end: Finished | ApiProblem | None) -> None:
        """The answer is complete, has failed, or its client left (None); called once."""


class AnswerResponse:
    """The ASGI response that asks the ring and answers one client, which may leave at any time."""

    def __init__(
        self,
        answer: AsyncGenerator[Answer, None],
        form: Format,
        streams: bool,
        pause_seconds: float,
        listener: AnswerListener,
    ) -> None:
        self._answer = answer
        self._form = form
        self._streams = streams
        self._pause_seconds = pause_seconds
        self._listener = listener
        self._end: Finished | ApiProblem | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._work(Writer(send)))
        left = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # This closes the generator, which cancels the request on the ring.
            for task in (work, left):
                task.cancel()
            ends = await asyncio.gather(work, left, return_exceptions=True)
            self._listener.ended(self._end)
        for problem in ends:
            if isinstance(problem, Exception):
                raise problem

    async def _work(self, writer: Writer) -> None:
        try:
            await (self._stream(writer) if self._streams else self._whole(writer))
        except EdgespecError as error:
            self._end = problem = problem_of(error)
            if writer.has_started:
                await writer.piece(event(problem.as_json()), is_last=True)
            else:
                await writer.whole(problem.status, problem.headers, problem.as_bytes())

    async def _whole(self, writer: Writer) -> None:
        log_probs: list[Object] = []
        async with contextlib.aclosing(self._answer) as answer:
            async for message in answer:
                if isinstance(message, Tokens):
                    self._listener.tokens(len(message.token_ids))
                    log_probs += log_probs_of(message.log_probs)
                elif isinstance(message, Finished):
                    self._end = message
                    body = encoded(self._form.whole(message, log_probs))
                    await writer.whole(200, {}, body)

    async def _stream(self, writer: Writer) -> None:
        waiting = WAITING
        messages = with_pauses(self._answer, self._pause_seconds)
        async with contextlib.aclosing(messages) as answer:
            # A request that is refused at once gets its own status: nothing is sent before the
            # coordinator's first message, or a pause.
            async for message in answer:
                if not writer.has_started:
                    await writer.events()
                    await self._say(writer, self._form.opening())
                match message:
                    case None:
                        await writer.piece(comment(waiting))
                    case Progress(_, waiting):
                        await writer.piece(comment(waiting))
                    case Tokens(_, ids, text, log_probs):
                        waiting = WAITING
                        self._listener.tokens(len(ids))
                        if text or log_probs:
                            told = log_probs_of(log_probs)
                            await self._say(writer, [self._form.piece(text, told)])
                    case Finished():
                        self._end = message
                        await self._say(writer, self._form.ending(message))
                        await writer.piece(DONE, is_last=True)

    async def _say(self, writer: Writer, objects: Sequence[Struct]) -> None:
        if objects:
            await writer.piece(b"".join(map(event, objects)))


async def _left(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        continue
