"""Codec: one message ↔ a list of frames, versioned, with limits, evaluating nothing a peer names.

Frame 0 is a msgpack array [MAGIC, VERSION, tag, numbers, field, …], a record in a field an array of
its own. A tensor is [dtype, shape] there, and its raw little-endian bytes are a later frame. Of a
list of integers the length is there; all of them together are `numbers`, as bytes of int64. So no
list in the header is long, and a peer cannot make the parser reserve memory for what it only
declares. Whatever bytes come in, `decode` returns a message or raises RemoteProtocolError, nothing
else.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
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
VERSION = 12

Frame = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Limits:
    """What a message may hold at most; beyond it, it is refused before memory is spent on it.

    `frame_bytes`: room for 64 rows of 32,768 float64; a stranger can send as much to a data socket
    before the handshake fails. `items`: entries of a list in the header. `lists`: in all of the
    header, where an empty one takes a byte, and 56 in memory. `numbers`: entries of all lists of
    integers together.
    """

    header_bytes: int = 4 << 20
    frame_bytes: int = 16 << 20
    frames: int = 8
    text_chars: int = 1 << 20
    items: int = 256
    lists: int = 1024
    numbers: int = 1 << 18


DEFAULT_LIMITS = Limits()

_LISTS: dict[Any, Callable[[IntArray], Any]] = {
    IntArray: lambda numbers: numbers,
    tuple[int, ...]: lambda numbers: tuple(numbers.tolist()),
    frozenset[int]: lambda numbers: frozenset(numbers.tolist()),
}
"""Types of fields that hold a list of integers, and how one is made of it."""
_PLACE = re.compile(r"(.*?)(?: - at `\$\[(\d+)\].*`)?", re.DOTALL)


class _Malformed(Exception):
    """Why a message cannot be read, or sent; becomes a protocol error at the border."""


@dataclass(frozen=True, slots=True)
class _Apart:
    """What a field holds that travels apart: a list of integers, a tensor, or records of `kind`.

    `listed`: what makes the field's value of a list of integers; None for all else.
    """

    kind: Any
    optional: bool = False
    many: bool = False
    listed: Callable[[IntArray], Any] | None = None


@dataclass(frozen=True, slots=True)
class _Plan:
    """How a message or a record in one travels: the names of its fields; places and shapes of those
    that are in frames or records themselves; the types of its values with bounds and without."""

    names: tuple[str, ...]
    apart: tuple[tuple[int, _Apart], ...]
    bounded: type[Struct]
    unbounded: type[Struct]
    all_apart: bool
    has_check: bool

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
        bounded, unbounded = (
            defstruct(
                kind.__name__,
                [(n, Finite if hints[n] is float else hints[n]) for n in names],
                array_like=True,
            )
            for hints in (exact | special, bare | special)
        )
        _PLANS[kind] = _Plan(
            names,
            tuple(apart.items()),
            bounded,
            unbounded,
            all_apart=0 < len(names) == len(apart),
            has_check=hasattr(kind, "check"),
        )
    return _PLANS[kind]


def _apart(hint: Any) -> _Apart | None:
    """How a field of this type travels, if not in the header."""
    kinds = get_args(hint)
    if hint in _LISTS:
        return _Apart(hint, listed=_LISTS[hint])
    if is_dataclass(hint):
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
        header = msgpack.packb([MAGIC, VERSION, _TAG_OF[kind], b"".join(frames.numbers), *values])
    except (ValueError, OverflowError) as problem:
        name = next(n for n, v in zip(_plan(kind).names, values, strict=True) if not _packs(v))
        text = f"{kind.__name__} cannot be sent because of {name}: {problem}"
        raise LocalProtocolError(text) from problem
    return [header, *frames.tensors]


def _packs(value: object) -> bool:
    try:
        msgpack.packb(value)
    except (ValueError, OverflowError):
        return False
    return True


class _Outgoing:
    """Takes what does not travel in the header."""

    def __init__(self) -> None:
        self.tensors: list[Frame] = []
        self.numbers: list[bytes] = []

    def record(self, record: Any) -> list[Any]:
        """A message's or record's values as they stand in the header."""
        plan = _plan(type(record))
        values = [getattr(record, name) for name in plan.names]
        for at, how in plan.apart:
            try:
                values[at] = self._put(how, values[at])
            except (TypeError, ValueError, OverflowError) as problem:
                raise _Malformed(f"{plan.names[at]}: {problem}") from None
        if plan.all_apart:
            return values
        try:
            return list(plan.checked(values, plan.unbounded))
        except _Malformed:  # numbers of numpy may be the only reason
            return list(plan.checked([_plain(value) for value in values], plan.unbounded))

    def _put(self, how: _Apart, value: Any) -> Any:
        if value is None and how.optional:
            return None
        if how.listed is not None:
            return self._list(value)
        if how.kind is Tensor:
            self.tensors.append(value.data)
            return [value.dtype, list(value.shape)]
        return [self.record(one) for one in value] if how.many else self.record(value)

    def _list(self, value: Any) -> int:
        if not isinstance(value, np.ndarray):
            value = np.fromiter(map(operator.index, value), np.int64)
        array = np.ascontiguousarray(value, "<i8")
        if array.ndim != 1:
            raise ValueError(f"an array of shape {array.shape} is no list of integers")
        self.numbers.append(array.tobytes())
        return len(array)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


# --- receiving ------------------------------------------------------------------------------------


def decode(frames: Sequence[Frame], limits: Limits = DEFAULT_LIMITS) -> Message:
    """The message in `frames`; raises RemoteProtocolError, and nothing else, if there is none."""
    # On the way of every token through every node: conditions are written out.
    try:
        if not 0 < len(frames) <= limits.frames:
            raise _Malformed("wrong number of frames")
        if len(frames[0]) > limits.header_bytes:
            raise _Malformed("header too long")
        for frame in frames:
            if len(frame) > limits.frame_bytes:
                raise _Malformed("frame too long")
        header = _unpack(frames[0], limits)
        if not isinstance(header, list) or len(header) < 3:
            raise _Malformed("header is no array")
        magic, version, tag, *values = header
        if magic != MAGIC:
            raise _Malformed("not an edgespec message")
        if type(version) is not int:
            raise _Malformed("version is no integer")
        if version != VERSION:
            raise _Malformed(f"protocol version {version}, this program speaks {VERSION}")
        if type(tag) is not int or tag not in TAGS:
            raise _Malformed("unknown message tag")
        numbers = values.pop(0) if values else None
        if type(numbers) is not bytes or len(numbers) % 8:
            raise _Malformed("its lists of integers are missing")
        incoming = _Incoming(frames, numbers, limits)
        message: Message = incoming.record(TAGS[tag], values)
        incoming.finish()
        return message
    except _Malformed as problem:
        raise RemoteProtocolError(f"malformed message: {problem}") from None


def _unpack(frame: Frame, limits: Limits) -> Any:
    left = limits.lists
    may_have_more = len(frame) > left  # each takes a byte at least

    def count(value: list[Any]) -> list[Any]:
        nonlocal left
        left -= 1
        if left < 0:
            raise _Malformed("too many lists")
        return value

    try:
        return msgpack.unpackb(
            frame,
            strict_map_key=True,
            list_hook=count if may_have_more else None,
            max_str_len=4 * limits.text_chars,
            max_bin_len=8 * limits.numbers,
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

    def __init__(self, frames: Sequence[Frame], numbers: bytes, limits: Limits) -> None:
        self._frames = frames
        self._taken = 1  # of the frames
        self._limits = limits
        self._numbers = np.frombuffer(numbers, "<i8").astype(np.int64)  # as bytes are read-only
        self._read = 0  # of the numbers
        self._has_long_text = len(frames[0]) > limits.text_chars  # or may have one

    def record(self, kind: type, values: Any) -> Any:
        """The message or record of these values."""
        plan = _PLANS.get(kind) or _plan(kind)
        if type(values) is not list or len(values) != len(plan.names):
            raise _Malformed(f"{kind.__name__} has the wrong number of fields")
        if self._has_long_text:
            for value in values:
                if isinstance(value, str) and len(value) > self._limits.text_chars:
                    raise _Malformed(f"{kind.__name__} has a text that is too long")
        at = 0
        try:
            for at, how in plan.apart:
                if values[at] is None and how.optional:
                    continue
                if how.listed is not None:
                    values[at] = how.listed(self._list(values[at]))
                elif how.kind is Tensor:
                    values[at] = self._tensor(values[at])
                elif how.many:
                    values[at] = self._records(how.kind, values[at])
                else:
                    values[at] = self.record(how.kind, values[at])
        except _Malformed as problem:
            raise _Malformed(f"{kind.__name__}.{plan.names[at]}: {problem}") from None
        found = kind(*(values if plan.all_apart else plan.checked(values, plan.bounded)))
        if plan.has_check:
            try:
                found.check()
            except ValueError as problem:
                raise _Malformed(f"{kind.__name__}: {problem}") from None
        return found

    def _records(self, kind: type, values: Any) -> tuple[Any, ...]:
        if type(values) is not list:
            raise _Malformed("no list")
        return tuple([self.record(kind, one) for one in values])

    def _list(self, length: Any) -> IntArray:
        if type(length) is not int or length < 0:
            raise _Malformed("no length of a list")
        before, self._read = self._read, self._read + length
        if self._read > len(self._numbers):
            raise _Malformed("integers are missing")
        return self._numbers[before : self._read]

    def _tensor(self, value: Any) -> Tensor:
        if type(value) is not list or len(value) != 2:
            raise _Malformed("an array has no dtype and shape")
        dtype, shape = value
        if type(dtype) is not str or dtype not in ITEM_SIZES:
            raise _Malformed("an array has an unknown dtype")
        if type(shape) is not list or len(shape) > 4:
            raise _Malformed("an array has no shape")
        for extent in shape:
            if type(extent) is not int or not 0 <= extent <= self._limits.frame_bytes:
                raise _Malformed("an array's shape is bad")
        if self._taken == len(self._frames):
            raise _Malformed("a frame is missing")
        data = self._frames[self._taken]
        self._taken += 1
        if math.prod(shape) * ITEM_SIZES[dtype] != len(data):
            raise _Malformed("an array's bytes and shape differ")
        return Tensor(dtype, tuple(shape), data)

    def finish(self) -> None:
        """Everything that came must have been used."""
        if self._read != len(self._numbers):
            raise _Malformed("integers are left")
        if self._taken != len(self._frames):
            raise _Malformed("a frame too many")


_TAG_OF = {kind: tag for tag, kind in TAGS.items()}
