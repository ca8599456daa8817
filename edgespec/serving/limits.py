"""Limits: how much of everything one client of the API may take, so that there is some for all."""

from __future__ import annotations

from dataclasses import dataclass, fields

from edgespec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes, times in seconds.

    `body`, `header`: the longest of a request. `header_seconds`, `body_seconds`: within which they
    have to come. `idle_seconds`: how long a connection is kept for the next request.
    `connections`: at once; of these, `answers` may be waiting for an answer or be reading one. One
    too many takes the place of one that has sent no head for `crowded_seconds`, if there is one.
    `bodies`: of all connections together.
    `write_seconds`: how long a client may take nothing of an answer. `pause_seconds`: after so long
    a silence a stream says that it still lives. `drain_seconds`: how long a sender that was refused
    is still listened to, so that it gets to read why.
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
            if not getattr(self, field.name) > 0:
                raise ConfigError(
                    f"{field.name} is {getattr(self, field.name)}; it must be above 0"
                )


CONNECT_S = 2.0
"""Seconds that a request waits for a coordinator that is not there."""

STATUS_AGE_S = 0.25
"""However many ask how the ring is, the coordinator is asked this often at most."""

RETRY_S = 5
"""What clients are told to wait before they try again."""
