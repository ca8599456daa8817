"""Links: how long a message takes from one node to the next; first in, first out, like TCP."""

from __future__ import annotations

import random

from edgespec.errors import ConfigError
from edgespec.schema import FileStruct


class LinkSpec(FileStruct, frozen=True):
    """One direction of one link.

    `latency` and `jitter` (the most that chance adds to it) in seconds; `bytes_per_second`, 0 for
    no limit; `loss`: the probability that an attempt is lost and repeated `retry_after` seconds
    later. Raises ConfigError for figures that no link can have.
    """

    latency: float = 0.0
    bytes_per_second: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    retry_after: float = 0.2

    def __post_init__(self) -> None:
        low = min(self.latency, self.bytes_per_second, self.jitter, self.loss, self.retry_after)
        if low < 0 or self.loss >= 1:
            raise ConfigError(f"{self}: no figure may be negative, and loss must be below 1")


class Link:
    """One direction of a link: a message leaves when the one before it has, and never overtakes."""

    def __init__(self, spec: LinkSpec, rng: random.Random) -> None:
        self._spec = spec
        self._rng = rng
        self._free_at = 0.0
        self._last_arrival = 0.0

    def send(self, now: float, nbytes: int, extra: float = 0.0) -> float:
        """When a message of `nbytes` handed over at `now` arrives; `extra` seconds are added.

        A lost attempt delays its message and with it all that follow; it does not occupy the link
        a second time.
        """
        spec = self._spec
        self._free_at = max(now, self._free_at)
        if spec.bytes_per_second:
            self._free_at += nbytes / spec.bytes_per_second
        arrival = self._free_at + spec.latency + extra
        if spec.jitter:
            arrival += self._rng.random() * spec.jitter
        if spec.loss:
            while self._rng.random() < spec.loss:
                arrival += spec.retry_after
        self._last_arrival = max(arrival, self._last_arrival)
        return self._last_arrival


class Network(FileStruct, frozen=True):
    """All links of a ring of N stages.

    `ring[i]` leads from node i to the next one (N + 1 links); `to_stages[s - 1]` and
    `from_stages[s - 1]` are the control channel between the coordinator and stage s.
    """

    ring: tuple[LinkSpec, ...]
    to_stages: tuple[LinkSpec, ...]
    from_stages: tuple[LinkSpec, ...]

    def __post_init__(self) -> None:
        stages = len(self.ring) - 1
        if stages < 1 or (len(self.to_stages), len(self.from_stages)) != (stages, stages):
            raise ConfigError("a network has one more ring link than links to and from stages")

    @staticmethod
    def even(stages: int, ring: LinkSpec, control: LinkSpec | None = None) -> Network:
        """Equal links everywhere; the control channel like the ring unless told otherwise."""
        channel = (control or ring,) * stages
        return Network((ring,) * (stages + 1), channel, channel)
