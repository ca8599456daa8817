"""Block receiver: fetches a block file piece by piece, verifies it, resumes after any cut.

A file is hashed in chunks and travels in pieces of a chunk. See docs/transfer.md.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

from edgespec.errors import ConfigError, EdgespecError, PeerLost, RemoteProtocolError
from edgespec.wire.block_messages import (
    HASH_BYTES,
    BlockOffer,
    BlockPreparing,
    BlockRefused,
    BlockRequest,
    Piece,
    PieceRequest,
)
from edgespec.wire.messages import Message

WINDOW = 4
"""Pieces in a chunk, and the most that are requested at once: a cut costs at most one chunk."""

ASK_S = 2.0
"""Seconds after which a receiver without an offer asks again."""

RETRY_S = 8.0
"""Seconds without a new piece after which a receiver asks again: the sender may have dropped one (a
cut connection is noticed at once). The wait doubles until the next piece comes."""

SILENCE_S = 30.0
"""Seconds without progress after which the sender is lost."""

TRIES = 3
"""Wrong hashes in a row after which a chunk is wrong at the sender."""

BLOCKS = 3
"""Different blocks that a sender may offer during one transfer."""

SHOW_S = 0.25
"""Seconds between two reports of progress."""

SMOOTH_S = 3.0
"""Seconds over which a rate is smoothed."""


# --- effects --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskSender:
    """Send this to the sender."""

    message: BlockRequest | PieceRequest


@dataclass(frozen=True, slots=True)
class OpenPart:
    """Open the part file of this block and read it: `part_read` …, `part_ended`."""

    offer: BlockOffer


@dataclass(frozen=True, slots=True)
class Write:
    """Write to the part file, whose length is `offset`."""

    offset: int
    data: bytes | memoryview


@dataclass(frozen=True, slots=True)
class Truncate:
    """Cut the part file down to this length."""

    size: int


@dataclass(frozen=True, slots=True)
class Complete:
    """The part file is whole and verified: it may take its name."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The transfer ends with this error."""

    error: EdgespecError


@dataclass(frozen=True, slots=True)
class TransferProgress:
    """Show the user: bytes `done` of `total`, `rate` in bytes a second, seconds `left`.

    `total` is 0 until the block is offered. `left` is infinite while nothing arrives.
    """

    text: str
    done: int = 0
    total: int = 0
    rate: float = 0.0
    left: float = math.inf


ReceiverEffect = AskSender | OpenPart | Write | Truncate | Complete | GiveUp | TransferProgress

# --- state ----------------------------------------------------------------------------------------


class _Prefix:
    """The first `size` bytes of a block, with the hashes over them."""

    def __init__(self, offer: BlockOffer) -> None:
        self.offer = offer
        self._whole = hashlib.sha256()
        self._verified = self._whole.copy()
        self._chunk = hashlib.sha256()
        self.size = 0

    def feed(self, data: bytes | memoryview) -> bool:
        """Add bytes, at most up to the end of a chunk; False if that chunk is wrong.

        A wrong chunk is dropped: the prefix then ends where it began.
        """
        self._whole.update(data)
        self._chunk.update(data)
        self.size += len(data)
        if self.size % self.offer.chunk_bytes and self.size < self.offer.size:
            return True
        chunk = (self.size - 1) // self.offer.chunk_bytes
        at = chunk * HASH_BYTES
        good = self._chunk.digest() == bytes(self.offer.chunk_hashes.data[at : at + HASH_BYTES])
        if good:
            self._verified = self._whole.copy()
        else:
            self._whole = self._verified.copy()
            self.size = chunk * self.offer.chunk_bytes
        self._chunk = hashlib.sha256()
        return good

    @property
    def is_whole(self) -> bool:
        return self.size == self.offer.size

    @property
    def sha256(self) -> str:
        """Of all bytes so far, in hex."""
        return self._whole.hexdigest()


class _Rate:
    """Bytes a second, smoothed."""

    def __init__(self, done: int, now: float) -> None:
        self._done, self._at = done, now
        self.value = 0.0

    def note(self, done: int, now: float) -> bool:
        """`done` bytes are there now; returns whether the rate was updated."""
        passed = now - self._at
        if passed < SHOW_S:
            return False
        latest = max(done - self._done, 0) / passed
        weight = 1.0 if self.value == 0.0 else 1.0 - math.exp(-passed / SMOOTH_S)
        self.value += weight * (latest - self.value)
        self._done, self._at = done, now
        return True


class BlockReceiver:
    """Fetches the block file of one stage from one sender into a part file, front to back."""

    def __init__(self, stage: int, source: str, now: float, silence: float = SILENCE_S) -> None:
        """`source`: the sender's address, for messages; `silence`: seconds without progress."""
        self._stage = stage
        self._source = source
        self._silence = silence
        self._connected = False
        self._fetching = False
        self._opened: _Prefix | None = None
        self._offers = 0
        self._reading = False
        self._asked = 0
        self._early: dict[int, bytes | memoryview] = {}
        self._wrong = 0
        self._rate = _Rate(0, 0.0)
        self._heard = self._next = now
        self._retry = RETRY_S

    def deadline(self) -> float:
        """When to call `tick` next."""
        return min(self._next, self._heard + self._silence)

    @property
    def _prefix(self) -> _Prefix:
        assert self._opened is not None, "there was an offer"
        return self._opened

    @property
    def _chunk_bytes(self) -> int:
        return self._prefix.offer.chunk_bytes

    # --- asking for the block ---------------------------------------------------------------------

    def link(self, is_up: bool, now: float) -> list[ReceiverEffect]:
        """The connection to the sender is there (again), or broke: what was on its way is lost."""
        self._connected = is_up
        self._fetching &= is_up
        return self._ask_block(now) if is_up else []

    def tick(self, now: float) -> list[ReceiverEffect]:
        """The deadline has come."""
        if now - self._heard >= self._silence:
            return [GiveUp(self._lost(now - self._heard))]
        if now < self._next:
            return []
        if self._fetching:
            self._fetching = False
            self._retry *= 2.0
        return self._ask_block(now)

    def _ask_block(self, now: float) -> list[ReceiverEffect]:
        # Also after an offer: the sender may be another process by now, which has made none.
        self._next = now + ASK_S
        return [AskSender(BlockRequest(self._stage))] if self._connected else []

    def _lost(self, silent: float) -> PeerLost:
        what = f"block {self._stage} from {self._source}"
        if self._connected:
            return PeerLost(
                f"{what} came no further for {silent:.0f} s; does the program that listens there "
                "belong to this ring, and does it still run?"
            )
        return PeerLost(
            f"{what} cannot be fetched: no connection for {silent:.0f} s; does it still run, and "
            "is the port open?"
        )

    def hear(self, message: Message, now: float) -> list[ReceiverEffect]:
        """A message of the sender came."""
        match message:
            case BlockPreparing(text):
                self._heard = now
                return [TransferProgress(text)]
            case BlockOffer():
                return self._on_offer(message, now)
            case BlockRefused(reason):
                return [GiveUp(ConfigError(f"{self._source} has no block for us: {reason}"))]
            case Piece():
                return self._on_piece(message, now)
        name = type(message).__name__
        problem = f"{self._source} sent a {name} instead of stage {self._stage}'s block"
        return [GiveUp(RemoteProtocolError(problem))]

    def _on_offer(self, offer: BlockOffer, now: float) -> list[ReceiverEffect]:
        if self._opened is not None and offer == self._opened.offer:
            return self._start_fetching(now)
        self._offers += 1
        if self._offers > BLOCKS:
            problem = f"{self._source} offered {self._offers} different blocks for one stage"
            return [GiveUp(RemoteProtocolError(f"{problem}; ask whoever runs it"))]
        self._heard = now
        self._opened = _Prefix(offer)
        self._reading = True
        self._fetching = False
        self._early.clear()
        self._wrong = 0
        looking = TransferProgress("looking for what is here already", 0, offer.size)
        return [looking, OpenPart(offer)]

    # --- what an earlier transfer left ------------------------------------------------------------

    def part_read(self, data: bytes) -> list[ReceiverEffect]:
        """The next bytes of the part file, at most up to the end of a chunk."""
        if not self._reading or self._prefix.feed(data):
            return []
        self._reading = False
        return [Truncate(self._prefix.size)]

    def part_ended(self, now: float) -> list[ReceiverEffect]:
        """All of the part file was read, or all up to what is wrong in it."""
        self._reading = False
        self._heard = now
        self._rate = _Rate(self._prefix.size, now)
        return [self._progress(), *self._start_fetching(now)]

    # --- pieces -----------------------------------------------------------------------------------

    def _start_fetching(self, now: float) -> list[ReceiverEffect]:
        if self._reading:
            return []
        if self._prefix.is_whole:
            return self._finish()
        if self._fetching or not self._connected:
            return []
        self._asked = self._prefix.size
        self._fetching = True
        self._next = now + self._retry
        return self._ask_pieces()

    def _ask_pieces(self) -> list[ReceiverEffect]:
        """Request what the window allows; if that is nothing, still report what has arrived."""
        if not self._fetching:  # an offer must come first
            return []
        have, sha256 = self._prefix.size, self._prefix.offer.sha256
        effects: list[ReceiverEffect] = []
        self._asked = max(self._asked, have)
        while (length := self._length(self._asked)) and (
            self._asked + length <= have + self._chunk_bytes
        ):
            if self._asked not in self._early:
                effects.append(AskSender(PieceRequest(sha256, self._asked, length, have)))
            self._asked += length
        return effects or [AskSender(PieceRequest(sha256, self._asked, 0, have))]

    def _length(self, offset: int) -> int:
        """Length of the piece at `offset`: to the next multiple of a piece, or the end."""
        piece = self._chunk_bytes // WINDOW
        return min(piece - offset % piece, self._prefix.offer.size - offset)

    def _on_piece(self, piece: Piece, now: float) -> list[ReceiverEffect]:
        if not self._is_wanted(piece):
            return []
        self._early[piece.offset] = piece.data.data
        self._heard = now
        self._retry = RETRY_S
        effects: list[ReceiverEffect] = []
        while (data := self._early.pop(self._prefix.size, None)) is not None:
            effects.append(Write(self._prefix.size, data))
            if not self._prefix.feed(data):
                return [*effects, *self._drop_chunk(now)]
            if self._prefix.size % self._chunk_bytes == 0:
                self._wrong = 0
        if self._rate.note(self._prefix.size, now):
            effects.append(self._progress())
        if self._prefix.is_whole:
            return [*effects, *self._finish()]
        if self._fetching:
            self._next = now + self._retry
        return [*effects, *self._ask_pieces()]

    def _is_wanted(self, piece: Piece) -> bool:
        """Whether it was requested and is not there yet."""
        if self._opened is None or self._reading or piece.sha256 != self._opened.offer.sha256:
            return False
        begin, chunk_bytes = self._prefix.size, self._chunk_bytes
        if not begin <= piece.offset < min(begin + chunk_bytes, self._prefix.offer.size):
            return False
        if piece.offset != begin and piece.offset % (chunk_bytes // WINDOW):
            return False
        fits = len(piece.data.data) == self._length(piece.offset)
        return fits and piece.offset not in self._early

    def _drop_chunk(self, now: float) -> list[ReceiverEffect]:
        """The chunk that just ended is wrong: fetch it again, or give up."""
        self._wrong += 1
        begin = self._prefix.size
        if self._wrong >= TRIES:
            problem = (
                f"chunk {begin // self._chunk_bytes} of block {self._stage} from "
                f"{self._source} had a wrong hash {self._wrong} times; the file there, or the way "
                "from there, is damaged"
            )
            return [Truncate(begin), GiveUp(RemoteProtocolError(problem))]
        self._asked = begin
        return [Truncate(begin), *self._ask_pieces()]

    def _finish(self) -> list[ReceiverEffect]:
        if self._prefix.sha256 != self._prefix.offer.sha256:
            problem = (
                f"block {self._stage} from {self._source} has another hash than it "
                "was offered with, though each chunk is right; fetch it from another node"
            )
            return [Truncate(0), GiveUp(RemoteProtocolError(problem))]
        return [*self._ask_pieces(), self._progress(), Complete()]

    def _progress(self) -> TransferProgress:
        done, total, rate = self._prefix.size, self._prefix.offer.size, self._rate.value
        left = 0.0 if done == total else (total - done) / rate if rate else math.inf
        text = f"{done / 1e6:.1f} of {total / 1e6:.1f} MB"
        if rate:
            text += f", {rate / 1e6:.1f} MB/s"
        if rate and left:
            text += f", {left:.0f} s left"
        return TransferProgress(text, done, total, rate, left)
