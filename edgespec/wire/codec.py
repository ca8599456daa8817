"""Codec: one message ↔ a list of frames, versioned, with limits, evaluating nothing a peer names.

Frame 0 is a msgpack array [MAGIC, VERSION, tag, field, …]. A tensor, and a list of integers, is
[dtype, shape] there, and its raw little-endian bytes are the next frame: so nothing in the header
is long, and a peer cannot make the parser reserve memory for what it only declares. Whatever bytes
come in, `decode` returns a message or raises RemoteProtocolError, nothing else.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, get_type_hints

import msgpack
import numpy as np

from edgespec.errors import LocalProtocolError, RemoteProtocolError
from edgespec.tree.ledger import RetainSet
from edgespec.types.tensor import ITEM_SIZES, IntArray, Layers, Tensor
from edgespec.wire.block_messages import BlockOffer, Piece, PieceRequest
from edgespec.wire.client_messages import NodeStatus, SourceFigures
from edgespec.wire.messages import TAGS, Health, Message, Ready
from edgespec.wire.segment import MOST_PARTS, Header, Part, Segment, StageTime
from edgespec.wire.snapshots import (
    MOST_RUNS,
    Snapshot,
    SnapshotNode,
    SnapshotSegment,
    StageActivity,
    StageRun,
    Subscribe,
    SubscribeActivity,
)

MAGIC = "edgespec"
VERSION = 8

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
    rows: int = 1 << 16


SMALLEST_CHUNK, LARGEST_CHUNK = 64 << 10, 4 << 20
"""Bytes of a chunk of a block file, whose bounds are multiples of CHUNK_STEP."""

CHUNK_STEP = 4096

MOST_CHUNKS = 1 << 17
"""Of a block file: 128 GiB in chunks of 1 MiB, whose hashes take 4 MiB."""

SHORTEST_S, LONGEST_S = 1e-9, 1e9
"""Seconds of what a stage says that it did, if it says any: quotients of them are finite too."""

HASH_BYTES = 32
"""Of a SHA-256."""

MOST_LAYERS = 16
"""That a draft source may tap."""

DEFAULT_LIMITS = Limits()


class _Malformed(Exception):
    """Why a message cannot be read; becomes RemoteProtocolError at the border."""


def encode(message: Message) -> list[Frame]:
    """Frames of a message; a tensor's bytes are shared, not copied.

    Raises LocalProtocolError for a value that its field cannot hold: an integer beyond 64 bits,
    NaN, text that is not Unicode, a wrong type.
    """
    tag, plan = _PLAN_OF[type(message)]
    header: list[Any] = [MAGIC, VERSION, tag]
    frames: list[Frame] = [b""]
    name = ""
    try:
        for name, kind in plan:
            header.append(kind.pack(getattr(message, name), frames))
        name = "its header"
        frames[0] = msgpack.packb(header)
    except (TypeError, ValueError, OverflowError) as problem:
        raise LocalProtocolError(
            f"{type(message).__name__} cannot be sent because of {name}: {problem}"
        ) from problem
    return frames


def decode(frames: Sequence[Frame], limits: Limits = DEFAULT_LIMITS) -> Message:
    """The message in `frames`; raises RemoteProtocolError, and nothing else, if there is none."""
    try:
        return _decode(frames, limits)
    except _Malformed as problem:
        raise RemoteProtocolError(f"malformed message: {problem}") from None


def _decode(frames: Sequence[Frame], limits: Limits) -> Message:
    _need(0 < len(frames) <= limits.frames, "wrong number of frames")
    _need(len(frames[0]) <= limits.header_bytes, "header too long")
    _need(all(len(f) <= limits.frame_bytes for f in frames), "frame too long")
    header = _unpack(frames[0], limits)
    _need(isinstance(header, list) and len(header) >= 3, "header is no array")
    _need(header[0] == MAGIC, "not an edgespec message")
    _need(_is_int(header[1]), "version is no integer")
    _need(header[1] == VERSION, f"protocol version {header[1]}, this program speaks {VERSION}")
    _need(_is_int(header[2]) and header[2] in TAGS, "unknown message tag")
    message_type = TAGS[header[2]]
    plan = _PLAN_OF[message_type][1]
    _need(len(header) == 3 + len(plan), f"{message_type.__name__} has the wrong number of fields")
    raw = iter(frames[1:])
    values = {
        name: kind.unpack(value, raw, limits)
        for (name, kind), value in zip(plan, header[3:], strict=True)
    }
    _need(next(raw, None) is None, "a frame too many")
    message = message_type(**values)
    match message:
        case Segment():
            _check_segment(message, limits)
        case Health():
            _check_health(message)
        case BlockOffer():
            _check_offer(message)
        case PieceRequest():
            _check_piece_request(message)
        case Piece():
            _check_piece(message)
        case StageActivity(runs) | Snapshot(runs=runs):
            _check_runs(runs)
        case Subscribe(seconds) | SubscribeActivity(seconds):
            _need(0.0 <= seconds < math.inf, "a time that cannot be")
        case Ready(seconds):
            _need(0.0 <= seconds <= LONGEST_S, "a time that cannot be")
    return message


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


def _check_segment(segment: Segment, limits: Limits) -> None:
    parts, rows = segment.parts, segment.rows
    _need(0 < len(parts) <= MOST_PARTS, "wrong number of parts")
    _need(rows <= limits.rows, "too many rows")
    _need(len({part.request for part in parts}) == len(parts), "a request has two parts")
    _need(segment.header.seq >= 0, "negative number")
    for part in parts:
        _check_part(part, segment.hidden is not None)
    if segment.hidden is not None:
        shape = segment.hidden.shape
        _need(len(shape) == 2 and shape[0] == rows, "hidden is not one vector a row")
    if segment.aux_hidden is not None:
        dtype, shape = segment.aux_hidden.dtype, segment.aux_hidden.shape
        _need(dtype == "uint8" and len(shape) == 2, "aux_hidden is no bytes of rows")
        fits = shape[0] == rows and bool(segment.header.aux_layers)
        _need(fits, "aux_hidden is not one vector a row")
    if segment.ppd_tokens is not None:
        shape = segment.ppd_tokens.shape
        _need(len(shape) == 2 and shape[0] <= limits.rows, "ppd_tokens are no list of vectors")
    for time in segment.cost:
        _need(time.rows > 0, "a time of no rows")
        _need(0.0 <= time.seconds < math.inf, "a time that cannot be")


def _check_part(part: Part, may_lack_tokens: bool) -> None:
    rows = len(part.ids)
    _need(min(part.request, part.epoch, part.reserve, part.want) >= 0, "negative number")
    _need(min(part.fork_of, *part.fork_ids, 0) >= 0, "negative number")
    for name in ("parents", "positions"):
        _need(len(getattr(part, name)) == rows, f"{name} and ids differ in length")
    fits = len(part.tokens) == rows or (may_lack_tokens and not len(part.tokens))
    _need(fits, "tokens and ids differ in length")
    if rows:
        _need(int(part.ids.min()) >= 0, "negative id")
        _need(int(part.positions.min()) >= 0, "negative position")


def _check_health(health: Health) -> None:
    degrees = (health.temperature, health.limit)
    _need(all(abs(celsius) < 1000.0 for celsius in degrees), "a temperature that cannot be")
    _need(0 <= health.free <= health.memory, "more memory is free than there is")
    _need(0.0 <= health.busy <= 1.0, "a share that is none")
    times = (health.slowdown, health.one_row, health.few_rows)
    _need(all(n == 0.0 or SHORTEST_S <= n <= LONGEST_S for n in times), "a time that cannot be")


def _check_offer(offer: BlockOffer) -> None:
    _need(_is_sha256(offer.sha256), "a hash is no SHA-256")
    fits = SMALLEST_CHUNK <= offer.chunk_bytes <= LARGEST_CHUNK
    _need(fits and offer.chunk_bytes % CHUNK_STEP == 0, "a chunk's size is bad")
    chunks = -(-offer.size // offer.chunk_bytes)
    _need(0 < chunks <= MOST_CHUNKS, "a block file's size is bad")
    hashes = offer.chunk_hashes
    fits = hashes.dtype == "uint8" and hashes.shape == (chunks, HASH_BYTES)
    _need(fits, "a block file's hashes and size differ")


def _check_piece_request(request: PieceRequest) -> None:
    _need(_is_sha256(request.sha256), "a hash is no SHA-256")
    _need(min(request.offset, request.length, request.have) >= 0, "negative number")
    _need(request.length <= LARGEST_CHUNK, "a piece is too long")


def _check_piece(piece: Piece) -> None:
    _need(_is_sha256(piece.sha256), "a hash is no SHA-256")
    _need(piece.offset >= 0, "negative number")
    _need(piece.data.dtype == "uint8" and len(piece.data.shape) == 1, "a piece is no bytes")
    _need(0 < len(piece.data.data) <= LARGEST_CHUNK, "a piece's length is bad")


def _check_runs(runs: tuple[StageRun, ...]) -> None:
    _need(len(runs) <= MOST_RUNS, "too many runs")
    for run in runs:
        _need(min(run.stage, run.request, run.seq) >= 0, "negative number")
        _need(0 <= run.wasted <= run.rows, "more rows are wasted than there are")
        times = (run.ago, run.seconds)
        _need(all(0.0 <= seconds < math.inf for seconds in times), "a time that cannot be")


def _is_sha256(text: str) -> bool:
    return len(text) == 2 * HASH_BYTES and all(c in "0123456789abcdef" for c in text)


def _need(condition: bool, problem: str) -> None:
    if not condition:
        raise _Malformed(problem)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# --- kinds of field -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Kind:
    """How one type of field is packed into the header (and raw frames), and read back."""

    pack: Callable[[Any, list[Frame]], Any]
    unpack: Callable[[Any, Iterator[Frame], Limits], Any]


def _pack_int(value: Any, frames: list[Frame]) -> int:
    number = int(operator.index(value))
    if not -(1 << 63) <= number < 1 << 64:
        raise OverflowError("an integer has more than 64 bits")
    return number


def _pack_bool(value: Any, frames: list[Frame]) -> bool:
    return bool(value)


def _pack_float(value: Any, frames: list[Frame]) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("a float is no finite number")
    return number


def _pack_text(value: Any, frames: list[Frame]) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} is no text")
    value.encode()  # refuses half a surrogate pair, which a command line can hold
    return value


def _pack_texts(value: Any, frames: list[Frame]) -> list[str]:
    return [_pack_text(text, frames) for text in value]


def _read_int(value: Any, raw: Iterator[Frame], limits: Limits) -> int:
    _need(_is_int(value), "a field is no integer")
    return int(value)


def _read_bool(value: Any, raw: Iterator[Frame], limits: Limits) -> bool:
    _need(isinstance(value, bool), "a field is neither true nor false")
    return bool(value)


def _read_float(value: Any, raw: Iterator[Frame], limits: Limits) -> float:
    _need(isinstance(value, float), "a field is no float")
    _need(math.isfinite(value), "a field is no finite number")
    return float(value)


def _read_text(value: Any, raw: Iterator[Frame], limits: Limits) -> str:
    _need(isinstance(value, str) and len(value) <= limits.text_chars, "a field is no fit text")
    return str(value)


def _read_texts(value: Any, raw: Iterator[Frame], limits: Limits) -> tuple[str, ...]:
    _need(isinstance(value, list) and len(value) <= limits.items, "a field is no fit list")
    return tuple(_read_text(text, raw, limits) for text in value)


def _pack_array(value: IntArray, frames: list[Frame]) -> list[Any]:
    array = np.ascontiguousarray(value, "<i8")
    if array.ndim != 1:
        raise ValueError(f"an array of shape {array.shape} is no list of integers")
    frames.append(array.tobytes())
    return ["int64", list(array.shape)]


def _pack_tensor(value: Tensor | None, frames: list[Frame]) -> list[Any] | None:
    if value is None:
        return None
    frames.append(value.data)
    return [value.dtype, list(value.shape)]


def _read_tensor(value: Any, raw: Iterator[Frame], limits: Limits) -> Tensor:
    _need(isinstance(value, list) and len(value) == 2, "an array has no dtype and shape")
    dtype, shape = value
    _need(isinstance(dtype, str) and dtype in ITEM_SIZES, "an array has an unknown dtype")
    _need(isinstance(shape, list) and len(shape) <= 4, "an array has no shape")
    fits = all(_is_int(e) and 0 <= e <= limits.frame_bytes for e in shape)
    _need(fits, "an array's shape is bad")
    data = next(raw, None)
    _need(data is not None, "a frame is missing")
    assert data is not None
    _need(math.prod(shape) * ITEM_SIZES[dtype] == len(data), "an array's bytes and shape differ")
    return Tensor(dtype, tuple(shape), data)


def _read_optional_tensor(value: Any, raw: Iterator[Frame], limits: Limits) -> Tensor | None:
    return None if value is None else _read_tensor(value, raw, limits)


def _read_array(value: Any, raw: Iterator[Frame], limits: Limits) -> IntArray:
    tensor = _read_tensor(value, raw, limits)
    _need(tensor.dtype == "int64" and len(tensor.shape) == 1, "an array is no list of integers")
    return np.frombuffer(tensor.data, "<i8").astype(np.int64)  # a copy, as frames are read-only


def _pack_numbers(value: Iterable[int], frames: list[Frame]) -> list[Any]:
    return _pack_array(np.fromiter(map(operator.index, value), np.int64), frames)


def _read_numbers(value: Any, raw: Iterator[Frame], limits: Limits) -> tuple[int, ...]:
    array = _read_array(value, raw, limits)
    _need(len(array) <= limits.numbers, "a list is too long")
    return tuple(array.tolist())


def _pack_layers(value: Layers, frames: list[Frame]) -> list[int]:
    return [_pack_int(layer, frames) for layer in value]


def _read_layers(value: Any, raw: Iterator[Frame], limits: Limits) -> Layers:
    _need(isinstance(value, list) and len(value) <= MOST_LAYERS, "a field is no fit list")
    _need(all(_is_int(layer) and layer >= 0 for layer in value), "a layer's number is bad")
    _need(all(a < b for a, b in pairwise(value)), "layers are not ascending")
    return Layers(tuple(value))


def _record(record: type) -> _Kind:
    """The kind of one of these: an array of its fields in the header."""
    hints = get_type_hints(record)
    kinds = [(f.name, _KINDS[hints[f.name]]) for f in fields(record)]

    def pack(value: Any, frames: list[Frame]) -> list[Any]:
        return [kind.pack(getattr(value, name), frames) for name, kind in kinds]

    def read(value: Any, raw: Iterator[Frame], limits: Limits) -> Any:
        fits = isinstance(value, list) and len(value) == len(kinds)
        _need(fits, f"a {record.__name__} has the wrong number of fields")
        pairs = zip(kinds, value, strict=True)
        return record(**{name: kind.unpack(part, raw, limits) for (name, kind), part in pairs})

    return _Kind(pack, read)


def _records(record: type) -> _Kind:
    """The kind of a tuple of these."""
    one = _record(record)

    def pack(value: Any, frames: list[Frame]) -> list[Any]:
        return [one.pack(each, frames) for each in value]

    def read(value: Any, raw: Iterator[Frame], limits: Limits) -> tuple[Any, ...]:
        _need(isinstance(value, list) and len(value) <= limits.items, "a field is no fit list")
        return tuple(one.unpack(each, raw, limits) for each in value)

    return _Kind(pack, read)


def _read_number_set(value: Any, raw: Iterator[Frame], limits: Limits) -> frozenset[int]:
    return frozenset(_read_numbers(value, raw, limits))


_KINDS: dict[Any, _Kind] = {
    int: _Kind(_pack_int, _read_int),
    bool: _Kind(_pack_bool, _read_bool),
    float: _Kind(_pack_float, _read_float),
    str: _Kind(_pack_text, _read_text),
    tuple[str, ...]: _Kind(_pack_texts, _read_texts),
    tuple[int, ...]: _Kind(_pack_numbers, _read_numbers),
    frozenset[int]: _Kind(_pack_numbers, _read_number_set),
    IntArray: _Kind(_pack_array, _read_array),
    Layers: _Kind(_pack_layers, _read_layers),
    Tensor: _Kind(_pack_tensor, _read_tensor),
    Tensor | None: _Kind(_pack_tensor, _read_optional_tensor),
}
_KINDS |= {one: _record(one) for one in (Header, RetainSet)}
for _type in (NodeStatus, Part, SnapshotNode, SnapshotSegment, SourceFigures, StageRun, StageTime):
    _KINDS[tuple[_type, ...]] = _records(_type)  # type: ignore[valid-type]


def _plan(message_type: type[Message]) -> tuple[tuple[str, _Kind], ...]:
    hints = get_type_hints(message_type)
    return tuple((f.name, _KINDS[hints[f.name]]) for f in fields(message_type))


_PLAN_OF: dict[type[Message], tuple[int, tuple[tuple[str, _Kind], ...]]] = {
    message_type: (tag, _plan(message_type)) for tag, message_type in TAGS.items()
}
