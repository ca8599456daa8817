"""Wires: the messages under way on a ring's links, and what becomes of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from edgespec.sim.clock import Clock
from edgespec.sim.faults import Dice
from edgespec.sim.links import Link, Network
from edgespec.sim.log import message_words
from edgespec.wire.codec import decode, encode
from edgespec.wire.messages import Message, Retain
from edgespec.wire.segment import Segment


class Wires:
    """The links of one ring after the other; nothing can be sent before the first `mend`.

    `segments`: {sequence number: requests} of those on their way round. `control`: how many
    messages of each request are under way on the control channel. `lost`: {(stage, request): epoch
    of the newest retained set that never arrived}. `rings`: how many rings were cut.
    """

    def __init__(
        self,
        network: Network,
        dice: Dice,
        rng: random.Random,
        clock: Clock,
        message_bytes: Callable[[Message, int], int],
        arrived: Callable[[int, Message], None],
        note: Callable[[int, str], None],
    ) -> None:
        """`arrived(node, message)`: it came out of a link there."""
        self._network, self._dice, self._rng, self._clock = network, dice, rng, clock
        self._message_bytes, self._arrived, self._note = message_bytes, arrived, note
        self.segments: dict[int, tuple[int, ...]] = {}
        self.control: Counter[int] = Counter()
        self.lost: dict[tuple[int, int], int] = {}
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
        self.lost.clear()
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
        if self._dice.loses(message):
            self._note(node, f"never gets {message_words(message)}")
            if isinstance(message, Retain):
                self.lost[node, message.request] = message.keep.epoch
            return
        message = self._dice.bent(message)
        frame = encode(message)
        control = None if isinstance(message, Segment) else int(getattr(message, "request", -1))
        size = self._message_bytes(message, len(frame))
        late = self._dice.lateness(message)
        at = link.send(self._clock.now, size, self._dice.delay()) + late
        for when in (at, *(at + after for after in self._dice.repeats(message))):
            if control is not None:
                self.control[control] += 1
            self._clock.book(when, self._come, self.rings, node, frame, control)

    def _come(self, ring: int, node: int, frame: bytes, control: int | None) -> None:
        """A message comes out of a link; `control`: its request, on the control channel."""
        if control is not None:
            self.control[control] -= 1
        if ring == self.rings or not (node or control is None):  # what stages said still comes
            self._arrived(node, decode(frame))
