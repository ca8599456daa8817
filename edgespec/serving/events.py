"""Events: the page's files, and the one stream from which it learns what the ring does.

However many look at the page, the coordinator is watched once; and not at all if nobody does.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict
from importlib.resources import files
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from edgespec.errors import EdgespecError
from edgespec.serving.problems import SERVER, ApiProblem
from edgespec.wire.client_messages import Status
from edgespec.wire.snapshots import Snapshot

STATUS_S = 1.0
"""Seconds between two looks at the ring."""

WATCH_S = 10.0
"""Seconds that a watch is asked for; it is renewed when half of them are over."""

MOST_VIEWERS = 64

MOST_UNREAD = 8
"""Events that are kept for a viewer that is slow; then the older ones are left out."""

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # ask each time: the answer is mostly 304
}
"""Of the page: nothing from elsewhere, and no script or style that stands in the page itself."""


class Watched(Protocol):
    """A client of the coordinator, as far as the page needs it."""

    async def status(self, age: float = 0.0) -> Status:
        """The ring. Raises EdgespecError if the coordinator cannot be asked."""

    def watch(self, seconds: float, see: Callable[[Snapshot], None]) -> None:
        """Have scenes shown to `see` for so many seconds; 0: none any more.

        Raises EdgespecError if the coordinator cannot be asked.
        """


class Viewer:
    """One open page."""

    def __init__(self) -> None:
        self._unread: list[bytes] = []
        self._news = asyncio.Event()

    def put(self, event: bytes) -> None:
        """One more event for it."""
        self._unread = [*self._unread[1 - MOST_UNREAD :], event]
        self._news.set()

    async def take(self) -> bytes:
        """All that it has not seen, once there is something."""
        await self._news.wait()
        self._news.clear()
        unread, self._unread = self._unread, []
        return b"".join(unread)


class _Stream(StreamingResponse):
    """What a viewer is sent; `left` is told of its end, also of one that comes before the first
    event."""

    def __init__(self, viewer: Viewer, left: Callable[[Viewer], None]) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(self._view(), media_type="text/event-stream", headers=headers)
        self._viewer, self._left = viewer, left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._left(self._viewer)

    async def _view(self) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield await self._viewer.take()
        finally:
            self._left(self._viewer)


class Theatre:
    """Watches the ring on behalf of all viewers."""

    def __init__(self, client: Watched) -> None:
        self._client = client
        self._viewers: set[Viewer] = set()
        self._work: asyncio.Task[None] | None = None

    async def events(self, request: Request) -> Response:
        """The stream: status once a second, scenes while a request runs."""
        if len(self._viewers) >= MOST_VIEWERS:
            raise ApiProblem(
                503,
                f"{MOST_VIEWERS} pages are open already; close one of them",
                kind=SERVER,
                code="too_many_viewers",
            )
        viewer = Viewer()
        self._viewers.add(viewer)
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._watch())
        return _Stream(viewer, self._left)

    def _left(self, viewer: Viewer) -> None:
        self._viewers.discard(viewer)
        if not self._viewers and self._work is not None:
            self._work.cancel()
            self._work = None

    async def _watch(self) -> None:
        """As long as anybody looks."""
        try:
            renew = 0.0
            while True:
                started = time.monotonic()
                try:
                    self._tell("status", _status(await self._client.status()))
                    if started >= renew:
                        self._client.watch(WATCH_S, self._on_scene)
                        renew = started + WATCH_S / 2
                except EdgespecError as problem:
                    self._tell("status", {"reachable": False, "text": str(problem)})
                    renew = 0.0  # who is back knows nothing of it
                await asyncio.sleep(max(started + STATUS_S - time.monotonic(), 0.1))
        finally:
            with contextlib.suppress(EdgespecError):
                self._client.watch(0.0, self._on_scene)

    def _on_scene(self, scene: Snapshot) -> None:
        self._tell("scene", _scene(scene))

    def _tell(self, name: str, value: dict[str, Any]) -> None:
        data = json.dumps(value, allow_nan=False, separators=(",", ":"))
        event = f"event: {name}\ndata: {data}\n\n".encode()
        for viewer in self._viewers:
            viewer.put(event)


def _status(status: Status) -> dict[str, Any]:
    return {**asdict(status), "reachable": True, "lines": None}


def _scene(scene: Snapshot) -> dict[str, Any]:
    """Its parts as lists of lists, in the order of their fields: half as long as with names."""
    return {
        "state": scene.state,
        "request": scene.request,
        "policy": scene.policy,
        "tokens": scene.tokens,
        "trips": scene.trips,
        "root": scene.root,
        "nodes": [
            [n.id, n.parent, n.text, n.state, round(n.probability, 4), n.source, n.sent]
            for n in scene.nodes
        ],
        "segments": [[s.seq, s.rows, s.dead] for s in scene.segments],
        "runs": [
            [r.stage, r.request, r.seq, round(r.ago, 4), round(r.seconds, 4), r.rows, r.wasted]
            for r in scene.runs
        ],
    }


class Files:
    """The page's files, in memory: there is no path that could lead anywhere else."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[bytes, str, str]] = {}
        for file in files("edgespec.serving").joinpath("static").iterdir():
            kind = TYPES.get(file.name.rpartition(".")[2])
            if kind is not None:
                body = file.read_bytes()
                tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
                self._files[file.name] = body, f"{kind}; charset=utf-8", tag

    async def page(self, request: Request) -> Response:
        """The page itself."""
        return self._answer("index.html", request)

    async def file(self, request: Request) -> Response:
        """What it is made of. Raises ApiProblem if there is no such file."""
        name = request.path_params["name"]
        if name not in self._files:
            raise ApiProblem(404, "the page has no such file", code="unknown_url")
        return self._answer(name, request)

    def _answer(self, name: str, request: Request) -> Response:
        body, kind, tag = self._files[name]
        headers = {**HEADERS, "etag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(body, headers={**headers, "content-type": kind})


def routes(client: Watched) -> list[Route]:
    """`/`, its files and `/events`, for an application that keeps the client connected."""
    pages, theatre = Files(), Theatre(client)
    return [
        Route("/", pages.page, methods=["GET"]),
        Route("/static/{name}", pages.file, methods=["GET"]),
        Route("/events", theatre.events, methods=["GET"]),
    ]
