"""Registrar: who belongs to the cluster, and what each may do, as the coordinator node asks it."""

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

_ASKING: frozenset[type[Message]] = frozenset({Submit, Cancel, StatusRequest, Subscribe, Heartbeat})
_SERVING = _ASKING | {
    Join,
    Loading,
    Ready,
    Connected,
    Fault,
    Credit,
    Health,
    StageActivity,
    Goodbye,
}

MAY_SEND: dict[str, frozenset[type[Message]]] = {
    OWNER: _SERVING,
    STAGE: _SERVING | {Leave},
    CLIENT: _ASKING | {Leave},
    TOKEN: frozenset({Enrol}),
}
"""What the holder of a key may say to the coordinator, by the role that the key has."""


class AccessPolicy(Protocol):
    """Keys, and the roles that they have. Asked in the node's own thread and in that of ZAP."""

    def role_of(self, key: str) -> str | None:
        """One of MAY_SEND's; None for a key that is not, or no longer, known."""

    def why_not(self, key: str) -> str:
        """Why a key has no role, for the log."""

    def enrol(self, token_key: str, device_key: str, name: str) -> str:
        """Admit a device by a token; returns the name that it gets.

        Raises AccessRefused if the token does not, or no longer, count.
        """

    def forget(self, key: str) -> None:
        """Admit this device no more."""


def admits(access_policy: AccessPolicy, key: str, *, blocks: bool = False) -> str:
    """ "" if the holder of the key may connect (for `blocks`: as a stage), or why not."""
    role = access_policy.role_of(key)
    if role is None:
        return access_policy.why_not(key)
    return "" if not blocks or role in (OWNER, STAGE) else f"it is that of a {role}"
