"""Access policy: which keys belong to the cluster, and which messages each role may send."""

from __future__ import annotations

from typing import Protocol

from edgespec.wire.client_messages import Cancel, StatusRequest, Submit
from edgespec.wire.messages import (
    Connected,
    Credit,
    Enrol,
    Fault,
    Goodbye,
    Health,
    Heartbeat,
    Join,
    Leave,
    Loading,
    Message,
    Ready,
)
from edgespec.wire.snapshots import StageActivity, Subscribe

OWNER, STAGE, CLIENT, TOKEN = "owner", "stage", "client", "token"

_ASK: frozenset[type[Message]] = frozenset({Submit, Cancel, StatusRequest, Subscribe, Heartbeat})
_SERVE: frozenset[type[Message]] = _ASK | {
    Join,
    Loading,
    Ready,
    Connected,
    Fault,
    Credit,
    Health,
    StageActivity,
}
_SERVE |= {Goodbye}

MAY_SEND: dict[str, frozenset[type[Message]]] = {
    OWNER: _SERVE,
    STAGE: _SERVE | {Leave},
    CLIENT: _ASK | {Leave},
    TOKEN: frozenset({Enrol}),
}
"""The messages that the holder of a key may send to the coordinator, by the key's role."""


class AccessPolicy(Protocol):
    """Keys and their roles. Called in the node's own thread and in that of ZAP."""

    def role_of(self, key: str) -> str | None:
        """One of MAY_SEND's; None for an unknown or removed key."""

    def why_not(self, key: str) -> str:
        """Why a key has no role, for the log."""

    def enrol(self, token_key: str, device_key: str, name: str) -> str:
        """Admit a device by a token; returns its name. Raises AccessRefused for a bad token."""

    def forget(self, key: str) -> None:
        """Remove this device."""


def admits(access_policy: AccessPolicy, key: str, *, blocks: bool = False) -> str:
    """ "" if the holder of the key may connect (for `blocks`: as a stage), or why not."""
    role = access_policy.role_of(key)
    if role is None:
        return access_policy.why_not(key)
    return "" if not blocks or role in (OWNER, STAGE) else f"it is that of a {role}"
