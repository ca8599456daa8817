"""The codec against fuzzed frames: a message or the one error, in bounded time and memory."""

from __future__ import annotations

import os
import random
import struct
import time
import tracemalloc

import psutil
import pytest
from msgspec import msgpack
from msgspec.structs import replace
from support.fuzz import BOMBS, Fuzzer, begun, joined, packed, survives
from support.rings import submit
from support.segments import retain_message
from support.tiers import tiered

from edgespec.errors import RemoteProtocolError
from edgespec.net.control import CONTROL_BYTES
from edgespec.tree.ledger import MOST_RETAINED
from edgespec.types.record import MOST_NUMBERS
from edgespec.types.tool_forms import Tool
from edgespec.wire.client_messages import (
    ChatMessage,
    Finished,
    NodeStatus,
    Status,
    Submit,
    TokenBias,
    Tokens,
)
from edgespec.wire.codec import MAGIC, TAGS, VERSION, decode, encode
from edgespec.wire.messages import Heartbeat, Message, Retain
from edgespec.wire.segment import Segment
from edgespec.wire.snapshots import Snapshot, SnapshotNode

SEED = int(os.environ.get("EDGESPEC_FUZZ_SEED", "0")) or random.randrange(1, 2**32)
SLOWEST_S = 2.0
"""Of the processor, for one frame, which may be 4 MiB of header."""

MOST_MEMORY = 24 << 20
"""For one: 4 MiB of it, its texts decoded, or lists of as many integers as may be."""

DEEP_MEMORY = (1024 * 256 * 8) + (64 << 10)
"""For a short one: msgpack goes 1,024 lists deep, with a place in each for 256 values."""

ALL = list(TAGS.values())


def flood(count: int) -> tuple[int, float]:
    """Decode so many; returns how many were messages, and the slowest one's seconds."""
    print(f"fuzzed with seed {SEED}; EDGESPEC_FUZZ_SEED={SEED} repeats it")
    fuzzer, good, slowest = Fuzzer(SEED), 0, 0.0
    for _ in range(count):
        frames = fuzzer.frames()
        started = time.thread_time()
        good += survives(frames)
        slowest = max(slowest, time.thread_time() - started)
    return good, slowest


def check(count: int) -> None:
    """No crash, no growth, no stand-still; and neither all nor none of them are messages."""
    process = psutil.Process()
    flood(1_000)
    before, started = process.memory_info().rss, time.perf_counter()
    good, slowest = flood(count)
    seconds, grown = time.perf_counter() - started, process.memory_info().rss - before
    print(
        f"{count} frames, {good} of them messages, in {seconds:.1f} s; the slowest took "
        f"{slowest * 1e3:.1f} ms; memory grew by {grown / 1e6:.1f} MB"
    )
    assert slowest < SLOWEST_S
    assert grown < MOST_MEMORY
    assert count / 100 < good < count / 2


@pytest.mark.parametrize("count", tiered([8_000, 30_000], [8_000]))
def test_fuzzed_frames_are_messages_or_the_one_error(count: int) -> None:
    check(count)


def test_frames_that_a_first_change_has_emptied_are_changed_further() -> None:
    empty = [joined([packed(MAGIC), packed(VERSION)])]
    for seed in range(200):
        survives(Fuzzer(seed).mutated(empty))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_very_many_fuzzed_frames_are_messages_or_the_one_error() -> None:
    check(1_000_000)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_valid_messages_of_every_type_are_made(kind: type[Message]) -> None:
    fuzzer = Fuzzer(SEED)
    for _ in range(20):
        message = fuzzer.message(kind)
        assert type(message) is kind
        assert survives([encode(message)]), message


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_no_truncated_message_is_one(kind: type[Message]) -> None:
    frame = encode(Fuzzer(SEED).message(kind))
    for at in range(len(frame)):
        assert not survives([frame[:at]])


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_field_confused_with_every_type(kind: type[Message]) -> None:
    magic, version, fields = msgpack.decode(encode(Fuzzer(SEED).message(kind)))
    parts = [packed(value) for value in (magic, version, *fields)]
    values = (None, True, 0, -1, 2**64 - 1, 0.5, "", "text", [], [1], ["int64", [0]], {"a": 1})
    for at in range(len(parts)):
        for strange in (*map(packed, values), *BOMBS):
            survives([joined([*parts[:at], strange, *parts[at + 1 :]])])


def memory_for(frame: bytes) -> tuple[int, str]:
    """The most that was held at once, and why it was refused."""
    tracemalloc.start()
    try:
        decode(frame)
    except RemoteProtocolError as problem:
        return tracemalloc.get_traced_memory()[1], str(problem)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak, ""


@pytest.mark.parametrize("count", tiered([500, 2_000], [500]))
def test_fuzzed_frames_take_little_memory(count: int) -> None:
    fuzzer = Fuzzer(SEED + 1)
    assert max(memory_for(b"".join(fuzzer.frames()))[0] for _ in range(count)) < DEEP_MEMORY


def test_a_short_frame_of_lists_within_lists_takes_little_memory() -> None:
    """One fuzzed frame of 20,000 is such a one."""
    wide = struct.pack(">BH", 0xDC, 256)
    for kind in (Heartbeat, Status):
        peak, reason = memory_for(begun(kind) + wide * 1_500)
        assert "StackError" in reason or "too deep" in reason
        assert peak < DEEP_MEMORY


LEAVES = [b"\x90", b"\xa2ab", b"\xce\xff\xff\xff\xff", b"\xc0", b"\x80"]


@pytest.mark.parametrize("leaf", tiered(LEAVES, [b"\x90"]))
def test_a_frame_full_of_small_things_takes_little_memory(leaf: bytes) -> None:
    """4 MiB of empty lists would be 266 MB of Python's."""
    wide = struct.pack(">BH", 0xDC, 256)
    inner = wide + (wide + leaf * 256) * 256
    body = inner * 64
    for kind in (Segment, Retain, Submit, Tokens, Finished, Status):
        peak, reason = memory_for((begun(kind) + body)[:CONTROL_BYTES])
        said = ("too many values", "behind the message", "a map")
        assert any(words in reason for words in said), kind
        assert peak < MOST_MEMORY


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_nothing_is_reserved_for_lists_that_are_only_declared(kind: type[Message]) -> None:
    """Each within another: 1,000 of a quarter of a million items would be 2 GB."""
    for length in (255, MOST_NUMBERS):
        nested = struct.pack(">BI", 0xDD, length) * 1_000
        for rest in (b"", bytes(MOST_NUMBERS)):
            peak, reason = memory_for(begun(kind) + nested + rest)
            assert reason
            assert peak < 4 << 20


NUMBERS = tuple(range(300, 300 + MOST_NUMBERS))
KEPT = frozenset(range(MOST_RETAINED))
NODES = (SnapshotNode(1, 0, "x" * 4096, "sent", 0.5, "p", True),) * 256
LONGEST: list[Message] = [
    retain_message(1, 1, 1, NUMBERS, KEPT),
    Status(True, ("é" * 4096,) * 256, (NodeStatus(1, 0, 4),) * 256),
    replace(submit(), messages=(ChatMessage("user", "x" * 256),) * 4096),
    replace(submit(), logit_bias=(TokenBias(1, 0.5),) * 1024, tools=(Tool("f", "", {}),) * 128),
    Tokens(1, NUMBERS, "é" * 4096),
    Snapshot("answering", 1, "p", 5, 2.5, 7, NODES, (), ()),
]


@pytest.mark.parametrize("message", LONGEST, ids=lambda message: type(message).__name__)
def test_the_longest_messages_take_little_memory(message: Message) -> None:
    peak, reason = memory_for(encode(message))
    assert not reason
    assert peak < MOST_MEMORY
