"""Run as a program: serves a file as a block, or fetches one, for tests that kill processes.

    transfer_process.py serve FILE COUNT     prints its port, serves until its input ends
    transfer_process.py fetch PORT FILE      fetches into FILE, waits for its input to end

In the file COUNT stands at any time how many bytes of FILE were sent.
At its end each prints by how many bytes its memory had grown at most.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from edgespec.config import Address
from edgespec.net.block_server import BlockServer, ServedBlock
from edgespec.net.block_transfer import fetch_block
from edgespec.net.keys import Identity, KeyPair

SENDER = KeyPair.from_words("the sender")
RECEIVER = Identity(KeyPair.from_words("the receiver"), SENDER.public)
HOST = "127.0.0.1"


def served(path: Path) -> ServedBlock:
    """What a daemon's cache would say of a file."""
    whole = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(1 << 20):
            whole.update(data)
    return ServedBlock(path, '{"stage": 1}', "{}", whole.hexdigest(), path.stat().st_size)


def memory(field: str) -> int:
    """VmRSS (now) or VmHWM (the most so far) of this process in bytes."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


class Counted(BlockServer):
    """Writes down what it sent, so that it is known after a SIGKILL."""

    count = -1
    _sent = 0

    @property
    def sent_bytes(self) -> int:
        """As the server has it."""
        return self._sent

    @sent_bytes.setter
    def sent_bytes(self, value: int) -> None:
        self._sent = value
        if self.count >= 0:
            os.pwrite(self.count, b"%20d" % value, 0)


def serve(path: Path, count: Path) -> None:
    """Until the input ends."""

    def prepare(stage: int, tell: Callable[[str], None]) -> ServedBlock:
        return served(path)

    def admits(key: str) -> str:
        return "" if key == RECEIVER.own.public else "it is not the receiver"

    server = Counted(Address(HOST, 0), SENDER, admits, prepare, lambda: False)
    server.count = os.open(count, os.O_WRONLY | os.O_CREAT)
    server.start()
    print(server.port, flush=True)
    sys.stdin.read()
    server.stop()


def fetch(port: int, path: Path) -> None:
    """Fetch, then say so."""
    fetch_block(Address(HOST, port), RECEIVER, 1, lambda _: path, lambda _: None, lambda: False)
    print("fetched", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    assert "torch" not in sys.modules, "moving bytes needs no torch"
    before = memory("VmRSS")
    if sys.argv[1] == "serve":
        serve(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        fetch(int(sys.argv[2]), Path(sys.argv[3]))
    print(memory("VmHWM") - before, flush=True)
