"""Nodes and clients of two versions: each is told both, and ends; nothing waits in vain."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq
from support.keys import OWN, OWNER_IDENTITY, everybody
from support.nodes import QUICK, NodeThread
from support.sockets import (
    DEVICE,
    HOST,
    PATIENCE_S,
    BareSockets,
    listening,
    next_of,
    polled_until,
    staged,
)
from support.versions import NEWER, refusal_by_newer, said_by

from edgespec.backends.compute import StageCompute
from edgespec.config import Address
from edgespec.errors import AccessRefused, OtherVersion, PeerLost
from edgespec.net import control, sockets
from edgespec.net.block_server import BlockServer
from edgespec.net.block_transfer import fetch_block
from edgespec.net.keys import Token
from edgespec.net.zmq_transport import ZmqTransport
from edgespec.ring.health import LINE_CHARS
from edgespec.ring.member import MemberMachine
from edgespec.runtime import async_client
from edgespec.runtime.async_client import AsyncClient
from edgespec.runtime.client import Client
from edgespec.runtime.enrolment import enrol
from edgespec.runtime.stage_node import StageNode
from edgespec.serving.problems import problem_of
from edgespec.wire.block_messages import BlockRequest
from edgespec.wire.client_messages import StatusRequest
from edgespec.wire.codec import VERSION, decode, encode
from edgespec.wire.messages import Fault, Heartbeat, Join, Message, Refuse, StandBy
from edgespec.wire.refusal import refusal

BOTH = (
    rf"^the coordinator at {HOST}:\d+ is of another version: it runs edgespec 9\.8\.7 \(protocol "
    rf"{NEWER}\), this program is edgespec \S+ \(protocol {VERSION}\); install the same edgespec "
    "on all machines$"
)
JOIN = Join(1, "board", 7, HOST, 9, DEVICE.own.public)


class Newer:
    """A coordinator of a later version: it refuses whatever comes."""

    def __init__(self) -> None:
        self.transport = listening()
        self.address = Address(HOST, self.transport.control_port)

    def say(self, peer: bytes, frame: bytes) -> None:
        """In any version."""
        assert self.transport.control is not None
        self.transport.control.send_multipart([peer, frame])

    def refuse_next(self) -> None:
        """Wait for a message, and answer."""
        self.say(next_of(self.transport).peer, refusal_by_newer())


@pytest.fixture
def newer() -> Iterator[Newer]:
    """One that listens."""
    made = Newer()
    with closing(made.transport):
        yield made


@pytest.fixture
def bare() -> Iterator[BareSockets]:
    """Makes sockets that belong to no node."""
    with BareSockets() as made:
        yield made


# --- who is refused -------------------------------------------------------------------------------


def test_a_coordinator_tells_each_other_version_in_its_own(
    bare: BareSockets, caplog: pytest.LogCaptureFixture
) -> None:
    for version in (7, 12, VERSION - 1, NEWER, 127):
        with closing(listening()) as coordinator:
            sender = bare.connect(zmq.DEALER, coordinator.control_port, DEVICE.own)
            sender.send(said_by(version, JOIN))
            sender.send(encode(Fault(1, "behind it")))
            assert next_of(coordinator).message == Fault(1, "behind it"), "all that is taken"
            assert sender.recv() == refusal(version)
        assert f"and it runs an edgespec of protocol {version}, this program is" in caplog.text
        caplog.clear()


def test_a_message_of_several_frames_is_told_by_its_first(bare: BareSockets) -> None:
    with closing(listening()) as coordinator:
        sender = bare.connect(zmq.DEALER, coordinator.control_port, DEVICE.own)
        sender.send_multipart([said_by(NEWER, JOIN), b"rows"])
        sender.send(encode(Fault(1, "behind it")))
        next_of(coordinator)
        assert sender.recv() == refusal(NEWER)


def test_who_repeats_itself_is_told_once_a_second_and_the_log_once_a_minute(
    bare: BareSockets, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    monkeypatch.setattr(sockets, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with closing(listening()) as coordinator:
        # Of one machine, that is with one key, as an API that connects anew.
        one, other = (
            bare.connect(zmq.DEALER, coordinator.control_port, DEVICE.own) for _ in range(2)
        )
        for now[0], sender, is_told in [
            (100.0, one, True),
            (100.9, one, False),
            (101.0, one, True),
            (101.1, other, True),
            (160.5, other, True),
        ]:
            sender.send(said_by(NEWER, JOIN))
            sender.send(said_by(NEWER, JOIN))
            sender.send(encode(Heartbeat()))
            coordinator.send_control(next_of(coordinator).peer, Heartbeat(1))
            answers = [sender.recv()]
            while answers[-1] != encode(Heartbeat(1)):
                answers.append(sender.recv())
            assert answers[:-1] == is_told * [refusal(NEWER)], now
    assert len(caplog.messages) == 2


def test_a_key_that_counts_no_more_is_told_nothing(bare: BareSockets) -> None:
    known = [DEVICE.own.public]
    with closing(listening(lambda key: "" if key in known else "it was removed")) as coordinator:
        sender = bare.connect(zmq.DEALER, coordinator.control_port, DEVICE.own)
        sender.send(encode(Heartbeat()))
        peer = next_of(coordinator).peer
        known.clear()
        sender.send(said_by(NEWER, JOIN))
        sender.send(encode(Heartbeat()))
        next_of(coordinator)
        coordinator.send_control(peer, Heartbeat(1))
        assert sender.recv() == encode(Heartbeat(1))


def test_a_server_of_blocks_tells_it_too(bare: BareSockets) -> None:
    def prepare(stage: int, tell: Callable[[str], None]) -> object:
        raise AssertionError("it is not understood")

    server = BlockServer(
        Address(HOST, 0),
        OWN,
        everybody,
        prepare,  # type: ignore[arg-type]
        lambda: False,
    )
    server.start()
    try:
        asking = bare.connect(zmq.DEALER, server.port, DEVICE.own)
        asking.send(said_by(NEWER, BlockRequest(1)))
        assert asking.recv() == refusal(NEWER)
    finally:
        server.stop()


# --- who learns it --------------------------------------------------------------------------------


def stage_node(coordinator: Newer) -> StageNode:
    """A stage that never loads anything."""

    def load(*_: object) -> StageCompute:
        raise AssertionError("it gets no layers")

    transport = staged(coordinator.transport)
    member = MemberMachine(JOIN, "it", PATIENCE_S, QUICK)
    return StageNode(transport, member, coordinator.address, load)


def test_a_stage_ends(newer: Newer) -> None:
    thread = NodeThread(stage_node(newer))
    newer.refuse_next()
    with pytest.raises(OtherVersion, match=BOTH):
        thread.ended()


def test_a_stage_ends_that_was_a_member_before(newer: Newer) -> None:
    """Its service starts it again, and then the edgespec that was installed meanwhile."""
    thread = NodeThread(stage_node(newer))
    newer.transport.send_control(next_of(newer.transport).peer, StandBy("all places are taken"))
    newer.refuse_next()
    with pytest.raises(OtherVersion, match=BOTH):
        thread.ended()


def test_so_it_does_by_any_frame_of_another_version(newer: Newer) -> None:
    thread = NodeThread(stage_node(newer))
    newer.say(next_of(newer.transport).peer, said_by(NEWER, Heartbeat()))
    with pytest.raises(OtherVersion, match=rf"it runs an edgespec of protocol {NEWER}, this .* is"):
        thread.ended()


def test_a_client_ends(newer: Newer) -> None:
    with Client(newer.address, DEVICE, PATIENCE_S, QUICK) as client:
        client.send(Heartbeat())
        newer.refuse_next()
        with pytest.raises(OtherVersion, match=BOTH):
            client.status()


def test_a_device_with_a_token_is_told(newer: Newer) -> None:
    token = Token.parse(Token.new(OWN.public).text)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(enrol, newer.address, token, DEVICE.own, "board", PATIENCE_S)
        newer.refuse_next()
        with pytest.raises(OtherVersion, match=BOTH):
            asking.result()


def test_a_transfer_of_a_block_ends(newer: Newer, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(
            *(fetch_block, newer.address, DEVICE, 1, lambda offer: tmp_path / "x"),
            *(lambda progress: None, lambda: False),
        )
        newer.refuse_next()
        with pytest.raises(OtherVersion, match=BOTH):
            fetching.result()


def test_the_api_says_it_to_who_asks_and_once_to_its_log(
    newer: Newer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(async_client, "REOPEN_S", 0.01)

    async def refused() -> None:
        async with AsyncClient(newer.address, DEVICE, 0.01, QUICK) as client:
            for _ in range(2):  # it connects anew
                while not (came := newer.transport.poll(0.0)):
                    await asyncio.sleep(0.005)
                client._problem = PeerLost("not yet")
                newer.say(came[0].peer, refusal_by_newer())
                while not isinstance(client._problem, OtherVersion):
                    await asyncio.sleep(0.005)
                with pytest.raises(OtherVersion, match=BOTH) as problem:
                    await client.status()
                assert problem_of(problem.value).status == 503

    asyncio.run(asyncio.wait_for(refused(), 3 * PATIENCE_S))
    assert len([one for one in caplog.messages if "another version" in one]) == 1


# --- an older coordinator, which says nothing -----------------------------------------------------


def test_a_coordinator_that_lets_in_and_says_nothing_is_mentioned_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(listening()) as silent, closing(staged(silent)) as stage:
        polled_until(stage, lambda: stage.is_let_in)
        stage.poll(0.0)
        assert not caplog.messages
        monkeypatch.setattr(control, "QUIET_S", 0.0)
        polled_until(stage, lambda: caplog.messages)
        stage.poll(0.0)
        stage.poll(0.0)
    assert len(caplog.messages) == 1
    assert "or it is older than edgespec" in caplog.text


def test_one_that_answers_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(listening()) as coordinator, closing(staged(coordinator)) as stage:
        stage.send_control(b"", JOIN)
        coordinator.send_control(next_of(coordinator).peer, StandBy("wait"))
        assert next_of(stage).message == StandBy("wait")
        monkeypatch.setattr(control, "QUIET_S", 0.0)
        stage.poll(0.01)
    assert not caplog.messages


def test_the_error_of_a_client_tells_whether_it_was_let_in() -> None:
    silent = ZmqTransport.coordinator(Address(HOST, 0), OWNER_IDENTITY, everybody)
    address = Address(HOST, silent.control_port)
    with closing(silent), Client(address, DEVICE, PATIENCE_S, QUICK) as client:
        polled_until(client._transport, lambda: client._transport.is_let_in)
        client._started -= 2 * PATIENCE_S
        with pytest.raises(PeerLost, match=r"let this program in, and said nothing .* older than"):
            client.status()


# --- what peers say is cut before the log ---------------------------------------------------------

LONG = "\x1b[2J\n12:00:00 all is well" + "x" * 1_000_000


def test_a_frame_of_anything_is_a_short_line(
    bare: BareSockets, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(listening()) as coordinator:
        sender = bare.connect(zmq.DEALER, coordinator.control_port, DEVICE.own)
        other = LONG.encode()
        sender.send(b"\x93\xdb" + len(other).to_bytes(4, "big") + other + encode(Heartbeat())[10:])
        sender.send(encode(Heartbeat()))
        next_of(coordinator)
    assert caplog.messages
    assert all(len(one) < 200 and one.isprintable() for one in caplog.messages)


def test_what_a_coordinator_says_is_a_short_line(
    newer: Newer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "edgespec")
    thread = NodeThread(stage_node(newer))
    peer = next_of(newer.transport).peer
    said: list[Message] = [StandBy(LONG), Refuse(LONG), StandBy("behind it")]
    for message in said:
        newer.transport.send_control(peer, message)
    while "behind it" not in caplog.messages:
        newer.transport.poll(0.01)
    thread.close()
    thread.join()
    assert sum("xxx" in one for one in caplog.messages) == 2
    assert all(len(one) <= LINE_CHARS and one.isprintable() for one in caplog.messages)
    assert decode(encode(said[0])) == said[0], "it is short in the log alone"


def test_so_is_the_error_that_it_causes(newer: Newer) -> None:
    token = Token.parse(Token.new(OWN.public).text)
    with Client(newer.address, DEVICE, PATIENCE_S, QUICK) as client, ThreadPoolExecutor(1) as pool:
        client.send(Heartbeat())
        newer.transport.send_control(next_of(newer.transport).peer, Refuse(LONG))
        with pytest.raises(AccessRefused) as asked:
            client.status()
        enrolling = pool.submit(enrol, newer.address, token, DEVICE.own, "board", PATIENCE_S)
        while isinstance((came := next_of(newer.transport)).message, Heartbeat | StatusRequest):
            pass
        newer.transport.send_control(came.peer, Refuse(LONG))
        with pytest.raises(AccessRefused) as enrolled:
            enrolling.result()
    for problem in asked, enrolled:
        assert len(str(problem.value)) < 500
        assert str(problem.value).isprintable()
