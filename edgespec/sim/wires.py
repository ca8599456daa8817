"""Wires: the messages under way on a ring's links, and what becomes of them."""

from __future__ import annotations

import random
from collections.abc import Callable

from edgespec.sim.clock import Clock
from edgespec.sim.links import Link, Network
from edgespec.wire.codec import decode, encode
from edgespec.wire.messages import Message
from edgespec.wire.segment import Segment


class Wires:
    """The links of one ring after the other; nothing can be sent before the first `mend`.

    `segments`: {sequence number: requests} of those on their way round. `rings`: how many rings
    were cut.
    """

    def __init__(
        self,
        network: Network,
        rng: random.Random,
        clock: Clock,
        message_bytes: Callable[[Message, int], int],
        arrived: Callable[[int, Message], None],
    ) -> None:
        """`arrived(node, message)`: it came out of a link there."""
        self._network, self._rng, self._clock = network, rng, clock
        self._message_bytes, self._arrived = message_bytes, arrived
        self.segments: dict[int, tuple[int, ...]] = {}
        self.rings = 0
        self._ring: list[Link] = []
        self._to_stages: list[Link] = []
        self._from_stages: list[Link] = []

    def mend(self) -> None:
        """A ring is up, on new links."""
        of = self._network
        self._ring, self._to_stages, self._from_stages = (
            [Link(spec, self._rng) for spec in specs]
            for specs in (of.ring, of.to_stages, of.from_stages)
        )

    def cut(self) -> None:
        """The ring is no more: its messages do not arrive, but for what stages have said."""
        self.rings += 1
        self.segments.clear()
        self._ring, self._to_stages, self._from_stages = [], [], []

    def send_on(self, node: int, segment: Segment) -> None:
        """Round the ring, from that node to the next."""
        if not self._ring:
            return
        if node == 0:
            numbers = tuple(part.request for part in segment.parts)
            self.segments[segment.header.seq] = numbers
        self._send(self._ring[node], (node + 1) % len(self._ring), segment)

    def send_stages(self, message: Message) -> None:
        for number, link in enumerate(self._to_stages, 1):
            self._send(link, number, message)

    def send_coordinator(self, node: int, message: Message) -> None:
        if self._from_stages:
            self._send(self._from_stages[node - 1], 0, message)

    def _send(self, link: Link, node: int, message: Message) -> None:
        frame = encode(message)
        size = self._message_bytes(message, len(frame))
        self._book(link.send(self._clock.now, size), node, message, frame)

    def _book(self, at: float, node: int, message: Message, frame: bytes) -> None:
        self._clock.book(at, self._come, self.rings, node, message, frame)

    def _come(self, ring: int, node: int, message: Message, frame: bytes) -> None:
        """A message comes out of a link; what stages said still comes when the ring is cut."""
        if ring == self.rings or not (node or isinstance(message, Segment)):
            self._arrived(node, decode(frame))
