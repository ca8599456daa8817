"""Real senders and receivers of a block, killed again and again; and what memory they take."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest
from support import transfer_process
from support.tiers import thorough

from edgespec.net.block_server import CHUNK_BYTES

SCRIPT = Path(transfer_process.__file__)
PATIENCE_S = 120.0
BESIDES_A_CONNECTION = 16 << 10
"""Bytes of handshakes, pings and offers."""
BESIDES_A_PIECE = 512
"""Bytes of headers and keys."""


@contextmanager
def process(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """The script, killed at the end if it still runs."""
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as started:
        try:
            yield started
        finally:
            started.kill()


def line_of(started: subprocess.Popen[str]) -> str:
    """The next line that it prints."""
    assert started.stdout is not None
    return started.stdout.readline().strip()


class SlowWire:
    """A TCP relay to `target` that carries `rate` bytes a second back, and counts them."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.target = 0
        self.carried = 0
        self.connections = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.settimeout(0.1)
        self.port: int = self._listening.getsockname()[1]
        self._closed = False
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        """End all connections."""
        self._closed = True
        for thread in self._threads:
            thread.join()
        self._listening.close()

    def _accept(self) -> None:
        while not self._closed:
            with suppress(OSError):
                here, _ = self._listening.accept()
                try:
                    there = socket.create_connection(("127.0.0.1", self.target))
                except OSError:
                    here.close()
                    continue
                self.connections += 1
                for pump in (self._back, self._forth):
                    self._threads.append(threading.Thread(target=pump, args=(here, there)))
                    self._threads[-1].start()

    def _forth(self, here: socket.socket, there: socket.socket) -> None:
        self._pump(here, there, slowly=False)

    def _back(self, here: socket.socket, there: socket.socket) -> None:
        self._pump(there, here, slowly=True)

    def _pump(self, source: socket.socket, sink: socket.socket, slowly: bool) -> None:
        source.settimeout(0.1)
        with suppress(OSError):
            while not self._closed:
                try:
                    data = source.recv(1 << 16)
                except TimeoutError:
                    continue
                if not data:
                    break
                if slowly:
                    self.carried += len(data)
                    time.sleep(len(data) / self.rate)
                sink.settimeout(PATIENCE_S)
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        source.close()  # the other direction closes the other end


class Endurance:
    """A block that is fetched over a slow wire, again and again, while processes are killed."""

    def __init__(self, folder: Path, size: int, rate: float, seed: int) -> None:
        self.folder = folder
        self.rng = random.Random(seed)
        self.data = self.rng.randbytes(size)
        self.source = folder / "stage-1.safetensors"
        self.source.write_bytes(self.data)
        self.goal = folder / "fetched.safetensors"
        self.part = folder / "fetched.safetensors.part"
        self.wire = SlowWire(rate)
        self.kills = {"sender": 0, "receiver": 0}
        self.in_the_middle = 0
        self.rounds = 0
        self.running: dict[str, ExitStack] = {}
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, role: str) -> None:
        """Start a sender or a receiver."""
        stack = self.running[role] = ExitStack()
        if role == "sender":
            count = self.folder / f"count-{self.kills['sender']}"
            started = stack.enter_context(process("serve", self.source, count))
            self.wire.target = int(line_of(started))
        else:
            started = stack.enter_context(process("fetch", self.wire.port, self.goal))
        self.processes[role] = started

    def kill(self, role: str) -> None:
        """SIGKILL."""
        self.processes[role].kill()
        self.running[role].close()
        self.kills[role] += 1

    def close(self) -> None:
        """End all."""
        for stack in self.running.values():
            stack.close()
        self.wire.close()

    def run(self, kills: int) -> None:
        """Until there were so many kills and the block of the last round is there."""
        self.start("sender")
        self.start("receiver")
        while sum(self.kills.values()) < kills:
            self._until_some_more_arrived()
            time.sleep(self.rng.uniform(0.0, 0.2))
            if self.goal.exists():
                self._end_round()
                self.start("receiver")
                continue
            there = self.part.stat().st_size if self.part.exists() else 0
            self.in_the_middle += 0 < there < len(self.data)
            victim = self.rng.choice(("sender", "receiver"))
            self.kill(victim)
            self.start(victim)
        self._end_round()

    def _until_some_more_arrived(self) -> None:
        limit = time.monotonic() + PATIENCE_S
        before = self.wire.carried
        while self.wire.carried < before + (1 << 18) and not self.goal.exists():
            assert time.monotonic() < limit, "the transfer came no further"
            time.sleep(0.005)

    def _end_round(self) -> None:
        assert line_of(self.processes["receiver"]) == "fetched"
        self.running["receiver"].close()
        assert self.goal.read_bytes() == self.data
        assert not self.part.exists()
        self.goal.unlink()
        self.rounds += 1

    def report(self) -> str:
        """Asserts that no byte was carried twice beyond a chunk a kill; the figures."""
        killed = sum(self.kills.values())
        least = self.rounds * len(self.data)
        pieces = self.wire.carried / (CHUNK_BYTES / 4)
        besides = BESIDES_A_CONNECTION * self.wire.connections + BESIDES_A_PIECE * pieces
        twice = self.wire.carried - least
        sent = sum(int(count.read_text()) for count in self.folder.glob("count-*")) - least
        figures = (
            f"{killed} kills ({self.kills['sender']} of the sender, {self.kills['receiver']} of "
            f"the receiver; {self.in_the_middle} in the middle of a file) in {self.rounds} "
            f"transfers of {len(self.data)} bytes: {self.wire.carried} bytes carried, {twice} "
            f"more than needed, {twice / killed / CHUNK_BYTES:.2f} chunks a kill; handed to the "
            f"network by the senders: {sent} more, {sent / killed / CHUNK_BYTES:.2f} chunks a kill"
        )
        assert sent <= killed * CHUNK_BYTES, figures
        assert twice <= killed * CHUNK_BYTES + besides, figures
        assert self.in_the_middle >= 0.7 * killed, figures
        assert besides < 0.2 * killed * CHUNK_BYTES, figures
        return figures


@pytest.mark.parametrize(
    "kills", [thorough(8), pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_killed_at_random_the_block_ends_whole_and_no_chunk_is_fetched_twice(
    kills: int, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    with closing(Endurance(tmp_path, (12 << 20) + 12_345, 8e6, seed)) as endurance:
        endurance.run(kills)
        print(endurance.report())


@pytest.mark.slow
def test_memory_is_bounded_on_both_sides(tmp_path: Path) -> None:
    source, goal = tmp_path / "stage-1.safetensors", tmp_path / "fetched.safetensors"
    rng = random.Random(0)
    with source.open("wb") as file:
        for _ in range(200):
            file.write(rng.randbytes(1_000_000))
    grown = {}
    with process("serve", source, tmp_path / "count") as sender:
        port = line_of(sender)
        with process("fetch", port, goal) as receiver:
            started = time.monotonic()
            assert line_of(receiver) == "fetched"
            seconds = time.monotonic() - started
            for name, one in (("receiver", receiver), ("sender", sender)):
                assert one.stdin is not None
                one.stdin.close()
                grown[name] = int(line_of(one)) / 1e6
    print(f"memory grew by {grown} MB; 200 MB in {seconds:.2f} s, start and hashing included")
    assert transfer_process.served(goal).sha256 == transfer_process.served(source).sha256
    assert max(grown.values()) < 30.0
