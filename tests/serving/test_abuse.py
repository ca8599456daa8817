"""Clients that send too much, too slowly, or rubbish: clear refusals, and a stream goes on."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import httpx
import psutil
import pytest
from support.apis import api, heard, spoken
from support.nodes import PATIENCE_S, NodeRing, until
from support.rings import submit

from edgespec.runtime.access_policy import CLIENT
from edgespec.serving.limits import HttpLimits

MIB = 1 << 20
LIMITS = HttpLimits(
    body=MIB,
    header_seconds=PATIENCE_S,
    body_seconds=PATIENCE_S,
    connections=300,
    crowded_seconds=PATIENCE_S,
)
IMPATIENT = replace(LIMITS, header_seconds=1.0, body_seconds=1.0, idle_seconds=2, write_seconds=1.0)
HEAD = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"


@pytest.fixture(scope="module")
def ring() -> Iterator[NodeRing]:
    """A ring that is slow enough for a stream to last."""
    with NodeRing(2) as made:
        made.await_up()
        for block in made.blocks:
            block.delay = 0.01
        yield made


@pytest.fixture(scope="module")
def url(ring: NodeRing) -> Iterator[str]:
    """Its API, with narrow limits on sizes."""
    who = ring.keys.add("the API", CLIENT)
    with api(ring.address, who, limits=LIMITS) as base:
        yield base


@pytest.fixture(scope="module")
def impatient(ring: NodeRing) -> Iterator[str]:
    """Another one, which waits for nothing long."""
    who = ring.keys.add("the impatient API", CLIENT)
    with api(ring.address, who, limits=IMPATIENT) as base:
        yield base


@contextmanager
def undisturbed(ring: NodeRing, url: str) -> Iterator[None]:
    """A stream that runs meanwhile has the text that it should have."""
    asked = submit(prompt="meanwhile", max_new_tokens=60, policy="autoregressive")
    body = {
        "prompt": asked.prompt,
        "max_tokens": asked.max_new_tokens,
        "policy": asked.policy,
        "temperature": 0,
        "seed": 0,
        "stream": True,
    }
    told: list[str] = []
    begun = threading.Event()

    def read() -> None:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    told.append(json.loads(line[6:])["choices"][0]["text"])
                    begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(PATIENCE_S)
    yield
    reader.join(PATIENCE_S)
    assert not reader.is_alive()
    assert "".join(told) == ring.expected(asked).text


def memory() -> int:
    """Bytes that this process, in which the API runs, has resident."""
    return psutil.Process().memory_info().rss


def problem(reply: bytes) -> tuple[int, str]:
    """Status and code of a raw response."""
    head, _, body = reply.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


@pytest.mark.thorough
def test_a_body_of_100_megabytes_is_refused_before_it_is_read(ring: NodeRing, url: str) -> None:
    with undisturbed(ring, url):
        before = memory()
        # The client lives in this process too, and httpcore copies what is left of a whole body
        # after each send: pieces keep its memory out of what is measured.
        reply = httpx.post(
            f"{url}/v1/completions",
            content=itertools.repeat(bytes(MIB), 100),
            headers={"content-type": "application/json", "content-length": str(100 * MIB)},
            timeout=PATIENCE_S,
        )
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, "body_too_large")
        assert memory() - before < 30 * MIB


def test_a_body_without_a_length_is_refused_where_it_gets_too_long(
    ring: NodeRing, url: str
) -> None:
    chunk = b"x" * 65536

    def endless() -> Iterator[bytes]:
        for _ in range(100 * MIB // len(chunk)):
            yield chunk

    with undisturbed(ring, url):
        before = memory()
        reply = httpx.post(
            f"{url}/v1/completions",
            content=endless(),
            headers={"content-type": "application/json"},
            timeout=PATIENCE_S,
        )
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, "body_too_large")
        assert memory() - before < 30 * MIB


def test_curl_gets_the_refusal_of_a_long_body(url: str, tmp_path: os.PathLike[str]) -> None:
    file = os.path.join(tmp_path, "body")
    with open(file, "wb") as opened:
        opened.truncate(100 * MIB)
    done = subprocess.run(
        ["curl", "-s", "-w", "%{http_code}", "-H", "content-type: application/json",
         "--data-binary", f"@{file}", f"{url}/v1/completions"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.stdout.endswith("413"), done


@pytest.mark.parametrize(
    ("said", "status", "code"),
    [
        ("rubbish\r\n\r\n", 400, "invalid_http"),
        ("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, "invalid_http"),
        ("GET /" + "x" * 1_000_000 + " HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n", 400, "invalid_http"),
        (HEAD + "x: " + "y" * 1_000_000 + "\r\n\r\n", 400, "invalid_http"),
        (HEAD + "x: a\x00b\r\n\r\n", 400, "invalid_http"),
        (HEAD + "content-length: x\r\n\r\n", 400, "invalid_http"),
        (
            HEAD + "connection: close\r\ncontent-length: " + "9" * 18 + "\r\n\r\n",
            413,
            "body_too_large",
        ),
    ],
)
def test_rubbish_is_refused(url: str, said: str, status: int, code: str) -> None:
    told = spoken(url, said.encode("latin-1"))
    assert problem(told) == (status, code)


@pytest.mark.parametrize("said", [HEAD, "", HEAD + "content-length: 10\r\n\r\n{"])
def test_silence_is_refused(impatient: str, said: str) -> None:
    told = spoken(impatient, said.encode("latin-1"))
    assert problem(told) == (408, "request_timeout")


def test_random_bytes_never_make_the_api_fail(url: str) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    chance = random.Random(seed)
    good = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    with httpx.Client(base_url=url, headers={"content-type": "application/json"}) as http:
        for _ in range(60):
            body = bytearray(good)
            for _ in range(chance.randrange(1, 4)):
                body[chance.randrange(len(body))] = chance.randrange(256)
            reply = http.post("/v1/completions", content=bytes(body))
            assert reply.status_code in (200, 400, 404), (seed, bytes(body), reply.text)
        assert http.get("/healthz").status_code == 200


@pytest.mark.thorough
def test_two_hundred_slow_clients_disturb_nobody(ring: NodeRing, impatient: str) -> None:
    host, _, port = impatient.removeprefix("http://").partition(":")
    with undisturbed(ring, impatient), ExitStack() as stack:
        before = memory()
        slow = []
        for number in range(200):
            one = stack.enter_context(socket.create_connection((host, int(port)), PATIENCE_S))
            one.sendall((HEAD + "content-length: 1000\r\n\r\n{" if number % 2 else HEAD).encode())
            slow.append(one)
        assert httpx.get(f"{impatient}/healthz", timeout=PATIENCE_S).status_code == 200
        assert memory() - before < 60 * MIB
        for one in slow:  # each of them is told, and let go
            assert problem(heard(one))[0] == 408


def test_too_many_connections_are_refused_and_the_rest_goes_on(ring: NodeRing, url: str) -> None:
    host, _, port = url.removeprefix("http://").partition(":")
    with ExitStack() as stack:
        many = [
            stack.enter_context(socket.create_connection((host, int(port)), PATIENCE_S))
            for _ in range(LIMITS.connections + 20)
        ]
        last = many[LIMITS.connections - 10 :]
        until(lambda: len(select.select(last, [], [], 0.0)[0]) >= 10)
        for one in select.select(last, [], [], 0.0)[0]:
            assert problem(heard(one)) == (503, "too_many_connections")
    until(lambda: httpx.get(f"{url}/healthz").status_code == 200)


def test_who_does_not_read_its_answers_is_cut_off(impatient: str) -> None:
    """More answers than the network takes up unread are asked for at once."""
    host, _, port = impatient.removeprefix("http://").partition(":")
    asked = b"GET /openapi.json HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    size = len(httpx.get(f"{impatient}/openapi.json").content)
    many = (16 * MIB) // size
    before = memory()
    with socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect((host, int(port)))
        lazy.settimeout(PATIENCE_S)
        lazy.sendall(asked * many)
        assert lazy.recv(1, socket.MSG_PEEK), "it is answered"
        until(lambda: not is_served(lazy))
        read = 0
        with contextlib.suppress(ConnectionError):
            while part := lazy.recv(1 << 16):
                read += len(part)
    assert read < many * size / 2
    assert memory() - before < 30 * MIB


def is_served(connection: socket.socket) -> bool:
    """Whether this process, in which the API runs, still has the connection's other end.

    What is closed while the kernel has bytes to send is listed without a process.
    """
    own, me = connection.getsockname(), os.getpid()
    return any(one.raddr == own and one.pid == me for one in psutil.net_connections("tcp4"))


def test_idle_memory_stays_bounded_under_many_requests(url: str) -> None:
    with httpx.Client(base_url=url) as http:
        for _ in range(10):
            http.post("/v1/completions", content=b"x" * (MIB - 10))
        before = memory()
        for _ in range(60):
            http.post("/v1/completions", content=b"x" * (MIB - 10))
        assert memory() - before < 30 * MIB


def test_the_api_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, edgespec.cli.main, edgespec.daemon.api; "
        "print([m for m in ('torch', 'transformers', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_long_head_is_refused_however_it_comes(url: str) -> None:
    head = "GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\nx-long: {}\r\nconnection: close\r\n\r\n"
    answer = spoken(url, head.format("a" * 40_000).encode())
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"invalid_http" in answer
    assert spoken(url, head.format("a" * 20_000).encode()).startswith(b"HTTP/1.1 200 ")


def test_bodies_of_all_connections_have_one_bound(ring: NodeRing) -> None:
    limits = replace(LIMITS, bodies=2 * MIB)
    who = ring.keys.add("another API", CLIENT)
    with api(ring.address, who, limits=limits) as url, ExitStack() as stack:
        host, _, port = url.removeprefix("http://").partition(":")
        head = f"{HEAD}content-type: application/json\r\ncontent-length: {MIB}\r\n\r\n".encode()
        held = []
        for _ in range(6):
            one = stack.enter_context(socket.create_connection((host, int(port)), PATIENCE_S))
            one.sendall(head + b'{"prompt":"' + b"a" * (MIB - 20))
            held.append(one)
        # What is beyond the bound is told so, the others are still waited for.
        until(lambda: len(select.select(held, [], [], 0.0)[0]) >= 3)
        refused = select.select(held, [], [], 0.2)[0]
        for one in refused:
            said = b""
            while b"too_many_bodies" not in said:
                part = one.recv(1 << 16)
                assert part, said
                said += part
            assert said.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after" in said.lower()
        small = httpx.post(
            f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 1}, timeout=PATIENCE_S
        )
        assert small.status_code == 200
