"""Paced transport: counts what a node sends, and emulates the delay of other links.

Every message of a request carries the time at which it is due: it is sent at once, and the receiver
holds it back until then. The real delays are hidden in the time of the emulated link. Due times are
of time.monotonic, which the processes of one machine share.
"""

from __future__ import annotations

import heapq
import math
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq

from edgespec.net.keys import Identity
from edgespec.net.sockets import Content
from edgespec.net.zmq_transport import Incoming, ZmqTransport
from edgespec.wire.codec import encode
from edgespec.wire.messages import CloseRequest, Credit, Fault, Message, Retain
from edgespec.wire.segment import Segment

if TYPE_CHECKING:
    from edgespec.planning.costs import LinkCosts

OF_REQUESTS = (Retain, CloseRequest, Fault, Credit)
"""Control messages between coordinator and stages that cost time while a request runs. Messages
with clients, and those that set a ring up, are not emulated."""

FARTHEST_S = 10.0
"""A message that is due so many seconds before or after now was not stamped on this machine."""

FINE_S = 0.001
"""ZeroMQ waits in whole milliseconds: shorter waits are slept, in steps of STEP_S."""

STEP_S = 0.0002

_STAMP = struct.Struct(">8sd")
_MARK = b"due at: "


@dataclass(frozen=True, slots=True)
class LinkPace:
    """The outgoing links of one node.

    `ring` leads to the next node; a control message takes `control` seconds and no bandwidth;
    `segment_bytes(segment)`: its size, were its rows those of the charged model.
    """

    ring: LinkCosts
    control: float
    segment_bytes: Callable[[Segment], int]


@dataclass(frozen=True, slots=True)
class Stamped(Incoming):
    """A message that came over an emulated link, `at` its due time."""

    at: float = 0.0


class PacedTransport(ZmqTransport):
    """A ZmqTransport whose messages arrive when they would over the links of `pace`.

    Either all nodes of a ring have a pace, or none. `happened_at()`: when the cause of a message
    happened. `compute_ends()`: when what the node computes ends as charged: later messages wait for
    what comes of it, however late that is. `on_sent(message, nbytes)` is called for every segment
    and every control message of a request; the bytes are the charged model's under a pace, else the
    real ones.
    """

    def __init__(self, identity: Identity) -> None:
        super().__init__(identity)
        self.pace: LinkPace | None = None
        self.happened_at: Callable[[], float] = time.monotonic
        self.compute_ends: Callable[[], float] = lambda: math.inf
        self.on_sent: Callable[[Message, int], None] | None = None
        self._free_at = 0.0
        self._stamp: float | None = None
        self._early_ones: list[tuple[float, int, Stamped]] = []
        self._taken = 0

    # --- sending ------------------------------------------------------------------------------

    def send_ring(self, segment: Segment, *stamp: bytes) -> None:
        if self.is_in_ring:  # else it is sent again when there is a connection
            nbytes = self._count(segment)
            if self.pace is not None:
                link = self.pace.ring
                self._free_at = max(self.happened_at(), self._free_at) + link.seconds(nbytes)
                stamp = (_STAMP.pack(_MARK, self._free_at + link.latency),)
        super().send_ring(segment, *stamp)

    def send_control(self, peer: bytes, message: Message, *stamp: bytes) -> None:
        if isinstance(message, OF_REQUESTS):
            self._count(message)
            if self.pace is not None:
                stamp = (_STAMP.pack(_MARK, self.happened_at() + self.pace.control),)
        super().send_control(peer, message, *stamp)

    def _count(self, message: Message) -> int:
        if self.pace is not None and isinstance(message, Segment):
            nbytes = self.pace.segment_bytes(message)
        elif self.on_sent is None:
            return 0
        else:
            nbytes = len(encode(message))
        if self.on_sent is not None:
            self.on_sent(message, nbytes)
        return nbytes

    # --- receiving ----------------------------------------------------------------------------

    def poll(self, timeout: float) -> list[Incoming]:
        """What came within `timeout` seconds or earlier, and is due."""
        waiting = self._early_ones
        left = timeout
        if waiting:
            left = min(max(waiting[0][0] - time.monotonic(), 0.0), timeout)
            if left < FINE_S:
                waits = waiting[0][0] > self.compute_ends()
                time.sleep(STEP_S if waits else min(left, STEP_S))
                left = 0.0
            else:
                left = math.floor(left * 1000) / 1000
        ready: list[Incoming] = []
        for incoming in super().poll(left):
            if isinstance(incoming, Stamped):
                self._taken += 1
                heapq.heappush(waiting, (incoming.at, self._taken, incoming))
            else:
                ready.append(incoming)
        now = min(time.monotonic(), self.compute_ends())
        while waiting and waiting[0][0] <= now:
            ready.append(heapq.heappop(waiting)[2])
        return ready

    def _take_control(self, control: zmq.Socket[bytes]) -> Iterator[Incoming]:
        return self._stamped(super()._take_control(control))

    def _take_ring(self, pull: zmq.Socket[bytes]) -> Iterator[Incoming]:
        return self._stamped(super()._take_ring(pull))

    def _stamped(self, taken: Iterator[Incoming]) -> Iterator[Incoming]:
        for one in taken:  # `_read` has just seen its stamp
            at = self._stamp
            if at is None or self.pace is None or not abs(at - time.monotonic()) < FARTHEST_S:
                yield one
            else:
                yield Stamped(one.on_ring, one.peer, one.message, one.key, one.ring_key, at)

    def _read(self, frames: list[Content]) -> Message:
        self._stamp = None
        if frames and len(frames[-1]) == _STAMP.size:
            mark, at = _STAMP.unpack(frames[-1])
            if mark == _MARK:
                self._stamp = at
                frames.pop()
        return super()._read(frames)
