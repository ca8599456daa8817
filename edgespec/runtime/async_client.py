"""AsyncClient: many requests at once over one connection to a coordinator, for asyncio programs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar, cast

import zmq
import zmq.asyncio
from msgspec.structs import replace

from edgespec.config import Address, Timing
from edgespec.errors import (
    EdgespecError,
    OtherVersion,
    PeerLost,
    ProtocolError,
    RemoteProtocolError,
    RequestFailed,
)
from edgespec.net.control import Handshakes, check_version, never_answered, set_up
from edgespec.net.keys import Identity
from edgespec.net.sockets import Dropped, connect, only
from edgespec.net.zmq_transport import LINGER_MS
from edgespec.runtime.client import Answer, CoordinatorWatch, answer_of
from edgespec.wire.client_messages import (
    Cancel,
    Echoed,
    Failed,
    Finished,
    Progress,
    Status,
    StatusRequest,
    Submit,
    Tokens,
)
from edgespec.wire.codec import decode, encode
from edgespec.wire.messages import Heartbeat, Message
from edgespec.wire.snapshots import Snapshot, Subscribe

log = logging.getLogger(__name__)

REOPEN_S = 2.0
"""Seconds until a coordinator that refused is asked again: ZeroMQ itself would not."""

MOST_UNREAD = 4096
"""Messages of one answer that are kept for a slow reader; then the answer is cut off."""

_Socket = zmq.asyncio.Socket
Told = TypeVar("Told")


class AsyncClient(CoordinatorWatch):
    """One connection to a coordinator, made again whenever it breaks. Use with `async with`.

    A question without a connection waits for one, `wait` seconds at most. A request ends with its
    connection, by which the coordinator knows its clients. If a silent coordinator is given up
    while the connection stands, its requests are cancelled: it may only have hung for a while.
    """

    def __init__(
        self, coordinator: Address, identity: Identity, wait: float, timing: Timing | None = None
    ) -> None:
        super().__init__(coordinator, wait, timing)
        self._identity = identity
        self._context = zmq.asyncio.Context()
        self._socket: _Socket | None = None
        self._life: asyncio.Task[None] | None = None
        self._heard = self._known = 0.0
        self._connected = asyncio.Event()
        self._problem: EdgespecError = PeerLost(
            f"no coordinator has answered at {coordinator} yet; is `edgespec serve` running there, "
            "and has it finished loading?"
        )
        self._tag = 0
        self._requests: dict[int, _Inbox] = {}
        self._status: asyncio.Future[Status] | None = None
        self._newest: tuple[float, Status] | None = None
        self._is_over = False
        self._on_snapshot: Callable[[Snapshot], None] | None = None
        self._dropped = Dropped()
        self._told = ""  # to the log

    async def __aenter__(self) -> AsyncClient:
        self._life = asyncio.create_task(self._stay_connected())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._life is not None:
            self._life.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._life
        self.end(PeerLost("this program is ending"))
        self._context.destroy(linger=LINGER_MS)

    def end(self, problem: EdgespecError) -> None:
        """End all requests with that problem, and take no more."""
        self._is_over = True
        self._lose(problem)

    @property
    def problem(self) -> EdgespecError | None:
        """Why the coordinator cannot be asked now; None if it can."""
        return None if self._connected.is_set() else self._problem

    async def ask(self, submit: Submit) -> AsyncGenerator[Answer, None]:
        """Submit a request, under a tag of this client, and yield what comes, Finished last.

        Closing the generator cancels the request. Raises RequestFailed with the coordinator's
        reason, PeerLost or AccessRefused if it cannot be asked or is lost.
        """
        self._tag += 1
        submit = replace(submit, tag=self._tag)
        try:
            frame = encode(submit)
        except ProtocolError as problem:  # the coordinator would drop it
            raise RequestFailed(f"the request cannot be sent: {problem}", "invalid") from None
        await self._connection()
        inbox = self._requests[submit.tag] = _Inbox()
        try:
            self._send_frame(frame)
            self._known = self._time.now()
            while not inbox.is_over:
                yield await inbox.take()
        finally:
            del self._requests[submit.tag]
            if not inbox.is_over:
                with contextlib.suppress(EdgespecError):
                    self._send(Cancel(submit.tag))

    async def status(self, age: float = 0.0) -> Status:
        """The ring as the coordinator sees it, or saw it at most `age` seconds ago.

        Raises PeerLost or AccessRefused if it cannot be asked.
        """
        if self._newest and self._connected.is_set() and self._time.now() - self._newest[0] <= age:
            return self._newest[1]
        await self._connection()
        if self._status is None:
            self._status = asyncio.get_running_loop().create_future()
            self._send(StatusRequest())
        # Several may wait for the same answer: one that gives up must not cancel it. What ends the
        # wait for a silent coordinator is `_beat`.
        return await asyncio.shield(self._status)

    def subscribe(
        self,
        seconds: float,
        on_snapshot: Callable[[Snapshot], None],
        requests: tuple[int, ...] = (),
    ) -> None:
        """Pass snapshots of the oldest running request, and of those with these numbers, to
        `on_snapshot` for so many seconds; 0: stop.

        Raises PeerLost if there is no connection.
        """
        self._on_snapshot = on_snapshot if seconds > 0 else None
        self._send(Subscribe(seconds, requests))

    async def _connection(self) -> None:
        """Wait for a connection. Raises why there is none."""
        # Not wait_for: before Python 3.12 it loses a cancellation that comes with the connection.
        connected = asyncio.ensure_future(self._connected.wait())
        try:
            done, _ = await asyncio.wait({connected}, timeout=self._wait)
        finally:
            connected.cancel()
        if not done:
            raise _again(self._problem)

    # --- the connection -----------------------------------------------------------------------

    async def _stay_connected(self) -> None:
        while True:
            try:
                await self._talk()
            except EdgespecError as problem:
                if isinstance(problem, OtherVersion) and str(problem) != self._told:
                    self._told = str(problem)
                    log.warning("%s", problem)
                self._lose(problem)
            except zmq.ZMQError as problem:  # this process can have no more sockets
                self._lose(PeerLost(f"no connection to the coordinator ({problem.strerror})"))
            await asyncio.sleep(REOPEN_S)

    async def _talk(self) -> None:
        """Use one connection until it fails, which raises the reason."""
        opened = self._context.socket(zmq.DEALER)
        monitor = None
        try:
            lost_ms = round(2000 * self._silence)
            set_up(_as_plain(opened), self._identity, lost_ms)
            # A request that was given up must not be delivered to the next coordinator.
            opened.setsockopt(zmq.IMMEDIATE, 1)
            monitor = opened.get_monitor_socket(Handshakes.EVENTS)
            connect(_as_plain(opened), self._coordinator)
            self._socket = opened
            await _first_to_fail(self._listen(opened), self._follow(monitor), self._beat())
        finally:
            self._socket = None
            if monitor is not None:
                opened.disable_monitor()
                monitor.close(linger=0)
            opened.close(linger=LINGER_MS)

    async def _listen(self, opened: _Socket) -> None:
        while True:
            frames: list[bytes] = await opened.recv_multipart()
            check_version(frames[0], self._coordinator)
            try:
                self._take(decode(only(frames)))
            except RemoteProtocolError as problem:
                self._dropped.note(str(problem))

    async def _follow(self, monitor: _Socket) -> None:
        handshakes = Handshakes(self._coordinator)
        while True:
            event = handshakes.take(await monitor.recv_multipart())
            handshakes.check()
            if event == zmq.EVENT_DISCONNECTED:
                self._lose(self._broken())
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                if isinstance(self._problem, PeerLost) and not self._connected.is_set():
                    self._problem = never_answered(self._coordinator, self._wait, is_let_in=True)
                with contextlib.suppress(PeerLost):
                    self._send(StatusRequest())  # its answer shows that the coordinator is there

    async def _beat(self) -> None:
        """Send heartbeats while a request runs, and notice a coordinator that falls silent."""
        every = self._timing.answer_silence / 4
        asked = float("-inf")
        while True:
            now = self._time.now()
            with contextlib.suppress(PeerLost):
                if self._requests:
                    self._send(Heartbeat())
                if now - asked >= every or not self._requests:
                    asked = now
                    self._send(StatusRequest())  # answered in any case
            pause = (self._timing if self._requests else self._timing.resting).beat
            await asyncio.sleep(pause)
            now = self._time.turned(pause)
            # The coordinator answers heartbeats only of clients whose requests it has.
            heard = self._known if self._requests else self._heard
            silent = now - heard
            if self._connected.is_set() and silent > self._silence:
                for tag in self._requests:  # also those whose reader hangs
                    with contextlib.suppress(EdgespecError):
                        self._send(Cancel(tag))  # comes after its Submit, however late both come
                self._lose(self._silent_for(silent))

    def _send(self, message: Message) -> None:
        """Raises PeerLost if there is no connection, or it takes no more."""
        self._send_frame(encode(message))

    def _send_frame(self, frame: bytes) -> None:
        if self._socket is None:
            raise _again(self._problem)
        sent = asyncio.ensure_future(self._socket.send(frame, flags=zmq.NOBLOCK))
        if sent.exception() is not None:  # it is done at once, for good or not
            raise PeerLost(f"the coordinator at {self._coordinator} takes no messages")

    def _take(self, message: Message) -> None:
        self._heed(message)
        self._heard = now = self._time.now()
        if not isinstance(message, Status):
            self._known = now
        if not self._is_over:
            self._connected.set()
        match message:
            case Status():
                self._newest = now, message
                if self._status is not None and not self._status.done():
                    self._status.set_result(message)
                self._status = None
            case Snapshot() if self._on_snapshot is not None:
                self._on_snapshot(message)
            case Progress() | Echoed() | Tokens() | Finished() | Failed():
                if message.tag in self._requests:
                    self._requests[message.tag].put(message)

    def _lose(self, problem: EdgespecError) -> None:
        """End the connection, and all requests and questions with it."""
        self._problem = problem
        self._connected.clear()
        if self._status is not None and not self._status.done():
            self._status.set_exception(_again(problem))
            self._status.exception()  # mark it as read: all that waited may have given up
        self._status = None
        for inbox in self._requests.values():
            inbox.fail(_again(problem))


class _Inbox:
    """Messages of one request that have not been read."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[Answer | Failed | EdgespecError] = asyncio.Queue()
        self.is_over = self._is_whole = False  # its end was read, or has come

    def put(self, message: Answer | Failed) -> None:
        if self._messages.qsize() < MOST_UNREAD:
            self._messages.put_nowait(message)
            self._is_whole |= isinstance(message, Finished | Failed)
        else:
            self.fail(RequestFailed("the answer was not read as fast as it came", "slow"))

    def fail(self, problem: EdgespecError) -> None:
        """Replace all that was not read, but of an answer that is whole."""
        if self._is_whole:
            return
        while not self._messages.empty():
            self._messages.get_nowait()
        self._messages.put_nowait(problem)

    async def take(self) -> Answer:
        """Raises the request's bad end."""
        message = await self._messages.get()
        if isinstance(message, EdgespecError):
            raise message
        self.is_over = isinstance(message, Finished | Failed)
        return answer_of(message)


async def with_pauses(
    answer: AsyncGenerator[Told, None], seconds: float
) -> AsyncGenerator[Told | None, None]:
    """An answer, with None whenever nothing came for so many seconds. Closes it at the end."""
    coming: asyncio.Task[Told] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(anext(answer))
            done, _ = await asyncio.wait({coming}, timeout=seconds)
            if not done:
                yield None
                continue
            finished, coming = coming, None
            try:
                yield finished.result()
            except StopAsyncIteration:
                return
    finally:
        if coming is not None:
            coming.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await coming
        await answer.aclose()


async def _first_to_fail(*works: Coroutine[Any, Any, None]) -> None:
    """Run them together, end all with the first one that ends, and raise what it raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for problem in ended:
        if isinstance(problem, Exception):
            raise problem


def _as_plain(opened: _Socket) -> zmq.Socket[bytes]:
    """For set-up calls, which are the same for both kinds of socket."""
    return cast("zmq.Socket[bytes]", opened)


def _again(problem: EdgespecError) -> EdgespecError:
    """A copy: an exception that is raised twice gathers tracebacks."""
    return type(problem)(str(problem))
