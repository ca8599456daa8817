"""Enrolment: has the key of a device or client admitted by a token, or forgotten; it blocks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from edgespec.config import Address
from edgespec.errors import AccessRefused
from edgespec.net.control import never_answered
from edgespec.net.keys import Identity, KeyPair, Token
from edgespec.net.zmq_transport import ZmqTransport
from edgespec.ring.health import REASON_CHARS, printable
from edgespec.wire.messages import Enrol, Enrolled, Goodbye, Leave, Message, Refuse, Removed

LOOK_S = 0.2

SAY_S = 5.0
"""Seconds between two lines about a coordinator that has not answered."""

M = TypeVar("M", bound=Message)


def enrol(
    coordinator: Address,
    token: Token,
    own: KeyPair,
    name: str,
    wait: float,
    say: Callable[[str], None] = lambda text: None,
) -> str:
    """Have the public key of `own` admitted; returns its name in the cluster. `say` is told every
    SAY_S that there is no answer yet.

    Raises AccessRefused if the token is not valid there, OtherVersion if that coordinator is of
    another version, PeerLost after `wait` seconds without an answer.
    """
    identity = Identity(token.pair, token.coordinator)
    return _ask(coordinator, identity, Enrol(own.public, name), Enrolled, wait, say).name


def leave(coordinator: Address, identity: Identity, wait: float) -> None:
    """Have this node's own key forgotten. Raises like `enrol`."""
    _ask(coordinator, identity, Leave(), Goodbye, wait, lambda text: None)


def _ask(
    coordinator: Address,
    identity: Identity,
    question: Message,
    wanted: type[M],
    wait: float,
    say: Callable[[str], None],
) -> M:
    """Ask once and return the first answer; ZeroMQ holds the question until it connects."""
    transport = ZmqTransport.client(coordinator, identity)
    began = said = time.monotonic()
    deadline = began + wait
    try:
        transport.send_control(b"", question)
        while (now := time.monotonic()) < deadline:
            if now - said >= SAY_S:
                said = now
                say(f"no answer yet from {coordinator} ({now - began:.0f} s); it may be loading")
            for incoming in transport.poll(LOOK_S):
                answer = incoming.message
                if isinstance(answer, wanted):
                    return answer
                reason = "it did not understand"
                if isinstance(answer, Refuse | Removed):
                    reason = printable(answer.reason, REASON_CHARS)
                raise AccessRefused(f"the coordinator at {coordinator} refused: {reason}")
    finally:
        transport.close()
    raise never_answered(coordinator, wait, transport.is_let_in)
