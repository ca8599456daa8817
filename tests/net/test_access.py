"""Who may connect: gates, refusals, rings of the past, crowds of silent strangers."""

from __future__ import annotations

import logging
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress

import numpy as np
import pytest
import zmq
from support.keys import OWN, everybody, identity
from support.segments import one_part
from support.sockets import (
    DEVICE,
    HOST,
    MEMBER,
    PATIENCE_S,
    BareSockets,
    listening,
    next_of,
    nothing_of,
    polled_until,
    staged,
)
from zmq.auth.thread import AuthenticationThread

from edgespec.config import Address
from edgespec.errors import AccessRefused
from edgespec.net import access, control, slowness
from edgespec.net.access import Gate
from edgespec.net.control import Handshakes, Seen, look
from edgespec.net.keys import Identity, KeyPair, short
from edgespec.net.sockets import BATCH
from edgespec.net.zmq_transport import ZmqTransport
from edgespec.wire.codec import encode
from edgespec.wire.messages import Heartbeat
from edgespec.wire.segment import Segment

OTHER = KeyPair.from_words("someone else")
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"


@pytest.fixture
def bare() -> Iterator[BareSockets]:
    """Makes sockets that belong to no node."""
    with BareSockets() as made:
        yield made


@pytest.fixture(autouse=True)
def _not_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that stands still beside other work is not taken for one that was busy itself."""
    monkeypatch.setattr(access, "BUSY_S", PATIENCE_S)


def segment(seq: int = 1) -> Segment:
    """A segment."""
    ids = np.arange(2, dtype=np.int64)
    return one_part(1, seq, 0, False, 0, 2, ids, ids, ids, ids, None)


def client_of(coordinator: ZmqTransport, who: Identity = DEVICE) -> ZmqTransport:
    """Somebody who connects."""
    return ZmqTransport.client(Address(HOST, coordinator.control_port), who)


def refusal_of(client: ZmqTransport) -> str:
    """Why it is not let in."""
    limit = time.monotonic() + PATIENCE_S
    while time.monotonic() < limit:
        try:
            client.poll(0.05)
        except AccessRefused as refused:
            return str(refused)
    raise AssertionError("it was let in, or never knew better")


# --- a gate ---------------------------------------------------------------------------------------


def test_a_gate_admits_by_channel(bare: BareSockets) -> None:
    allowed = {"one": DEVICE.own.public, "two": OTHER.public}
    with zmq.Context() as context, ExitStack() as stack, closing(Gate(context)) as gate:
        for channel, key in allowed.items():
            pull = stack.enter_context(context.socket(zmq.PULL))
            gate.guard(pull, channel, OWN, lambda asked, key=key: "" if asked == key else "no")
            port = pull.bind_to_random_port(f"tcp://{HOST}")
            for pair in (DEVICE.own, OTHER):
                bare.connect(zmq.PUSH, port, pair).send(pair.public.encode())
            assert pull.poll(1e3 * PATIENCE_S)
            assert pull.recv() == key.encode()
            assert not pull.poll(200), "the other one came in too"


def test_a_refusal_is_logged_with_address_channel_and_reason_once_a_second(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    with closing(listening(lambda key: "it is on nobody's list")) as coordinator:
        started = time.monotonic()
        for number in range(20):
            with closing(client_of(coordinator, identity(f"stranger {number}"))) as client:
                refusal_of(client)
        took = time.monotonic() - started
    said = [r.getMessage() for r in caplog.records]
    first = short(identity("stranger 0").own.public)
    assert said[0] == (
        f"refused a connection: {HOST} wants to use the control channel with the key {first}: "
        "it is on nobody's list"
    )
    assert len(said) <= 1 + took


def test_who_is_refused_knows_it() -> None:
    with closing(listening(lambda key: "no")) as coordinator:
        with closing(client_of(coordinator)) as client:
            client.send_control(b"", Heartbeat())
            reason = refusal_of(client)
        where = Address(HOST, coordinator.control_port)
        assert reason.startswith(f"the coordinator at {where} does not accept the key of this")
        assert "edgespec token new" in reason
        assert nothing_of(coordinator)


def test_who_expects_another_coordinator_knows_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with closing(listening()) as coordinator:
        with closing(client_of(coordinator, Identity(DEVICE.own, OTHER.public))) as client:
            client.send_control(b"", Heartbeat())
            reason = refusal_of(client)
        assert re.match(rf"who listens at {HOST}:\d+ is not the coordinator of the clus", reason)
        assert nothing_of(coordinator)
    assert "has no key, takes this for another cluster" in caplog.text


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ZmqTransport, threading.Event]]:
    """A coordinator that admits nobody until the event, as while it imports torch: the ends of
    handshakes come earlier than they do there."""
    monkeypatch.setattr(access, "HANDSHAKE_MS", 200)
    monkeypatch.setattr(control, "STRANGER_S", 0.75)
    free = threading.Event()

    def admits(key: str) -> str:
        free.wait(PATIENCE_S)
        return ""

    with closing(listening(admits)) as coordinator:
        yield coordinator, free
        free.set()


def failures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each handshake of a client here that fails."""
    failed: list[int] = []
    take = Handshakes.take

    def counted(self: Handshakes, frames: list[bytes]) -> int:
        event = take(self, frames)
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            failed.append(event)
        return event

    monkeypatch.setattr(Handshakes, "take", counted)
    return failed


def test_a_coordinator_that_is_too_busy_for_handshakes_is_waited_for(
    busy: tuple[ZmqTransport, threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, free = busy
    failed = failures(monkeypatch)
    with closing(staged(coordinator)) as stage:
        stage.send_control(b"", Heartbeat())
        polled_until(stage, lambda: len(failed) > control.MOST_FAILURES + 1)
        free.set()
        polled_until(stage, lambda: coordinator.poll(0.0))


def test_a_client_that_was_busy_itself_accuses_nobody(
    busy: tuple[ZmqTransport, threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads many ends at once then."""
    coordinator, free = busy
    failed = failures(monkeypatch)
    with closing(client_of(coordinator)) as client:
        client.send_control(b"", Heartbeat())
        time.sleep(1.5)  # as an import does
        polled_until(client, lambda: len(failed) > control.MOST_FAILURES)
        free.set()
        polled_until(client, lambda: coordinator.poll(0.0))


def test_a_wrong_key_is_told_soon_by_a_busy_coordinator_too(
    busy: tuple[ZmqTransport, threading.Event],
) -> None:
    with closing(client_of(busy[0], Identity(DEVICE.own, OTHER.public))) as client:
        client.send_control(b"", Heartbeat())
        assert "is not the coordinator of the cluster" in refusal_of(client)


def test_a_list_that_cannot_be_read_lets_nobody_in(caplog: pytest.LogCaptureFixture) -> None:
    def admits(key: str) -> str:
        raise OSError("the disk is gone")

    caplog.set_level(logging.WARNING)
    with closing(listening(admits)) as coordinator:
        for who in (DEVICE, Identity.of_coordinator(OWN)):
            with closing(client_of(coordinator, who)) as client:
                client.send_control(b"", Heartbeat())
                refusal_of(client)
        assert nothing_of(coordinator)
    assert "the list of keys cannot be read (the disk is gone)" in caplog.text
    assert len(caplog.records) <= 3, "strangers fill the log"


def test_a_node_that_answers_for_the_coordinator_without_its_key_is_told_nothing() -> None:
    with BareSockets() as bare:
        impostor = bare.open(zmq.ROUTER)
        impostor.curve_server = True
        impostor.curve_secretkey = OTHER.secret.encode()
        port = impostor.bind_to_random_port(f"tcp://{HOST}")
        with closing(ZmqTransport.client(Address(HOST, port), DEVICE)) as client:
            client.send_control(b"", Heartbeat())
            refusal_of(client)
        assert not impostor.poll(0)


# --- the data ring --------------------------------------------------------------------------------


def test_a_ring_is_shut_to_who_knows_the_secret_of_an_earlier_one(
    bare: BareSockets, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "edgespec")
    with closing(listening()) as coordinator, closing(staged(coordinator)) as stage:
        early = bare.connect(zmq.PUSH, stage.data_port, MEMBER, DEVICE.own.public)
        early.send(encode(segment(1)))
        assert next_of(stage).on_ring
        for node in coordinator, stage:
            node.open_ring("the secret of the next ring")
        late = bare.connect(zmq.PUSH, stage.data_port, MEMBER, DEVICE.own.public)
        for old in (early, late):  # one is still connected, the other may not connect
            with suppress(zmq.Again):  # it may have been refused by now
                old.send(encode(segment(2)), zmq.NOBLOCK)
        assert nothing_of(stage, 0.3)
        for note in ("over a connection of an earlier ring", "wants to use the data ring"):
            polled_until(stage, lambda note=note: note in caplog.text)
        coordinator.connect_ring(Address(HOST, stage.data_port), DEVICE.own.public)
        coordinator.send_ring(segment(3))
        came = next_of(stage).message
        assert isinstance(came, Segment)
        assert came.header.seq == 3


def test_a_segment_goes_to_the_holder_of_the_expected_key_alone() -> None:
    with closing(listening()) as coordinator, closing(staged(coordinator)) as stage:
        coordinator.connect_ring(Address(HOST, stage.data_port), OTHER.public)
        coordinator.send_ring(segment())
        assert nothing_of(stage, 0.3)
        polled_until(coordinator, lambda: coordinator.ring_broke)


def test_a_right_key_of_the_cluster_opens_no_ring(bare: BareSockets) -> None:
    with closing(listening()) as coordinator:
        for pair in (DEVICE.own, OWN):
            member = bare.connect(zmq.PUSH, coordinator.data_port, pair)
            with suppress(zmq.Again):  # it may have been refused by now
                member.send(encode(segment()), zmq.NOBLOCK)
        assert nothing_of(coordinator, 0.3)


# --- bytes ----------------------------------------------------------------------------------------


def raw(port: int, *parts: bytes) -> socket.socket:
    """A plain TCP connection on which this was sent."""
    made = socket.create_connection((HOST, port))
    for part in parts:
        made.sendall(part)
    return made


def await_closed(opened: socket.socket) -> None:
    """Until the other side ends it. Raises TimeoutError if it does not."""
    opened.settimeout(PATIENCE_S)
    with suppress(ConnectionError):
        while opened.recv(4096):
            pass


NO_KEY = "has no key, takes this for another cluster, or only looked who listens"


def noted(coordinator: ZmqTransport) -> bool:
    """Whether it knows where a connection comes from that is open still."""
    assert coordinator._gate is not None
    return any(door._peers for door in coordinator._gate._doors)


def test_who_proves_no_key_is_logged_with_its_address(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "HANDSHAKE_MS", 1_000)
    with closing(listening()) as coordinator, raw(coordinator.control_port):
        polled_until(coordinator, lambda: noted(coordinator))
        polled_until(coordinator, lambda: caplog.messages)
    assert caplog.messages == [f"refused a connection: {HOST} {NO_KEY}"]


def test_who_leaves_at_once_is_logged_too(caplog: pytest.LogCaptureFixture) -> None:
    with closing(listening()) as coordinator:
        raw(coordinator.control_port).close()
        polled_until(coordinator, lambda: caplog.messages)
    assert caplog.messages[0].endswith(NO_KEY)


def test_who_only_looks_with_a_key_of_the_cluster_is_no_stranger(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with closing(listening()) as coordinator:
        at = Address(HOST, coordinator.control_port)
        assert look(at, DEVICE, PATIENCE_S) is Seen.OURS
        with raw(coordinator.control_port):  # what comes behind it is logged
            polled_until(coordinator, lambda: noted(coordinator))
        polled_until(coordinator, lambda: caplog.messages)
    assert len(caplog.messages) == 1


def test_who_came_while_the_loop_stood_still_is_not_called_a_stranger(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But a wrong key is one."""
    monkeypatch.setattr(access, "BUSY_S", 0.2)
    with closing(listening()) as coordinator:
        for _ in range(2 * BATCH):
            raw(coordinator.control_port).close()
        stranger = Identity(DEVICE.own, OTHER.public)
        look(Address(HOST, coordinator.control_port), stranger, PATIENCE_S)
        time.sleep(0.3)
        polled_until(coordinator, lambda: len(caplog.messages) >= 2)
    busy, wrong = caplog.messages
    assert re.fullmatch("refused a connection: .* was not answered in time, as this .*", busy)
    assert wrong.endswith(NO_KEY)


SILENT: dict[str, tuple[bytes, ...]] = {
    "nothing": (),
    "half a greeting": (GREETING[:7],),
    "a greeting": (GREETING + b"CURVE" + bytes(15) + b"\x00" + bytes(31),),
}
WRONG: dict[str, tuple[bytes, ...]] = {
    "http": (b"GET / HTTP/1.0\r\n\r\n" + bytes(64),),
    "noise": (random.Random(0).randbytes(200),),
    "no mechanism": (GREETING + b"NULL" + bytes(16) + b"\x00" + bytes(31),),
    "a password": (GREETING + b"PLAIN" + bytes(15) + b"\x00" + bytes(31),),
    "the protocol of 2010": (b"\x01\x00\x02\x00x",),
    "a gigabyte": (
        *SILENT["a greeting"],
        b"\x06" + struct.pack(">Q", 1 << 30) + b"x" * 1000,
    ),
}


@pytest.mark.parametrize("name", [*SILENT, *WRONG])
def test_who_is_no_zeromq_is_cut_off_and_does_no_harm(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "HANDSHAKE_MS", 400)
    with closing(listening()) as coordinator:
        said = {**SILENT, **WRONG}[name]
        with raw(coordinator.control_port, *said) as one, raw(coordinator.data_port, *said) as two:
            await_closed(one)
            await_closed(two)
        with closing(client_of(coordinator)) as client:
            client.send_control(b"", Heartbeat())
            assert next_of(coordinator).message == Heartbeat()


def test_every_door_has_the_limit_on_handshakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slowness, "_slowness", 1.0)  # whatever program ran in this process
    with closing(listening()) as coordinator, closing(staged(coordinator)) as stage:
        for door in (coordinator.control, coordinator.pull, stage.pull):
            assert door is not None
            assert door.getsockopt(zmq.HANDSHAKE_IVL) == access.HANDSHAKE_MS == 3_000


def test_closing_hangs_on_nobody_who_is_half_in(bare: BareSockets) -> None:
    """Also on those who wait for an answer of the list at that very moment."""

    asked = threading.Event()

    def slow(key: str) -> str:
        asked.set()
        time.sleep(0.02)
        return ""

    with ExitStack() as stack:
        coordinator = listening(slow)
        for parts in SILENT.values():
            stack.enter_context(raw(coordinator.control_port, *parts))
        for pair in (DEVICE.own, None, OTHER, *(KeyPair.new() for _ in range(20))):
            bare.connect(zmq.DEALER, coordinator.control_port, pair).send(b"x")
        polled_until(coordinator, asked.is_set)
        coordinator.close()  # to hang is to hang for ever


def test_a_node_whose_address_is_taken_leaves_no_gate_behind() -> None:
    with closing(listening()) as coordinator:
        assert _threads() == 1
        address = Address(HOST, coordinator.control_port)
        for _ in range(3):
            with pytest.raises(Exception, match="cannot listen"):
                ZmqTransport.coordinator(address, Identity.of_coordinator(OWN), everybody)
        assert _threads() == 1


def _threads() -> int:
    return sum(isinstance(t, AuthenticationThread) for t in threading.enumerate())
