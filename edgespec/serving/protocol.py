"""Protocol: uvicorn's HTTP/1.1, with bounds on connections, on slow senders and on slow readers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Generator
from functools import partial
from http import HTTPStatus
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from edgespec.config import Address
from edgespec.net.discovery_interfaces import listens_everywhere
from edgespec.net.sockets import number_of
from edgespec.serving.app import Service
from edgespec.serving.limits import HttpLimits
from edgespec.serving.problems import ApiProblem

GRACE_S = 2
"""Seconds for open answers to send their error when the process ends."""

LAST_S = 0.5
"""Seconds in which an open answer may end by itself then: its end may have come already."""

TICK_S = 5.0
"""Seconds for which the date of answers is kept."""

ENDING = (signal.SIGINT, signal.SIGTERM)


class _Protocol(H11Protocol):
    """One connection."""

    limits = HttpLimits()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sender_limit: asyncio.TimerHandle | None = None
        self._reader_limit: asyncio.TimerHandle | None = None
        self._is_refused = False
        self._since = self.loop.time()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > 2 * self.limits.connections:
            self.transport.abort()  # as many connections are being refused already
        elif len(self.connections) > self.limits.connections and not self._made_room():
            words = "too many connections are open"
            self._refuse(ApiProblem(503, words, code="too_many_connections"))
        else:
            self._await_request()

    def _made_room(self) -> bool:
        """Drop the connection that has sent no head for longest, if that is long enough."""
        waiting = [c for c in self.connections if isinstance(c, _Protocol) and c._may_go(self)]
        if not waiting:
            return False
        min(waiting, key=lambda one: one._since).transport.abort()
        return True

    def _may_go(self, newer: _Protocol) -> bool:
        idles = not self._is_answering and not self.transport.is_closing()
        return idles and newer._since - self._since > self.limits.crowded_seconds

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
            self._since = self.loop.time()
            _stop(self._sender_limit)
            self._sender_limit = None

    @property
    def _is_answering(self) -> bool:
        """A request's head has come, and its answer is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def _await_request(self) -> None:
        """Bound the time for a request's head, or for the rest of a refused body."""
        self._sender_limit = self.loop.call_later(self.limits.header_seconds, self._too_slow)

    def _too_slow(self) -> None:
        self._sender_limit = None
        words = f"no request came within {self.limits.header_seconds:g} s"
        self._refuse(ApiProblem(408, words, code="request_timeout"))

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for input that is not HTTP, or has too long a head."""
        self._refuse(ApiProblem(400, "this is no valid HTTP request", code="invalid_http"))

    def _refuse(self, problem: ApiProblem) -> None:
        """Answer a connection whose request did not reach the application, and close it.

        Its input is read and discarded for a while: closing at once would reset the connection
        before the client has read the answer.
        """
        if self._is_refused or self.transport.is_closing():
            return
        cycle: object | None = self.cycle
        if cycle is not None:  # an answer is or was on the way: no second one
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
            seconds = self.limits.write_seconds
            self._reader_limit = self.loop.call_later(seconds, self.transport.abort)

    def resume_writing(self) -> None:
        _stop(self._reader_limit)
        self._reader_limit = None
        super().resume_writing()


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def opened(address: Address, backlog: int) -> socket.socket:
    """A listening socket. Raises OSError."""
    host = number_of(address.host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and listens_everywhere(host):
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(socket.getaddrinfo(host, address.port, family, socket.SOCK_STREAM)[0][4])
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


def settings_of(app: Starlette, limits: HttpLimits, backlog: int) -> uvicorn.Config:
    """How uvicorn serves an application within these limits."""
    # Bad requests must not fill the log; our own bugs have to be in it.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    return uvicorn.Config(
        app,
        http=type("ApiProtocol", (_Protocol,), {"limits": limits}),
        ws="none",
        lifespan="on",
        loop="asyncio",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=limits.idle_seconds,
        timeout_graceful_shutdown=GRACE_S,
        h11_max_incomplete_event_size=limits.header,
        backlog=backlog,
    )


class CalmServer(uvicorn.Server):
    """One that is told when it is to end; uvicorn's looks ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ending = asyncio.Event()
        self.loop: asyncio.AbstractEventLoop | None = None
        """The one in which it runs."""

    async def main_loop(self) -> None:
        self.loop = asyncio.get_running_loop()
        while not await self.on_tick(0):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ending.wait(), TICK_S)

    def end(self) -> None:
        """Have it end; any thread, and a signal handler, may call this."""
        self.should_exit = True
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self._ending.set)


class ApiServer(CalmServer):
    """Ends every open answer with an error when a signal ends the process."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self.beat: Callable[[], None] = lambda: None
        """Called at least every TICK_S while the loop turns."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """As in uvicorn, without raising the signal again: this process has its own exit code."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {one: signal.signal(one, self.handle_exit) for one in ENDING}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)

    async def on_tick(self, counter: int) -> bool:
        self.beat()
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        turns, loop = self._service.turns, self.loop
        if turns is None or loop is None or turns.closing:
            self._finish(sig, frame)
        else:
            why = f"stopped by {signal.Signals(sig).name}"
            # Never as a second Ctrl-C, for which uvicorn drops all without another word.
            then = partial(self._finish, signal.SIGTERM, frame)
            loop.call_soon_threadsafe(turns.close, why, then)

    def _finish(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self.loop.call_later, LAST_S, self._service.end)
        self.end()
