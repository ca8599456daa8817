"""Enrolment: has the key of a device or client admitted by a token, or forgotten; it blocks."""

from __future__ import annotations

import time

from edgespec.config import Address
from edgespec.errors import AccessRefused, PeerLost
from edgespec.net.keys import Identity, KeyPair, Token
from edgespec.net.zmq_transport import ZmqTransport
from edgespec.wire.messages import Enrol, Enrolled, Goodbye, Leave, Message, Refuse, Removed

LOOK_S = 0.2


def enrol(coordinator: Address, token: Token, own: KeyPair, name: str, wait: float) -> str:
    """Have the public key of `own` admitted; returns its name in the cluster.

    Raises AccessRefused if the token is not valid there, PeerLost after `wait` seconds without an
    answer.
    """
    identity = Identity(token.pair, token.coordinator)
    answer = _ask(coordinator, identity, Enrol(own.public, name), wait)
    if isinstance(answer, Enrolled):
        return answer.name
    raise AccessRefused(f"the coordinator at {coordinator} refused: {_reason(answer)}")


def leave(coordinator: Address, identity: Identity, wait: float) -> None:
    """Have this node's own key forgotten. Raises like `enrol`."""
    answer = _ask(coordinator, identity, Leave(), wait)
    if not isinstance(answer, Goodbye):
        raise AccessRefused(f"the coordinator at {coordinator} refused: {_reason(answer)}")


def _reason(answer: Message) -> str:
    return answer.reason if isinstance(answer, Refuse | Removed) else "it did not understand"


def _ask(coordinator: Address, identity: Identity, question: Message, wait: float) -> Message:
    """Ask once and return the first answer; ZeroMQ holds the question until it connects."""
    transport = ZmqTransport.client(coordinator, identity)
    deadline = time.monotonic() + wait
    try:
        transport.send_control(b"", question)
        while time.monotonic() < deadline:
            for incoming in transport.poll(LOOK_S):
                return incoming.message
    finally:
        transport.close()
    raise PeerLost(
        f"no coordinator answered at {coordinator} within {wait:.0f} s; is `edgespec serve` "
        "running there, has it finished loading, and is the port open?"
    )
