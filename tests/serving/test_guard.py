"""The guard: whatever a client says of the host that it means, no key is none."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from typing import Any, cast
from urllib.parse import quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.tiers import examples

from edgespec.runtime.async_client import AsyncClient
from edgespec.serving.app import Service, application
from edgespec.serving.events import routes
from edgespec.wire.client_messages import NodeStatus, Status

Ask = Callable[[str, bytes, str], int]
"""The status of a GET of that path, with that Host header and that key."""

KEY = "a key"
OPEN = ("/", "/healthz", "/readyz", "/openapi.json", "/static/page.js")
GUARDED = ("/v1/models", "/v1/models/m", "/metrics", "/events", "/v1/embeddings", "/nothing")

PIECES = ("a", "::1", "[", "]", ":", "1", "@", "?", "#", "/", "\\", "%", " ", ".", "\t", "é")
HOSTS = st.one_of(
    st.binary(max_size=20),
    st.lists(st.sampled_from([*PIECES, "localhost", "127.0.0.1", *OPEN]), max_size=6).map(
        lambda parts: "".join(parts).encode("latin-1")
    ),
)
LOOPBACK = re.compile(rb"(localhost|\[?127\.0\.0\.1\]?|\[::1\])(:[0-9]*)?")
PATHS = st.one_of(
    st.sampled_from([*OPEN, *GUARDED]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20).map("/{}".format),
    st.lists(st.sampled_from([*PIECES, *OPEN, *GUARDED, "\n"]), max_size=4).map("".join),
)


class Client:
    """A coordinator's client that can always tell how the ring is."""

    async def status(self, age: float = 0.0) -> Status:
        return Status(True, (), (NodeStatus(1, 0, 4, state="ready"),), 1, model="m")


PORT = 8000


def asking(
    loop: asyncio.AbstractEventLoop,
    accepts: Callable[[str], bool] | None,
    open_ports: frozenset[int] = frozenset(),
) -> Ask:
    """How to ask the API at that port without a network."""
    client = cast(AsyncClient, Client())
    app = application(Service(client), accepts, routes(client), open_ports)

    def ask(path: str, host: bytes, key: str = "") -> int:
        headers = [(b"host", host)]
        if key:
            headers.append((b"authorization", b"Bearer " + key.encode()))
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": path,
            "raw_path": quote(path).encode(),
            "root_path": "",
            "query_string": b"",
            "headers": headers,
            "server": ("192.168.1.5", PORT),
            "client": ("192.168.1.6", 40000),
        }
        statuses: list[int] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        loop.run_until_complete(app(scope, receive, send))
        (status,) = statuses
        return status

    return ask


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.fixture(scope="module")
def ask(loop: asyncio.AbstractEventLoop) -> Ask:
    """Of an API that has one key."""
    return asking(loop, KEY.__eq__)


@pytest.fixture(scope="module")
def ask_freely(loop: asyncio.AbstractEventLoop) -> Ask:
    """Of one that needs none."""
    return asking(loop, None)


@examples(600)
@given(path=PATHS, host=HOSTS)
@example(path="/v1/models", host=b"a/static/")
@example(path="/v1/models", host=b"a/healthz?")
@example(path="/nothing", host=b"[")
@example(path="/events\n", host=b"[")
def test_no_host_opens_a_path_that_needs_a_key(ask: Ask, path: str, host: bytes) -> None:
    is_open = path in OPEN or path.startswith("/static/")
    for key in ("", "another"):
        status = ask(path, host, key)
        assert (status == 401) == (not is_open)
        assert status < 500
    if path.strip() != "/events":  # which does not end; a route takes a line's end behind it, too
        assert ask(path, host, KEY) in (200, 404, 405)


@examples(600)
@given(path=PATHS, host=HOSTS)
def test_without_keys_only_the_loopback_is_asked(ask_freely: Ask, path: str, host: bytes) -> None:
    status = ask_freely("/" if path.strip() == "/events" else path, host, "")
    assert status in (200, 403, 404, 405)
    assert status == 403 or LOOPBACK.fullmatch(host.lower())


def test_a_port_of_loopback_needs_no_key_beside_one_that_does(
    loop: asyncio.AbstractEventLoop,
) -> None:
    """But a host and an origin as ever."""
    accepts = KEY.__eq__
    beside = asking(loop, accepts, frozenset({PORT}))
    assert beside("/v1/models", b"localhost") == 200
    assert beside("/v1/models", b"board.local") == 403
    assert asking(loop, accepts, frozenset({PORT + 1}))("/v1/models", b"localhost") == 401
