"""Codec: one message ↔ one frame of bytes, versioned, with limits, evaluating nothing a peer names.

A frame is a MessagePack array [MAGIC, VERSION, [tag, field, …]], a record in a field an array of
its own. An array of integers is its little-endian bytes there, a tensor its dtype, its shape and
its bytes. The package msgpack packs and unpacks it, within limits; msgspec then holds each value to
its field's type. Whatever bytes come in, `decode` returns a message or raises RemoteProtocolError,
nothing else, and takes little more memory than a valid message of that length.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from msgpack import Packer, Unpacker, packb, unpackb
from msgspec import MsgspecError, convert, to_builtins
from msgspec.structs import fields

from edgespec.errors import LocalProtocolError, RemoteProtocolError
from edgespec.tree.ledger import MOST_RETAINED
from edgespec.types.record import INT64, MOST_NUMBERS, MOST_RECORDS, Record
from edgespec.types.tool_forms import DEEPEST
from edgespec.wire import block_messages, snapshots  # noqa: F401 (of their messages)
from edgespec.wire.client_messages import Echoed, Finished, Submit, Tokens
from edgespec.wire.messages import Message, Retain
from edgespec.wire.segment import Segment

MAGIC: Final = "edgespec"
VERSION: Final = 18

TAGS = {kind.__struct_config__.tag: kind for kind in Message.__subclasses__()}
"""All messages by their tags. A peer names a number in it, never a type."""

MOST_BYTES = 16 << 20
"""Of a frame: room for 64 rows of 32,768 float64; a stranger can send as much to a data socket
before the handshake fails."""

MOST_ITEMS = 1 << 14
"""Values in a message without long lists."""

SHORT = 1 << 18
"""Bytes of a frame whose values need not be counted: they take 10 MB at most."""

LONG = (Retain, Submit, Tokens, Finished, Echoed)
"""Messages with lists of more than MOST_RECORDS values, or with maps."""

MOST_LONG = MOST_NUMBERS + MOST_RETAINED + MOST_ITEMS
"""What the values of such a message may weigh, by the memory that they take: an integer 1."""

TEXT, LIST, MAP = 2, 3, 6
"""What others weigh."""

MOST_DEPTH = DEEPEST + 8
"""Of values within each other in such a message: a tool's schema, and what it stands in."""

START = re.compile(rb"(?:[\x90-\x9f]|\xdc..)\xa8edgespec([\0-\x7f])(\xdc..|.|$)", re.DOTALL)
"""What a frame of any version begins with: an array's length, MAGIC, VERSION and the length of the
message's own array."""


_CANNOT = (TypeError, ValueError, OverflowError, MsgspecError)  # and so msgpack's
_BYTES = (bytes, memoryview)  # which msgspec leaves as they are: else a text stands for them


def encode(message: Message) -> bytes:
    """The frame of a message.

    Raises LocalProtocolError for what no peer would take: a wrong type, an integer beyond 64 bits,
    NaN, text that is not Unicode. Of a Segment, which is on the way of every token, the peer is
    left to find out some of it.
    """
    try:
        frame = packed(message)
        if not isinstance(message, Segment):
            _typed(frame, type(message))
    except _CANNOT as problem:
        raise _not_sent(message, problem) from problem
    return frame


def packed(message: Message) -> bytes:
    """The frame of a message, whether a peer would take it or not."""
    return bytes(packb(_plain(message)))


class SegmentPacker:
    """Packs segments into one piece of memory, one after the other: hidden rows need no new memory
    each time, which the system would have to clear."""

    def __init__(self) -> None:
        self._packer = Packer(autoreset=False)

    def frame(self, segment: Segment) -> memoryview:
        """As `encode` has it. It counts until it is released, and has to be before the next."""
        self._packer.reset()
        try:
            self._packer.pack(_plain(segment))
        except _CANNOT as problem:
            raise _not_sent(segment, problem) from problem
        return memoryview(self._packer.getbuffer())


def _plain(message: Message) -> object:
    """A message as what msgpack knows."""
    return MAGIC, VERSION, to_builtins(message, builtin_types=_BYTES, enc_hook=_known)


def _known(value: object) -> object:
    """What msgspec does not know as what it knows. Raises TypeError for anything but numbers of
    numpy, and arrays of one axis and 64 bits."""
    if isinstance(value, np.ndarray) and value.dtype == INT64 and value.ndim == 1:
        return value.tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot cross the wire")


def _not_sent(message: Message, problem: Exception) -> LocalProtocolError:
    wrong = _wrong_field(message) or problem
    return LocalProtocolError(f"{type(message).__name__} cannot be sent: {wrong}")


def _wrong_field(record: Record) -> str:
    """The first field that cannot cross the wire, and why; "" if all can."""
    for known in fields(record):
        value = getattr(record, known.name)
        try:
            plain = packb(to_builtins(value, builtin_types=_BYTES, enc_hook=_known))
            convert(unpackb(plain), known.type, builtin_types=_BYTES)
        except _CANNOT as problem:
            within = _wrong_field(value) if isinstance(value, Record) else ""
            return f"{known.name}.{within}" if within else f"{known.name}: {problem}"
    return ""


def decode(frame: bytes | memoryview) -> Message:
    """The message in a frame; raises RemoteProtocolError, and nothing else, if there is none."""
    if len(frame) > MOST_BYTES:
        raise _malformed("it is too long")
    start = START.match(frame)
    if start is None:
        raise _malformed("it begins as none of edgespec's")
    if start[1][0] != VERSION:
        raise _malformed(f"protocol version {start[1][0]}, this program speaks {VERSION}")
    kind = TAGS.get(frame[start.end()]) if start.end() < len(frame) else None
    if kind is None:
        raise _malformed("it has none of the tags that there are")
    try:
        message = _typed(frame, kind)
        message.check()
    except Exception as problem:  # bad bytes raise many types
        why = str(problem) or type(problem).__name__  # msgpack's StackError says nothing
        raise _malformed(f"{kind.__name__}: {why}") from None
    return message


def _malformed(why: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"malformed message: {why}")


def _typed(frame: bytes | memoryview, kind: type[Message]) -> Message:
    _, _, values = _unpacked(frame, kind)
    if len(values) != 1 + len(kind.__struct_fields__):  # msgspec would fill in those at the end
        raise ValueError("wrong number of fields")
    return convert(values, kind, builtin_types=_BYTES)


def _unpacked(frame: bytes | memoryview, kind: type[Message]) -> Any:
    """The values of a frame, before anything is known of their types."""
    limits: dict[str, Any] = {"list_hook": _counter()} if len(frame) > SHORT else {}
    try:  # of tuples the empty one, which nearly every message has, takes no memory
        return unpackb(
            frame,
            use_list=False,
            object_hook=_no_map,
            max_array_len=MOST_RECORDS,
            max_map_len=0,
            max_ext_len=0,
            **limits,
        )
    except ValueError:
        if kind not in LONG:
            raise
    return _LongReader(frame).whole()


def _no_map(_: object) -> None:
    raise ValueError("a map")


def _counter() -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Called with each list of a frame as it is complete: raises ValueError if there is too much in
    all of them. Many small values take far more memory than their bytes."""
    left = MOST_ITEMS

    def count(items: tuple[Any, ...]) -> tuple[Any, ...]:
        nonlocal left
        left -= 1 + len(items)
        if left < 0:
            raise ValueError("too many values")
        return items

    return count


class _LongReader:
    """Reads values one by one, so that it stops where there are too many, or too deep. msgpack
    itself reserves memory for lists as long as they say that they are, each within another."""

    def __init__(self, frame: bytes | memoryview) -> None:
        self._frame = frame
        self._left = MOST_LONG
        limits = dict.fromkeys(("max_array_len", "max_map_len", "max_ext_len", "max_bin_len"), 0)
        self._source = Unpacker(max_buffer_size=len(frame), **limits)
        self._source.feed(frame)

    def whole(self) -> Any:
        """All of it. Raises ValueError, or what msgpack raises, if it is more or less than one
        value."""
        value = self._value(MOST_DEPTH)
        if self._source.tell() != len(self._frame):
            raise ValueError("something stands behind the message")
        return value

    def _value(self, depth: int, in_map: bool = False) -> Any:
        first = self._frame[self._source.tell()]
        if 0x90 <= first < 0xA0 or 0xDC <= first <= 0xDD:
            entries = self._take(self._source.read_array_header(), LIST, depth)
            if not entries and not in_map:
                return ()  # one for all: most lists of a message are empty
            return [self._value(depth - 1, in_map) for _ in range(entries)]
        if 0x80 <= first < 0x90 or 0xDE <= first <= 0xDF:
            entries = self._take(self._source.read_map_header(), MAP, depth)
            return {self._source.unpack(): self._value(depth - 1, True) for _ in range(entries)}
        value = self._source.unpack()
        self._take(0, 1 if type(value) is int else TEXT)
        return value

    def _take(self, entries: int, weight: int, depth: int = 1) -> int:
        """Raises ValueError if there is no room for this weight, or for so many entries more."""
        self._left -= weight
        if depth == 0 or entries > self._left or self._left < 0:
            raise ValueError("too many values, or too deep")
        return entries
