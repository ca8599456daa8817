"""Enrolment: has the key of a device or client admitted by a token, or forgotten; it blocks."""

from __future__ import annotations

import time
from typing import TypeVar

from edgespec.config import Address
from edgespec.errors import AccessRefused, PeerLost
from edgespec.net.keys import Identity, KeyPair, Token
from edgespec.net.zmq_transport import ZmqTransport
from edgespec.wire.messages import Enrol, Enrolled, Goodbye, Leave, Message, Refuse, Removed

LOOK_S = 0.2

M = TypeVar("M", bound=Message)


def enrol(coordinator: Address, token: Token, own: KeyPair, name: str, wait: float) -> str:
    """Have the public key of `own` admitted; returns its name in the cluster.

    Raises AccessRefused if the token is not valid there, PeerLost after `wait` seconds without an
    answer.
    """
    identity = Identity(token.pair, token.coordinator)
    return _ask(coordinator, identity, Enrol(own.public, name), Enrolled, wait).name


def leave(coordinator: Address, identity: Identity, wait: float) -> None:
    """Have this node's own key forgotten. Raises like `enrol`."""
    _ask(coordinator, identity, Leave(), Goodbye, wait)


def _ask(
    coordinator: Address, identity: Identity, question: Message, wanted: type[M], wait: float
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
                    reason = answer.reason
                raise AccessRefused(f"the coordinator at {coordinator} refused: {reason}")
    finally:
        transport.close()
    raise PeerLost(
        f"no coordinator answered at {coordinator} within {wait:.0f} s; is `edgespec serve` "
        "running there, has it finished loading, and is the port open?"
    )
