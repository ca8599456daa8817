"""A receiver of blocks with chance against it: the file ends whole, nothing much is sent twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.transfers import CHUNK, Receiver, block, fetch, offer_of, opened, piece_of

from edgespec.blocks.receiver import ASK_S, TRIES
from edgespec.types.tensor import Tensor
from edgespec.wire.block_messages import BlockRequest, Piece, PieceRequest
from edgespec.wire.messages import Message


class Chance:
    """A receiver and a sender's file with chance between them; counts what was sent."""

    def __init__(self, draw: st.DataObject, data: bytes) -> None:
        self.draw = draw
        self.data = data
        self.on_its_way: list[Message] = []
        self.sent = 0
        self.cuts = 0
        self.lost = 0
        self.corrupt = 0
        self.receiver = Receiver()
        self.receiver.link(True)

    def run(self, faults: list[str]) -> None:
        """Play the faults one by one, then let it go well."""
        for fault in faults:
            self.serve()
            if self.receiver.complete:
                return
            getattr(self, fault)()
        for _ in range(2_000):
            self.serve()
            if self.receiver.complete or self.receiver.error:
                return
            if self.on_its_way:
                self.deliver()
            else:
                self.receiver.wait(ASK_S)
        raise AssertionError("it does not end")

    def serve(self) -> None:
        """Answer all that was asked."""
        for message in self.receiver.asked:
            if isinstance(message, BlockRequest):
                self.on_its_way.append(offer_of(self.data))
            elif isinstance(message, PieceRequest) and message.length:
                self.sent += message.length
                self.on_its_way.append(piece_of(self.data, message))
        self.receiver.asked.clear()

    def deliver(self, at: int = 0) -> None:
        """The message at that place arrives."""
        if self.on_its_way:
            self.receiver.hear(self.on_its_way.pop(at))

    def reorder(self) -> None:
        """A later message arrives before the others."""
        if self.on_its_way:
            self.deliver(self.draw.draw(st.integers(0, len(self.on_its_way) - 1)))

    def repeat(self) -> None:
        """A message arrives twice."""
        if self.on_its_way:
            self.on_its_way.insert(0, self.on_its_way[0])
            self.deliver()

    def lose(self) -> None:
        """A message is lost, though the connection holds."""
        if self.on_its_way:
            self.on_its_way.pop(0)
            self.lost += 1

    def spoil(self) -> None:
        """A piece arrives with wrong bytes."""
        if self.on_its_way and isinstance(self.on_its_way[0], Piece) and self.corrupt < TRIES - 1:
            piece = self.on_its_way[0]
            data = bytes(byte ^ 1 for byte in piece.data.data)
            self.on_its_way[0] = replace(piece, data=Tensor("uint8", (len(data),), data))
            self.deliver()
            self.corrupt += 1

    def cut(self) -> None:
        """The connection breaks, or the sender restarts: what is on its way is lost."""
        self.cuts += 1
        self.on_its_way.clear()
        self.receiver.link(False)
        self.receiver.asked.clear()
        self.receiver.link(True)

    def kill(self) -> None:
        """The receiver is killed, in the middle of writing perhaps, and starts again."""
        self.cuts += 1
        self.on_its_way.clear()
        part = self.receiver.part
        self.receiver = Receiver(part)
        self.receiver.link(True)


FAULTS = ("deliver", "cut", "kill", "reorder", "repeat", "lose", "spoil")


@given(st.data(), st.floats(0.01, 3.5), st.lists(st.sampled_from(FAULTS), max_size=60))
def test_the_file_ends_whole_whatever_happens(
    draw: st.DataObject, chunks: float, faults: list[str]
) -> None:
    data = block(chunks)
    chance = Chance(draw, data)
    chance.run(faults)
    assert chance.receiver.complete, chance.receiver.error
    assert chance.receiver.part == data


@given(
    st.data(), st.floats(0.01, 3.5), st.lists(st.sampled_from(("deliver", "cut", "kill", "repeat")))
)
def test_a_cut_costs_no_more_than_a_chunk(
    draw: st.DataObject, chunks: float, faults: list[str]
) -> None:
    data = block(chunks)
    chance = Chance(draw, data)
    chance.run(faults)
    assert chance.receiver.complete
    assert chance.sent <= len(data) + chance.cuts * CHUNK


@given(st.integers(0, 4 * CHUNK), st.integers(0, 4 * CHUNK), st.binary(min_size=1, max_size=50))
def test_whatever_a_part_file_holds(length: int, at: int, garbage: bytes) -> None:
    data = block()
    part = bytearray(block(4)[:length])
    part[at : at + len(garbage)] = garbage
    receiver = opened(data, part)
    fetch(receiver, data)
    assert receiver.complete
    assert receiver.part == data
