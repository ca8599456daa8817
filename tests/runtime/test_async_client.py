"""The asyncio client: many answers over one connection, cancels, lost and refusing coordinators."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, closing
from typing import Any

import pytest
from support.keys import OWNER_IDENTITY, ListedKeys, everybody, identity
from support.nodes import NodeRing, aging
from support.rings import submit

from edgespec.config import Address, Timing
from edgespec.errors import AccessRefused, PeerLost, RequestFailed
from edgespec.net.keys import Identity
from edgespec.net.zmq_transport import Incoming, ZmqTransport
from edgespec.runtime import async_client
from edgespec.runtime.access_policy import CLIENT, admits
from edgespec.runtime.async_client import AsyncClient, with_pauses
from edgespec.wire.client_messages import (
    Cancel,
    Failed,
    Finished,
    Progress,
    Status,
    StatusRequest,
    Submit,
    Tokens,
)
from edgespec.wire.messages import Heartbeat, Message, Removed

HOST = "127.0.0.1"
TIMING = Timing(beat=0.05, answer_silence=60.0)
WAIT_S = 60.0


class Scripted:
    """A coordinator that shows life, and says what a test tells it to."""

    def __init__(self, port: int = 0, admits: Callable[[str], str] = everybody) -> None:
        self.transport = ZmqTransport.coordinator(Address(HOST, port), OWNER_IDENTITY, admits)
        self.address = Address(HOST, self.transport.control_port)
        self.heard: list[Incoming] = []
        self.is_mute = False

    def turn(self) -> None:
        """Take what came; answer heartbeats and questions."""
        for incoming in self.transport.poll(0.0):
            message = incoming.message
            if isinstance(message, Heartbeat | StatusRequest):
                if not self.is_mute:
                    reply = Status(True, ()) if isinstance(message, StatusRequest) else message
                    self.transport.send_control(incoming.peer, reply)
            else:
                self.heard.append(incoming)

    async def live(self) -> None:
        """As long as the test runs."""
        while True:
            self.turn()
            await asyncio.sleep(0.005)

    async def next(self) -> tuple[bytes, Message]:
        """The next message that is no sign of life, and who sent it."""
        while not self.heard:
            await asyncio.sleep(0.005)
        incoming = self.heard.pop(0)
        return incoming.peer, incoming.message

    async def submitted(self) -> tuple[bytes, Submit]:
        """The next one, which must be a request."""
        peer, message = await asyncio.wait_for(self.next(), WAIT_S)
        assert isinstance(message, Submit)
        return peer, message


@pytest.fixture
def coordinator() -> Iterator[Scripted]:
    """A scripted coordinator."""
    scripted = Scripted()
    with closing(scripted.transport):
        yield scripted


def run(work: Coroutine[Any, Any, None]) -> None:
    """A test's coroutine, which must come to an end."""
    asyncio.run(asyncio.wait_for(work, 3 * WAIT_S))


@asynccontextmanager
async def talking(
    scripted: Scripted,
    who: Identity = OWNER_IDENTITY,
    wait: float = WAIT_S,
    timing: Timing = TIMING,
) -> AsyncIterator[AsyncClient]:
    """A client of a coordinator that shows life."""
    life = asyncio.ensure_future(scripted.live())
    try:
        async with AsyncClient(scripted.address, who, wait, timing) as client:
            yield client
    finally:
        life.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await life


def end_of(tag: int) -> Finished:
    """A good end."""
    return Finished(
        tag, "ab", (1, 2), "length", "p", "d", 1, 1, 2, 1.0, 0.5, 1.0, (1,), 2, 0, 0, 0.1
    )


async def collected(client: AsyncClient, ask: Submit) -> list[Message]:
    """A whole answer."""
    return [message async for message in client.ask(ask)]


async def read_slowly(client: AsyncClient) -> None:
    """Take an answer more slowly than it comes."""
    async for _ in client.ask(submit()):
        await asyncio.sleep(0.2)


def test_answers_of_one_connection_do_not_mix(coordinator: Scripted) -> None:
    async def work() -> None:
        async with talking(coordinator) as client:
            both = [asyncio.ensure_future(collected(client, submit(prompt=p))) for p in "ab"]
            (peer, first), (_, second) = [await coordinator.submitted() for _ in both]
            assert first.tag != second.tag
            for message in (
                Progress(second.tag, "waiting"),
                Tokens(first.tag, (1,), "a"),
                Tokens(99, (9,), "of nobody"),
                end_of(second.tag),
                Tokens(first.tag, (2,), "b"),
                end_of(first.tag),
            ):
                coordinator.transport.send_control(peer, message)
            one, other = [await task for task in both]
            assert one == [
                Tokens(first.tag, (1,), "a"),
                Tokens(first.tag, (2,), "b"),
                end_of(first.tag),
            ]
            assert other == [Progress(second.tag, "waiting"), end_of(second.tag)]

    run(work())


def test_a_refusal_is_raised_with_its_kind(coordinator: Scripted) -> None:
    async def work() -> None:
        async with talking(coordinator) as client:
            answer = asyncio.ensure_future(collected(client, submit()))
            peer, asked = await coordinator.submitted()
            coordinator.transport.send_control(peer, Failed(asked.tag, "too many", "queue"))
            with pytest.raises(RequestFailed, match="too many") as caught:
                await answer
            assert caught.value.kind == "queue"

    run(work())


def test_closing_an_answer_cancels_it_and_reading_it_to_its_end_does_not(
    coordinator: Scripted,
) -> None:
    async def work() -> None:
        async with talking(coordinator) as client:
            answer = client.ask(submit())
            first = asyncio.ensure_future(answer.__anext__())
            peer, asked = await coordinator.submitted()
            coordinator.transport.send_control(peer, Tokens(asked.tag, (1,), "a"))
            assert await first == Tokens(asked.tag, (1,), "a")
            await answer.aclose()
            assert (await coordinator.next())[1] == Cancel(asked.tag)

            whole = asyncio.ensure_future(collected(client, submit()))
            peer, asked = await coordinator.submitted()
            coordinator.transport.send_control(peer, end_of(asked.tag))
            assert await whole == [end_of(asked.tag)]
            await asyncio.sleep(0.2)
            assert coordinator.heard == []

    run(work())


def test_a_task_that_is_cancelled_cancels_its_request(coordinator: Scripted) -> None:
    async def work() -> None:
        async with talking(coordinator) as client:
            task = asyncio.ensure_future(collected(client, submit()))
            _, asked = await coordinator.submitted()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await coordinator.next())[1] == Cancel(asked.tag)

    run(work())


def test_a_coordinator_that_falls_silent_is_lost_and_found_again(coordinator: Scripted) -> None:
    async def work() -> None:
        async with talking(coordinator) as client:
            answer = asyncio.ensure_future(collected(client, submit()))
            await coordinator.submitted()
            coordinator.is_mute = True
            with aging(client):
                with pytest.raises(PeerLost, match="silent"):
                    await answer
                client._wait = 0.0  # for a connection that may come yet
                with pytest.raises(PeerLost, match="silent"):
                    await collected(client, submit())
                assert isinstance(client.problem, PeerLost)
            coordinator.is_mute = False
            while client.problem is not None:
                await asyncio.sleep(0.01)

    run(work())


def test_a_slow_coordinator_is_waited_for_as_long_as_it_says(coordinator: Scripted) -> None:
    async def work() -> None:
        async with talking(coordinator) as client:
            answer = asyncio.ensure_future(collected(client, submit()))
            peer, _ = await coordinator.submitted()
            coordinator.is_mute = True
            told = 4 * TIMING.answer_silence
            coordinator.transport.send_control(peer, Heartbeat(silence=told))
            while client._silence != told:
                await asyncio.sleep(0.005)
            client._known -= told / 2
            await asyncio.sleep(5 * TIMING.beat)  # in which it would notice
            assert client.problem is None
            client._known -= told / 2
            with pytest.raises(PeerLost, match=r"has been silent for 24\d\.\d s"):
                await answer

    run(work())


def test_a_coordinator_that_ends_is_noticed_at_once_and_its_successor_is_found() -> None:
    async def work() -> None:
        first = Scripted()
        async with AsyncClient(first.address, OWNER_IDENTITY, WAIT_S, TIMING) as client:
            life = asyncio.ensure_future(first.live())
            answer = asyncio.ensure_future(collected(client, submit()))
            await first.submitted()
            life.cancel()
            first.transport.close()
            # Nothing of the request that was given up reaches the next coordinator.
            with pytest.raises(PeerLost, match="broke"):
                await asyncio.wait_for(answer, TIMING.answer_silence / 2)
            second = Scripted(first.address.port)
            life = asyncio.ensure_future(second.live())
            try:
                again = asyncio.ensure_future(collected(client, submit(prompt="again")))
                peer, asked = await second.submitted()
                assert asked.prompt == "again"
                second.transport.send_control(peer, end_of(asked.tag))
                assert await again == [end_of(asked.tag)]
            finally:
                life.cancel()
                second.transport.close()

    run(work())


def test_nobody_there_is_told_within_the_wait() -> None:
    async def work() -> None:
        async with AsyncClient(Address(HOST, 1), OWNER_IDENTITY, 0.2, TIMING) as client:
            for asked in (client.status(), collected(client, submit())):
                with pytest.raises(PeerLost, match="no coordinator has answered"):
                    await asked

    run(work())


def test_many_who_ask_for_the_status_share_one_answer(coordinator: Scripted) -> None:
    async def work() -> None:
        async with talking(coordinator) as client:
            told = await asyncio.gather(*(client.status() for _ in range(20)))
            assert all(one is told[0] for one in told)
            impatient = asyncio.ensure_future(client.status())
            await asyncio.sleep(0)
            impatient.cancel()
            assert (await client.status()).ready
            assert await client.status(age=5.0) is not None

    run(work())


def test_a_key_that_is_not_known_is_refused_until_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_client, "REOPEN_S", 0.1)
    keys = ListedKeys()
    scripted = Scripted(admits=lambda key: admits(keys, key))

    async def work() -> None:
        async with talking(scripted, identity("somebody")) as client:
            while isinstance(client.problem, PeerLost):
                await asyncio.sleep(0.01)
            client._wait = 0.0  # how long it waits for a connection that may come yet
            with pytest.raises(AccessRefused, match="does not accept the key"):
                await client.status()
            keys.add("somebody", CLIENT)
            while client.problem is not None:
                await asyncio.sleep(0.01)

    with closing(scripted.transport):
        run(work())


def test_a_key_that_is_removed_ends_its_requests(coordinator: Scripted) -> None:
    async def work() -> None:
        async with talking(coordinator) as client:
            answer = asyncio.ensure_future(collected(client, submit()))
            peer, _ = await coordinator.submitted()
            coordinator.transport.send_control(peer, Removed("it was removed"))
            with pytest.raises(AccessRefused, match="it was removed"):
                await answer

    run(work())


def test_who_does_not_read_is_cut_off(
    coordinator: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_client, "MOST_UNREAD", 5)

    async def work() -> None:
        async with talking(coordinator) as client:
            reading = asyncio.ensure_future(read_slowly(client))
            peer, asked = await coordinator.submitted()
            for number in range(20):
                coordinator.transport.send_control(peer, Tokens(asked.tag, (number,), "x"))
            with pytest.raises(RequestFailed, match="not read") as caught:
                await reading
            assert caught.value.kind == "slow"
            assert (await coordinator.next())[1] == Cancel(asked.tag)

    run(work())


def test_an_answer_that_came_whole_outlives_its_connection() -> None:
    """As it does when a coordinator ends that has drained, and its reader is slow."""

    async def work() -> None:
        inbox, cut = (async_client._Inbox() for _ in range(2))
        told = [Tokens(1, (1, 2), "ab"), end_of(1)]
        for message in told:
            inbox.put(message)
        inbox.fail(PeerLost("it broke"))
        assert [await inbox.take(), await inbox.take()] == told
        assert inbox.is_over
        cut.put(told[0])
        cut.fail(PeerLost("it broke"))
        with pytest.raises(PeerLost):
            await cut.take()

    run(work())


@pytest.mark.parametrize(
    "ask", [submit(prompt="x" * (2 << 20)), submit(prompt="\ud800"), submit(seed=1 << 70)]
)
def test_what_cannot_be_sent_is_said(coordinator: Scripted, ask: Submit) -> None:
    async def work() -> None:
        async with talking(coordinator) as client:
            with pytest.raises(RequestFailed, match="cannot be sent") as caught:
                await collected(client, ask)
            assert caught.value.kind == "invalid"

    run(work())


def test_pauses_are_told_and_lose_nothing(coordinator: Scripted) -> None:
    async def work() -> None:
        async with talking(coordinator) as client:
            answer = with_pauses(client.ask(submit()), 0.05)
            first = asyncio.ensure_future(answer.__anext__())
            peer, asked = await coordinator.submitted()
            assert await first is None
            coordinator.transport.send_control(peer, Tokens(asked.tag, (1,), "a"))
            rest = []
            async for message in answer:
                if message is None:
                    coordinator.transport.send_control(peer, end_of(asked.tag))
                else:
                    rest.append(message)
            assert rest == [Tokens(asked.tag, (1,), "a"), end_of(asked.tag)]
            closed = with_pauses(client.ask(submit()), 0.05)
            assert await closed.__anext__() is None
            await closed.aclose()
            _, asked = await coordinator.submitted()
            assert (await coordinator.next())[1] == Cancel(asked.tag)

    run(work())


def test_a_real_ring_answers_many_at_once() -> None:
    with NodeRing(2) as ring:
        ring.await_up()
        asks = [submit(prompt=f"hello {number}", seed=number) for number in range(8)]

        async def work() -> None:
            who = ring.keys.add("many", CLIENT)
            async with AsyncClient(ring.address, who, WAIT_S, ring.timing) as client:
                ends = await asyncio.gather(*(collected(client, ask) for ask in asks))
            for ask, messages in zip(asks, ends, strict=True):
                assert isinstance(messages[-1], Finished)
                ring.assert_right(ask, messages[-1])

        run(work())
        ring.assert_free()
