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

from edgespec.errors import ConfigError
from edgespec.runtime.async_client import AsyncClient
from edgespec.serving.app import Service, application
from edgespec.serving.events import routes
from edgespec.serving.guard import FORWARDED, Door
from edgespec.wire.client_messages import NodeStatus, Status

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
FREE = Door(frozenset({PORT}))


def refuse(key: str) -> bool:
    """There is no key."""
    return False


class Ask:
    """How to ask the API at that port without a network."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        accepts: Callable[[str], bool],
        door: Door,
        exchanged: Callable[[str], str | None] = lambda key: None,
    ) -> None:
        client = cast(AsyncClient, Client())
        self._app = application(Service(client), accepts, door, routes(client, exchanged))
        self._loop = loop

    def __call__(self, path: str, host: bytes, key: str = "", **headers: str) -> int:
        """The status of a GET of that path, with that Host header and that key."""
        return int(self.told("GET", path, host, key, **headers)["status"])

    def told(
        self, method: str, path: str, host: bytes = b"localhost", key: str = "", **more: str
    ) -> dict[str, str]:
        """The headers of an answer, and its status; of a header's name `_` stands for `-`."""
        headers = [(b"host", host)]
        headers += [(name.replace("_", "-").encode(), text.encode()) for name, text in more.items()]
        if key:
            headers.append((b"authorization", b"Bearer " + key.encode()))
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": quote(path).encode(),
            "root_path": "",
            "query_string": b"",
            "headers": headers,
            "server": ("192.168.1.5", PORT),
            "client": ("192.168.1.6", 40000),
        }
        told: dict[str, str] = {}

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                assert not told
                told["status"] = str(message["status"])
                told.update({name.decode(): value.decode() for name, value in message["headers"]})

        self._loop.run_until_complete(self._app(scope, receive, send))
        return told


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.fixture(scope="module")
def ask(loop: asyncio.AbstractEventLoop) -> Ask:
    """Of an API that has one key."""
    return Ask(loop, KEY.__eq__, Door())


@pytest.fixture(scope="module")
def ask_freely(loop: asyncio.AbstractEventLoop) -> Ask:
    """Of one that needs none."""
    return Ask(loop, refuse, FREE)


@examples(600)
@given(path=PATHS, host=HOSTS)
@example(path="/v1/models", host=b"a/static/")
@example(path="/v1/models", host=b"a/healthz?")
@example(path="/nothing", host=b"[")
@example(path="/events\n", host=b"[")
def test_no_host_opens_a_path_that_needs_a_key(ask: Ask, path: str, host: bytes) -> None:
    routed = path.rstrip("/") or "/"
    is_open = routed in OPEN or routed.startswith("/static/")
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
    beside = Ask(loop, accepts, FREE)
    assert beside("/v1/models", b"localhost") == 200
    assert beside("/v1/models", b"board.local") == 403
    other = Door(frozenset({PORT + 1}))
    assert Ask(loop, accepts, other)("/v1/models", b"localhost") == 401


@pytest.mark.parametrize("header", FORWARDED)
def test_what_a_proxy_passes_on_needs_a_key_on_loopback_too(
    loop: asyncio.AbstractEventLoop, header: str
) -> None:
    said = {header.replace("-", "_"): "192.168.1.7"}
    asked = Ask(loop, KEY.__eq__, FREE)
    assert asked("/v1/models", b"localhost", **said) == 401
    assert asked("/v1/models", b"localhost", "another", **said) == 401
    assert asked("/v1/models", b"llm.example", KEY, **said) == 200
    assert asked("/healthz", b"llm.example", **said) == 200
    assert Ask(loop, refuse, FREE)("/v1/models", b"localhost", **said) == 401


def test_names_are_those_that_are_given(loop: asyncio.AbstractEventLoop) -> None:
    named = Door(FREE.open_ports, names=frozenset({"board.local"}))
    free = Ask(loop, refuse, named)
    assert free("/v1/models", b"Board.local:8000") == 200
    assert free("/v1/models", b"192.168.1.5") == 403
    assert free("/v1/models", b"evil.example") == 403
    keyed = Ask(loop, KEY.__eq__, Door(names=frozenset({"board.local"})))
    assert keyed("/v1/models", b"board.local") == 401
    for host in (b"board.local", b"192.168.1.5:8000", b"[fe80::1]:8000", b"localhost"):
        assert keyed("/v1/models", host, KEY) == 200
    assert keyed("/v1/models", b"evil.example", KEY) == 403


def test_a_slash_at_the_end_leads_to_the_same_place(ask: Ask, ask_freely: Ask) -> None:
    for path in ("/v1/models", "/v1/models/m", "/health", "/readyz"):
        assert ask_freely(f"{path}/", b"localhost") == 200
    assert ask("/v1/models/", b"localhost") == 401
    assert ask("/health/", b"localhost") == 200


def test_pages_of_sites_that_are_named_may_ask_and_no_others(
    loop: asyncio.AbstractEventLoop,
) -> None:
    site = "https://chat.example"
    origins = frozenset({site})
    free = Ask(loop, refuse, Door(FREE.open_ports, origins))
    keyed = Ask(loop, KEY.__eq__, Door(origins=origins))
    asked = {"access_control_request_method": "POST"}
    headers = {"access_control_request_headers": "authorization, content-type, x-stainless-os"}
    for door in (free, keyed):
        told = door.told("OPTIONS", "/v1/chat/completions", origin=site, **asked, **headers)
        assert told["status"] == "200"
        assert told["access-control-allow-origin"] == site
        assert "x-stainless-os" in told["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in told
        other = door.told("OPTIONS", "/v1/models", origin="https://evil.example", **asked)
        assert "access-control-allow-origin" not in other
    assert free("/v1/models", b"localhost", origin=site, sec_fetch_site="cross-site") == 200
    assert free("/v1/models", b"localhost", origin="https://evil.example") == 403
    refused = keyed.told("GET", "/v1/models", origin=site)
    assert (refused["status"], refused["access-control-allow-origin"]) == ("401", site)
    assert keyed("/v1/models", b"localhost", KEY, origin=site) == 200
    plain = Ask(loop, KEY.__eq__, Door()).told("OPTIONS", "/v1/models", origin=site, **asked)
    assert plain["status"] == "401"
    assert "access-control-allow-origin" not in plain


def test_keys_that_cannot_be_read_are_said_once_and_let_nobody_in(
    loop: asyncio.AbstractEventLoop, caplog: pytest.LogCaptureFixture
) -> None:
    def accepts(key: str) -> bool:
        raise ConfigError("/state/api-keys.json is damaged; put a copy of it back")

    ask = Ask(loop, accepts, Door())
    for _ in range(3):
        assert ask("/v1/models", b"board", KEY) == 503
    assert ask("/healthz", b"board") == 200
    assert [record.message for record in caplog.records] == [
        "no API key is accepted: /state/api-keys.json is damaged; put a copy of it back"
    ]


def test_a_key_that_cannot_be_exchanged_is_no_bug(loop: asyncio.AbstractEventLoop) -> None:
    def exchanged(key: str) -> str | None:
        raise ConfigError("another edgespec is changing the folder")

    ask = Ask(loop, refuse, Door(), exchanged)
    assert ask.told("POST", "/key")["status"] == "503"
