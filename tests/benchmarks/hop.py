"""What a hop of the ring takes: between two processes over loopback, by turns with bare ZeroMQ.

    python tests/benchmarks/hop.py [--blocks 12] [--json]

A message goes to another process and comes back; a hop is half of that. Of hidden rows in bfloat16:
64 (128 KiB) and 1 (2 KiB). One after the other, in blocks of 25 such trips:

raw        a message of as many bytes, from PUSH to PULL
curve      the same, encrypted as all of edgespec's sockets are
loop       the least that a node of Python does: receive, decode, encode, send over such sockets
transport  a Segment over edgespec's sockets: encode, send, poll, receive, decode
stage      the other process is a stage, whose layers cost nothing: its loop, machine, worker and
           tensors; with each segment comes the Retain of the token before

Of every hop: the least time and the median of the blocks' least (microseconds), and the CPU time
of both ends (the least block's mean). `stage_cpu_ms`: CPU time of the stage process for each
segment with its Retain: what a stage costs a token beside its layers. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import numpy as np
import zmq

sys.path.insert(0, str(Path(__file__).parent.parent))

from support.keys import OWN, OWNER_IDENTITY, everybody, identity
from support.segments import one_part, retain_message

from edgespec.config import Address, Timing
from edgespec.daemon.process import PARENT, end_with_parent
from edgespec.net.control import ping
from edgespec.net.keys import KeyPair
from edgespec.net.zmq_transport import ZmqTransport
from edgespec.types.tensor import Tensor
from edgespec.wire.codec import decode, encode
from edgespec.wire.messages import Assign, Connect, Heartbeat, Join, Message, Ready
from edgespec.wire.segment import Segment

HOST, HIDDEN = "127.0.0.1", 1024
ROWS = {"128 KiB": 64, "one row": 1}
TRIPS = 25
RING = "the secret of the ring"
REQUEST = 1
CALM = Timing(beat=0.25, silence=60.0)
DEVICE = identity("a device")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=12, help="of 25 trips, of each kind")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--other", choices=OTHERS, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.other:
        end_with_parent()
        OTHERS[asked.other](asked.port)
        return
    found = measure(asked.blocks)
    if asked.json:
        print(json.dumps(found))
        return
    for size, kinds in found.items():
        for kind, figures in kinds.items():
            listed = "  ".join(f"{name} {value:.3g}" for name, value in figures.items())
            print(f"{size:8}  {kind:10}  {listed}")


def measure(blocks: int) -> dict[str, dict[str, dict[str, float]]]:
    """By size and kind, the figures by their names."""
    ends: dict[str, End] = {
        "raw": Bare("raw", curve=False),
        "curve": Bare("curve", curve=True),
        "loop": Loop("loop", curve=True),
        "transport": Transport("transport"),
        "stage": Stage("stage"),
    }
    found: dict[str, dict[str, dict[str, float]]] = {}
    try:
        for size, rows in ROWS.items():
            taken: dict[str, list[list[float]]] = {kind: [] for kind in ends}
            spent: dict[str, list[float]] = {kind: [] for kind in ends}
            other: dict[str, list[float]] = {kind: [] for kind in ends}
            for end in ends.values():
                end.trips(rows)  # connect, and fill caches
            for _ in range(blocks):
                for kind, end in ends.items():
                    own, theirs = time.process_time(), end.cpu_time()
                    taken[kind].append(end.trips(rows))
                    own, theirs = time.process_time() - own, end.cpu_time() - theirs
                    spent[kind].append((own + theirs) / TRIPS / 2)
                    other[kind].append(theirs / TRIPS)
            found[size] = {kind: _figures(taken[kind], spent[kind]) for kind in ends}
            found[size]["stage"]["stage_cpu_ms"] = 1e3 * min(other["stage"])
            for kind in ("loop", "transport", "stage"):
                for bare in ("raw", "curve"):
                    ratio = found[size][kind]["min_us"] / found[size][bare]["min_us"]
                    found[size][kind][f"times_{bare}"] = ratio
    finally:
        for end in ends.values():
            end.close()
    return found


def _figures(blocks: list[list[float]], spent: list[float]) -> dict[str, float]:
    least = [min(block) for block in blocks]
    return {
        "min_us": 5e5 * min(least),
        "median_us": 5e5 * statistics.median(least),
        "cpu_ms": 1e3 * min(spent),
    }


class End(ABC):
    """This end of a pair of processes; the other one is a child."""

    def __init__(self, kind: str, port: int) -> None:
        command = [sys.executable, __file__, "--other", kind, "--port", str(port)]
        environment = {**os.environ, PARENT: str(os.getpid())}
        self._child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    def said(self) -> int:
        """The number that the child prints next."""
        assert self._child.stdout is not None
        return int(self._child.stdout.readline())

    def cpu_time(self) -> float:
        """CPU seconds of all threads of the child."""
        tasks = Path(f"/proc/{self._child.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9

    def trips(self, rows: int) -> list[float]:
        """Seconds of each of TRIPS trips."""
        found = []
        for _ in range(TRIPS):
            trip = self.trip(rows)
            began = time.perf_counter()
            trip()
            found.append(time.perf_counter() - began)
        return found

    @abstractmethod
    def trip(self, rows: int) -> Callable[[], object]:
        """Sends a message of so many rows and waits for it."""

    def close(self) -> None:
        self._child.kill()
        self._child.wait()


class Bare(End):
    """Two pairs of PUSH and PULL; the child sends back what it gets."""

    def __init__(self, kind: str, curve: bool) -> None:
        self._pull = pull_socket(curve)
        super().__init__(kind, port_of(self._pull))
        self._push = push_socket(self.said(), curve)

    def trip(self, rows: int) -> Callable[[], object]:
        data = os.urandom(2 * HIDDEN * rows)

        def go() -> None:
            self._push.send(data)
            self._pull.recv()

        return go


def pull_socket(curve: bool) -> zmq.Socket[bytes]:
    made = zmq.Context.instance().socket(zmq.PULL)
    if curve:
        made.curve_server = True
        made.curve_secretkey = OWN.secret.encode()
    made.bind(f"tcp://{HOST}:*")
    return made


def push_socket(port: int, curve: bool) -> zmq.Socket[bytes]:
    made = zmq.Context.instance().socket(zmq.PUSH)
    ping(made)
    if curve:
        own = KeyPair.new()
        made.curve_serverkey = OWN.public.encode()
        made.curve_publickey, made.curve_secretkey = own.public.encode(), own.secret.encode()
    made.connect(f"tcp://{HOST}:{port}")
    return made


def port_of(opened: zmq.Socket[bytes]) -> int:
    return int(opened.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])


def other_bare(port: int, curve: bool) -> None:
    pull, push = pull_socket(curve), push_socket(port, curve)
    print(port_of(pull), flush=True)
    while True:
        push.send(pull.recv())


class Loop(Bare):
    """The same with a Segment, which both ends read and write."""

    def trip(self, rows: int) -> Callable[[], object]:
        segment = segment_of(rows, 1)

        def go() -> None:
            self._push.send(encode(segment))
            decode(self._pull.recv(copy=False).buffer)

        return go


def other_loop(port: int) -> None:
    pull, push = pull_socket(True), push_socket(port, True)
    print(port_of(pull), flush=True)
    while True:
        push.send(encode(decode(pull.recv(copy=False).buffer)))


class Transport(End):
    """The sockets of a coordinator, and those of a stage in the child."""

    def __init__(self, kind: str) -> None:
        self._sockets = ZmqTransport.coordinator(Address(HOST, 0), OWNER_IDENTITY, everybody)
        self._sockets.open_ring(RING)
        super().__init__(kind, self._sockets.control_port)
        self._seq, self._peer = 0, b""
        join = self.heard(Join)
        self.met(join)

    def met(self, join: Join) -> None:
        self.say(Connect("", self._sockets.data_port, OWN.public))
        self._sockets.connect_ring(Address(HOST, join.port), DEVICE.own.public)

    def say(self, message: Message) -> None:
        self._sockets.send_control(self._peer, message)

    def heard(self, kind: type) -> Message:
        """The next message of that type."""
        while True:
            for incoming in self._sockets.poll(0.2):
                self._peer = incoming.peer or self._peer
                if isinstance(incoming.message, kind):
                    return incoming.message

    def trip(self, rows: int) -> Callable[[], object]:
        self._seq += 1
        segment = segment_of(rows, self._seq)

        def go() -> None:
            self._sockets.send_ring(segment)
            assert self.heard(Segment).rows == rows

        return go

    def close(self) -> None:
        super().close()
        self._sockets.close()


def segment_of(rows: int, seq: int) -> Segment:
    """A chain of rows behind the one before."""
    first = 100 * seq
    ids = np.arange(first, first + rows)
    data = os.urandom(2 * HIDDEN * rows)
    return one_part(
        REQUEST,
        seq,
        seq,
        False,
        int(seq == 1),
        rows,
        ids,
        np.concatenate(([first - 100 if seq > 1 else -1], ids[:-1])),
        np.arange(seq - 1, seq - 1 + rows),
        np.zeros(0, np.int64),
        Tensor("bfloat16", (rows, HIDDEN), data),
    )


def other_transport(port: int) -> None:
    sockets = ZmqTransport.stage(Address(HOST, port), DEVICE, HOST)
    sockets.open_ring(RING)
    sockets.send_control(b"", _join(sockets))
    while True:
        for incoming in sockets.poll(0.5):
            match incoming.message:
                case Segment() as segment:
                    sockets.send_ring(segment)
                case Connect(_, next_port, key):
                    sockets.connect_ring(Address(HOST, next_port), key)


def _join(sockets: ZmqTransport) -> Join:
    return Join(0, "a device", os.getpid(), HOST, sockets.data_port, DEVICE.own.public, 1 << 40)


class Stage(Transport):
    """The coordinator of a ring of three, whose stage 2 is in the child."""

    def met(self, join: Join) -> None:
        assign = Assign(2, 3, 1, 2, "none", "0" * 64, "bfloat16", "none", 4096, 0, RING, rows=4096)
        self.say(assign)
        self.heard(Ready)
        super().met(join)

    def trip(self, rows: int) -> Callable[[], object]:
        before = 100 * self._seq
        again = super().trip(rows)

        def go() -> None:
            self.say(retain_message(REQUEST, self._seq, before + 99, [before], []))
            again()

        return go

    def trips(self, rows: int) -> list[float]:
        self.say(Heartbeat())
        return super().trips(rows)


def other_stage(port: int) -> None:
    import torch

    from edgespec.backends.compute import StageCompute
    from edgespec.backends.torch_backend import TorchBlock
    from edgespec.config import Quantisation
    from edgespec.daemon.random_layers import RandomLayers
    from edgespec.model.block import Block
    from edgespec.model.model_config import ModelConfig
    from edgespec.ring.member import MemberMachine
    from edgespec.runtime.stage_node import StageNode

    torch.set_num_threads(1)
    sizes = {"vocab_size": 8, "hidden_size": HIDDEN, "intermediate_size": 64}
    heads = {"num_hidden_layers": 3, "num_attention_heads": 16, "num_key_value_heads": 4}
    config = ModelConfig({"model_type": "llama", **sizes, **heads})
    block = Block(RandomLayers(config, Quantisation()), 1, 2, "bfloat16")
    block._layers, block._plan = [lambda hidden, turn, cache, seen: hidden], None
    compute = StageCompute(TorchBlock(block))
    sockets = ZmqTransport.stage(Address(HOST, port), DEVICE, HOST)
    member = MemberMachine(_join(sockets), "the benchmark", 60.0, CALM)
    StageNode(sockets, member, Address(HOST, port), lambda *_: compute).run()


OTHERS: dict[str, Callable[[int], None]] = {
    "raw": lambda port: other_bare(port, False),
    "curve": lambda port: other_bare(port, True),
    "loop": other_loop,
    "transport": other_transport,
    "stage": other_stage,
}


if __name__ == "__main__":
    main()
