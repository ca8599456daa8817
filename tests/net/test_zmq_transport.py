"""The ZeroMQ transport alone: strangers, addresses, a ring that connects late, closing."""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress

import numpy as np
import pytest
import zmq

from edgespec.config import Address
from edgespec.errors import ConfigError, PeerLost
from edgespec.net.sockets import own_address_towards
from edgespec.net.zmq_transport import Incoming, ZmqTransport
from edgespec.wire.codec import DEFAULT_LIMITS, encode
from edgespec.wire.messages import Fault, Heartbeat, Join, Segment

HOST = "127.0.0.1"
PATIENCE_S = 10.0


@pytest.fixture
def coordinator() -> Iterator[ZmqTransport]:
    """A coordinator's sockets."""
    with closing(ZmqTransport.coordinator(Address(HOST, 0))) as transport:
        yield transport


@pytest.fixture
def stage(coordinator: ZmqTransport) -> Iterator[ZmqTransport]:
    """A stage's sockets, with the ring's key."""
    with closing(ZmqTransport.stage(Address(HOST, coordinator.control_port), HOST)) as transport:
        transport.ring_key = coordinator.ring_key
        yield transport


@pytest.fixture
def stranger() -> Iterator[Callable[[int, int], zmq.Socket[bytes]]]:
    """Makes sockets that belong to nobody."""
    with ExitStack() as opened:
        context = opened.enter_context(zmq.Context())

        def connect(kind: int, port: int) -> zmq.Socket[bytes]:
            made = opened.enter_context(context.socket(kind))
            made.linger = 0
            made.connect(f"tcp://{HOST}:{port}")
            return made

        yield connect


def segment(seq: int = 1) -> Segment:
    """A segment."""
    ids = np.arange(2, dtype=np.int64)
    return Segment(1, seq, 0, False, 0, 2, ids, ids, ids, ids, None)


def next_of(transport: ZmqTransport) -> Incoming:
    """The next message that is not dropped."""
    limit = time.monotonic() + PATIENCE_S
    while time.monotonic() < limit:
        for incoming in transport.poll(0.1):
            return incoming
    raise AssertionError("nothing came")


# --- strangers ------------------------------------------------------------------------------------

RUBBISH: list[list[bytes]] = [
    [b""],
    [b"\xff" * 100],
    [b"GET / HTTP/1.1\r\n\r\n"],
    [b"x"] * 50,
    [os.urandom(3000), os.urandom(10)],
    [bytes(f) for f in encode(Heartbeat())] + [b"one frame too many"],
    [bytes(encode(Join(1, "x", 1, HOST, 1))[0])[:-1]],
]


@pytest.mark.parametrize("number", range(len(RUBBISH)))
def test_rubbish_on_the_control_channel_is_dropped(
    number: int,
    coordinator: ZmqTransport,
    stranger: Callable[[int, int], zmq.Socket[bytes]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    sender = stranger(zmq.DEALER, coordinator.control_port)
    sender.send_multipart(RUBBISH[number])
    sender.send_multipart(encode(Fault(5, "it lives")))
    assert next_of(coordinator).message == Fault(5, "it lives")
    assert "dropped a message" in caplog.text


@pytest.mark.parametrize("number", range(len(RUBBISH)))
def test_rubbish_on_the_data_ring_is_dropped(
    number: int,
    coordinator: ZmqTransport,
    stage: ZmqTransport,
    stranger: Callable[[int, int], zmq.Socket[bytes]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    coordinator.connect_ring(Address(HOST, stage.data_port))
    sender = stranger(zmq.PUSH, stage.data_port)
    sender.send_multipart(RUBBISH[number])
    sender.send_multipart([coordinator.ring_key, *RUBBISH[number]])
    sender.send_multipart([coordinator.ring_key, *encode(segment(8))])
    came = next_of(stage)
    assert came.on_ring
    assert isinstance(came.message, Segment)
    assert came.message.seq == 8
    assert "dropped a message" in caplog.text


@pytest.mark.parametrize("key", [None, b"", b"0" * 32])
def test_a_segment_without_the_rings_key_is_dropped(
    key: bytes | None,
    coordinator: ZmqTransport,
    stage: ZmqTransport,
    stranger: Callable[[int, int], zmq.Socket[bytes]],
) -> None:
    for receiver, sender in (stage, coordinator), (coordinator, stage):
        forged = [] if key is None else [key]
        stranger(zmq.PUSH, receiver.data_port).send_multipart([*forged, *encode(segment(2**40))])
        assert receiver.poll(0.2) == []
        sender.connect_ring(Address(HOST, receiver.data_port))
        sender.send_ring(segment(3))
        came = next_of(receiver).message
        assert isinstance(came, Segment)
        assert came.seq == 3


def test_a_stage_without_a_place_takes_no_segment(
    coordinator: ZmqTransport, stranger: Callable[[int, int], zmq.Socket[bytes]]
) -> None:
    with closing(ZmqTransport.stage(Address(HOST, coordinator.control_port), HOST)) as alone:
        sender = stranger(zmq.PUSH, alone.data_port)
        sender.send_multipart([b"", *encode(segment())])
        assert alone.poll(0.2) == []


def test_two_rings_have_two_keys(coordinator: ZmqTransport) -> None:
    with closing(ZmqTransport.coordinator(Address(HOST, 0))) as other:
        assert other.ring_key != coordinator.ring_key
        assert len(other.ring_key) >= 32


def test_what_comes_on_the_wrong_socket_is_dropped(
    coordinator: ZmqTransport,
    stage: ZmqTransport,
    stranger: Callable[[int, int], zmq.Socket[bytes]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    sender = stranger(zmq.DEALER, coordinator.control_port)
    sender.send_multipart(encode(segment()))
    sender.send_multipart(encode(Heartbeat()))
    assert next_of(coordinator).message == Heartbeat()
    assert "segment on the control channel" in caplog.text
    pusher = stranger(zmq.PUSH, stage.data_port)
    pusher.send_multipart([stage.ring_key, *encode(Fault(1, "x"))])
    pusher.send_multipart([stage.ring_key, *encode(segment())])
    assert isinstance(next_of(stage).message, Segment)
    assert "Fault on the data ring" in caplog.text


def test_a_flood_of_rubbish_does_not_fill_the_log(
    coordinator: ZmqTransport,
    stranger: Callable[[int, int], zmq.Socket[bytes]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    sender = stranger(zmq.DEALER, coordinator.control_port)
    for _ in range(500):
        sender.send_multipart([b"rubbish"])
    sender.send_multipart(encode(Heartbeat()))
    assert next_of(coordinator).message == Heartbeat()
    assert 1 <= len(caplog.records) < 10


def test_bytes_that_are_no_zeromq_do_no_harm(coordinator: ZmqTransport) -> None:
    """Also the announcement of a frame of a gigabyte, behind a proper greeting."""
    greeting = (
        b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL" + bytes(16) + b"\x00" + bytes(31)
    )
    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    (frame,) = (bytes(frame) for frame in encode(Fault(1, "well-formed")))
    hello = bytes([4, len(ready)]) + ready + bytes([0, len(frame)]) + frame
    huge = b"\x02" + struct.pack(">Q", 1 << 30) + b"x" * 1000
    for rubbish in (os.urandom(200), b"GET / HTTP/1.0\r\n\r\n"):
        with socket.create_connection((HOST, coordinator.control_port)) as raw:
            raw.sendall(rubbish)
    with socket.create_connection((HOST, coordinator.control_port)) as raw:
        raw.sendall(greeting)
        assert raw.recv(10)[:1] == b"\xff"
        raw.sendall(hello)
        assert next_of(coordinator).message == Fault(1, "well-formed")
        raw.sendall(huge)
        assert _until_closed(raw), "the connection of a sender beyond all limits goes on"
    with closing(ZmqTransport.client(Address(HOST, coordinator.control_port))) as client:
        client.send_control(b"", Heartbeat())
        assert next_of(coordinator).message == Heartbeat()


def _until_closed(raw: socket.socket) -> bool:
    """Whether the other side closes sooner than it would find this one dead."""
    limit = time.monotonic() + 2.0
    with suppress(ConnectionError, TimeoutError):
        while (left := limit - time.monotonic()) > 0:
            raw.settimeout(left)
            if not raw.recv(4096):
                break
    return time.monotonic() < limit


def test_the_limit_on_frames_reaches_every_socket(coordinator: ZmqTransport) -> None:
    for opened in (coordinator._control, coordinator._pull):
        assert opened is not None
        assert opened.getsockopt(zmq.MAXMSGSIZE) == DEFAULT_LIMITS.frame_bytes


# --- connecting late, and peers that are gone -----------------------------------------------------


def test_segments_sent_before_the_ring_is_connected_are_not_lost(
    coordinator: ZmqTransport, stage: ZmqTransport
) -> None:
    """Data may overtake the control message that tells where to push it."""
    for seq in (1, 2):
        coordinator.send_ring(segment(seq))
    coordinator.connect_ring(Address(HOST, stage.data_port))
    coordinator.send_ring(segment(3))
    seqs: list[int] = []
    while len(seqs) < 3:
        came = stage.poll(PATIENCE_S)
        assert came
        seqs += [i.message.seq for i in came if isinstance(i.message, Segment)]
    assert seqs == [1, 2, 3]


def test_a_peer_that_is_gone_is_an_error_and_not_a_silence(coordinator: ZmqTransport) -> None:
    client = ZmqTransport.client(Address(HOST, coordinator.control_port))
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
    with closing(ZmqTransport.client(Address(HOST, port))) as client:
        client.send_control(b"", Heartbeat())
        time.sleep(0.3)
        with closing(ZmqTransport.coordinator(Address(HOST, port))) as late:
            assert next_of(late).message == Heartbeat()


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
        client = ZmqTransport.client(Address(HOST, listener.getsockname()[1]))
        if other_end == "gone":
            listener.listen()
            taken, _ = listener.accept()
            taken.close()
        for _ in range(100):
            client.send_control(b"", Heartbeat())
        started = time.monotonic()
        client.close()
        assert time.monotonic() - started < 3.0


def test_closing_hands_over_the_last_words(coordinator: ZmqTransport) -> None:
    client = ZmqTransport.client(Address(HOST, coordinator.control_port))
    client.send_control(b"", Fault(1, "last words"))
    client.close()
    assert next_of(coordinator).message == Fault(1, "last words")


def test_a_broken_connection_to_the_next_node_is_noticed(coordinator: ZmqTransport) -> None:
    """What was on its way may be lost, though both ends live and connect again."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen()
        coordinator.connect_ring(Address(HOST, listener.getsockname()[1]))
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
        ZmqTransport.coordinator(address)


def test_a_host_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:0"):
        ZmqTransport.coordinator(Address("192.0.2.1", 0))


@pytest.mark.parametrize("host", ["no-such-host.invalid", "x" * 70, "a..b"])
def test_an_unknown_host_is_refused_everywhere(host: str) -> None:
    for attempt in (
        lambda: ZmqTransport.coordinator(Address(host, 0)),
        lambda: ZmqTransport.client(Address(host, 7430)),
        lambda: own_address_towards(Address(host, 7430)),
    ):
        with pytest.raises(ConfigError, match="unknown"):
            attempt()


def test_localhost_is_an_address_to_listen_on() -> None:
    with closing(ZmqTransport.coordinator(Address("localhost", 0))) as transport:
        assert transport.control_port > 0


def test_ones_own_address_towards_loopback_is_loopback() -> None:
    assert own_address_towards(Address("localhost", 1)) == HOST
