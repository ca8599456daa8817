"""What every transport promises, told once and shown on each: in-process and ZeroMQ."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Protocol

import numpy as np
import pytest
from support.keys import OWNER_IDENTITY
from support.local_ring import InprocLink
from support.segments import one_part, retain_message
from support.sockets import DEVICE, HOST, PATIENCE_S, listening, next_of, staged

from edgespec.config import Address
from edgespec.errors import LocalProtocolError
from edgespec.net.zmq_transport import ZmqTransport
from edgespec.types.tensor import Tensor
from edgespec.wire.client_messages import Submit
from edgespec.wire.messages import Heartbeat, Message
from edgespec.wire.segment import Segment


class Link(Protocol):
    """One way from a sender to a receiver."""

    def send(self, message: Message) -> None:
        """Put a message behind those on the way."""

    def receive(self) -> Message:
        """The oldest message on the way."""


class ZmqLink:
    """A ZeroMQ way: what `send` puts in comes out of `receiver`."""

    def __init__(self, send: Callable[[Message], None], receiver: ZmqTransport) -> None:
        self.send = send
        self._receiver = receiver
        self._here: list[Message] = []

    def receive(self) -> Message:
        """Wait for the next message."""
        limit = time.monotonic() + PATIENCE_S
        while not self._here:
            assert time.monotonic() < limit, "nothing came"
            self._here += [incoming.message for incoming in self._receiver.poll(0.5)]
        return self._here.pop(0)


def to_coordinator(stack: ExitStack) -> Link:
    """The control channel of a stage or client."""
    coordinator = stack.enter_context(closing(listening()))
    address = Address(HOST, coordinator.control_port)
    client = stack.enter_context(closing(ZmqTransport.client(address, OWNER_IDENTITY)))
    return ZmqLink(lambda message: client.send_control(b"", message), coordinator)


def to_stage(stack: ExitStack) -> Link:
    """The control channel from the coordinator, to a stage that said something first."""
    coordinator = stack.enter_context(closing(listening()))
    stage = stack.enter_context(closing(staged(coordinator)))
    stage.send_control(b"", Heartbeat())
    peer = next_of(coordinator).peer
    return ZmqLink(lambda message: coordinator.send_control(peer, message), stage)


def along_ring(stack: ExitStack) -> Link:
    """The data ring between two nodes."""
    coordinator = stack.enter_context(closing(listening()))
    stage = stack.enter_context(closing(staged(coordinator)))
    coordinator.connect_ring(Address(HOST, stage.data_port), DEVICE.own.public)
    return ZmqLink(coordinator.send_ring, stage)  # type: ignore[arg-type]


def in_process(stack: ExitStack) -> Link:
    """A link of this process."""
    return InprocLink()


ALL = {
    "in process": in_process,
    "zmq ring": along_ring,
    "zmq to coordinator": to_coordinator,
    "zmq to stage": to_stage,
}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closes what a link opened."""
    with ExitStack() as opened:
        yield opened


def segment(seq: int, rows: int = 3) -> Segment:
    """A segment with recognisable contents."""
    ids = np.arange(rows, dtype=np.int64) + seq
    hidden = Tensor("float32", (rows, 2), np.full((rows, 2), seq, "<f4").tobytes())
    return one_part(1, seq, 0, False, 0, rows, ids, ids - 1, ids, ids[:0], hidden)


def numbered(link: str, number: int) -> Message:
    """A message that this way may carry, and that says which one it is."""
    if "ring" in link:
        return segment(number)
    return retain_message(1, number, number, (number,), tuple(range(number)))


def number_of(message: Message) -> int:
    """Which message it is."""
    return message.header.seq if isinstance(message, Segment) else message.keep.epoch  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ALL)
def test_messages_arrive_once_and_in_order(name: str, stack: ExitStack) -> None:
    link = ALL[name](stack)
    for number in range(300):
        link.send(numbered(name, number))
    assert [number_of(link.receive()) for _ in range(300)] == list(range(300))


@pytest.mark.parametrize("name", ALL)
def test_a_message_arrives_as_it_was_sent(name: str, stack: ExitStack) -> None:
    link = ALL[name](stack)
    sent = numbered(name, 7)
    link.send(sent)
    came = link.receive()
    assert came is not sent, "everything goes through the codec"
    if isinstance(sent, Segment) and isinstance(came, Segment):
        assert came.hidden is not None
        assert sent.hidden is not None
        assert bytes(came.hidden.data) == bytes(sent.hidden.data)
        assert came.parts[0].ids.tolist() == sent.parts[0].ids.tolist()
    else:
        assert came == sent


@pytest.mark.parametrize("name", ["in process", "zmq ring"])
def test_a_sender_may_reuse_its_memory(name: str, stack: ExitStack) -> None:
    """What was sent is what the sender had at that time, for integers at least."""
    link = ALL[name](stack)
    sent = segment(5)
    link.send(sent)
    sent.parts[0].ids[:] = 99
    came = link.receive()
    assert isinstance(came, Segment)
    assert came.parts[0].ids.tolist() == [5, 6, 7]


@pytest.mark.parametrize("name", [name for name in ALL if "ring" not in name])
def test_what_cannot_be_sent_is_refused_and_nothing_else_is_lost(
    name: str, stack: ExitStack
) -> None:
    link = ALL[name](stack)
    bad = Submit(1, "hi", 1, float("nan"), 0, 1.0, 0.0, 0, (), "")
    with pytest.raises(LocalProtocolError, match="temperature"):
        link.send(bad)
    link.send(Heartbeat())
    assert link.receive() == Heartbeat()


@pytest.mark.parametrize("name", ["in process", "zmq ring"])
def test_a_large_segment_passes_whole(name: str, stack: ExitStack) -> None:
    link = ALL[name](stack)
    rows, width = 64, 8192
    data = np.random.default_rng(0).bytes(rows * width * 4)
    ids = np.arange(rows, dtype=np.int64)
    hidden = Tensor("float32", (rows, width), data)
    link.send(one_part(1, 1, 0, True, 0, 0, ids, ids, ids, ids[:0], hidden))
    came = link.receive()
    assert isinstance(came, Segment)
    assert came.hidden is not None
    assert bytes(came.hidden.data) == data
