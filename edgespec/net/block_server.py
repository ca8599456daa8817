"""Block server: a node's socket and threads that send block files to the nodes of the ring.

It has its own channel and context: a chunk never delays a segment or a retained set.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import zmq

from edgespec.blocks.receiver import WINDOW
from edgespec.blocks.sender import MOST_PEERS, PieceSender, SendPiece
from edgespec.config import MOST_STAGES, Address
from edgespec.errors import ConfigError, EdgespecError, ModelError, RemoteProtocolError
from edgespec.net.access import Admits, Gate
from edgespec.net.keys import KeyPair, short
from edgespec.net.sockets import Dropped, OtherVersions, Poller, bind, only, proved
from edgespec.types.tensor import Tensor
from edgespec.wire.block_messages import (
    HASH_BYTES,
    HEAD_NUMBER,
    BlockOffer,
    BlockPreparing,
    BlockRefused,
    BlockRequest,
    Piece,
    PieceRequest,
)
from edgespec.wire.codec import decode, encode
from edgespec.wire.messages import Message

log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20
"""The bytes under one hash, and the cost of a cut: 10 ms of gigabit Ethernet."""

REQUEST_BYTES = 4096
"""Requests are small; a longer frame closes its connection."""

QUEUED = 2 * WINDOW
"""Pieces that may wait for one receiver to read them: twice what a normal one requests."""

LOST_MS = 10_000
"""A receiver that hears nothing for so long connects again, and is given up here 20 s later; long,
as pings queue behind pieces."""

BULK = 0x28
"""Type of service (AF11, "high-throughput data"): queues that look at it, such as Linux's
pfifo_fast and those of wireless cards, let other packets pass these."""

LOOK_S = 0.05
"""Seconds between two looks at whether the ring is busy, while pieces wait."""

IDLE_S = 60.0
"""The longest wait for messages, of which, and of the end, the sockets tell."""

CLOSING_S = 5.0
"""Seconds for which stopping waits for a block that is being made, in a daemon thread."""


@dataclass(frozen=True, slots=True)
class ServedBlock:
    """A finished block file, with its texts and the figures of its manifest."""

    path: Path
    manifest_text: str
    config_text: str
    sha256: str
    size: int


Prepare = Callable[[int, Callable[[str], None]], ServedBlock]
"""Makes or finds the block of a stage; the second argument takes progress in words. May take
minutes. Raises EdgespecError with the reason if there is no such block."""


@dataclass(frozen=True, slots=True)
class _Ready:
    """A hashed block: its open file, and the offer to receivers."""

    file: int
    offer: BlockOffer


class BlockServer:
    """Serves block files to the nodes that it admits. Can be started and stopped once."""

    def __init__(
        self,
        address: Address,
        own: KeyPair,
        admits: Admits,
        prepare: Prepare,
        busy: Callable[[], bool],
    ) -> None:
        """Listen at `address` (port 0: any free one); `busy()`: whether the ring works now.

        `own`: the key pair to prove. `prepare` is called in one thread, `busy` in another one,
        often. Raises ConfigError if the address cannot be used.
        """
        self._busy = busy
        self._admits = admits
        self._context = zmq.Context()
        router = self._router = self._context.socket(zmq.ROUTER)
        router.linger = 0
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES)
        router.setsockopt(zmq.SNDHWM, QUEUED)
        router.setsockopt(zmq.RCVHWM, 2 * QUEUED)
        router.setsockopt(zmq.TOS, BULK)
        self._gate = Gate(self._context)
        self._door = self._gate.guard(self._router, "the block channel", own, admits)
        try:
            self.port = bind(self._router, address)
        except ConfigError:
            self._close()
            raise
        self._bell, self._waker = socket.socketpair()
        self._bell.setblocking(False)
        self._preparer = _Preparer(prepare, self._ring)
        self._sender = PieceSender()
        self._ready: dict[int, _Ready] = {}
        self._files: dict[str, _Ready] = {}
        self._waiters: dict[int, set[bytes]] = {}
        self._texts: dict[int, str] = {}
        self._dropped = Dropped()
        self._other_versions = OtherVersions(admits)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="edgespec-blocks", daemon=True)
        self.sent_bytes = 0
        """Bytes of block files since the start."""

    def start(self) -> None:
        self._preparer.start()
        self._thread.start()

    def stop(self) -> None:
        """End both threads and close; receivers can resume later.

        A running `prepare` ends at its next progress; this waits CLOSING_S for it.
        """
        self._stopping = True
        self._ring()
        if self._thread.ident is not None:
            self._thread.join()
        self._preparer.stop()
        self._close()
        self._bell.close()
        self._waker.close()
        for file in {ready.file for ready in (*self._files.values(), *self._ready.values())}:
            os.close(file)

    def _close(self) -> None:
        self._gate.close()
        self._router.close()
        self._context.term()

    def _ring(self) -> None:
        # A full socket means that the loop has plenty of wake-ups to read already.
        with contextlib.suppress(OSError):
            self._bell.send(b"!")

    # --- the loop -----------------------------------------------------------------------------

    def _run(self) -> None:
        poller = Poller()
        for source in (self._router, self._waker, self._door):
            poller.register(source)
        while not self._stopping:
            began = time.monotonic()
            ready = poller.poll(self._timeout())
            if self._waker.fileno() in ready:
                self._waker.recv(4096)
            self._gate.look(ready, began)
            try:
                self._step()
            except Exception:  # a bug: this message is lost, the others are not
                log.exception("serving a block failed")

    def _timeout(self) -> float:
        deadline = self._sender.deadline()
        if deadline is None:
            return IDLE_S
        wait = min(max(deadline - time.monotonic(), 0.0), LOOK_S)
        return wait + 0.001  # a wait may end too early, again and again

    def _step(self) -> None:
        self._carry_out(self._sender.set_busy(self._busy(), time.monotonic()))
        for key, frames in proved(self._router):
            peer, reason = bytes(frames.pop(0)), self._admits(key)
            if reason:  # the key was removed since it connected
                self._dropped.note(f"the key {short(key)} asks for a block: {reason}")
                self._send(peer, BlockRefused("this device is no part of the cluster any more"))
                continue
            if self._other_versions.refuse(self._router, peer, key, frames[0]):
                continue
            try:
                self._on_message(peer, decode(only(frames)))
            except RemoteProtocolError as problem:
                self._dropped.note(str(problem))
        while self._preparer.news:
            self._on_news(*self._preparer.news.popleft())

    def _on_message(self, peer: bytes, message: Message) -> None:
        match message:
            case BlockRequest(stage):
                self._on_block_request(peer, stage)
            case PieceRequest():
                self._on_piece_request(peer, message)
            case _:
                self._dropped.note(f"it is a {type(message).__name__} where blocks are served")

    def _send(self, peer: bytes, message: Message) -> bool:
        """Returns whether it was sent; a receiver that is gone or does not read will ask again."""
        try:
            frames = [peer, encode(message)]
            self._router.send_multipart(frames, flags=zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        except zmq.ZMQError as problem:
            if problem.errno != zmq.EHOSTUNREACH:
                raise
            self._sender.left(peer)
            return False
        return True

    # --- offers -------------------------------------------------------------------------------

    def _on_block_request(self, peer: bytes, stage: int) -> None:
        if not HEAD_NUMBER <= stage <= MOST_STAGES:
            self._send(peer, BlockRefused(f"there is no block {stage}"))
            return
        if stage in self._ready:
            self._send(peer, self._ready[stage].offer)
            return
        if stage not in self._texts:
            self._texts[stage] = f"block {stage} waits for its turn to be prepared"
            self._preparer.want(stage)
        waiters = self._waiters.setdefault(stage, set())
        if len(waiters) < MOST_PEERS:
            waiters.add(peer)
        self._send(peer, BlockPreparing(self._texts[stage]))

    def _on_news(self, stage: int, news: str | _Ready | EdgespecError) -> None:
        match news:
            case str():
                self._texts[stage] = news
                said: Message = BlockPreparing(news)
            case _Ready():
                self._ready[stage] = self._files[news.offer.sha256] = news
                said = news.offer
            case EdgespecError():
                said = BlockRefused(str(news))
        done = not isinstance(news, str)
        for peer in list(self._waiters.get(stage, ())):
            if not self._send(peer, said) or done:
                self._waiters[stage].discard(peer)
        if done:
            self._texts.pop(stage, None)
            self._waiters.pop(stage, None)

    # --- pieces -------------------------------------------------------------------------------

    def _on_piece_request(self, peer: bytes, request: PieceRequest) -> None:
        ready = self._files.get(request.sha256)
        if ready is None:
            self._dropped.note("it asks for a piece of a block that was not offered")
            return
        too_long = request.length > CHUNK_BYTES // WINDOW
        if too_long or request.offset + request.length > ready.offer.size:
            self._dropped.note("it asks for a piece that is not in the block")
            return
        self._carry_out(self._sender.asked(peer, request, time.monotonic()))

    def _carry_out(self, leaving: list[SendPiece]) -> None:
        for piece in leaving:
            self._send_piece(piece.peer, piece.request)

    def _send_piece(self, peer: bytes, request: PieceRequest) -> None:
        ready = self._files.get(request.sha256)
        if ready is None:  # forgotten meanwhile
            return
        data = b""
        with contextlib.suppress(OSError):
            data = os.pread(ready.file, request.length, request.offset)
        if len(data) != request.length:
            self._forget(ready)
            self._send(peer, BlockRefused("its file there became shorter or cannot be read"))
            return
        piece = Piece(request.sha256, request.offset, Tensor("uint8", (len(data),), data))
        if self._send(peer, piece):
            self.sent_bytes += len(data)

    def _forget(self, ready: _Ready) -> None:
        """The file has changed: the next request has it prepared again."""
        os.close(ready.file)
        del self._files[ready.offer.sha256]
        self._ready = {stage: one for stage, one in self._ready.items() if one is not ready}


class _Preparer:
    """The thread that prepares blocks, one after the other; `news` has its progress and results."""

    def __init__(self, prepare: Prepare, ring: Callable[[], None]) -> None:
        self._prepare = prepare
        self._ring = ring
        self._stages: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._stopping = False
        self.news: deque[tuple[int, str | _Ready | EdgespecError]] = deque()
        self._thread = threading.Thread(target=self._run, name="edgespec-prepare", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def want(self, stage: int) -> None:
        self._stages.put(stage)

    def stop(self) -> None:
        """End the thread, and close the files that were not taken."""
        self._stopping = True
        self._stages.put(None)
        if self._thread.ident is not None:
            self._thread.join(CLOSING_S)
        for _, news in self.news:
            if isinstance(news, _Ready):
                os.close(news.file)

    def _run(self) -> None:
        while (stage := self._stages.get()) is not None and not self._stopping:
            self._tell(stage, self._made(stage))

    def _tell(self, stage: int, news: str | _Ready | EdgespecError) -> None:
        if self._stopping and isinstance(news, str):
            raise EdgespecError("the node that makes the block is ending")
        self.news.append((stage, news))
        self._ring()

    def _made(self, stage: int) -> _Ready | EdgespecError:
        try:
            block = self._prepare(stage, lambda text: self._tell(stage, text))
            return _hashed(block, lambda text: self._tell(stage, text))
        except EdgespecError as problem:
            return problem
        except Exception as problem:  # a bug, or the device: only this block fails
            log.exception("block %d could not be made", stage)
            return EdgespecError(f"making it failed ({type(problem).__name__}: {problem})")


def _hashed(block: ServedBlock, tell: Callable[[str], None]) -> _Ready:
    """Open the file and read it once, for the hashes of its chunks.

    Raises ModelError if it cannot be read or is not what the manifest says.
    """
    try:
        file = os.open(block.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _Ready(file, _offer_of(block, file, tell))
        except BaseException:
            os.close(file)
            raise
    except OSError as problem:
        raise ModelError(f"cannot read {block.path} ({problem.strerror})") from None


def _offer_of(block: ServedBlock, file: int, tell: Callable[[str], None]) -> BlockOffer:
    whole, hashes, size = hashlib.sha256(), bytearray(), 0
    while chunk := os.pread(file, CHUNK_BYTES, size):
        if size % (64 * CHUNK_BYTES) == 0:
            tell(f"hashing the block: {size / 1e6:.0f} of {block.size / 1e6:.0f} MB")
        whole.update(chunk)
        hashes += hashlib.sha256(chunk).digest()
        size += len(chunk)
    if size != block.size or whole.hexdigest() != block.sha256:
        raise ModelError(
            f"{block.path} is not what its manifest says (its size or hash differs); delete its "
            "folder, so that it is made again"
        )
    table = Tensor("uint8", (len(hashes) // HASH_BYTES, HASH_BYTES), bytes(hashes))
    texts = block.manifest_text, block.config_text
    offer = BlockOffer(*texts, size, block.sha256, CHUNK_BYTES, table)
    encode(offer)  # offer nothing that a receiver would refuse
    return offer
