"""Block transfer: fetches the block of a stage from a node that serves it, into a file here."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils.monitor import parse_monitor_message

from edgespec.blocks.receiver import (
    SILENCE_S,
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
from edgespec.config import Address
from edgespec.errors import (
    AccessRefused,
    CapacityError,
    ConfigError,
    EdgespecError,
    RemoteProtocolError,
)
from edgespec.files import part_of, settle
from edgespec.net.access import prove
from edgespec.net.block_server import BULK, LOST_MS, QUEUED
from edgespec.net.control import check_version, ping
from edgespec.net.keys import Identity
from edgespec.net.sockets import Poller, connect, only, waiting
from edgespec.wire.block_messages import BlockOffer
from edgespec.wire.codec import MOST_BYTES, decode, encode

LOOK_S = 0.2
"""The longest wait for messages, so that `stop` is called often."""

ROOM = 64 << 20
"""Bytes of the disk that stay free."""


@dataclass(frozen=True, slots=True)
class FetchedBlock:
    """A whole and verified block file, with its texts."""

    path: Path
    manifest_text: str
    config_text: str


def fetch_block(
    source: Address,
    identity: Identity,
    stage: int,
    place: Callable[[BlockOffer], Path],
    progress: Callable[[TransferProgress], None],
    stop: Callable[[], bool],
    silence: float = SILENCE_S,
) -> FetchedBlock:
    """Fetch the block of `stage` from a BlockServer at `source`; returns when it is there.

    `place(offer)`: the file's path, in an existing folder. Until the file is whole it is
    `<name>.part` beside it, and an earlier part is used. `stop()` true ends the transfer.

    Raises PeerLost after `silence` seconds without progress; ConfigError if the sender refuses, or
    the address cannot be used; RemoteProtocolError for a sender that breaks the protocol, of which
    OtherVersion is one; CapacityError if the disk is full; EdgespecError if it was stopped; and
    what `place` raises.
    """
    machine = BlockReceiver(stage, str(source), time.monotonic(), silence)
    fetch = _Fetch(source, identity, machine, place, progress, stop)
    with contextlib.closing(fetch):
        return fetch.run()


class _Fetch:
    """One transfer: a socket, a part file, and the machine between them."""

    def __init__(
        self,
        source: Address,
        identity: Identity,
        machine: BlockReceiver,
        place: Callable[[BlockOffer], Path],
        progress: Callable[[TransferProgress], None],
        stop: Callable[[], bool],
    ) -> None:
        self._source = source
        self._machine = machine
        self._place = place
        self._progress = progress
        self._stop = stop
        self._part: _PartFile | None = None
        self._fetched: FetchedBlock | None = None
        self._context = zmq.Context()
        self._context.linger = 0
        dealer = self._dealer = self._context.socket(zmq.DEALER)
        prove(dealer, identity.own, identity.coordinator)
        dealer.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
        dealer.setsockopt(zmq.RCVHWM, QUEUED)
        dealer.setsockopt(zmq.TOS, BULK)
        ping(dealer, LOST_MS)
        dealer.setsockopt(zmq.RECONNECT_IVL, 100)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
        events = (
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        )
        self._monitor: zmq.Socket[bytes] = dealer.get_monitor_socket(events)

    def close(self) -> None:
        if self._part is not None:
            self._part.close()
        self._dealer.disable_monitor()
        self._monitor.close()
        self._dealer.close()
        self._context.term()

    def run(self) -> FetchedBlock:
        connect(self._dealer, self._source)
        poller = Poller()
        poller.register(self._dealer)
        poller.register(self._monitor)
        while self._fetched is None:
            self._check_stop()
            wait = self._machine.deadline() - time.monotonic()
            poller.poll(min(max(wait, 0.0), LOOK_S) + 0.001)
            self._take()
            if time.monotonic() >= self._machine.deadline():
                self._carry_out(self._machine.tick(time.monotonic()))
        return self._fetched

    def _check_stop(self) -> None:
        if self._stop():
            raise EdgespecError("the transfer of the block was stopped")

    def _take(self) -> None:
        """Handle connection events, then messages: pieces that came before a cut are used too."""
        for frames in waiting(self._monitor):
            event = parse_monitor_message(frames)["event"]
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise AccessRefused(f"{self._source} does not send blocks to this machine's key")
            is_up = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._carry_out(self._machine.link(is_up, time.monotonic()))
        for frames in waiting(self._dealer):
            check_version(frames[0], self._source)
            try:
                message = decode(only(frames))
            except RemoteProtocolError as problem:
                raise RemoteProtocolError(f"{self._source} sent a {problem}") from None
            self._carry_out(self._machine.hear(message, time.monotonic()))

    def _carry_out(self, effects: list[ReceiverEffect]) -> None:
        for effect in effects:
            if self._fetched is not None:
                return
            match effect:
                case AskSender(message):
                    # A full queue means a dead connection: the next one repeats the request.
                    with contextlib.suppress(zmq.Again):
                        self._dealer.send(encode(message), zmq.NOBLOCK)
                case TransferProgress():
                    self._progress(effect)
                case GiveUp(error):
                    raise error
                case OpenPart(offer):
                    self._open_part(offer)
                case Write(offset, data):
                    self._opened.write(offset, data)
                case Truncate(size):
                    self._opened.truncate(size)
                case Complete():
                    self._opened.complete()
                    offer = self._opened.offer
                    self._fetched = FetchedBlock(self._opened.path, offer.manifest, offer.config)

    @property
    def _opened(self) -> _PartFile:
        assert self._part is not None, "it was opened for the offer"
        return self._part

    # --- the part file ------------------------------------------------------------------------

    def _open_part(self, offer: BlockOffer) -> None:
        path = self._place(offer)
        if self._part is not None:
            self._part.close()
        self._part = _PartFile(path, offer)
        if self._part.is_needless(self._check_stop):
            self._part.discard()
            self._fetched = FetchedBlock(path, offer.manifest, offer.config)
            return
        for data in self._part.read():
            self._check_stop()
            effects = self._machine.part_read(data)
            self._carry_out(effects)
            if effects:  # the rest of it is wrong
                break
        self._part.check_room()
        self._carry_out(self._machine.part_ended(time.monotonic()))


@contextlib.contextmanager
def _disk(path: Path) -> Iterator[None]:
    """Turn errors of the disk into a CapacityError that names the file."""
    try:
        yield
    except OSError as problem:
        raise CapacityError(
            f"cannot write {path} ({problem.strerror or problem}); make room there, or choose "
            "another folder"
        ) from None


class _PartFile:
    """A block file on its way: `<name>.part`, locked, always a prefix of the block."""

    def __init__(self, path: Path, offer: BlockOffer) -> None:
        """Raises ConfigError if another process fetches it, CapacityError if it cannot be made."""
        self.path = path
        self.offer = offer
        self._part = part_of(path)
        with _disk(self._part):
            self._file = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise ConfigError(
                f"another program fetches {path} already; wait for it, or end it"
            ) from None

    def close(self) -> None:
        """Close the file; the next transfer resumes from it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def discard(self) -> None:
        self._part.unlink(missing_ok=True)
        self.close()

    def is_needless(self, check_stop: Callable[[], None]) -> bool:
        """Whether the finished file exists: another transfer may just have ended."""
        whole = hashlib.sha256()
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size != self.offer.size:
                    return False
                while data := file.read(self.offer.chunk_bytes):
                    check_stop()
                    whole.update(data)
        except OSError:
            return False
        return whole.hexdigest() == self.offer.sha256

    def read(self) -> Iterator[bytes]:
        """Its content, a chunk at a time; it is first cut to the block's size."""
        with _disk(self._part):
            if os.fstat(self._file).st_size > self.offer.size:
                os.ftruncate(self._file, self.offer.size)
            at = 0
            while data := os.pread(self._file, self.offer.chunk_bytes, at):
                yield data
                at += len(data)

    def check_room(self) -> None:
        """Raises CapacityError if the disk has no room for what is missing."""
        with _disk(self._part):
            missing = self.offer.size - os.fstat(self._file).st_size
            free = shutil.disk_usage(self._part.parent).free
        if missing and missing + ROOM > free:
            raise CapacityError(
                f"{self._part.parent} has {free / 1e6:.0f} MB free, the rest of the block needs "
                f"{(missing + ROOM) / 1e6:.0f} MB; make room there, or choose another folder"
            )

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """`offset`: the length of the file."""
        with _disk(self._part):
            rest = memoryview(data)
            while rest:
                written = os.pwrite(self._file, rest, offset)
                rest, offset = rest[written:], offset + written

    def truncate(self, size: int) -> None:
        with _disk(self._part):
            os.ftruncate(self._file, size)

    def complete(self) -> None:
        """Give the whole file its name, so that it survives a power failure."""
        with _disk(self.path):
            settle(self._part, self.path)
        self.close()
