"""The HTTP API in a thread of the test's own process, over whichever coordinator a test has."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from support.nodes import PATIENCE_S, QUICK, until

from edgespec.config import Address, Timing
from edgespec.daemon.api import listening, server_of
from edgespec.net.keys import Identity
from edgespec.runtime.async_client import AsyncClient
from edgespec.serving.app import Service
from edgespec.serving.guard import Door
from edgespec.serving.limits import HttpLimits
from edgespec.serving.turns import ModelTurns

HOST = "127.0.0.1"


@contextmanager
def api(
    coordinator: Address,
    identity: Identity,
    *,
    limits: HttpLimits | None = None,
    aliases: frozenset[str] = frozenset(),
    accepts: Callable[[str], bool] | None = None,
    door: Door | None = None,
    exchanged: Callable[[str], str | None] = lambda key: None,
    timing: Timing | None = None,
    wait: float = 2.0,
    turns: ModelTurns | None = None,
) -> Iterator[str]:
    """Serve it, and give its base URL when it has reached the coordinator. `accepts`: keys; None:
    none is needed, but where a `door` says so. `turns`: see Service."""
    listener = listening(Address(HOST, 0))
    door = door or Door()
    if accepts is None:
        door = replace(door, open_ports={listener.getsockname()[1]})
    client = AsyncClient(coordinator, identity, wait, timing or QUICK)
    service = Service(client, limits, aliases, turns)
    server = server_of(service, accepts or (lambda key: False), door, exchanged)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        until(lambda: server.started and client.problem is None)
        yield f"http://{HOST}:{listener.getsockname()[1]}"
    finally:
        server.handle_exit(15, None)
        thread.join(PATIENCE_S)
        listener.close()
        assert not thread.is_alive(), "the API did not end"


def spoken(url: str, said: bytes, seconds: float = PATIENCE_S) -> bytes:
    """All that comes back when these bytes are sent to the API, until it closes."""
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), seconds) as connection:
        connection.sendall(said)
        return heard(connection, seconds)


def leave_when(url: str, body: Any, condition: Callable[[], object]) -> None:
    """Ask, and hang up without a word as soon as the condition holds."""
    host, _, rest = url.removeprefix("http://").partition(":")
    port, _, path = rest.partition("/")
    sent = json.dumps(body).encode()
    head = f"POST /{path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    with socket.create_connection((host, int(port)), PATIENCE_S) as connection:
        connection.sendall(f"{head}content-length: {len(sent)}\r\n\r\n".encode() + sent)
        until(condition)


def heard(connection: socket.socket, seconds: float = PATIENCE_S) -> bytes:
    """All that comes until the other side closes."""
    connection.settimeout(seconds)
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)
