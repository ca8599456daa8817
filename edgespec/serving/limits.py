"""Limits: how much of each resource the clients of the API may take."""

from __future__ import annotations

from dataclasses import dataclass, fields

from edgespec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Sizes in bytes, times in seconds.

    `body`, `header`: maximum sizes of one request; `header_seconds`, `body_seconds`: the time in
    which they have to arrive. `bodies`: bodies of all connections together. `idle_seconds`: how
    long a connection is kept for the next request. `connections`: open at once; one more replaces
    a connection that has sent no head for `crowded_seconds`, if there is one. `answers`: requests
    that wait for an answer or read one. `write_seconds`: how long a client may leave its answer
    unread. `pause_seconds`: a silent stream sends a comment this often. `drain_seconds`: how long
    the input of a refused sender is still read, so that it gets to read the refusal.
    """

    body: int = 4 << 20
    header: int = 32 << 10
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    idle_seconds: int = 30
    connections: int = 512
    crowded_seconds: float = 1.0
    bodies: int = 64 << 20
    answers: int = 128
    write_seconds: float = 20.0
    pause_seconds: float = 10.0
    drain_seconds: float = 5.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if not (value := getattr(self, field.name)) > 0:
                raise ConfigError(f"{field.name} is {value}; it must be above 0")


CONNECT_S = 2.0
"""Seconds that a request waits for a coordinator that is not there."""

STATUS_AGE_S = 0.25
"""Age up to which a status of the ring is used again instead of asking the coordinator."""

RETRY_S = 5
"""Seconds in `Retry-After`."""
