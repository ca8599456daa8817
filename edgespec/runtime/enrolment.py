"""Enrolment: has the key of a device or client admitted by a token, or forgotten; it blocks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from edgespec.config import Address
from edgespec.errors import AccessRefused, PeerLost
from edgespec.net.control import never_answered
from edgespec.net.keys import Identity, KeyPair, Token
from edgespec.net.zmq_transport import ZmqTransport
from edgespec.ring.health import REASON_CHARS, printable
from edgespec.wire.messages import (
    Enrol,
    Enrolled,
    Goodbye,
    Join,
    Leave,
    Message,
    Refuse,
    Removed,
)

LOOK_S = 0.2

NO_STAGE = "there is no stage"
"""How the coordinator's refusal of a stage's number begins."""

Meanwhile = Callable[[], None]
"""Called, more than once, while the coordinator takes its time to answer."""

M = TypeVar("M", bound=Message)


def enrol(
    coordinator: Address,
    token: Token,
    own: KeyPair,
    name: str,
    wait: float,
    meanwhile: Meanwhile = lambda: None,
) -> str:
    """Have the public key of `own` admitted; returns its name in the cluster.

    Raises AccessRefused if the token is not valid there, OtherVersion if that coordinator is of
    another version, PeerLost after `wait` seconds without an answer.
    """
    identity = Identity(token.pair, token.coordinator)
    return _ask(coordinator, identity, Enrol(own.public, name), Enrolled, wait, meanwhile).name


def leave(coordinator: Address, identity: Identity, wait: float) -> None:
    """Have this node's own key forgotten. Raises like `enrol`."""
    _ask(coordinator, identity, Leave(), Goodbye, wait)


def require_stage(
    coordinator: Address,
    identity: Identity,
    stage: int,
    wait: float,
    meanwhile: Meanwhile = lambda: None,
) -> None:
    """Raise AccessRefused if the ring has no stage of this number, or does not let the key in; a
    coordinator that does not answer within `wait` seconds will say so later.

    A Join with no address is refused, and takes no place.
    """
    try:
        join = Join(stage, "", 0, "", 0, identity.own.public)
        refusal = _ask(coordinator, identity, join, Refuse, wait, meanwhile)
    except PeerLost:
        return
    if refusal.reason.startswith(NO_STAGE):
        raise AccessRefused(f"the coordinator at {coordinator} refused: {refusal.reason}")


def _ask(
    coordinator: Address,
    identity: Identity,
    question: Message,
    wanted: type[M],
    wait: float,
    meanwhile: Meanwhile = lambda: None,
) -> M:
    """Ask once and return the first answer; ZeroMQ holds the question until it connects."""
    transport = ZmqTransport.client(coordinator, identity)
    deadline = time.monotonic() + wait
    try:
        transport.send_control(b"", question)
        while time.monotonic() < deadline:
            for incoming in transport.poll(LOOK_S):
                answer = incoming.message
                if isinstance(answer, wanted):
                    return answer
                reason = "it did not understand"
                if isinstance(answer, Refuse | Removed):
                    reason = printable(answer.reason, REASON_CHARS)
                raise AccessRefused(f"the coordinator at {coordinator} refused: {reason}")
            meanwhile()
    finally:
        transport.close()
    raise never_answered(coordinator, wait, transport.is_let_in)
