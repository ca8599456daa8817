"""Paced transport: when messages arrive, in which order, and what is counted."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
import zmq
from support.keys import OWN, OWNER_IDENTITY, everybody
from support.segments import one_part, retain_message
from support.sockets import DEVICE, HOST, PATIENCE_S, RING, BareSockets

from edgespec.config import Address
from edgespec.net.emulated_link import LinkPace, PacedTransport, Stamped
from edgespec.net.zmq_transport import Incoming, ZmqTransport
from edgespec.planning.costs import LinkCosts
from edgespec.wire.codec import encode
from edgespec.wire.messages import CloseRequest, Heartbeat, Message, Retain
from edgespec.wire.segment import Segment

LATENCY = 0.05
SENDING = 0.02  # of a segment with one row
PACE = LinkPace(LinkCosts(LATENCY, 1000.0), 0.03, lambda segment: 20 * segment.rows)


@pytest.fixture
def near() -> Iterator[PacedTransport]:
    """A coordinator whose ring leads back to itself."""
    made = PacedTransport.coordinator(Address(HOST, 0), OWNER_IDENTITY, everybody)
    with closing(made) as transport:
        transport.open_ring(RING)
        transport.connect_ring(Address(HOST, transport.data_port), OWN.public)
        yield transport


@pytest.fixture
def far(near: PacedTransport) -> Iterator[PacedTransport]:
    """A stage."""
    with closing(PacedTransport.stage(Address(HOST, near.control_port), DEVICE, HOST)) as transport:
        yield transport


def segment(seq: int = 1, rows: int = 1) -> Segment:
    """A segment."""
    ids = np.arange(rows, dtype=np.int64)
    return one_part(1, seq, 0, False, 0, rows, ids, ids - 1, ids, ids, None)


def taken(transport: ZmqTransport, count: int) -> list[tuple[float, Incoming]]:
    """The next messages, and when they came."""
    found: list[tuple[float, Incoming]] = []
    limit = time.monotonic() + PATIENCE_S
    while len(found) < count:
        assert time.monotonic() < limit, f"only {found} came"
        found += [(time.monotonic(), incoming) for incoming in transport.poll(0.5)]
    return found


def test_segments_arrive_one_behind_the_other_as_over_the_link(near: PacedTransport) -> None:
    near.pace = PACE
    begin = time.monotonic()
    near.happened_at = lambda: begin
    for seq, rows in ((1, 1), (2, 2), (3, 1)):
        near.send_ring(segment(seq, rows))
    came = taken(near, 3)
    due = [begin + LATENCY + SENDING * rows for rows in (1, 3, 4)]
    for seq, ((at, incoming), wanted) in enumerate(zip(came, due, strict=True), 1):
        assert isinstance(incoming, Stamped)
        assert isinstance(incoming.message, Segment)
        assert (incoming.on_ring, incoming.message.header.seq) == (True, seq)
        assert incoming.at == pytest.approx(wanted)
        assert wanted <= at  # usually within a millisecond


def test_control_messages_of_a_request_take_their_time_and_others_none(
    near: PacedTransport, far: PacedTransport
) -> None:
    near.pace = far.pace = PACE
    far.send_control(b"", Heartbeat())
    ((_, hello),) = taken(near, 1)
    begin = time.monotonic()
    near.happened_at = lambda: begin
    near.send_control(hello.peer, retain_message(1, 1, 4, (2,), (3,)))
    near.send_control(hello.peer, Heartbeat())
    near.send_control(hello.peer, CloseRequest(1))
    came = taken(far, 3)
    assert [type(incoming.message) for _, incoming in came] == [Heartbeat, Retain, CloseRequest]
    assert all(at >= begin + PACE.control for at, _ in came[1:])
    assert not isinstance(came[0][1], Stamped)


def test_a_poll_does_not_wait_for_what_is_due_later(near: PacedTransport) -> None:
    near.pace = LinkPace(LinkCosts(9.0, 1e9), 0.0, lambda segment: 0)
    near.send_ring(segment())
    begin = time.monotonic()
    while time.monotonic() - begin < 0.1:
        assert near.poll(0.02) == []


def test_what_is_due_after_the_running_compute_waits_for_what_comes_of_it(
    near: PacedTransport,
) -> None:
    near.pace = LinkPace(LinkCosts(0.01, 1e9), 0.0, lambda segment: 0)
    due = time.monotonic() + 0.01
    near.compute_ends = lambda: due - 0.005
    near.send_ring(segment())
    while time.monotonic() < due + 0.05:
        assert near.poll(0.02) == []
    near.compute_ends = lambda: due + 0.005
    taken(near, 1)


def test_a_segment_that_its_ring_did_not_outlive_does_not_arrive(near: PacedTransport) -> None:
    near.pace = LinkPace(LinkCosts(9.0, 1e9), 0.0, PACE.segment_bytes)
    near.send_ring(segment(1))
    limit = time.monotonic() + PATIENCE_S
    while not near._early_ones:  # it is here, but not due yet
        assert time.monotonic() < limit
        assert near.poll(0.0) == []
    near.pace = PACE
    near.open_ring("the secret of the next ring")
    near.connect_ring(Address(HOST, near.data_port), OWN.public)
    near.send_ring(segment(2))
    ((_, incoming),) = taken(near, 1)
    assert isinstance(incoming.message, Segment)
    assert incoming.message.header.seq == 2


def test_without_a_pace_stamped_messages_are_taken_as_they_come(
    near: PacedTransport, far: PacedTransport
) -> None:
    far.pace = PACE
    far.send_control(b"", CloseRequest(1))
    ((_, incoming),) = taken(near, 1)
    assert type(incoming) is Incoming
    assert incoming.message == CloseRequest(1)


@pytest.mark.parametrize("due", [float("nan"), float("inf"), -1e300, 1e300])
def test_a_stamp_that_is_not_of_this_machine_counts_for_nothing(
    near: PacedTransport, due: float
) -> None:
    near.pace = PACE
    with BareSockets() as bare:
        member = bare.connect(zmq.DEALER, near.control_port, DEVICE.own)
        member.send_multipart([encode(CloseRequest(1)), struct.pack(">8sd", b"due at: ", due)])
        ((_, incoming),) = taken(near, 1)
    assert type(incoming) is Incoming
    assert incoming.message == CloseRequest(1)


def test_what_belongs_to_requests_is_counted(near: PacedTransport, far: PacedTransport) -> None:
    sent: list[tuple[str, int]] = []

    def note(message: Message, nbytes: int) -> None:
        sent.append((type(message).__name__, nbytes))

    near.on_sent = far.on_sent = note
    far.send_control(b"", Heartbeat())
    near.send_ring(segment(1, 3))
    far.send_control(b"", CloseRequest(1))
    near.pace = PACE
    near.send_ring(segment(2, 3))
    real = len(encode(segment(1, 3)))
    end = len(encode(CloseRequest(1)))
    assert sent == [("Segment", real), ("CloseRequest", end), ("Segment", 60)]
