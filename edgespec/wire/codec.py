"""Codec: one message ↔ one frame of bytes, versioned, with limits, evaluating nothing a peer names.

A frame is a MessagePack array [MAGIC, VERSION, [tag, field, …]], a record in a field an array of
its own. An array of integers is its little-endian bytes there, a tensor its dtype, its shape and
its bytes, which are not copied when they are read. Whatever bytes come in, `decode` returns a
message or raises RemoteProtocolError, nothing else. msgspec holds each value to its field's type as
it reads it, and reserves memory for no more than is there.
"""

from __future__ import annotations

import re
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Final, Literal

from msgspec import DecodeError, Struct, msgpack

from edgespec.errors import LocalProtocolError, RemoteProtocolError
from edgespec.types.record import packed_array, wrong_field
from edgespec.wire.messages import Message
from edgespec.wire.segment import Segment
from edgespec.wire.tags import TAGS

MAGIC: Final = "edgespec"
VERSION: Final = 16

MOST_BYTES = 16 << 20
"""Of a frame: room for 64 rows of 32,768 float64; a stranger can send as much to a data socket
before the handshake fails."""

if TYPE_CHECKING:
    AnyMessage = Message
else:
    AnyMessage = reduce(or_, TAGS.values())


class _Frame(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    magic: Literal["edgespec"]
    version: Literal[16]
    message: AnyMessage


_ENCODER = msgpack.Encoder(enc_hook=packed_array)
_DECODER = msgpack.Decoder(_Frame)
START = re.compile(rb"(?:[\x90-\x9f]|\xdc..)\xa8edgespec([\0-\x7f])(\xdc..|.|$)", re.DOTALL)
"""What a frame of any version begins with: an array's length, MAGIC, VERSION and the length of the
message's own array."""


def _length_of(kind: type[Message]) -> bytes:
    """How the array of a tag and this message's fields begins."""
    items = 1 + len(kind.__struct_fields__)
    return bytes([0x90 | items]) if items < 16 else b"\xdc" + items.to_bytes(2, "big")


_CANNOT = (DecodeError, TypeError, ValueError, OverflowError)
_LENGTHS = {kind: _length_of(kind) for kind in TAGS.values()}


def encode(message: Message) -> bytes:
    """The frame of a message.

    Raises LocalProtocolError for what no peer would take: a wrong type, an integer beyond 64 bits,
    NaN, text that is not Unicode. Of a Segment, which is on the way of every token, the peer is
    left to find out some of it.
    """
    try:
        frame = packed(message)
        if not isinstance(message, Segment):
            _DECODER.decode(frame)
    except _CANNOT as problem:
        raise _not_sent(message, problem) from problem
    return frame


def encode_into(room: bytearray, segment: Segment) -> None:
    """The same of a segment, as all that is in `room` then: hidden rows need no new memory each
    time, which the system would have to clear."""
    try:
        _ENCODER.encode_into(_Frame(MAGIC, VERSION, segment), room)
    except _CANNOT as problem:
        raise _not_sent(segment, problem) from problem


def _not_sent(message: Message, problem: Exception) -> LocalProtocolError:
    wrong = wrong_field(message) or problem
    return LocalProtocolError(f"{type(message).__name__} cannot be sent: {wrong}")


def packed(message: Message) -> bytes:
    """The frame of a message, whether a peer would take it or not."""
    return _ENCODER.encode(_Frame(MAGIC, VERSION, message))


def decode(frame: bytes | memoryview) -> Message:
    """The message in a frame; raises RemoteProtocolError, and nothing else, if there is none."""
    if len(frame) > MOST_BYTES:
        raise RemoteProtocolError("malformed message: it is too long")
    start = START.match(frame)
    try:
        message = _DECODER.decode(frame).message
    except Exception as problem:  # bad bytes raise many types
        # What msgspec says of another MAGIC quotes all of it.
        text = "it begins as none of edgespec's" if start is None else str(problem)
        if start is not None and start[1][0] != VERSION:
            text = f"protocol version {start[1][0]}, this program speaks {VERSION}"
        raise RemoteProtocolError(f"malformed message: {text}") from None
    # msgspec fills in fields at the end that have a default.
    if start is None or start[2] != _LENGTHS[type(message)]:
        text = f"malformed message: {type(message).__name__}: wrong number of fields"
        raise RemoteProtocolError(text)
    try:
        message.check()
    except ValueError as problem:
        text = f"malformed message: {type(message).__name__}: {problem}"
        raise RemoteProtocolError(text) from None
    return message
