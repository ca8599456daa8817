"""In-process transport: a link that carries frames, every message through the codec both ways."""

from __future__ import annotations

from collections import deque

from edgespec.wire.codec import decode, encode
from edgespec.wire.messages import Message


class InprocLink:
    """A one-way link between two machines of this process, first in, first out."""

    def __init__(self) -> None:
        self._frames: deque[list[bytes]] = deque()

    def __len__(self) -> int:
        return len(self._frames)

    def send(self, message: Message) -> None:
        """Encode a message and put it behind those on the way."""
        self._frames.append([bytes(frame) for frame in encode(message)])

    def receive(self, index: int = 0) -> Message:
        """Take the message at `index` of those on the way (the oldest) and decode it."""
        frames = self._frames[index]
        del self._frames[index]
        return decode(frames)

    def waiting(self) -> list[Message]:
        """The messages on the way, the oldest first."""
        return [decode(frames) for frames in self._frames]
