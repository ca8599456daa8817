"""Answering: carries the answers to one call from the ring to a client, whole or as events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from edgespec.errors import EdgespecError
from edgespec.runtime.async_client import with_pauses
from edgespec.runtime.client import Answer
from edgespec.serving.formats import Format, Object, encoded
from edgespec.serving.problems import ApiProblem, problem_of
from edgespec.serving.token_details import log_probs_of
from edgespec.serving.turns import ModelTurn
from edgespec.wire.client_messages import Echoed, Finished, Progress, Tokens

WAITING = "waiting for the next token"
HEAD = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # a proxy would keep pieces back
}
"""Headers of a stream, beside its type."""


class AnswerListener(Protocol):
    """Is told what becomes of answers."""

    def tokens(self, count: int) -> None:
        """`count` more tokens came."""

    def ended(self, end: Finished | ApiProblem | None) -> None:
        """An answer is complete, has failed, or its client left (None); called once for each."""


class AnswerResponse:
    """The ASGI response that asks the ring and answers one client, which may leave at any time.

    An answer that ends leaves the others; with one that fails all of them do."""

    def __init__(
        self,
        answers: Sequence[AsyncGenerator[Answer, None]],
        form: Format,
        streams: bool,
        pause_seconds: float,
        listener: AnswerListener,
        headers: Mapping[str, str],
    ) -> None:
        self._headers = headers
        self._answers = answers
        self._form = form
        self._streams = streams
        self._pause_seconds = pause_seconds
        self._listener = listener
        self._ends: dict[int, Finished] = {}
        self._problem: ApiProblem | None = None
        self.has_started = False
        """Whether the stream's head is on its way."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._work(scope, receive, send))
        left = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # This closes the generators, which cancels the requests on the ring.
            for task in (work, left):
                task.cancel()
            ends = await asyncio.gather(work, left, return_exceptions=True)
            for index in range(len(self._answers)):
                self._listener.ended(self._ends.get(index, self._problem))
        for problem in ends:
            if isinstance(problem, Exception):
                raise problem

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A request that is refused at once gets its own status: a stream starts with the
        # coordinator's first message, or a pause.
        try:
            if not self._streams:
                whole = await self._whole()
                response = Response(whole, headers=self._headers, media_type="application/json")
                await response(scope, receive, send)
                return
            async with contextlib.aclosing(self._events()) as events:
                async for data in events:
                    if not data and self.has_started:
                        continue
                    if not self.has_started:
                        self.has_started = True
                        await send(_head(self._form, self._headers))
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body"})
        except (EdgespecError, ApiProblem) as error:
            problem = error if isinstance(error, ApiProblem) else problem_of(error)
            self._problem = problem
            told = self._form if self.has_started else None
            await _tell_problem(problem, told, scope, receive, send)

    async def _whole(self) -> bytes:
        log_probs: list[list[Object]] = [[] for _ in self._answers]
        async with contextlib.aclosing(_together(self._answers)) as answers:
            async for index, message in answers:
                if isinstance(message, Echoed):
                    self._form.take_prompt(index, message)
                elif isinstance(message, Tokens):
                    self._listener.tokens(len(message.token_ids))
                    log_probs[index] += log_probs_of(message.log_probs)
                elif isinstance(message, Finished):
                    self._ends[index] = message
        return encoded(self._form.whole(self._in_order, log_probs))

    async def _events(self) -> AsyncGenerator[bytes, None]:
        waiting, is_open, form = WAITING, False, self._form
        messages = with_pauses(_together(self._answers), self._pause_seconds)
        async with contextlib.aclosing(messages) as answers:
            async for told in answers:
                index, message = told or (0, None)
                if isinstance(message, Echoed):
                    form.take_prompt(index, message)
                if isinstance(message, Echoed | Tokens | Finished) and not is_open:
                    is_open = True
                    read = 0 if isinstance(message, Echoed) else message.prompt_tokens
                    yield form.framed(form.opening(read))
                match message:
                    case None:
                        yield form.waiting(waiting)
                    case Progress(_, waiting):
                        yield form.waiting(waiting)
                    case Echoed():
                        yield form.framed(form.prompted(index, message))
                    case Tokens(_, ids):
                        waiting = WAITING
                        self._listener.tokens(len(ids))
                        yield form.framed(form.pieces(index, message))
                    case Finished():
                        self._ends[index] = message
                        yield form.framed(form.endings(index, message))
        yield form.framed(form.closing(self._in_order)) + form.done

    @property
    def _in_order(self) -> list[Finished]:
        return [self._ends[index] for index in range(len(self._answers))]


class WaitingResponse:
    """The ASGI response to a request whose model may have to be loaded first: it says meanwhile
    what it waits for, and then answers."""

    def __init__(
        self,
        turn: ModelTurn,
        form: Format | None,
        headers: Mapping[str, str],
        pause_seconds: float,
        answer: Callable[[], Awaitable[AnswerResponse]],
        refused: Callable[[ApiProblem], None],
    ) -> None:
        """`form`: of a stream, which says what it waits for; None: of a whole answer. `answer`:
        made when the model is there; raises ApiProblem. `refused`: hears of one."""
        self._turn, self._form, self._headers = turn, form, headers
        self._pause_seconds, self._answer, self._refused = pause_seconds, answer, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        turn, form, has_started = self._turn, self._form, False
        try:
            async with contextlib.aclosing(waits(turn, receive, self._pause_seconds)) as pauses:
                async for _ in pauses:
                    if form is None:
                        continue
                    if not has_started:
                        has_started = True
                        await send(_head(form, self._headers))
                    said = form.waiting(turn.words)
                    await send({"type": "http.response.body", "body": said, "more_body": True})
            response = await self._answer()
            response.has_started = has_started
            await response(scope, receive, send)
        except ApiProblem as problem:
            self._refused(problem)
            await _tell_problem(problem, form if has_started else None, scope, receive, send)
        except ClientDisconnect:
            pass
        finally:
            turn.end()


async def waits(turn: ModelTurn, receive: Receive, pause: float) -> AsyncGenerator[None, None]:
    """Wait for a turn, and yield whenever so many seconds have gone by. Raises ApiProblem if there
    is none within its time, and ClientDisconnect if the client leaves."""
    left = asyncio.ensure_future(_left(receive))
    parts = {turn.given, left}
    try:
        while not turn.given.done():
            await asyncio.wait(parts, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
            if left.done():
                raise ClientDisconnect
            turn.check_wait()
            if not turn.given.done():
                yield
        turn.given.result()
    finally:
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)


def _head(form: Format, headers: Mapping[str, str]) -> Message:
    """The begin of a stream."""
    told = {**HEAD, **headers, "content-type": form.media}
    named = [(name.encode(), value.encode()) for name, value in told.items()]
    return {"type": "http.response.start", "status": 200, "headers": named}


async def _tell_problem(
    problem: ApiProblem, form: Format | None, scope: Scope, receive: Receive, send: Send
) -> None:
    """End the response with a problem, `form`: within the stream that has begun."""
    path = scope["path"]
    if form is None:
        await problem.response(path)(scope, receive, send)
    else:
        await send({"type": "http.response.body", "body": form.framed([problem.as_json(path)])})


async def _together(
    answers: Sequence[AsyncGenerator[Answer, None]],
) -> AsyncGenerator[tuple[int, Answer], None]:
    """What comes of any of these answers, with its index, as it comes, until all have ended; raises
    what the first one raises. Closes them at the end."""
    news: asyncio.Queue[tuple[int, Answer] | Exception] = asyncio.Queue(1)

    async def pass_on(index: int, answer: AsyncGenerator[Answer, None]) -> None:
        try:
            async with contextlib.aclosing(answer):
                async for message in answer:
                    await news.put((index, message))
        except Exception as problem:
            await news.put(problem)

    works = [asyncio.ensure_future(pass_on(*one)) for one in enumerate(answers)]
    left = len(works)
    try:
        while left:
            told = await news.get()
            if isinstance(told, Exception):
                raise told
            left -= isinstance(told[1], Finished)
            yield told
    finally:
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)


async def _left(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        continue
