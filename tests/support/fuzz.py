"""Fuzzed frames: a valid message of every type, and all that may be done to it on its way.

Everything follows from a seed. Headers are changed field by field, in ways that a byte flip would
hardly ever hit: other types, lengths that are only declared, and what the packer refuses to pack.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np
from msgspec import msgpack
from msgspec.structs import fields, replace
from support.segments import changed, one_part

from edgespec.decoding.told_rules import MaskBook, told_rules
from edgespec.errors import RemoteProtocolError
from edgespec.net.sockets import only
from edgespec.types.record import IntArray, Record
from edgespec.types.tensor import ITEM_SIZES, NO_LAYERS, Layers, Tensor
from edgespec.verify.rules import Rules, ThoughtLimit
from edgespec.wire.block_messages import CHUNK_STEP, BlockOffer, Piece, PieceRequest
from edgespec.wire.client_messages import ChatMessage
from edgespec.wire.codec import MAGIC, TAGS, VERSION, decode, encode
from edgespec.wire.messages import Assign, Health, Message, Ready
from edgespec.wire.segment import Choosing, Segment, StageTime
from edgespec.wire.snapshots import (
    Snapshot,
    SnapshotNode,
    SnapshotSegment,
    StageActivity,
    StageRun,
    Subscribe,
    SubscribeActivity,
)

Frames = list[bytes]

POOL = 2_000
"""Valid messages that a fuzzer makes before it takes those that it has made."""

INTS = (0, 1, 2, 3, 255, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**63))
FLOATS = (0.0, -0.0, 0.5, 1.0, 80.0, 1e308, -1e308, 5e-324)
TEXTS = ("", "x", "stage 1", "\x1b[2J\x07", "é" * 9, "\U0001f600", "\x00", "a" * 300)


def _header_of(items: int) -> bytes:
    return struct.pack(">BH", 0xDC, items) if items < 1 << 16 else struct.pack(">BI", 0xDD, items)


BOMBS: tuple[bytes, ...] = (
    b"\xc1",  # the one byte that msgpack never uses
    b"\xdf\xff\xff\xff\xff",  # a map of 4 G entries
    b"\xdd\xff\xff\xff\xff",  # an array of as many
    b"\xdb\xff\xff\xff\xff",  # a text of 4 GiB
    b"\xc6\xff\xff\xff\xff",  # bytes of 4 GiB
    b"\xc9\xff\xff\xff\xff\x01",  # an extension of 4 GiB
    b"\xd4\x01x",  # extensions that are there
    b"\xd6\xff\x00\x00\x00\x00",  # a time, which msgpack knows itself
    b"\xc7\x0c\xff" + b"\xff" * 12,  # a time that is none
    b"\xc4\x01x",  # bytes
    b"\x81\xa1a\x01",  # maps, with keys of all kinds
    b"\x81\xc0\xc0",
    b"\x81\x90\x90",
    b"\xa2\xff\xfe",  # text that is no UTF-8
    b"\xa3\xed\xa0\x80",  # half a surrogate pair
    b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",  # not a number
    b"\xca\x7f\xc0\x00\x00",
    b"\xcb\x7f\xf0\x00\x00\x00\x00\x00\x00",  # infinite
    b"\xcb\xff\xf0\x00\x00\x00\x00\x00\x00",
    b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\x91" * 1_500 + b"\x90",  # nested, deeper than the parser's stack
    b"\x91" * 500 + b"\x90",
    _header_of(256) * 900,  # nested and wide, hardly begun
    _header_of(256) + b"\x90" * 256,
    _header_of(200) + (_header_of(250) + b"\x90" * 250) * 200,  # 50,000 empty lists
    _header_of(257) + b"\x01" * 257,
    msgpack.encode([["int64", [2**63]]]),
)
"""What no message has, as it stands in a header."""


def packed(value: object) -> bytes:
    """As it stands in a header."""
    return bytes(msgpack.encode(value))


def joined(parts: list[bytes], declared: int | None = None) -> bytes:
    """A frame of magic, version, tag and fields, which says that it has so many of the last two."""
    head, fields_ = b"\x93" + b"".join(parts[:2]), parts[2:]
    return head + _header_of(len(fields_) if declared is None else declared) + b"".join(fields_)


def begun(kind: type[Message]) -> bytes:
    """A frame of that type up to its first field."""
    items = 1 + len(kind.__struct_fields__)
    head = bytes([0x90 | items]) if items < 16 else _header_of(items)
    return joined([packed(MAGIC), packed(VERSION)])[:-3] + head + packed(kind.__struct_config__.tag)


class Fuzzer:
    """Frames without end, the same for a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._kinds = list(TAGS.values())
        self._pool: list[Frames] = []
        self._ways: tuple[Callable[[Frames], Frames], ...] = (
            self._flip,
            self._swap,
            self._truncate,
            self._insert,
            self._delete,
            self._multiply,
            self._shuffle,
            self._confuse,
            self._confuse,
            self._recount,
            self._retag,
        )

    # --- valid ones -------------------------------------------------------------------------------

    def message(self, kind: type[Message] | None = None) -> Message:
        """A valid one, of any type unless it is named."""
        kind = kind or self._random.choice(self._kinds)
        special: dict[Any, Callable[[], Message]] = {
            Segment: self._segment,
            Assign: self._assign,
            Health: self._health,
            Ready: lambda: Ready(2.5, self._random.choice(INTS)),
            Subscribe: lambda: Subscribe(5.0),
            SubscribeActivity: lambda: SubscribeActivity(5.0),
            StageActivity: lambda: StageActivity(self._runs()),
            Snapshot: self._scene,
            BlockOffer: self._offer,
            PieceRequest: self._piece_request,
            Piece: self._piece,
        }
        return special[kind]() if kind in special else self._any(kind)

    def _any(self, kind: type[Any]) -> Any:
        hints = get_type_hints(kind)
        return kind(**{f.name: self._value(hints[f.name]) for f in fields(kind)})

    def _value(self, hint: Any) -> Any:
        dice = self._random
        if hint is int:
            return dice.choice(INTS)
        if hint is bool:
            return dice.random() < 0.5
        if hint is float:
            return dice.choice(FLOATS)
        if hint is str:
            return dice.choice(TEXTS)
        some = range(dice.randrange(4))
        if hint is memoryview:
            return self._array(len(some))
        if hint == Tensor | None:
            return None if dice.random() < 0.5 else self._tensor((len(some),))
        if hint == dict[str, Any]:
            return {dice.choice(TEXTS): [dice.choice(FLOATS), {"a": None}] for _ in some}
        if get_origin(hint) in (Union, UnionType):
            return self._value(dice.choice(get_args(hint)))
        if hint is NoneType:
            return None
        if get_origin(hint) is dict:
            return {dice.choice(TEXTS): dice.choice((None, 0.5, True, 7, "a")) for _ in some}
        if hint == frozenset[int]:
            return frozenset(self._int64() for _ in some)
        if get_origin(hint) is tuple:
            (item, _) = get_args(hint)  # tuple[item, ...]
            return tuple(self._int64() if item is int else self._value(item) for _ in some)
        if isinstance(hint, type) and issubclass(hint, Record):
            made = self._any(hint)
            return replace(made, role="user") if isinstance(made, ChatMessage) else made
        raise TypeError(f"no value for {hint}")

    def _int64(self) -> int:
        return self._random.choice([n for n in INTS if n < 2**63])

    def _array(self, length: int, least: int = -(2**63)) -> IntArray:
        return np.array([max(self._int64(), least) for _ in range(length)], np.int64)

    def _tensor(self, shape: tuple[int, ...]) -> Tensor:
        dtype = self._random.choice(sorted(ITEM_SIZES))
        size = int(np.prod(shape)) * ITEM_SIZES[dtype]
        return Tensor(dtype, shape, self._random.randbytes(size))

    def _whole(self) -> int:
        return self._random.choice([n for n in INTS if n >= 0])

    def _times(self) -> tuple[StageTime, ...]:
        seconds = [
            self._random.choice((0.0, 0.25, 1e300)) for _ in range(self._random.randrange(4))
        ]
        return tuple(StageTime(self._whole() or 1, each) for each in seconds)

    def _segment(self) -> Segment:
        dice, whole = self._random, self._whole
        rows = dice.randrange(5)
        hidden = self._tensor((rows, dice.randrange(4))) if dice.random() < 0.5 else None
        segment = one_part(
            whole(),
            whole(),
            whole(),
            dice.random() < 0.5,
            whole(),
            whole(),
            self._array(rows, 0),
            self._array(rows),
            self._array(rows, 0),
            self._array(0 if hidden is not None and dice.random() < 0.5 else rows),
            hidden,
            self._times(),
            aux_layers=dice.choice((NO_LAYERS, Layers((0, 3)))),
        )
        return segment if dice.random() < 0.5 else changed(segment, **self._rules(rows))

    def _rules(self, rows: int) -> dict[str, object]:
        """What the last stage is told of the rules of so many rows."""
        dice = self._random
        limit = ThoughtLimit(dice.randrange(9), (1,), (2, 3))
        rules = Rules(None, 0.5, 1.5, ((1, 2.5),), 1.25, frozenset((4, 5)), 3, (6,), limit)
        told = replace(told_rules(rules, (7, 8)), masked=True)
        masks = [np.arange(99) % dice.choice((1, 2, 99)) == 0 for _ in range(rows)]
        ids = np.arange(rows)
        allowed = MaskBook().allowed(ids, masks)
        return {"choosing": Choosing(0.5, 3, 0.25, 0.75, 2**64 - 1, 5, told, allowed)}

    def _assign(self) -> Assign:
        ports, whole = (1, 7, 65535), self._whole
        place = Assign(2, 3, 0, 4, "m", "f", "float32", "none", 1024, 7, "key")
        end = whole() or 1
        numbers = {"first": self._random.choice((0, end - 1)), "end": end, "rows": whole()}
        made: Assign = replace(
            self._any(Assign),
            **{"stage": 2, "stages": self._random.choice((2, 256)), **numbers},
            context_length=whole() or 1,
            blocks_port=self._random.choice(ports),
            block_number=whole(),
        )
        return self._random.choice((place, made))

    def _health(self) -> Health:
        free = self._random.choice((0, 5, 2**33))
        return Health(40.0, 90.0, free + 7, free, 0.5, True, self._random.choice(TEXTS), 1.5, 0.1)

    def _runs(self) -> tuple[StageRun, ...]:
        run = StageRun(2, 1, self._whole(), 0.25, 0.5, 7, self._random.randrange(8))
        return (run,) * self._random.randrange(4)

    def _scene(self) -> Snapshot:
        nodes = tuple(self._any(SnapshotNode) for _ in range(self._random.randrange(4)))
        segments = tuple(self._any(SnapshotSegment) for _ in range(self._random.randrange(4)))
        return Snapshot("answering", 1, "adaptive", 5, 2.5, 7, nodes, segments, self._runs())

    def _sha256(self) -> str:
        return self._random.randbytes(32).hex()

    def _offer(self) -> BlockOffer:
        chunk = CHUNK_STEP * self._random.randrange(16, 1024)
        chunks = self._random.randrange(1, 5)
        size = chunk * chunks - self._random.randrange(chunk)
        table = Tensor("uint8", (chunks, 32), self._random.randbytes(32 * chunks))
        return BlockOffer("{}", "{}", size, self._sha256(), chunk, table)

    def _piece_request(self) -> PieceRequest:
        length = self._random.choice((0, 1, 4096, 1 << 18, 1 << 22))
        return PieceRequest(self._sha256(), self._whole(), length, self._whole())

    def _piece(self) -> Piece:
        data = self._random.randbytes(self._random.randrange(1, 200))
        return Piece(self._sha256(), self._whole(), Tensor("uint8", (len(data),), data))

    # --- what may be done to them -----------------------------------------------------------------

    def frames(self) -> Frames:
        """The next ones: mostly a message with one or two things wrong."""
        dice = self._random
        if dice.random() < 0.1:
            return self.rubbish()
        if len(self._pool) < POOL:
            self._pool.append([encode(self.message())])
        return self.mutated(dice.choice(self._pool))

    def rubbish(self) -> Frames:
        """Random bytes, half of them behind an honest beginning."""
        dice = self._random
        head = b"" if dice.random() < 0.5 else b"\x93" + packed(MAGIC) + packed(VERSION)
        first = head + dice.randbytes(dice.randrange(60))
        return [first, *(dice.randbytes(dice.randrange(40)) for _ in range(dice.randrange(4)))]

    def mutated(self, frames: Frames) -> Frames:
        """The same with one or two things wrong."""
        frames = list(frames)
        for _ in range(self._random.randrange(1, 3)):
            frames = self._random.choice(self._ways)(frames)
        return frames

    def _change(self, frames: Frames, change: Callable[[bytearray, int], object]) -> Frames:
        """Change one frame, mostly the header, at a place in it."""
        if not frames:
            return [b""]
        which = 0 if self._random.random() < 0.7 else self._random.randrange(len(frames))
        data = bytearray(frames[which])
        if data:
            change(data, self._random.randrange(len(data)))
        return [*frames[:which], bytes(data), *frames[which + 1 :]]

    def _flip(self, frames: Frames) -> Frames:
        bit = 1 << self._random.randrange(8)
        return self._change(frames, lambda data, at: data.__setitem__(at, data[at] ^ bit))

    def _swap(self, frames: Frames) -> Frames:
        def swap(data: bytearray, at: int) -> None:
            other = self._random.randrange(len(data))
            data[at], data[other] = data[other], data[at]

        return self._change(frames, swap)

    def _truncate(self, frames: Frames) -> Frames:
        return self._change(frames, lambda data, at: data.__delitem__(slice(at, None)))

    def _insert(self, frames: Frames) -> Frames:
        new = self._random.choice((b"\x00", b"\xff", b"\xc1", *BOMBS))
        return self._change(frames, lambda data, at: data.__setitem__(slice(at, at), new))

    def _delete(self, frames: Frames) -> Frames:
        some = self._random.randrange(1, 9)
        return self._change(frames, lambda data, at: data.__delitem__(slice(at, at + some)))

    def _multiply(self, frames: Frames) -> Frames:
        times = self._random.choice((0, 2, 2, 9))
        at = self._random.randrange(len(frames)) if frames else 0
        return [*frames[:at], *(frames[at : at + 1] * times), *frames[at + 1 :]]

    def _shuffle(self, frames: Frames) -> Frames:
        return self._random.sample(frames, len(frames))

    def _parts(self, frames: Frames) -> list[bytes] | None:
        """Magic, version, tag and fields, each packed; None if that is spoilt already."""
        try:
            magic, version, values = msgpack.decode(frames[0])
            return [packed(value) for value in (magic, version, *values)]
        except Exception:  # bad bytes raise many types
            return None

    def _confuse(self, frames: Frames) -> Frames:
        """A field becomes something of another type, or a bomb."""
        parts = self._parts(frames)
        if not parts:
            return frames
        values = (None, True, [], {}, *INTS, *FLOATS, *TEXTS, ["int64", [1]], ["x", []], [[]])
        strange = packed(self._random.choice(values))
        if self._random.random() < 0.4:
            strange = self._random.choice(BOMBS)
        parts[self._random.randrange(len(parts))] = strange
        return [joined(parts), *frames[1:]]

    def _recount(self, frames: Frames) -> Frames:
        """A field more or less, or a header that says so."""
        parts = self._parts(frames)
        if not parts:
            return frames
        declared = max(0, len(parts) - 2 + self._random.choice((-1, 0, 1, 300)))
        at = self._random.randrange(len(parts))
        parts[at : at + 1] = parts[at : at + 1] * self._random.choice((0, 2))
        return [joined(parts, declared), *frames[1:]]

    def _retag(self, frames: Frames) -> Frames:
        """A message that says it is one of another type, or of another version."""
        parts = self._parts(frames)
        if not parts or len(parts) < 3:
            return frames
        at, new = self._random.choice(((1, VERSION + 1), (2, self._random.choice([*TAGS, 0, 99]))))
        parts[at] = packed(new)
        return [joined(parts), *frames[1:]]


def survives(frames: Frames) -> bool:
    """Whether it is a message, which then can be sent again; anything but the one error raises."""
    try:
        message = decode(only(frames))
    except RemoteProtocolError:
        return False
    assert type(decode(encode(message))) is type(message)
    return True
