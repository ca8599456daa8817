"""What programs of other versions of the protocol say."""

from __future__ import annotations

from edgespec.wire.codec import VERSION, encode
from edgespec.wire.messages import Message
from edgespec.wire.refusal import refusal_of

NEWER = VERSION + 1


def said_by(version: int, message: Message) -> bytes:
    """Its frame, were the message the same there."""
    frame = encode(message)
    return frame[:10] + bytes([version]) + frame[11:]


def refusal_by_newer() -> bytes:
    """How a coordinator of a later version refuses a program of this one."""
    words = f"it runs edgespec 9.8.7 (protocol {NEWER}), this program speaks protocol {VERSION}; hm"
    return refusal_of(VERSION, words)
