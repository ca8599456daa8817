"""Codec: one message ↔ a list of frames, versioned, with limits, evaluating nothing a peer names.

Frame 0 is a msgpack array [MAGIC, VERSION, tag, field, …], a record in a field an array of its own.
A tensor is [dtype, shape] there, and its raw little-endian bytes are a later frame. Of a list of
integers the length is there; all of them together are one frame of int64. So nothing in the header
is long, and a peer cannot make the parser reserve memory for what it only declares. Whatever bytes
come in, `decode` returns a message or raises RemoteProtocolError, nothing else.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import msgpack
import numpy as np
from msgspec import Struct, ValidationError, convert, defstruct, structs

from edgespec.errors import LocalProtocolError, RemoteProtocolError
from edgespec.types.tensor import ITEM_SIZES, IntArray, Tensor
from edgespec.wire.messages import Finite, Message
from edgespec.wire.tags import TAGS

MAGIC = "edgespec"
VERSION = 10

Frame = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Limits:
    """What a message may hold at most; beyond it, it is refused before memory is spent on it.

    `frame_bytes`: room for 64 rows of 32,768 float64; a stranger can send as much to a data socket
    before the handshake fails. `items`: entries of a list in the header. `lists`: in all of the
    header, where an empty one takes a byte, and 56 in memory. `numbers`: entries of a list of
    integers.
    """

    header_bytes: int = 4 << 20
    frame_bytes: int = 16 << 20
    frames: int = 8
    text_chars: int = 1 << 20
    items: int = 256
    lists: int = 1024
    numbers: int = 1 << 17


DEFAULT_LIMITS = Limits()

_LISTS = (IntArray, tuple[int, ...], frozenset[int])
_PLACE = re.compile(r"(.*?)(?: - at `\$\[(\d+)\].*`)?", re.DOTALL)


class _Malformed(Exception):
    """Why a message cannot be read, or sent; becomes a protocol error at the border."""


@dataclass(frozen=True, slots=True)
class _Apart:
    """What a field holds that travels apart: a list of integers, a tensor, or records of `kind`."""

    kind: Any
    optional: bool = False
    many: bool = False


@dataclass(frozen=True, slots=True)
class _Plan:
    """How a message or a record in one travels: the names of its fields; places and shapes of those
    that are in frames or records themselves; the types of its values with bounds and without."""

    names: tuple[str, ...]
    apart: tuple[tuple[int, _Apart], ...]
    bounded: type[Struct]
    unbounded: type[Struct]

    def checked(self, values: Any, schema: type[Struct]) -> tuple[Any, ...]:
        """The values of a record, if they fit the schema."""
        try:
            return structs.astuple(convert(values, schema))
        except ValidationError as problem:
            match = _PLACE.fullmatch(str(problem))
            assert match is not None
            place = f".{self.names[int(match[2])]}" if match[2] else ""
            raise _Malformed(f"{schema.__name__}{place}: {match[1]}") from None


_PLANS: dict[type, _Plan] = {}


def _plan(kind: type) -> _Plan:
    if kind not in _PLANS:
        exact, bare = get_type_hints(kind, include_extras=True), get_type_hints(kind)
        names = tuple(field.name for field in fields(kind))
        found = {at: _apart(bare[name]) for at, name in enumerate(names)}
        apart = {at: how for at, how in found.items() if how is not None}
        special = {name: Any for at, name in enumerate(names) if at in apart}
        schemas = []
        for hints in (exact | special, bare | special):
            types = [(n, Finite if hints[n] is float else hints[n]) for n in names]
            schemas.append(defstruct(kind.__name__, types, array_like=True))
        _PLANS[kind] = _Plan(names, tuple(apart.items()), *schemas)
    return _PLANS[kind]


def _apart(hint: Any) -> _Apart | None:
    """How a field of this type travels, if not in the header."""
    kinds = get_args(hint)
    if hint in _LISTS or is_dataclass(hint):
        return _Apart(hint)
    if len(kinds) == 2 and kinds[1] is NoneType and is_dataclass(kinds[0]):
        return _Apart(kinds[0], optional=True)
    if get_origin(hint) is tuple and is_dataclass(kinds[0]):
        return _Apart(kinds[0], many=True)
    return None


# --- sending --------------------------------------------------------------------------------------


def encode(message: Message) -> list[Frame]:
    """Frames of a message; a tensor's bytes are shared, not copied.

    Raises LocalProtocolError for a value that its field cannot hold: an integer beyond 64 bits,
    NaN, text that is not Unicode, a wrong type.
    """
    frames = _Outgoing()
    kind = type(message)
    try:
        values = frames.record(message)
    except (_Malformed, UnicodeError) as problem:
        raise LocalProtocolError(f"{kind.__name__} cannot be sent: {problem}") from problem
    try:
        header = msgpack.packb([MAGIC, VERSION, _TAG_OF[kind], *values])
    except (ValueError, OverflowError) as problem:
        name = next(n for n, v in zip(_plan(kind).names, values, strict=True) if not _packs(v))
        text = f"{kind.__name__} cannot be sent because of {name}: {problem}"
        raise LocalProtocolError(text) from problem
    return [header, *frames.finished()]


def _packs(value: object) -> bool:
    try:
        msgpack.packb(value)
    except (ValueError, OverflowError):
        return False
    return True


class _Outgoing:
    """Takes what does not travel in the header."""

    def __init__(self) -> None:
        self._frames: list[Frame] = []
        self._numbers: list[bytes] = []
        self._numbers_at = 0

    def record(self, record: Any) -> list[Any]:
        """A message's or record's values as they stand in the header."""
        plan = _plan(type(record))
        values = [_plain(getattr(record, name)) for name in plan.names]
        for at, how in plan.apart:
            try:
                values[at] = self._put(how, values[at])
            except (TypeError, ValueError, OverflowError) as problem:
                raise _Malformed(f"{plan.names[at]}: {problem}") from None
        return list(plan.checked(values, plan.unbounded))

    def _put(self, how: _Apart, value: Any) -> Any:
        if how.kind in _LISTS:
            return self._list(value)
        if value is None and how.optional:
            return None
        if how.kind is Tensor:
            self._frames.append(value.data)
            return [value.dtype, list(value.shape)]
        return [self.record(one) for one in value] if how.many else self.record(value)

    def _list(self, value: Any) -> int:
        if not isinstance(value, np.ndarray):
            value = np.fromiter(map(operator.index, value), np.int64)
        array = np.ascontiguousarray(value, "<i8")
        if array.ndim != 1:
            raise ValueError(f"an array of shape {array.shape} is no list of integers")
        if not self._numbers:
            self._numbers_at = len(self._frames)
        self._numbers.append(array.tobytes())
        return len(array)

    def finished(self) -> list[Frame]:
        """All frames but the header."""
        if self._numbers:
            self._frames.insert(self._numbers_at, b"".join(self._numbers))
        return self._frames


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


# --- receiving ------------------------------------------------------------------------------------


def decode(frames: Sequence[Frame], limits: Limits = DEFAULT_LIMITS) -> Message:
    """The message in `frames`; raises RemoteProtocolError, and nothing else, if there is none."""
    try:
        _need(0 < len(frames) <= limits.frames, "wrong number of frames")
        _need(len(frames[0]) <= limits.header_bytes, "header too long")
        _need(all(len(f) <= limits.frame_bytes for f in frames), "frame too long")
        header = _unpack(frames[0], limits)
        _need(isinstance(header, list) and len(header) >= 3, "header is no array")
        magic, version, tag, *values = header
        _need(magic == MAGIC, "not an edgespec message")
        _need(_is_int(version), "version is no integer")
        _need(version == VERSION, f"protocol version {version}, this program speaks {VERSION}")
        _need(_is_int(tag) and tag in TAGS, "unknown message tag")
        incoming = _Incoming(frames, limits)
        message: Message = incoming.record(TAGS[tag], values)
        incoming.finish()
        return message
    except _Malformed as problem:
        raise RemoteProtocolError(f"malformed message: {problem}") from None


def _unpack(frame: Frame, limits: Limits) -> Any:
    left = limits.lists

    def count(value: list[Any]) -> list[Any]:
        nonlocal left
        left -= 1
        _need(left >= 0, "too many lists")
        return value

    try:
        return msgpack.unpackb(
            frame,
            strict_map_key=True,
            list_hook=count,
            max_str_len=4 * limits.text_chars,
            max_bin_len=0,
            max_array_len=limits.items,
            max_map_len=0,
            max_ext_len=0,
        )
    except _Malformed:
        raise
    except Exception as problem:  # msgpack raises many types for bad bytes
        raise _Malformed(f"header is not readable ({type(problem).__name__})") from None


class _Incoming:
    """Gives what does not travel in the header, in the order in which it was taken."""

    def __init__(self, frames: Sequence[Frame], limits: Limits) -> None:
        self._rest = iter(frames[1:])
        self._limits = limits
        self._numbers: IntArray | None = None
        self._read = 0

    def record(self, kind: type, values: Any) -> Any:
        """The message or record of these values."""
        plan = _plan(kind)
        fits = isinstance(values, list) and len(values) == len(plan.names)
        _need(fits, f"{kind.__name__} has the wrong number of fields")
        for value in values:
            too_long = isinstance(value, str) and len(value) > self._limits.text_chars
            _need(not too_long, f"{kind.__name__} has a text that is too long")
        for at, how in plan.apart:
            try:
                values[at] = self._take(how, values[at])
            except _Malformed as problem:
                raise _Malformed(f"{kind.__name__}.{plan.names[at]}: {problem}") from None
        found = kind(*plan.checked(values, plan.bounded))
        try:
            if hasattr(found, "check"):
                found.check()
        except ValueError as problem:
            raise _Malformed(f"{kind.__name__}: {problem}") from None
        return found

    def _take(self, how: _Apart, value: Any) -> Any:
        kind = how.kind
        if kind in _LISTS:
            numbers = self._list(value)
            return numbers if kind == IntArray else get_origin(kind)(numbers.tolist())
        if value is None and how.optional:
            return None
        if kind is Tensor:
            return self._tensor(value)
        if not how.many:
            return self.record(kind, value)
        _need(isinstance(value, list), "no list")
        return tuple(self.record(kind, one) for one in value)

    def _list(self, length: Any) -> IntArray:
        _need(_is_int(length) and length >= 0, "no length of a list")
        _need(length <= self._limits.numbers, "a list is too long")
        if self._numbers is None:
            data = self._frame()
            _need(len(data) % 8 == 0, "a frame is no list of integers")
            self._numbers = np.frombuffer(data, "<i8").astype(np.int64)  # as frames are read-only
        found = self._numbers[self._read : self._read + length]
        _need(len(found) == length, "integers are missing")
        self._read += length
        return found

    def _tensor(self, value: Any) -> Tensor:
        _need(isinstance(value, list) and len(value) == 2, "an array has no dtype and shape")
        dtype, shape = value
        _need(isinstance(dtype, str) and dtype in ITEM_SIZES, "an array has an unknown dtype")
        _need(isinstance(shape, list) and len(shape) <= 4, "an array has no shape")
        fits = all(_is_int(e) and 0 <= e <= self._limits.frame_bytes for e in shape)
        _need(fits, "an array's shape is bad")
        data = self._frame()
        fits = math.prod(shape) * ITEM_SIZES[dtype] == len(data)
        _need(fits, "an array's bytes and shape differ")
        return Tensor(dtype, tuple(shape), data)

    def _frame(self) -> Frame:
        data = next(self._rest, None)
        if data is None:
            raise _Malformed("a frame is missing")
        return data

    def finish(self) -> None:
        """Everything that came must have been used."""
        _need(self._numbers is None or self._read == len(self._numbers), "integers are left")
        _need(next(self._rest, None) is None, "a frame too many")


def _need(condition: bool, problem: str) -> None:
    if not condition:
        raise _Malformed(problem)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_TAG_OF = {kind: tag for tag, kind in TAGS.items()}
