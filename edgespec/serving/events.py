"""Events: the page's files, and the one stream from which it learns what the ring does.

However many pages are open, there is one subscription at the coordinator; and none without pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from importlib.resources import files
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from edgespec.errors import EdgespecError, PeerLost
from edgespec.runtime.async_client import AsyncClient
from edgespec.serving.guard import KEYS_UNUSABLE, key_of
from edgespec.serving.problems import ApiProblem
from edgespec.types.record import as_dict
from edgespec.wire.snapshots import MOST_CHOSEN, Snapshot

STATUS_S = 1.0
"""Seconds between two status events."""

WATCH_S = 10.0
"""Seconds of one subscription; it is renewed at half time."""

MOST_VIEWERS = 64

MOST_UNREAD = 8
"""Events that are kept for a slow viewer; older ones are dropped."""

MOST_DIGITS = 15
"""Of a request's number."""

TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "mjs": "text/javascript",
    "svg": "image/svg+xml",
    "webmanifest": "application/manifest+json",
}

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # revalidate each time: the answer is mostly 304
}
"""Of the page: nothing from other sites, no inline script or style, and no text made into HTML."""


log = logging.getLogger(__name__)


class Viewer:
    """One open page. `request`: the number of the request that it shows; 0: the oldest."""

    def __init__(self, request: int = 0) -> None:
        self.request = request
        self._unread: list[bytes] = []
        self._news = asyncio.Event()

    def put(self, event: bytes) -> None:
        """Queue an event."""
        self._unread = [*self._unread[1 - MOST_UNREAD :], event]
        self._news.set()

    async def take(self) -> bytes:
        """Wait for events; returns all that are queued."""
        await self._news.wait()
        self._news.clear()
        unread, self._unread = self._unread, []
        return b"".join(unread)


class _Stream(StreamingResponse):
    """A viewer's response. It calls `left` at its end, also if that comes before any event."""

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
    """Watches the ring for all viewers."""

    def __init__(self, client: AsyncClient, absence: Callable[[], str] = lambda: "") -> None:
        """`absence()`: why there is no ring now, if that is as it should be; else ""."""
        self._client, self._absence = client, absence
        self._viewers: set[Viewer] = set()
        self._work: asyncio.Task[None] | None = None

    async def events(self, request: Request) -> Response:
        """The stream: a status each second, snapshots while a request runs: of the oldest one, and
        of the one with the number that the query gives as `request`."""
        if len(self._viewers) >= MOST_VIEWERS:
            words = f"{MOST_VIEWERS} pages are open already; close one of them"
            raise ApiProblem(503, words, code="too_many_viewers")
        viewer = Viewer(_chosen(request.query_params.get("request", "0")))
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
        """Runs while there are viewers."""
        try:
            renew, asked = 0.0, self._chosen
            while True:
                started = time.monotonic()
                try:
                    if why := self._absence():
                        raise PeerLost(why)
                    status = as_dict(await self._client.status())
                    self._tell("status", {**status, "reachable": True, "lines": None})
                    if started >= renew or asked != self._chosen:
                        asked = self._chosen
                        self._client.subscribe(WATCH_S, self._on_scene, asked)
                        renew = started + WATCH_S / 2
                except EdgespecError as problem:
                    self._tell("status", {"reachable": False, "text": str(problem)})
                    renew = 0.0  # a restarted coordinator has lost the subscription
                await asyncio.sleep(max(started + STATUS_S - time.monotonic(), 0.1))
        finally:
            with contextlib.suppress(EdgespecError):
                self._client.subscribe(0.0, self._on_scene)

    @property
    def _chosen(self) -> tuple[int, ...]:
        """The requests that viewers have chosen."""
        chosen = {viewer.request for viewer in self._viewers if viewer.request}
        return tuple(sorted(chosen))[-MOST_CHOSEN:]

    def _on_scene(self, scene: Snapshot) -> None:
        oldest = scene.place == 0
        to = [one for one in self._viewers if oldest or one.request == scene.request]
        self._tell("scene", _scene(scene), to)

    def _tell(self, name: str, value: dict[str, Any], to: Iterable[Viewer] | None = None) -> None:
        """Queue an event for these viewers, by default all."""
        data = json.dumps(value, allow_nan=False, separators=(",", ":"))
        event = f"event: {name}\ndata: {data}\n\n".encode()
        for viewer in self._viewers if to is None else to:
            viewer.put(event)


def _chosen(text: str) -> int:
    """The number of a request. Raises ApiProblem if it is none."""
    if not text.isascii() or not text.isdigit() or len(text) > MOST_DIGITS:
        raise ApiProblem(400, "request is no number of a request", param="request")
    return int(text)


def _scene(scene: Snapshot) -> dict[str, Any]:
    """With lists of field values in place of objects: half the size."""
    return {
        "state": scene.state,
        "request": scene.request,
        "place": scene.place,
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
    """The page's files, in memory, so that no path leads to another file."""

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
        """One of its files. Raises ApiProblem if there is no such file."""
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


def routes(
    client: AsyncClient,
    exchanged: Callable[[str], str | None] = lambda key: None,
    absence: Callable[[], str] = lambda: "",
) -> list[Route]:
    """`/`, its files, `/key` and `/events`; the application keeps the client connected.

    `exchanged`: the key that a device keeps in place of one for one use, None if that is none.
    `absence`: see Theatre.
    """
    pages, theatre = Files(), Theatre(client, absence)

    def key(request: Request) -> Response:  # not async: it writes a file
        try:
            kept = exchanged(key_of(request))
        except EdgespecError as problem:
            log.warning("a key for one use cannot be exchanged: %s", problem)
            raise ApiProblem(503, KEYS_UNUSABLE, code="keys_unusable") from None
        if kept is None:
            words = "this link was used before, or is too old; `edgespec key new` makes another"
            raise ApiProblem(401, words, code="invalid_api_key")
        return JSONResponse({"key": kept}, headers={"cache-control": "no-store"})

    return [
        Route("/key", key, methods=["POST"]),
        Route("/", pages.page, methods=["GET"]),
        Route("/static/{name}", pages.file, methods=["GET"]),
        Route("/events", theatre.events, methods=["GET"]),
    ]
