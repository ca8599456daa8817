"""The codec: what goes in comes out, and whatever else comes in is one kind of error."""

from __future__ import annotations

import math
import random
import struct
import time
import tracemalloc
from typing import Any, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import msgpack
from msgspec.structs import fields, replace
from support.cases import case
from support.segments import changed, one_part, retain_message

from edgespec.config import MOST_STAGES
from edgespec.errors import LocalProtocolError, RemoteProtocolError
from edgespec.tree.ledger import MOST_RETAINED, RetainSet
from edgespec.types.record import MOST_CHARS, MOST_NUMBERS, IntArray, Record
from edgespec.types.tensor import ITEM_SIZES, Layers, Tensor
from edgespec.types.tool_forms import DEEPEST, Tool
from edgespec.types.usual_sampling import UsualSampling
from edgespec.wire.block_messages import LARGEST_CHUNK, MOST_CHUNKS, BlockOffer, Piece, PieceRequest
from edgespec.wire.client_messages import (
    MOST_MESSAGES,
    MOST_TOOLS,
    ChatMessage,
    LiveRequest,
    NodeStatus,
    Progress,
    SourceFigures,
    Status,
    Submit,
    TokenBias,
    ToolCall,
)
from edgespec.wire.codec import (
    MAGIC,
    MOST_BYTES,
    TAGS,
    VERSION,
    SegmentPacker,
    decode,
    encode,
    packed,
)
from edgespec.wire.messages import Assign, Credit, Fault, Health, Heartbeat, Message, Ready, Retain
from edgespec.wire.segment import Segment, StageTime
from edgespec.wire.snapshots import (
    SnapshotNode,
    SnapshotSegment,
    StageRun,
    Subscribe,
    SubscribeActivity,
)

# --- strategies from the messages' own field types ------------------------------------------------

INT64 = st.integers(-(2**63), 2**63 - 1)


@st.composite
def tensors(draw: st.DrawFn, rows: int | None = None) -> Tensor:
    """Any small tensor, with `rows` rows if given."""
    dtype = draw(st.sampled_from(sorted(ITEM_SIZES)))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    if rows is not None:
        shape = (rows, draw(st.integers(0, 4)))
    size = int(np.prod(shape)) * ITEM_SIZES[dtype]
    return Tensor(dtype, shape, draw(st.binary(min_size=size, max_size=size)))


def arrays(length: int | None = None, least: int = -(2**63)) -> st.SearchStrategy[IntArray]:
    """int64 lists."""
    low, high = (0, 8) if length is None else (length, length)
    numbers = st.integers(least, 2**63 - 1)
    return st.lists(numbers, min_size=low, max_size=high).map(lambda x: np.array(x, np.int64))


VALUES: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**64 - 1),
    bool: st.booleans(),
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: st.text(max_size=20),
    tuple[int, ...]: st.lists(INT64, max_size=20).map(tuple),
    frozenset[int]: st.frozensets(INT64, max_size=20),
    tuple[str, ...]: st.lists(st.text(max_size=10), max_size=5).map(tuple),
    memoryview: arrays(),
    Tensor | None: st.none() | tensors(),
}


def made_of_values(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Anything of a type whose fields may hold whatever their own types can."""
    hints = get_type_hints(kind)
    return st.builds(kind, **{f.name: VALUES[hints[f.name]] for f in fields(kind)})


VALUES[float | None] = st.none() | VALUES[float]
VALUES[int | None] = st.none() | VALUES[int]
VALUES[UsualSampling] = made_of_values(UsualSampling)
VALUES[RetainSet] = made_of_values(RetainSet)
VALUES[NodeStatus] = made_of_values(NodeStatus)
VALUES[tuple[NodeStatus, ...]] = st.lists(VALUES[NodeStatus], max_size=3).map(tuple)
VALUES[tuple[LiveRequest, ...]] = st.lists(made_of_values(LiveRequest), max_size=3).map(tuple)
VALUES[tuple[TokenBias, ...]] = st.lists(made_of_values(TokenBias), max_size=3).map(tuple)
VALUES[tuple[ToolCall, ...]] = st.lists(made_of_values(ToolCall), max_size=3).map(tuple)
MESSAGES = st.builds(
    ChatMessage,
    st.text(min_size=1, max_size=9),
    VALUES[str],
    VALUES[tuple[ToolCall, ...]],
    VALUES[str],
    VALUES[str],
)
VALUES[tuple[ChatMessage, ...]] = st.lists(MESSAGES, max_size=3).map(tuple)
JSON = st.recursive(
    st.none() | st.booleans() | INT64 | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
VALUES[get_type_hints(Submit)["settings"]] = st.dictionaries(
    VALUES[str], VALUES[str] | INT64 | VALUES[float] | st.booleans() | st.none(), max_size=3
)
SCHEMAS = st.dictionaries(st.text(max_size=9), JSON, max_size=3)
VALUES[tuple[Tool, ...]] = st.lists(
    st.builds(Tool, VALUES[str], VALUES[str], SCHEMAS), max_size=3
).map(tuple)
VALUES[tuple[SourceFigures, ...]] = st.lists(made_of_values(SourceFigures), max_size=3).map(tuple)
VALUES[tuple[SnapshotNode, ...]] = st.lists(made_of_values(SnapshotNode), max_size=3).map(tuple)
VALUES[tuple[SnapshotSegment, ...]] = st.lists(made_of_values(SnapshotSegment), max_size=3).map(
    tuple
)


def stage_times() -> st.SearchStrategy[StageTime]:
    """Times that can be."""
    return st.builds(StageTime, st.integers(1, 2**63), st.floats(0.0, allow_infinity=False))


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    """Segments whose parts agree in length."""
    rows = draw(st.integers(0, 5))
    whole = st.integers(0, 2**63)
    hidden = draw(st.none() | tensors(rows))
    aux_layers = sorted(draw(st.sets(st.integers(0, 200), max_size=3)))
    columns = draw(st.none() | st.integers(0, 4)) if aux_layers else None
    return one_part(
        draw(whole),
        draw(whole),
        draw(whole),
        draw(st.booleans()),
        draw(whole),
        draw(whole),
        draw(arrays(rows, least=0)),
        draw(arrays(rows)),
        draw(arrays(rows, least=0)),
        draw(arrays(0 if hidden is not None and draw(st.booleans()) else rows)),
        hidden,
        draw(st.lists(stage_times(), max_size=3).map(tuple)),
        aux_layers=Layers(tuple(aux_layers)),
        aux_hidden=None if columns is None else raw_bytes(bytes(rows * columns), rows, columns),
    )


SHA256 = st.text("0123456789abcdef", min_size=64, max_size=64)
WHOLE = st.integers(0, 2**64 - 1)


def raw_bytes(data: bytes, *shape: int) -> Tensor:
    """Bytes as they cross the wire."""
    return Tensor("uint8", shape or (len(data),), data)


@st.composite
def offers(draw: st.DrawFn) -> BlockOffer:
    """Offers whose parts agree."""
    chunk_bytes = draw(st.integers(16, 1024)) * 4096
    chunks = draw(st.integers(1, 5))
    size = (chunks - 1) * chunk_bytes + draw(st.integers(1, chunk_bytes))
    hashes = raw_bytes(draw(st.binary(min_size=32 * chunks, max_size=32 * chunks)), chunks, 32)
    texts = st.text(max_size=20)
    return BlockOffer(draw(texts), draw(texts), size, draw(SHA256), chunk_bytes, hashes)


@st.composite
def healths(draw: st.DrawFn) -> Health:
    """What a device can say of itself."""
    degrees, times = st.floats(-999.0, 999.0), st.just(0.0) | st.floats(1e-9, 1e9)
    memory = draw(WHOLE)
    return Health(
        draw(degrees),
        draw(degrees),
        memory,
        draw(st.integers(0, memory)),
        draw(st.floats(0.0, 1.0)),
        draw(st.booleans()),
        draw(st.text(max_size=20)),
        draw(times),
        draw(times),
        draw(times),
    )


@st.composite
def stage_runs(draw: st.DrawFn) -> StageRun:
    """Runs that can be."""
    whole, times = st.integers(0, 2**63), st.floats(0.0, allow_infinity=False)
    numbers = (draw(whole), draw(whole), draw(whole), draw(times), draw(times))
    rows = draw(whole)
    return StageRun(*numbers, rows, draw(st.integers(0, rows)))


@st.composite
def assigns(draw: st.DrawFn) -> Assign:
    """Places that a ring and a model can have."""
    hints, numbers = get_type_hints(Assign), {}
    stages, end = draw(st.integers(1, MOST_STAGES)), draw(st.integers(1, 2**63))
    for name, least, most in (
        ("stage", 1, stages),
        ("stages", stages, stages),
        ("first", 0, end - 1),
        ("end", end, end),
        ("context_length", 1, 2**64 - 1),
        ("blocks_port", 1, 65535),
        ("block_number", 0, 2**64 - 1),
        ("rows", 0, 2**64 - 1),
    ):
        numbers[name] = draw(st.integers(least, most))
    others = {one.name: VALUES[hints[one.name]] for one in fields(Assign)}
    return Assign(**({n: draw(one) for n, one in others.items() if n not in numbers} | numbers))


RUNS = st.lists(stage_runs(), max_size=3).map(tuple)
VALUES[tuple[StageRun, ...]] = RUNS
SECONDS = st.floats(0.0, allow_infinity=False)


CHECKED: dict[type[Message], st.SearchStrategy[Any]] = {
    Segment: segments(),
    Assign: assigns(),
    BlockOffer: offers(),
    Health: healths(),
    Subscribe: st.builds(Subscribe, SECONDS, st.lists(INT64, max_size=8).map(tuple)),
    SubscribeActivity: st.builds(SubscribeActivity, SECONDS),
    Ready: st.builds(Ready, st.floats(0.0, 1e9), VALUES[int]),
    PieceRequest: st.builds(PieceRequest, SHA256, WHOLE, st.integers(0, LARGEST_CHUNK), WHOLE),
    Piece: st.builds(Piece, SHA256, WHOLE, st.binary(min_size=1, max_size=99).map(raw_bytes)),
}
"""Messages whose fields have to agree with each other, or to lie within limits."""


def messages_of(kind: type[Message]) -> st.SearchStrategy[Any]:
    """Any message of a type."""
    return CHECKED[kind] if kind in CHECKED else made_of_values(kind)


def plain(message: Record) -> tuple[object, ...]:
    """A message as something that compares: its type and all values with their types."""
    return type(message), *(_plain(getattr(message, each.name)) for each in fields(message))


def _plain(value: object) -> object:
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tolist()
    if isinstance(value, Tensor):
        return value.dtype, value.shape, bytes(value.data)
    if isinstance(value, tuple):
        return tuple(_plain(each) for each in value)
    return plain(value) if isinstance(value, Record) else (type(value), value)


@pytest.mark.parametrize("kind", TAGS.values(), ids=lambda kind: kind.__name__)
@settings(max_examples=40)
@given(data=st.data())
def test_every_message_comes_back_as_it_was(kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(messages_of(kind))
    frame = encode(message)
    # From the network come views, at any alignment.
    for received in (frame, memoryview(frame), memoryview(b"x" + frame)[1:]):
        assert plain(decode(received)) == plain(message)


def test_tags_and_types_belong_together() -> None:
    assert len(set(TAGS.values())) == len(TAGS)
    kinds = {kind.__name__ for kind in Message.__subclasses__()}
    assert kinds == {kind.__name__ for kind in TAGS.values()}, "a message without a tag"
    assert all(0 < tag < 128 for tag in TAGS)


def test_what_was_read_needs_no_frame_any_more() -> None:
    frame = bytearray(encode(_segment(hidden=Tensor("float32", (2, 8), bytes(64)))))
    back = decode(memoryview(frame))
    assert isinstance(back, Segment)
    assert back.hidden is not None
    frame[:] = b"\xab" * len(frame)
    assert bytes(back.hidden.data) == bytes(64)
    assert back.parts[0].ids.tolist() == [4, 5]


def test_the_room_of_a_segment_serves_again() -> None:
    packer = SegmentPacker()
    good = _segment(ppd_tokens=Tensor("float32", (2_000, 8), bytes(64_000)))
    for sent in (_segment(), good, _segment(seq=3)):
        with packer.frame(sent) as frame:
            assert frame == encode(sent)
    with pytest.raises(LocalProtocolError, match="parts"):
        packer.frame(_segment(ids=np.zeros((2, 2), np.int64)))
    with packer.frame(good) as frame:
        assert frame == encode(good), "nothing is left of the bad one"


def _segment(**changes: object) -> Segment:
    two = np.array([4, 5], np.int64)
    segment = one_part(1, 2, 0, False, 0, 2, two, two - 1, two, two, None)
    return changed(segment, **changes)


# --- what we refuse to send -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        Fault(2**64, "x"),
        Fault(-(2**63) - 1, "x"),
        Fault("1", "x"),  # type: ignore[arg-type]
        Fault(1, b"x"),  # type: ignore[arg-type]
        Fault(1, "half a pair \udc80"),
        retain_message(1, 2, 3, (2**63,), ()),
        retain_message(1, 2, 3, (1.5,), ()),  # type: ignore[arg-type]
        Submit(1, "x", 1, float("nan"), 0, 1.0, 0.0, 0, (), "p"),
        Submit(1, "x", 1, math.inf, 0, 1.0, 0.0, 0, (), "p"),
        Submit(1, "x", 1, 0.0, 0, 1.0, 0.0, 0, (1,), "p"),  # type: ignore[arg-type]
        Submit(1, "x", 1, 0.0, 0, 1.0, 0.0, 0, "ab\udc80", "p"),  # type: ignore[arg-type]
        _segment(ids=np.zeros((2, 2), np.int64)),
    ],
)
def test_what_a_field_cannot_hold_is_our_own_error(message: Message) -> None:
    with pytest.raises(LocalProtocolError, match=type(message).__name__):
        encode(message)


def test_a_whole_number_may_stand_for_a_float() -> None:
    message = Submit(1, "x", 1, 1, 0, 1, 0, np.int64(3), (), "p")  # type: ignore[arg-type]
    back = decode(encode(message))
    assert isinstance(back, Submit)
    assert (back.temperature, back.seed) == (1.0, 3)
    assert isinstance(back.temperature, float)


# --- what we refuse to read -----------------------------------------------------------------------


def refused(frame: bytes | memoryview) -> str:
    """The message of the error that decoding gives; fails the test if there is none."""
    with pytest.raises(RemoteProtocolError) as caught:
        decode(frame)
    return str(caught.value)


def header(tag: object, *values: object) -> bytes:
    """The frame of a message with this tag and these fields."""
    return msgpack.encode([MAGIC, VERSION, [tag, *values]])


def status(lines: object, nodes: object = (), live: object = ()) -> bytes:
    """The frame of a Status with these fields."""
    usual = [0.0, 0, 1.0, 0.0, 1.0]
    more = ("model", 1024, live, 0, 0, 0, 0, NODE, 0.0, "", "", (), usual, "", 0, "")
    return header(47, True, lines, nodes, 1, 1, 0.0, 0, 0, *more)


def retain(accepted: object, retained: object) -> bytes:
    """The frame of a Retain with these lists."""
    return header(2, 1, [1, 1, accepted, retained])


def asked(messages: object, tools: object = (), kind: object = "") -> bytes:
    """The frame of a Submit with these fields; `kind`: its policy."""
    plain = (1, "", 9, 0.0, 0, 1.0, 0.0, 0, [], kind, messages, -1, "", "", 0.0, 0.0, [], tools)
    return header(40, *plain, 1.0, 0, [], {}, -1, [], -1, False, False)


def nested(depth: int) -> object:
    """Maps within each other, so many."""
    inner: object = {}
    for _ in range(depth - 1):
        inner = {"a": inner}
    return inner


def range_of(count: int) -> list[int]:
    return list(range(count))


def array(ids: object) -> bytes:
    """The frame of a Segment with these ids."""
    frame = msgpack.decode(encode(_segment()))
    _, (part, *_), *_ = frame[2][1:]
    part[5] = ids
    return msgpack.encode(frame)


def piece(data: object) -> bytes:
    """The frame of a Piece with this dtype and shape, and eight bytes."""
    return header(65, "0" * 64, 0, [*data, bytes(8)] if isinstance(data, list) else data)


NODE: list[object] = [1, 0, 4, *[""] * 4, *[0.0] * 3, 0, 0, 0.0, False, "", 0.0, 0, "", 0.0, False]
"""A NodeStatus in a frame."""

HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "not msgpack": b"\xc1",
    "no array": msgpack.encode("edgespec"),
    "a map": msgpack.encode({"edgespec": 1}),
    "an empty map": b"\x80",
    "empty array": b"\x90",
    "other magic": msgpack.encode(["other", VERSION, [24, 0]]),
    "magic is a list": msgpack.encode([[], VERSION, [24, 0]]),
    "version is true": msgpack.encode([MAGIC, True, [24, 0]]),
    "tag is true": msgpack.encode([MAGIC, VERSION, [True]]),
    "tag is text": header("24"),
    "tag is a list": header([24]),
    "unknown tag": header(99),
    "negative tag": header(-1),
    "field too few": header(23, 1),
    "field too many": header(24, 0, 0.0, 1),
    "bytes behind the header": header(24, 0, 0.0) + b"\x00",
    "int is true": header(3, True),
    "int is a float": header(3, 1.0),
    "int is nil": header(3, None),
    "float is NaN": header(22, float("nan"), 1),
    "float is infinite": header(22, math.inf, 1),
    "text is bytes": header(6, b"x"),
    "text is not UTF-8": header(6, 0)[:-1] + b"\xa2\xff\xfe",
    "text is half a surrogate pair": header(6, 0)[:-1] + b"\xa3\xed\xb2\x80",
    "extension type": header(3, 0)[:-1] + b"\xd4\x01\x00",
    "timestamp": header(3, 0)[:-1] + b"\xd6\xff\x00\x00\x00\x00",
    "declares 4 GB of text": header(6, 0)[:-1] + b"\xdb\xff\xff\xff\xff",
    "declares 4 GB of bytes": header(6, 0)[:-1] + b"\xc6\xff\xff\xff\xff",
    "declares 2**32 items": b"\xdd\xff\xff\xff\xff",
    "declares a map of 2**32": header(6, 0)[:-1] + b"\xdf\xff\xff\xff\xff",
    "nested 100,000 deep": b"\x91" * 100_000 + b"\xc0",
    "texts are numbers": status([1]),
    "texts are nested": status([["a"]]),
    "too many texts": status(["a"] * 257),
    "records are no list": status([], 1),
    "a record is no list": status([], [1]),
    "a record lacks a field": status([], [NODE[:2]]),
    "a record has a field too many": status([], [[*NODE, 0]]),
    "a record's integer is text": status([], [["1", *NODE[1:]]]),
    "a record's float is NaN": status([], [[*NODE[:-1], float("nan")]]),
    "a record's text is a record": status([], [[*NODE[:3], NODE, *NODE[4:]]]),
    "too many records": status([], [NODE] * 257),
    "no more than a tag": msgpack.encode([MAGIC, VERSION, 24]),
    "nothing behind the version": msgpack.encode([MAGIC, VERSION]),
    "a field behind the message": msgpack.encode([MAGIC, VERSION, [24, 0], 0]),
    "list is a tensor": retain(["int64", [1]], []),
    "list is text": retain("1", []),
    "list is bytes": retain(bytes(8), []),
    "list of floats": retain([1.0], []),
    "list of an integer beyond 64 bits": retain([2**63], []),
    "too many integers": retain([0] * (MOST_NUMBERS + 1), []),
    "too many retained": retain([], range_of(MOST_RETAINED + 1)),
    "a conversation is text": asked('[{"role": "user", "content": "x"}]'),
    "a conversation is a number": asked(3),
    "a message is text": asked(["x"]),
    "a message is a map": asked([{"role": "user", "content": "x"}]),
    "a message without a content": asked([["user"]]),
    "a message that says nil": asked([["user", None]]),
    "a message that says a number": asked([["user", 1]]),
    "a message without a role": asked([["", "x"]]),
    "a message whose role is a list": asked([[["user"], "x"]]),
    "a message whose calls are a map": asked([["assistant", "", {}]]),
    "a call without arguments": asked([["assistant", "", [["f"]]]]),
    "a call whose arguments are a map": asked([["assistant", "", [["f", {}]]]]),
    "too many messages": asked([["user", "x"]] * (MOST_MESSAGES + 1)),
    "too long a conversation": asked([["user", "x" * (MOST_CHARS // 2 + 1)]] * 2),
    "a tool is a map": asked([], [{"name": "f"}]),
    "a tool's schema is a list": asked([], [["f", "", []]]),
    "a tool's schema has a number as a name": asked([], [["f", "", {1: 2}]]),
    "a tool's schema holds bytes": asked([], [["f", "", {"a": b"x"}]]),
    "a tool's schema is too deep": asked([], [["f", "", nested(DEEPEST + 1)]]),
    "a tool's schema is far too deep": asked([], [["f", "", nested(400)]]),
    "too many tools": asked([], [["f", "", {}]] * (MOST_TOOLS + 1)),
    "a map in the place of a text": asked([], [], {"a": 1}),
    "array of half a number": array(bytes(12)),
    "array is a list": array([1]),
    "array is text": array("x" * 8),
    "too many bytes of an array": array(bytes(8 * (MOST_NUMBERS + 1))),
    "array without its bytes": header(65, "0" * 64, 0, ["uint8", [8]]),
    "array whose bytes are text": header(65, "0" * 64, 0, ["uint8", [8], "x" * 8]),
    "array is a number": piece(8),
    "array is nil": piece(None),
    "array of an unknown dtype": piece(["object", [8]]),
    "array of a dtype that is a list": piece([["uint8"], [8]]),
    "array of floats": piece(["float64", [1]]),
    "array of two dimensions": piece(["uint8", [8, 1]]),
    "shape is negative": piece(["uint8", [-8]]),
    "shapes are negative": piece(["uint8", [-1, -8]]),
    "shape is true": piece(["uint8", [True]]),
    "shape overflows": piece(["uint8", [2**40]]),
    "shape of five dimensions": piece(["uint8", [1] * 5]),
    "bytes and shape differ": piece(["uint8", [9]]),
}


def test_the_hostile_arrays_are_refused_for_what_is_wrong_with_them() -> None:
    assert decode(retain([0], [])) == retain_message(1, 1, 1, (0,), ())
    assert isinstance(decode(retain([0] * MOST_NUMBERS, range_of(MOST_RETAINED))), Retain)
    assert isinstance(decode(array(np.array([4, 5]).tobytes())), Segment)
    assert isinstance(decode(piece(["uint8", [8]])), Piece)


def test_the_hostile_conversations_are_refused_for_what_is_wrong_with_them() -> None:
    schema = nested(DEEPEST)
    for many in (1, MOST_MESSAGES):
        message = decode(asked([["user", "x"]] * many, [["f", "", schema]] * MOST_TOOLS))
        assert isinstance(message, Submit)
        assert message.messages == (ChatMessage("user", "x"),) * many
        assert message.tools[-1].parameters == schema
        assert decode(encode(message)) == message
    assert isinstance(decode(asked([["user", "x" * (MOST_CHARS // 2)]] * 2)), Submit)
    message = decode(asked([["assistant", "", [["f", "{}", "1"]]]]))
    assert isinstance(message, Submit)
    assert message.messages[0].tool_calls == (ToolCall("f", "{}", "1"),)


@pytest.mark.parametrize("frame", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_bytes_are_refused(frame: bytes) -> None:
    refused(frame)
    refused(memoryview(frame))


def test_the_hostile_statuses_are_refused_for_what_is_wrong_with_them() -> None:
    message = decode(status(["a line"] * 256, [NODE] * 256))
    assert isinstance(message, Status)
    assert message.lines == ("a line",) * 256
    assert message.nodes == (NodeStatus(1, 0, 4, state="", words=""),) * 256


def test_half_a_heartbeat_is_refused() -> None:
    """Though the field that is missing has a default."""
    assert decode(header(24, 3, 1.5, 2, 7, True)) == Heartbeat(3, 1.5, 2, 7, True)
    assert "wrong number of fields" in refused(header(24, 3))
    assert "Fault: wrong number of fields" in refused(header(23, 1))


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 1e300},
        {"limit": -1e300},
        {"memory": -1, "free": -1},
        {"free": -1},
        {"free": 101},
        {"busy": 1.5},
        {"busy": -0.1},
        {"slowdown": 1e300},
        {"one_row": -1.0},
        {"few_rows": 1e300},
    ],
)
def test_a_device_cannot_say_what_no_device_is(changes: dict[str, Any]) -> None:
    health = Health(50.0, 90.0, 100, 100, 1.0, False, "", 1.0, 0.1, 0.2)
    assert decode(encode(health)) == health
    refused(packed(replace(health, **changes)))


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
def test_another_version_is_named(version: int) -> None:
    for values in ([], [0], [b""]):  # whatever follows the tag there
        text = refused(msgpack.encode([MAGIC, version, 24, *values]))
        assert f"version {version}" in text
        assert f"speaks {VERSION}" in text


@pytest.mark.parametrize(
    "changes",
    [
        {"ids": np.array([-1, 5])},
        {"positions": np.array([-1, 5])},
        {"ids": np.array([4])},
        {"parents": np.array([3])},
        {"positions": np.array([3])},
        {"tokens": np.array([3])},
        {"tokens": np.zeros(0, np.int64)},
        {"seq": -1},
        {"request": -1},
        {"epoch": -1},
        {"reserve": -1},
        {"want": -1},
        {"cost": (StageTime(1, 0.5), StageTime(1, -1e-9))},
        {"cost": (StageTime(0, 0.5),)},
        {"cost": (StageTime(-1, 0.5),)},
        {"hidden": Tensor("float32", (3, 1), bytes(12))},
        {"hidden": Tensor("float32", (2,), bytes(8))},
        {"hidden": Tensor("float32", (2, 1), bytes(8)), "tokens": np.zeros(1, np.int64)},
    ],
)
def test_segments_whose_parts_disagree_are_refused(changes: dict[str, object]) -> None:
    refused(packed(_segment(**changes)))


def _offer(**changes: object) -> BlockOffer:
    offer = BlockOffer("{}", "{}", 200_000, "0a" * 32, 1 << 16, raw_bytes(bytes(128), 4, 32))
    return replace(offer, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"size": 0},
        {"size": -1},
        {"size": 3 * (1 << 16)},
        {"size": 4 * (1 << 16) + 1},
        {"size": 2**63},
        {"sha256": "0a" * 31},
        {"sha256": "0A" * 32},
        {"sha256": "../" + "a" * 61},
        {"sha256": "a" * 63 + "\n"},
        {"chunk_bytes": 0},
        {"chunk_bytes": 1 << 15},
        {"chunk_bytes": (1 << 16) + 1},
        {"chunk_bytes": 2 * LARGEST_CHUNK, "chunk_hashes": raw_bytes(bytes(32), 1, 32)},
        {"chunk_hashes": raw_bytes(bytes(128))},
        {"chunk_hashes": raw_bytes(bytes(128), 2, 64)},
        {"chunk_hashes": raw_bytes(bytes(96), 3, 32)},
        {"chunk_hashes": Tensor("int64", (4, 32), bytes(8 * 128))},
        {
            "size": (MOST_CHUNKS + 1) << 16,
            "chunk_hashes": raw_bytes(bytes((MOST_CHUNKS + 1) * 32), MOST_CHUNKS + 1, 32),
        },
    ],
)
def test_offers_whose_parts_disagree_are_refused(changes: dict[str, object]) -> None:
    assert isinstance(decode(encode(_offer())), BlockOffer)
    refused(packed(_offer(**changes)))


@pytest.mark.parametrize(
    "message",
    [
        PieceRequest("0" * 63, 0, 1, 0),
        PieceRequest("0" * 64, -1, 1, 0),
        PieceRequest("0" * 64, 0, -1, 0),
        PieceRequest("0" * 64, 0, LARGEST_CHUNK + 1, 0),
        PieceRequest("0" * 64, 0, 1, -1),
        Piece("g" * 64, 0, raw_bytes(b"x")),
        Piece("0" * 64, -1, raw_bytes(b"x")),
        Piece("0" * 64, 0, raw_bytes(b"")),
        Piece("0" * 64, 0, raw_bytes(b"xy", 1, 2)),
        Piece("0" * 64, 0, raw_bytes(bytes(LARGEST_CHUNK + 1))),
        Piece("0" * 64, 0, Tensor("int64", (1,), bytes(8))),
    ],
)
def test_pieces_that_cannot_be_are_refused(message: Message) -> None:
    refused(packed(message))


def test_limits_hold() -> None:
    assert decode(encode(Progress(1, "é" * MOST_CHARS))) == Progress(1, "é" * MOST_CHARS)
    assert "length <=" in refused(packed(Progress(1, "x" * (MOST_CHARS + 1))))
    assert "too long" in refused(bytes(MOST_BYTES + 1))
    assert "too long" not in refused(bytes(MOST_BYTES))


def test_nothing_is_reserved_for_what_is_only_declared() -> None:
    nested = b"\xdd\x00\x01\x00\x00" * 1_000  # a thousand nested arrays of 65,536 items each
    texts = header(6, 0)[:-1] + b"\xdb\x00\x3f\xff\xff"
    wide = b"\xdc\xff\xff" * 1_000
    within = header(3, 0)[:-1] + nested
    for frame in (nested, texts, wide, b"\xdc\x01\x00" * 1_000, within):
        tracemalloc.start()
        started = time.process_time()
        refused(frame)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 4 << 20
        assert time.process_time() - started < 1.0


# --- fuzzing --------------------------------------------------------------------------------------


def survives(frame: bytes) -> bool:
    """Decode whatever it is: a message that can be encoded again, or the one error."""
    try:
        message = decode(frame)
    except RemoteProtocolError:
        return False
    assert plain(decode(encode(message))) == plain(message)
    return True


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_random_bytes(frame: bytes) -> None:
    survives(frame)


anything = st.recursive(
    st.none() | st.booleans() | INT64 | st.floats() | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=12,
)


@pytest.mark.thorough
@settings(max_examples=400)
@given(
    st.sampled_from([*TAGS, 0, 99]),
    st.lists(anything, max_size=12),
)
def test_headers_of_random_values(tag: int, values: list[object]) -> None:
    survives(header(tag, *values))


@settings(max_examples=200)
@given(st.data())
def test_one_field_replaced(data: st.DataObject) -> None:
    message = data.draw(messages_of(data.draw(st.sampled_from(sorted(TAGS.values(), key=str)))))
    values = msgpack.decode(encode(message))
    place = data.draw(st.sampled_from([values, values[2]]))
    place[data.draw(st.integers(0, len(place) - 1))] = data.draw(anything)
    survives(msgpack.encode(values))


EXAMPLES: list[Message] = [
    _segment(cost=(StageTime(3, 0.25), StageTime(2, 0.25))),
    Credit(7),
    _segment(hidden=Tensor("float16", (2, 3), bytes(12)), tokens=np.zeros(0, np.int64)),
    retain_message(1, 2, 300, (1, 2), (5, 6, 70_000)),
    Submit(1, "a prompt", 10, 0.5, 4, 1.0, 0.0, 2**64 - 1, ("stop", "é"), "flowspec"),
    Heartbeat(),
    _offer(),
    PieceRequest("0f" * 32, 2**40, 1 << 18, 0),
    Piece("0f" * 32, 2**40, raw_bytes(b"some bytes")),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_mutated_frames(message: Message) -> None:
    rng = random.Random(0)
    refusals = 0
    good = encode(message)
    for _ in range(2_000):
        frame = bytearray(good)
        for _ in range(rng.choice((1, 1, 2, 5))):
            at = rng.randrange(len(frame) + 1)
            match rng.randrange(5):
                case 0 if at < len(frame):
                    frame[at] = rng.randrange(256)
                case 1:
                    del frame[at:]
                case 2:
                    frame[at:at] = rng.randbytes(rng.randint(1, 5))
                case 3:
                    declares_much = struct.pack(
                        ">BI", rng.choice(b"\xc6\xc9\xdb\xdd\xdf"), 2**32 - 1
                    )
                    frame[at:at] = declares_much
                case _:
                    frame += frame[at:]
        refusals += not survives(bytes(frame))
    assert refusals > 1_000


# --- tensors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "shape", "data"),
    [
        ("complex64", (1,), bytes(8)),
        ("float32", (-1,), b""),
        ("float32", (2,), bytes(7)),
        ("float32", (2, 2), bytes(8)),
    ],
)
def test_a_tensor_checks_itself(dtype: str, shape: tuple[int, ...], data: bytes) -> None:
    with pytest.raises(ValueError, match=r"dtype|extent|takes"):
        Tensor(dtype, shape, data)


@given(tensors(4), st.lists(st.integers(0, 3), max_size=6))
def test_rows_of_a_tensor(tensor: Tensor, index: list[int]) -> None:
    taken = tensor.take(np.array(index, np.int64))
    row = len(tensor.data) // 4
    assert taken.shape == (len(index), *tensor.shape[1:])
    assert bytes(taken.data) == b"".join(bytes(tensor.data)[i * row : i * row + row] for i in index)


def test_all_rows_of_a_tensor_are_the_tensor() -> None:
    tensor = Tensor("float32", (3, 1), bytes(12))
    assert tensor.take(np.arange(3)) is tensor
    nothing = Tensor("float32", (0, 4), b"")
    assert nothing.take(np.zeros(0, np.int64)).shape == (0, 4)


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({"aux_layers": Layers((0, 5)), "aux_hidden": Tensor("uint8", (2, 3), b"aaabbb")}, True),
        ({"aux_layers": Layers((0, 5))}, True),
        ({"aux_hidden": Tensor("uint8", (2, 3), b"aaabbb")}, False),
        ({"aux_layers": Layers((5,)), "aux_hidden": Tensor("uint8", (1, 3), b"aaa")}, False),
        ({"aux_layers": Layers((5,)), "aux_hidden": Tensor("uint64", (2, 1), bytes(16))}, False),
        ({"aux_layers": Layers((5,)), "aux_hidden": Tensor("uint8", (2,), b"ab")}, False),
        ({"aux_layers": Layers((5, 5))}, False),
        ({"aux_layers": Layers((-1,))}, False),
        ({"aux_layers": Layers(tuple(range(17)))}, False),
    ],
)
def test_taps_travel_beside_the_rows(changes: dict[str, Any], fits: bool) -> None:
    ids = np.arange(2)
    plain = one_part(
        1, 2, 0, False, 0, 2, ids, ids - 1, ids, ids[:0], Tensor("uint8", (2, 1), b"hi")
    )
    segment = changed(plain, **changes)
    if not fits:
        with pytest.raises(RemoteProtocolError):
            decode(packed(segment))
        return
    again = decode(encode(segment))
    assert isinstance(again, Segment)
    assert (again.header.aux_layers, again.aux_hidden) == (
        segment.header.aux_layers,
        segment.aux_hidden,
    )


def test_an_assign_that_no_ring_or_model_has_is_none() -> None:
    place = Assign(2, 3, 4, 8, "m", "f", "float32", "none", 1024, 7, "key", rows=9)
    assert decode(encode(place)) == place
    lies = {
        "stage": (0, -1, 4),
        "stages": (1, MOST_STAGES + 1, 2**63),
        "first": (-1, 8, 2**63),
        "end": (4, 0, -(2**63)),
        "context_length": (0, -1),
        "blocks_port": (0, 65536),
        "block_number": (-1,),
        "rows": (-1, -(2**63)),
    }
    for field, values in lies.items():
        for value in values:
            with case(field, value), pytest.raises(RemoteProtocolError, match="Assign: "):
                decode(packed(replace(place, **{field: value})))


@pytest.mark.parametrize("seconds", [5e-324, 1e-10, 1e10, 1e308])
@pytest.mark.parametrize("name", ["slowdown", "one_row", "few_rows"])
def test_a_health_whose_quotients_are_not_finite_is_none(name: str, seconds: float) -> None:
    health = Health(40.0, 90.0, 9, 5, 0.5, False, "", 1.0, 0.1, 0.2)
    with pytest.raises(RemoteProtocolError, match="a time that cannot be"):
        decode(packed(replace(health, **{name: seconds})))
