"""Requests that nobody waits for any more end on the coordinator, whichever way they were left."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from support.keys import OWNER_IDENTITY
from support.nodes import HOST, NodeRing, aging, until
from support.nodes import PATIENCE_S as WAIT_S
from support.rings import submit

from edgespec.config import Address
from edgespec.errors import PeerLost
from edgespec.machines.effects import (
    Effect,
)
from edgespec.machines.events import (
    Event,
    MessageArrived,
)
from edgespec.net.zmq_transport import ZmqTransport
from edgespec.runtime.async_client import AsyncClient
from edgespec.runtime.client import Client
from edgespec.wire.client_messages import StatusRequest, Submit

TOKENS, FEW = 300, 50
"""Blocks that run for a whole answer, and that may run until one that nobody wants has ended."""

MANY = 3


def long(tag: int = 1) -> Submit:
    """A request whose answer takes half a minute."""
    return submit(tag, max_new_tokens=TOKENS, policy="autoregressive", seed=tag)


@pytest.fixture
def ring() -> Iterator[NodeRing]:
    """A slow ring, which is up."""
    with NodeRing(1) as ring:
        ring.await_up()
        ring.blocks[0].delay = 0.1
        yield ring


def assert_soon(ring: NodeRing, running: int) -> None:
    """That many requests go on and none waits, before much has been computed."""
    runs = ring.blocks[0].runs
    until(lambda: ring.machine.load() == (running, 0))
    assert ring.blocks[0].runs - runs < FEW


def assert_nothing_runs_soon(ring: NodeRing) -> None:
    """All requests end before long."""
    assert_soon(ring, 0)


def run(work: Callable[[], object]) -> None:
    """A test's coroutine, which must come to an end."""
    asyncio.run(asyncio.wait_for(work(), 3 * WAIT_S))  # type: ignore[arg-type]


async def read(client: AsyncClient, ask: Submit) -> None:
    """Read a whole answer."""
    async for _ in client.ask(ask):
        pass


async def until_soon(condition: Callable[[], object]) -> None:
    """Wait for what other threads bring about."""
    await asyncio.to_thread(until, condition, WAIT_S)


async def ended(asked: list[asyncio.Task[None]]) -> None:
    """All of them have failed, as the coordinator is gone for them."""
    ends = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(end, PeerLost) for end in ends), ends


def test_a_coordinator_that_stood_still_works_for_nobody_that_gave_it_up(ring: NodeRing) -> None:
    async def work() -> None:
        async with AsyncClient(ring.address, OWNER_IDENTITY, WAIT_S, ring.timing) as client:
            asked = [asyncio.ensure_future(read(client, long())) for _ in range(MANY)]
            await until_soon(lambda: ring.machine.load() == (1, MANY - 1))
            ring.threads[0].freeze()
            # Their Submit is read long after they were given up.
            asked += [asyncio.ensure_future(read(client, long())) for _ in range(MANY)]
            await until_soon(lambda: len(client._requests) == 2 * MANY)
            with aging(client):
                await ended(asked)
            ring.threads[0].thaw()
            await until_soon(lambda: client.problem is None)
            await asyncio.to_thread(assert_nothing_runs_soon, ring)
            await read(client, submit(max_new_tokens=2))  # the same connection is of use again

    run(work)


def test_a_reader_that_hangs_keeps_nobody_at_work(ring: NodeRing) -> None:
    async def work() -> None:
        async with AsyncClient(ring.address, OWNER_IDENTITY, WAIT_S, ring.timing) as client:
            answer = client.ask(long())
            await answer.__anext__()
            ring.threads[0].freeze()
            with aging(client):
                await until_soon(lambda: client.problem is not None)
            ring.threads[0].thaw()
            await asyncio.to_thread(assert_nothing_runs_soon, ring)
            await answer.aclose()

    run(work)


@pytest.mark.parametrize("turns", [0, 1, 3, 10, 30, 100])
def test_an_answer_that_is_closed_at_any_point_is_cancelled(ring: NodeRing, turns: int) -> None:
    async def work() -> None:
        async with AsyncClient(ring.address, OWNER_IDENTITY, WAIT_S, ring.timing) as client:
            asked = [asyncio.ensure_future(read(client, long())) for _ in range(MANY)]
            for _ in range(turns):
                await asyncio.sleep(0.002)
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            await read(client, submit(max_new_tokens=1))  # what was sent before has been read
            await asyncio.to_thread(assert_nothing_runs_soon, ring)

    run(work)


def test_the_blocking_client_leaves_nothing_behind(ring: NodeRing) -> None:
    with Client(ring.address, OWNER_IDENTITY, WAIT_S, ring.timing) as client:
        answer = client.ask(long())
        next(answer)
        ring.threads[0].freeze()
        with aging(client):
            with pytest.raises(PeerLost, match="silent"):
                list(answer)
            with pytest.raises(PeerLost, match="silent"):  # this one is read when all is over
                list(client.ask(long(2)))
        ring.threads[0].thaw()
        assert_nothing_runs_soon(ring)


def test_a_blocking_client_that_is_closed_takes_its_requests_along(ring: NodeRing) -> None:
    with ring.client() as other:
        running = other.ask(long(7))
        next(running)
        with Client(ring.address, OWNER_IDENTITY, WAIT_S, ring.timing) as client:
            waiting = client.ask(long())
            next(waiting)
        assert_soon(ring, 1)
        running.close()
        assert_nothing_runs_soon(ring)


def test_a_client_that_dies_takes_along_what_waits(ring: NodeRing) -> None:
    with ring.client() as other:
        running = other.ask(long(7))
        next(running)
        dying = ZmqTransport.client(ring.address, OWNER_IDENTITY)
        for tag in range(MANY):
            dying.send_control(b"", long(tag))
        until(lambda: ring.machine.load() == (1, MANY))
        dying.close()  # it says nothing more, as if it was killed
        assert_soon(ring, 1)
        running.close()


def test_what_is_read_after_its_client_died_is_not_computed(
    ring: NodeRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[object] = []
    handle = ring.machine.handle

    def noting(event: Event, now: float) -> list[Effect]:
        if isinstance(event, MessageArrived) and isinstance(event.message, Submit):
            read.append(event)
        return handle(event, now)

    monkeypatch.setattr(ring.machine, "handle", noting)
    dying = ZmqTransport.client(ring.address, OWNER_IDENTITY)
    dying.send_control(b"", StatusRequest())
    until(lambda: dying.poll(0.1))
    ring.threads[0].freeze()
    for tag in range(MANY):
        dying.send_control(b"", long(tag))
    dying.close()
    ring.threads[0].thaw()
    until(lambda: len(read) == MANY)
    assert_nothing_runs_soon(ring)


def test_a_connection_that_breaks_and_comes_back_begins_with_nothing(ring: NodeRing) -> None:
    async def work() -> None:
        with relayed(ring.address) as (address, cut):
            async with AsyncClient(address, OWNER_IDENTITY, WAIT_S, ring.timing) as client:
                asked = [asyncio.ensure_future(read(client, long())) for _ in range(MANY)]
                await until_soon(lambda: ring.machine.load() == (1, MANY - 1))
                cut()
                await ended(asked)
                await until_soon(lambda: client.problem is None)
                await asyncio.to_thread(assert_nothing_runs_soon, ring)

    run(work)


@contextmanager
def relayed(to: Address) -> Iterator[tuple[Address, Callable[[], None]]]:
    """An address from which connections go on to another one, until they are all cut."""
    ends: list[socket.socket] = []
    with socket.create_server((HOST, 0)) as server:

        def pump(source: socket.socket, target: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(65536):
                    target.sendall(data)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    near = server.accept()[0]
                    far = socket.create_connection((to.host, to.port))
                    ends.extend((near, far))
                    for pair in ((near, far), (far, near)):
                        threading.Thread(target=pump, args=pair, daemon=True).start()

        def cut() -> None:
            while ends:
                end = ends.pop()
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()

        threading.Thread(target=accept, daemon=True).start()
        yield Address(HOST, server.getsockname()[1]), cut
        server.shutdown(socket.SHUT_RDWR)
        cut()
