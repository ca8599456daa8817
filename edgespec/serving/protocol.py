"""Protocol: uvicorn's HTTP/1.1, with bounds on connections, on slow senders and on slow readers."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Generator
from http import HTTPStatus
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from edgespec.serving.app import Service
from edgespec.serving.limits import Limits
from edgespec.serving.problems import SERVER, ApiProblem

ENDING = (signal.SIGINT, signal.SIGTERM)


def protocol_of(limits: Limits) -> type[asyncio.Protocol]:
    """The protocol with these limits."""
    return type("ApiProtocol", (_Protocol,), {"limits": limits})


class _Protocol(H11Protocol):
    """One connection."""

    limits = Limits()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sender_limit: asyncio.TimerHandle | None = None
        self._reader_limit: asyncio.TimerHandle | None = None
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            self._refuse(
                ApiProblem(
                    503, "too many connections are open", kind=SERVER, code="too_many_connections"
                )
            )
        else:
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        _stop(self._sender_limit)
        _stop(self._reader_limit)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused or self.transport.is_closing():
            return
        if self._sender_limit is None and not self._is_answering:
            self._await_request()
        super().data_received(data)
        if self._is_answering:
            _stop(self._sender_limit)
            self._sender_limit = None

    @property
    def _is_answering(self) -> bool:
        """The head of a request is here, and its answer is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def _await_request(self) -> None:
        """A request's head, or the rest of a body that was refused, has to come in time."""
        self._sender_limit = self.loop.call_later(self.limits.header_seconds, self._too_slow)

    def _too_slow(self) -> None:
        self._sender_limit = None
        self._refuse(
            ApiProblem(
                408,
                f"no request came within {self.limits.header_seconds:g} s",
                code="request_timeout",
            )
        )

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP, or has too long a head."""
        self._refuse(ApiProblem(400, "this is no valid HTTP request", code="invalid_http"))

    def _refuse(self, problem: ApiProblem) -> None:
        """Answer what never got to the application, and close.

        What still comes is thrown away for a while: closing at once would take the answer back.
        """
        if self._is_refused or self.transport.is_closing():
            return
        if self.cycle is not None:  # an answer is, or was, on the way: two make no sense
            self.transport.abort()
            return
        body = problem.as_bytes()
        headers = {
            **problem.headers,
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
        }
        phrase = HTTPStatus(problem.status).phrase
        lines = [f"HTTP/1.1 {problem.status} {phrase}", *(f"{k}: {v}" for k, v in headers.items())]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.write_eof()
        self._is_refused = True
        _stop(self._sender_limit)
        self._sender_limit = self.loop.call_later(self.limits.drain_seconds, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._reader_limit is None:
            self._reader_limit = self.loop.call_later(
                self.limits.write_seconds, self.transport.abort
            )

    def resume_writing(self) -> None:
        _stop(self._reader_limit)
        self._reader_limit = None
        super().resume_writing()


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class ApiServer(uvicorn.Server):
    """Ends every open answer with a word when a signal ends the process."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """As uvicorn has it, but that signal is not raised again: it was obeyed, and this process
        has an exit code of its own."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {one: signal.signal(one, self.handle_exit) for one in ENDING}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._service.end()
