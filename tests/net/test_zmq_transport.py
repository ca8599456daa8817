"""The ZeroMQ transport alone: strangers, addresses, a ring that connects late, closing."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress

import numpy as np
import pytest
import zmq
from support.keys import OWN, OWNER_IDENTITY, everybody
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

from edgespec.config import Address
from edgespec.errors import ConfigError, PeerLost
from edgespec.net.control import CONTROL_BYTES
from edgespec.net.sockets import own_address_towards
from edgespec.net.zmq_transport import ZmqTransport
from edgespec.wire.codec import MOST_BYTES, encode
from edgespec.wire.messages import Fault, Heartbeat, Join
from edgespec.wire.segment import Segment


@pytest.fixture
def coordinator() -> Iterator[ZmqTransport]:
    """A coordinator's sockets."""
    with closing(listening()) as transport:
        yield transport


@pytest.fixture
def stage(coordinator: ZmqTransport) -> Iterator[ZmqTransport]:
    """A stage's sockets, in the same ring."""
    with closing(staged(coordinator)) as transport:
        yield transport


@pytest.fixture
def bare() -> Iterator[BareSockets]:
    """Makes sockets that belong to no node."""
    with BareSockets() as made:
        yield made


def segment(seq: int = 1) -> Segment:
    """A segment."""
    ids = np.arange(2, dtype=np.int64)
    return one_part(1, seq, 0, False, 0, 2, ids, ids, ids, ids, None)


def connect_ring(sender: ZmqTransport, receiver: ZmqTransport) -> None:
    """Let one of the two push to the other."""
    key = receiver.identity.own.public
    sender.connect_ring(Address(HOST, receiver.data_port), key)


# --- strangers, and members that send rubbish -----------------------------------------------------

RUBBISH: list[list[bytes]] = [
    [b""],
    [b"\xff" * 100],
    [b"GET / HTTP/1.1\r\n\r\n"],
    [b"x"] * 50,
    [os.urandom(3000), os.urandom(10)],
    [encode(Heartbeat()), b"one frame too many"],
    [encode(Join(1, "x", 1, HOST, 1, OWN.public))[:-1]],
]


def test_who_has_no_key_gets_nothing_through(
    coordinator: ZmqTransport,
    stage: ZmqTransport,
    bare: BareSockets,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for node in coordinator, stage:
        stranger = bare.connect(zmq.PUSH, node.data_port)
        with contextlib.suppress(zmq.Again):  # it may be turned away before it has said a word
            stranger.send(encode(segment()), zmq.NOBLOCK)
        assert nothing_of(node)
        polled_until(node, lambda: "has no key, takes this for" in caplog.text)
        caplog.clear()
    sender = bare.connect(zmq.DEALER, coordinator.control_port)
    sender.send(encode(Fault(1, "well-formed")))
    assert nothing_of(coordinator)
    assert not sender.poll(0), "it is told nothing either"


@pytest.mark.parametrize("number", range(len(RUBBISH)))
def test_rubbish_on_the_control_channel_is_dropped(
    number: int,
    coordinator: ZmqTransport,
    bare: BareSockets,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sender = bare.connect(zmq.DEALER, coordinator.control_port, DEVICE.own)
    sender.send_multipart(RUBBISH[number])
    sender.send(encode(Fault(5, "it lives")))
    came = next_of(coordinator)
    assert came.message == Fault(5, "it lives")
    assert came.key == DEVICE.own.public
    assert "dropped a message" in caplog.text


@pytest.mark.parametrize("number", range(len(RUBBISH)))
def test_rubbish_on_the_data_ring_is_a_fault_of_the_ring(
    number: int, stage: ZmqTransport, bare: BareSockets
) -> None:
    sender = bare.connect(zmq.PUSH, stage.data_port, MEMBER, DEVICE.own.public)
    sender.send_multipart(RUBBISH[number])
    sender.send(encode(segment(8)))
    came = next_of(stage)
    assert came.on_ring
    assert isinstance(came.message, Segment)
    assert came.message.header.seq == 8
    assert stage.ring_fault.startswith("sent a segment that cannot be read (malformed message")


def test_a_stage_without_a_place_takes_no_segment(
    coordinator: ZmqTransport, bare: BareSockets, caplog: pytest.LogCaptureFixture
) -> None:
    address = Address(HOST, coordinator.control_port)
    with closing(ZmqTransport.stage(address, DEVICE, HOST)) as alone:
        sender = bare.connect(zmq.PUSH, alone.data_port, MEMBER, DEVICE.own.public)
        with contextlib.suppress(zmq.Again):  # it may have been refused by now
            sender.send(encode(segment()), zmq.NOBLOCK)
        assert nothing_of(alone)
        polled_until(alone, lambda: "not that of a member of this ring" in caplog.text)


def test_what_comes_on_the_wrong_socket_is_dropped(
    coordinator: ZmqTransport,
    stage: ZmqTransport,
    bare: BareSockets,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sender = bare.connect(zmq.DEALER, coordinator.control_port, DEVICE.own)
    sender.send(encode(segment()))
    sender.send(encode(Heartbeat()))
    assert next_of(coordinator).message == Heartbeat()
    assert "segment on the control channel" in caplog.text
    pusher = bare.connect(zmq.PUSH, stage.data_port, MEMBER, DEVICE.own.public)
    pusher.send(encode(Fault(1, "x")))
    pusher.send(encode(segment()))
    assert isinstance(next_of(stage).message, Segment)
    assert stage.ring_fault == "sent a Fault for a segment"


def test_a_flood_of_rubbish_does_not_fill_the_log(
    coordinator: ZmqTransport, bare: BareSockets, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    sender = bare.connect(zmq.DEALER, coordinator.control_port, DEVICE.own)
    started = time.monotonic()
    for _ in range(500):
        sender.send_multipart([b"rubbish"])
    sender.send(encode(Heartbeat()))
    assert next_of(coordinator).message == Heartbeat()
    assert 1 <= len(caplog.records) < 10 + time.monotonic() - started


def test_a_frame_beyond_all_limits_ends_its_members_connection(
    coordinator: ZmqTransport, bare: BareSockets
) -> None:
    sender = bare.connect(zmq.DEALER, coordinator.control_port, DEVICE.own)
    monitor = sender.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    sender.send(encode(Heartbeat()))
    assert next_of(coordinator).message == Heartbeat()
    sender.send(bytes(CONTROL_BYTES + 1))
    polled_until(coordinator, lambda: monitor.poll(0))
    with closing(ZmqTransport.client(Address(HOST, coordinator.control_port), DEVICE)) as client:
        client.send_control(b"", Fault(1, "it lives"))
        polled_until(client, lambda: Fault(1, "it lives") in _messages(coordinator))
    sender.disable_monitor()
    monitor.close()


def _messages(transport: ZmqTransport) -> list[object]:
    return [incoming.message for incoming in transport.poll(0.0)]


def test_the_limit_on_frames_reaches_every_socket(coordinator: ZmqTransport) -> None:
    limits = {coordinator.control: CONTROL_BYTES, coordinator.pull: MOST_BYTES}
    for opened, limit in limits.items():
        assert opened is not None
        assert opened.getsockopt(zmq.MAXMSGSIZE) == limit


# --- connecting late, and peers that are gone -----------------------------------------------------


def test_segments_sent_before_the_ring_is_connected_are_not_lost(
    coordinator: ZmqTransport, stage: ZmqTransport
) -> None:
    """Data may overtake the control message that tells where to push it."""
    for seq in (1, 2):
        coordinator.send_ring(segment(seq))
    connect_ring(coordinator, stage)
    coordinator.send_ring(segment(3))
    seqs: list[int] = []
    limit = time.monotonic() + PATIENCE_S
    while len(seqs) < 3:
        assert time.monotonic() < limit
        came = stage.poll(0.5)
        seqs += [i.message.header.seq for i in came if isinstance(i.message, Segment)]
    assert seqs == [1, 2, 3]


def test_a_peer_that_is_gone_is_an_error_and_not_a_silence(coordinator: ZmqTransport) -> None:
    client = ZmqTransport.client(Address(HOST, coordinator.control_port), DEVICE)
    client.send_control(b"", Heartbeat())
    peer = next_of(coordinator).peer
    client.close()
    limit = time.monotonic() + PATIENCE_S
    with suppress(PeerLost):
        while time.monotonic() < limit:
            coordinator.send_control(peer, Heartbeat())
            time.sleep(0.01)
    with pytest.raises(PeerLost, match="no longer connected"):
        coordinator.send_control(peer, Heartbeat())


def test_a_client_may_come_before_the_coordinator() -> None:
    with socket.socket() as reserved:
        reserved.bind((HOST, 0))
        port = reserved.getsockname()[1]
    with closing(ZmqTransport.client(Address(HOST, port), OWNER_IDENTITY)) as client:
        client.send_control(b"", Heartbeat())
        time.sleep(0.3)
        late = ZmqTransport.coordinator(Address(HOST, port), OWNER_IDENTITY, everybody)
        with closing(late):
            assert next_of(late).message == Heartbeat()


def test_a_client_may_be_patient_for_minutes(coordinator: ZmqTransport) -> None:
    at = Address(HOST, coordinator.control_port)
    with closing(ZmqTransport.client(at, OWNER_IDENTITY, lost_s=240.0)) as client:
        client.send_control(b"", Heartbeat())
        assert next_of(coordinator).message == Heartbeat()


def test_poll_returns_when_a_waker_rings(coordinator: ZmqTransport) -> None:
    bell, waker = socket.socketpair()
    with bell, waker:
        coordinator.wake_on(waker)
        timer = threading.Timer(0.1, bell.send, [b"!"])
        timer.start()
        started = time.monotonic()
        assert coordinator.poll(PATIENCE_S) == []
        assert time.monotonic() - started < PATIENCE_S / 2
        timer.join()
        started = time.monotonic()
        coordinator.poll(0.05)  # the bell was emptied: it waits
        assert time.monotonic() - started >= 0.04


@pytest.mark.parametrize("other_end", ["never there", "gone"])
def test_closing_never_hangs_on_unsent_messages(other_end: str) -> None:
    with socket.socket() as listener:
        listener.bind((HOST, 0))  # bound but not listening: connections are refused
        client = ZmqTransport.client(Address(HOST, listener.getsockname()[1]), OWNER_IDENTITY)
        if other_end == "gone":
            listener.listen()
            taken, _ = listener.accept()
            taken.close()
        for _ in range(100):
            client.send_control(b"", Heartbeat())
        client.close()  # to hang is to hang for ever


def test_closing_hands_over_the_last_words(coordinator: ZmqTransport) -> None:
    client = ZmqTransport.client(Address(HOST, coordinator.control_port), DEVICE)
    client.send_control(b"", Fault(1, "last words"))
    client.close()
    assert next_of(coordinator).message == Fault(1, "last words")


def test_a_broken_connection_to_the_next_node_is_noticed(coordinator: ZmqTransport) -> None:
    """What was on its way may be lost, though both ends live and connect again."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen()
        coordinator.connect_ring(Address(HOST, listener.getsockname()[1]), DEVICE.own.public)
        taken, _ = listener.accept()
        with taken:
            assert coordinator.poll(0.1) == []
            assert coordinator.ring_broke is None
    limit = time.monotonic() + PATIENCE_S
    while coordinator.ring_broke is None and time.monotonic() < limit:
        coordinator.poll(0.1)
    assert coordinator.ring_broke is not None


# --- addresses ------------------------------------------------------------------------------------


def test_a_taken_port_is_refused_with_what_to_do(coordinator: ZmqTransport) -> None:
    address = Address(HOST, coordinator.control_port)
    with pytest.raises(ConfigError, match=rf"cannot listen on {HOST}:\d+ .*in use.*--port"):
        ZmqTransport.coordinator(address, OWNER_IDENTITY, everybody)


def test_a_host_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:0"):
        ZmqTransport.coordinator(Address("192.0.2.1", 0), OWNER_IDENTITY, everybody)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "x" * 70, "a..b"])
def test_an_unknown_host_is_refused_everywhere(host: str) -> None:
    for attempt in (
        lambda: ZmqTransport.coordinator(Address(host, 0), OWNER_IDENTITY, everybody),
        lambda: ZmqTransport.client(Address(host, 7430), OWNER_IDENTITY),
        lambda: own_address_towards(Address(host, 7430)),
    ):
        with pytest.raises(ConfigError, match="unknown"):
            attempt()


def test_localhost_is_an_address_to_listen_on() -> None:
    made = ZmqTransport.coordinator(Address("localhost", 0), OWNER_IDENTITY, everybody)
    with closing(made) as transport:
        assert transport.control_port > 0


def test_ones_own_address_towards_loopback_is_loopback() -> None:
    assert own_address_towards(Address("localhost", 1)) == HOST
