"""Strangers of all kinds, and members beyond their roles, around rings of real nodes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import zmq
from support.keys import OWN
from support.nodes import HOST, NodeRing
from support.rings import submit
from support.segments import one_part, retain_message
from support.sockets import BareSockets

from edgespec.net.keys import KeyPair
from edgespec.runtime.access_policy import CLIENT
from edgespec.types.tensor import Tensor
from edgespec.wire.client_messages import Cancel
from edgespec.wire.codec import encode
from edgespec.wire.messages import (
    Assign,
    CloseRequest,
    Connect,
    Credit,
    Enrol,
    Fault,
    Goodbye,
    Health,
    Heartbeat,
    Join,
    Loading,
    Message,
    Ready,
    Refuse,
    Removed,
)
from edgespec.wire.segment import Segment


def forged(seq: int, request: int = 1) -> Segment:
    """A segment that nobody of the ring sent."""
    ids = np.arange(3, dtype=np.int64)
    hidden = Tensor("uint64", (3, 1), bytes(24))
    return one_part(request, seq, 0, False, 9, 3, ids, ids - 1, ids, ids, hidden)


THIEF = KeyPair.from_words("a thief")

STRANGE: list[Message] = [
    Fault(1, "forged"),
    Fault(-1, "forged"),
    Ready(0.0),
    Goodbye("forged"),
    Loading("x"),
    Credit(1),
    Health(99.0, 90.0, 1, 1, 1.0, True, "forged"),
    retain_message(1, 2**40, 2**40, (), ()),
    CloseRequest(1),
    Cancel(1),
    Connect("10.9.9.9", 1, THIEF.public),
    Refuse("forged"),
    Removed("forged"),
    Enrol(THIEF.public, "thief"),
    Join(1, "thief", 1, HOST, 9, OWN.public),
    Join(99, "thief", 1, HOST, 9, THIEF.public),
    Join(2, "\x1b[31m", 1, "evil host", 99999999, OWN.public),
    Heartbeat(),
    Assign(1, 1, 0, 1, "m", "f", "float32", "none", 1, 7, ""),
    forged(1),
    forged(2**40),
]


class Annoyer:
    """Somebody who says everything, to everybody, all the time."""

    def __init__(self, ring: NodeRing, own: KeyPair | None, of_cluster: KeyPair = OWN) -> None:
        """`own`: the key that is shown; `of_cluster`: whose coordinator is expected."""
        self._own = own
        self._control = ring.address.port, of_cluster.public
        self._data: list[tuple[int, str]] = []
        for thread in ring.threads.values():
            transport = thread.node.transport
            self._data.append((transport.data_port, transport.identity.own.public))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        """Wait for its end."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            with BareSockets() as bare:  # who is refused would not come again by itself
                control = bare.connect(zmq.DEALER, self._control[0], self._own, self._control[1])
                data = [bare.connect(zmq.PUSH, port, self._own, key) for port, key in self._data]
                for _ in range(10):
                    self._say_all(control, data)
                    self._over.wait(0.05)

    def _say_all(self, control: zmq.Socket[bytes], data: list[zmq.Socket[bytes]]) -> None:
        for message in STRANGE:
            _put(control, [encode(message)])
            for opened in data:
                _put(opened, [encode(message)])
                _put(opened, [b"guess", encode(message)])
        for seq in range(60):  # numbers that are in flight right now, too
            for opened in data:
                _put(opened, [b"", encode(forged(seq))])
        _put(control, [b"\xc1" * 50])


def _put(opened: zmq.Socket[bytes], frames: Sequence[bytes | memoryview]) -> None:
    with suppress(zmq.Again):
        opened.send_multipart(frames, zmq.NOBLOCK)


def test_strangers_change_nothing_in_a_running_answer() -> None:
    """No key; unknown keys; another cluster's; a client's; and that of a stage without a place."""
    ask = submit(max_new_tokens=60)
    with NodeRing(3) as ring:
        ring.await_up()
        for block in ring.blocks:
            block.delay = 0.002
        client, stage = ring.keys.add("a bad client", CLIENT), ring.keys.add("a bad stage")
        annoyers = [Annoyer(ring, pair) for pair in (None, THIEF, client.own, stage.own)]
        annoyers.append(Annoyer(ring, THIEF, THIEF))
        try:
            answers = [ring.ask(ask) for _ in range(2)]
        finally:
            for annoyer in annoyers:
                annoyer.stop()
        for answer in answers:
            ring.assert_right(ask, answer)
            assert answer.recoveries == 0
        ring.assert_free()
        assert all(thread.stop is None for thread in ring.threads.values()), "all still run"
        assert len(ring.membership.daemon_peers) == 3


def test_a_stage_may_not_speak_for_requests_of_the_past() -> None:
    """Late, repeated and unknown messages of a real member do no harm either."""
    with NodeRing(2) as ring:
        ring.await_up()
        stage = ring.threads[1].node.transport
        ask = submit()
        for _ in range(3):
            stage.send_control(b"", Fault(999, "unknown"))
            stage.send_control(b"", Ready(1.0))
            stage.send_control(b"", Loading("x"))
            ring.assert_right(ask, ring.ask(ask))
