"""A receiver of blocks in virtual time: its program around the machine, all of it in view."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable

from msgspec.structs import replace

from edgespec.blocks.receiver import (
    WINDOW,
    AskSender,
    BlockReceiver,
    Complete,
    GiveUp,
    OpenPart,
    ReceiverEffect,
    TransferProgress,
    Truncate,
    Write,
)
from edgespec.errors import EdgespecError
from edgespec.types.tensor import Tensor
from edgespec.wire.block_messages import BlockOffer, BlockRequest, Piece, PieceRequest
from edgespec.wire.messages import Message

CHUNK = 1 << 16
PIECE = CHUNK // WINDOW


def block(chunks: float = 3.4, seed: int = 0) -> bytes:
    """A file of so many chunks."""
    return random.Random(seed).randbytes(int(chunks * CHUNK))


def offer_of(data: bytes, **changes: object) -> BlockOffer:
    """What a sender says of it."""
    chunks = [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]
    hashes = b"".join(hashlib.sha256(chunk).digest() for chunk in chunks)
    table = Tensor("uint8", (len(chunks), 32), hashes)
    offer = BlockOffer("{}", "{}", len(data), hashlib.sha256(data).hexdigest(), CHUNK, table)
    return replace(offer, **changes)  # type: ignore[arg-type]


def piece_of(data: bytes, request: PieceRequest) -> Piece:
    """The answer to a request."""
    part = data[request.offset : request.offset + request.length]
    return Piece(request.sha256, request.offset, Tensor("uint8", (len(part),), part))


class Receiver:
    """A receiver's program: a machine and its part file, which outlives it; `now` is its time."""

    def __init__(self, part: bytearray | None = None) -> None:
        self.machine = BlockReceiver(1, "coordinator:7430", 0.0)
        self.part = bytearray() if part is None else part
        self.now = 0.0
        self.asked: list[Message] = []
        self.shown: list[TransferProgress] = []
        self.error: EdgespecError | None = None
        self.complete = False

    def tell(self, step: Callable[..., list[ReceiverEffect]], *arguments: object) -> None:
        """One step of the machine, and all that follows from it."""
        if self.complete or self.error:
            return
        for effect in step(*arguments):
            self._carry_out(effect)

    def link(self, is_up: bool) -> None:
        """The connection to the sender is there, or broke."""
        self.tell(self.machine.link, is_up, self.now)

    def _carry_out(self, effect: ReceiverEffect) -> None:
        match effect:
            case AskSender(message):
                self.asked.append(message)
            case TransferProgress():
                self.shown.append(effect)
            case OpenPart(offer):
                self._read_part(offer)
            case Write(offset, data):
                assert offset == len(self.part), "a part file is a prefix"
                self.part += data
            case Truncate(size):
                assert size <= len(self.part)
                del self.part[size:]
            case Complete():
                self.complete = True
            case GiveUp(error):
                self.error = error

    def _read_part(self, offer: BlockOffer) -> None:
        del self.part[offer.size :]
        there = bytes(self.part)
        for at in range(0, len(there), offer.chunk_bytes):
            self.tell(self.machine.part_read, there[at : at + offer.chunk_bytes])
        self.tell(self.machine.part_ended, self.now)

    def hear(self, message: Message) -> None:
        """The sender says this."""
        self.tell(self.machine.hear, message, self.now)

    def take_asked(self) -> list[PieceRequest]:
        """The pieces that were asked for since the last call, without bare acknowledgements."""
        asked = [m for m in self.asked if isinstance(m, PieceRequest) and m.length]
        self.asked.clear()
        return asked

    def wait(self, seconds: float) -> None:
        """Time passes, and the machine is woken as it wants."""
        end = self.now + seconds
        while self.machine.deadline() <= end and not self.error:
            self.now = max(self.now, self.machine.deadline())
            self.tell(self.machine.tick, self.now)
        self.now = end


def opened(data: bytes, part: bytearray | None = None) -> Receiver:
    """A receiver that is connected and has heard the offer."""
    receiver = Receiver(part)
    receiver.link(True)
    assert receiver.asked == [BlockRequest(1)]
    receiver.hear(offer_of(data))
    return receiver


def fetch(receiver: Receiver, data: bytes) -> list[PieceRequest]:
    """Answer all that it asks; returns all that it asked."""
    served = []
    while asked := receiver.take_asked():
        for request in asked:
            served.append(request)
            receiver.hear(piece_of(data, request))
    return served
