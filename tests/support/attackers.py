"""Attackers of a ring, each in a process of its own: strangers, and insiders beyond their roles.

    python attackers.py '{"kind": "stage", "seed": 1, "seconds": 3, ...}'

They print what they sent as JSON when their time is over. What no attacker does is to ask for an
honest answer: who does makes others wait, as there are no quotas.
"""

from __future__ import annotations

import base64
import json
import os
import random
import resource
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import zmq
from msgspec.structs import replace
from support.fuzz import Frames, Fuzzer
from support.keys import OWN
from support.sockets import BareSockets

from edgespec.errors import RemoteProtocolError
from edgespec.net.keys import KeyPair
from edgespec.net.sockets import only
from edgespec.wire.block_messages import BlockRequest, PieceRequest
from edgespec.wire.client_messages import Cancel, StatusRequest, Submit
from edgespec.wire.codec import decode, packed
from edgespec.wire.messages import (
    Connected,
    Credit,
    Fault,
    Goodbye,
    Health,
    Heartbeat,
    Join,
    Loading,
    Message,
    Ready,
)

HOST = "127.0.0.1"
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
BIG = (4 << 20) - 100
"""Just below the longest header."""

OVERSIZED = (8 << 20) + 1
"""What ends the connection that it comes on."""


@dataclass(frozen=True)
class Target:
    """What an attacker knows. `data`: port and public key of each node's data socket.

    `own`: the words of which its key is made, "" for none; `cluster`: the coordinator's key that it
    expects. `handshake`: the bytes of a real client's connection. `recorded`: frames of real
    control messages.
    """

    kind: str
    seed: int
    seconds: float
    control: int
    blocks: int
    data: tuple[tuple[int, str], ...]
    own: str = ""
    cluster: str = OWN.public
    handshake: str = ""
    recorded: tuple[tuple[str, ...], ...] = ()

    @property
    def ports(self) -> list[int]:
        """All that can be connected to."""
        return [self.control, self.blocks, *(port for port, _ in self.data)]


def start(target: Target) -> subprocess.Popen[str]:
    """One attacker; read what it did with `sent`."""
    command = [sys.executable, __file__, json.dumps(asdict(target))]
    where = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    return subprocess.Popen(command, env=where, stdout=subprocess.PIPE, text=True)


def sent(attacker: subprocess.Popen[str], patience: float) -> Counter[str]:
    """What it sent, in frames and connections; it does not outlive its time."""
    try:
        out, _ = attacker.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        attacker.kill()
        out, _ = attacker.communicate()
    return Counter(json.loads(out or "{}"))


# --- strangers ------------------------------------------------------------------------------------


class Stranger:
    """Raw TCP: rubbish, and parts, changes and repeats of a real handshake."""

    def __init__(self, target: Target) -> None:
        self._ports = target.ports
        self._dice = random.Random(target.seed)
        self._handshake = base64.b64decode(target.handshake)
        self.done: Counter[str] = Counter()

    def run(self, until: float) -> None:
        """One connection after the other."""
        while time.monotonic() < until:
            with suppress(OSError):
                self._connection(self._dice.choice(self._ports))

    def _connection(self, port: int) -> None:
        with socket.create_connection((HOST, port), timeout=1.0) as opened:
            opened.settimeout(0.05)
            self.done["connections"] += 1
            for piece in self._words():
                opened.sendall(piece)
                self.done["frames"] += 1
            if self._dice.random() < 0.2:
                opened.recv(4096)

    def _words(self) -> Sequence[bytes]:
        dice, real = self._dice, self._handshake
        at = dice.randrange(len(real))
        changed = bytearray(real)
        for _ in range(dice.randrange(1, 4)):
            changed[dice.randrange(len(real))] ^= 1 << dice.randrange(8)
        long = dice.choice((300, 1 << 20, 1 << 30, 2**63, 2**64 - 1))
        declared = bytes([dice.choice((2, 3, 6))]) + struct.pack(">Q", long)
        return dice.choice(
            (
                [dice.randbytes(dice.randrange(1, 2000)) for _ in range(3)],
                [GREETING[: dice.randrange(1, 64)]],
                [GREETING, dice.randbytes(200)],
                [GREETING, declared, bytes(dice.choice((10, 100_000)))],
                [GREETING, *(bytes([4, 40]) + b"\x05HELLO" + dice.randbytes(34) for _ in range(5))],
                [GREETING.replace(b"CURVE", b"NULL\0"), b"\x04\x19\x05READY" + bytes(19)],
                [real[:at], real[at:]],
                [real[:at]],
                [bytes(changed)],
                [real, real],
                [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"],
            )
        )


class Crowd:
    """Very many connections, half of them silent, half of them very slow."""

    def __init__(self, target: Target) -> None:
        self._ports = target.ports
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = min(round(200 * target.seconds), 4_000, allowed // 2)
        self.done: Counter[str] = Counter()

    def run(self, until: float) -> None:
        """Keep as many as it may have, opening new ones for those that are ended."""
        opened: list[socket.socket] = []
        while time.monotonic() < until:
            while len(opened) < self._most and time.monotonic() < until:
                with suppress(OSError):
                    port = self._ports[self.done["connections"] % len(self._ports)]
                    opened.append(socket.create_connection((HOST, port), timeout=1.0))
                self.done["connections"] += 1
            opened = [one for number, one in enumerate(opened) if self._slowly(one, number)]
            time.sleep(0.2)
        for one in opened:
            one.close()

    def _slowly(self, one: socket.socket, number: int) -> bool:
        """Say another byte; whether the connection is still there."""
        one.setblocking(False)
        try:
            if number % 2:
                one.send(GREETING[:1])
                self.done["frames"] += 1
            return one.recv(100) != b""
        except BlockingIOError:
            return True
        except OSError:
            one.close()
            return False


# --- insiders -------------------------------------------------------------------------------------


class Insider:
    """Somebody with a ZeroMQ socket and a key, right or wrong, who says everything to all."""

    def __init__(self, target: Target, bare: BareSockets) -> None:
        self._target = target
        self._dice = random.Random(target.seed)
        self._fuzzer = Fuzzer(target.seed)
        self._own = KeyPair.from_words(target.own) if target.own else None
        self._recorded = [
            [base64.b64decode(frame) for frame in frames] for frames in target.recorded
        ]
        self.done: Counter[str] = Counter()
        key, own = target.cluster, self._own
        self._control = bare.connect(zmq.DEALER, target.control, own, key)
        self._flood = bare.connect(zmq.DEALER, target.control, own, key)
        self._blocks = bare.connect(zmq.DEALER, target.blocks, own, key)
        self._data = [bare.connect(zmq.PUSH, port, own, key) for port, key in target.data]
        for each in (self._control, self._flood, self._blocks, *self._data):
            each.sndhwm = 50

    def run(self, until: float) -> None:
        """As fast as it goes."""
        turn = 0
        while time.monotonic() < until:
            turn += 1
            self._put(self._control, "control", self._words())
            if turn % 4 == 0:
                self._put(self._dice.choice(self._data), "data", [b"", *self._words()])
            if turn % 4 == 1:
                self._put(self._blocks, "blocks", self._block_words())
            if turn % 100 == 0:
                self._put(self._flood, "big", [bytes(self._dice.choice((BIG, BIG, OVERSIZED)))])
            self._listen()

    def _put(self, opened: zmq.Socket[bytes], where: str, frames: Frames) -> None:
        try:
            opened.send_multipart(frames or [b""], zmq.NOBLOCK)
            self.done[where] += 1
        except zmq.Again:
            time.sleep(0.0002)

    def _listen(self) -> None:
        """Now and then, so that answers pile up on the other side, too."""
        if self._dice.random() < 0.3:
            with suppress(zmq.Again):
                self._control.recv_multipart(zmq.NOBLOCK)

    def _words(self) -> Frames:
        dice = self._dice.random()
        if dice < 0.5:
            return _no_question(self._fuzzer.frames())
        if dice < 0.6 and self._recorded:
            real = self._dice.choice(self._recorded)
            return real if self._dice.random() < 0.5 else _no_question(self._fuzzer.mutated(real))
        if dice < 0.8:
            return _no_question(_frames(self._fuzzer.message()))
        return _frames(self._dice.choice(self._about_itself()))

    def _about_itself(self) -> list[Message]:
        """What a stage may say; each would be right for one that has a place."""
        number = self._dice.randrange(-1, 30)
        key = self._own.public if self._own else ""
        stage, port = self._dice.randrange(4), self._dice.choice(self._target.data)[0]
        return [
            Join(stage, "toybox", 1, HOST, port, key),
            Join(0, "evil\x1b[2J", 2, HOST, 9, key),
            Join(stage, "evil", 1, HOST, port, OWN.public),
            Ready(1.0, number),
            Connected(number),
            Fault(number, "forged \x1b[31m"),
            Goodbye("forged"),
            Loading("forged"),
            Credit(number),
            Health(99.0, 90.0, 9, 1, 1.0, self._dice.random() < 0.5, "forged"),
            Heartbeat(number),
            StatusRequest(),
            Cancel(number),
        ]

    def _block_words(self) -> Frames:
        if self._dice.random() < 0.5:
            return self._words()
        number, piece = self._dice.randrange(-1, 99), self._dice.choice((0, 1, 1 << 18, 1 << 22))
        ask = PieceRequest("0" * 64, self._dice.randrange(9999), piece, 0)
        return _frames(self._dice.choice((BlockRequest(number), ask)))


def _frames(message: Message) -> Frames:
    return [packed(message)]


def _no_question(frames: Frames) -> Frames:
    """The same, but a question that would be answered asks for a policy that does not exist."""
    with suppress(RemoteProtocolError):
        message = decode(only(frames))
        if isinstance(message, Submit):
            return _frames(replace(message, policy="nobody's"))
    return frames


def main(arguments: str) -> None:
    """Attack until the time is over."""
    given = json.loads(arguments)
    given["data"] = [tuple(pair) for pair in given["data"]]
    target = Target(**given)
    until = time.monotonic() + target.seconds
    kinds = {"raw": Stranger, "crowd": Crowd}
    if target.kind in kinds:
        attacker = kinds[target.kind](target)
        attacker.run(until)
        print(json.dumps(attacker.done))
        return
    with BareSockets() as bare:
        insider = Insider(target, bare)
        insider.run(until)
        print(json.dumps(insider.done))


if __name__ == "__main__":
    main(sys.argv[1])
