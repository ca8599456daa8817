"""A served block for tests, and a bare receiver of it."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq
from support.keys import OWN
from support.sockets import DEVICE, HOST, BareSockets

from edgespec.config import Address
from edgespec.errors import ModelError
from edgespec.net.block_server import CHUNK_BYTES, BlockServer, Prepare, ServedBlock
from edgespec.net.block_transfer import FetchedBlock, fetch_block

DATA = random.Random(0).randbytes(3 * CHUNK_BYTES + 12_345)


class Site:
    """A folder with a finished block file, and a server of it."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "stage-1.safetensors"
        self.file.write_bytes(DATA)
        self.goal = folder / "fetched.safetensors"
        self.part = folder / "fetched.safetensors.part"
        self.sha256 = hashlib.sha256(DATA).hexdigest()
        self.prepared: list[int] = []
        self.busy = False
        self.admitted = {DEVICE.own.public}
        self.server = self.serving(0, self.prepare)

    def serving(self, port: int, prepare: Prepare) -> BlockServer:
        """A server that admits one device."""
        return BlockServer(Address(HOST, port), OWN, self.admits, prepare, lambda: self.busy)

    def admits(self, key: str) -> str:
        """Whom the test wants."""
        return "" if key in self.admitted else "it is not that of a stage"

    def prepare(self, stage: int, tell: Callable[[str], None]) -> ServedBlock:
        """Stage 1 is there, stage 2 cannot be made, making stage 3 is a bug, 4 is damaged."""
        self.prepared.append(stage)
        tell(f"quantising layer 1 of {stage}")
        if stage == 2:
            raise ModelError("the model has no layers for it")
        if stage == 3:
            raise ZeroDivisionError("layers")
        sha256 = "0" * 64 if stage == 4 else self.sha256
        return ServedBlock(self.file, '{"format": 1}', "{}", sha256, len(DATA))

    def fetch(self, stage: int = 1, **changes: object) -> FetchedBlock:
        """Fetch from it."""
        asked: dict[str, object] = {
            "source": Address(HOST, self.server.port),
            "identity": DEVICE,
            "stage": stage,
            "place": lambda _: self.goal,
            "progress": lambda _: None,
            "stop": lambda: False,
            "silence": 60.0,
        }
        return fetch_block(**{**asked, **changes})  # type: ignore[arg-type]


@contextmanager
def member(port: int, takes: int = 1000) -> Iterator[zmq.Socket[bytes]]:
    """A bare socket that is connected and has a right key."""
    with BareSockets() as bare:
        yield bare.connect(zmq.DEALER, port, DEVICE.own, takes=takes)
