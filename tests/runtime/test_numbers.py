"""No number of a peer's, and no exception of a machine, ends a node's process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given
from hypothesis import strategies as st
from msgspec import structs
from msgspec.structs import fields
from support.fuzz import Fuzzer
from support.memory_rings import CLIENT_PEER, MemoryRing
from support.rings import submit
from support.segments import changed
from support.tiers import examples, tiered

from edgespec.decoding.effects import Renew
from edgespec.decoding.events import (
    SegmentArrived,
)
from edgespec.decoding.holdings import Holdings
from edgespec.decoding.outbox import Outbox
from edgespec.decoding.request import Request
from edgespec.decoding.scheduler import Scheduler
from edgespec.errors import RemoteProtocolError
from edgespec.machines.effects import (
    Effect,
)
from edgespec.machines.events import (
    Event,
    Tick,
)
from edgespec.policy.registry import POLICIES
from edgespec.ring.events import RingFaulty
from edgespec.runtime.access_policy import CLIENT, MAY_SEND, STAGE
from edgespec.runtime.node import BUG, RENEW_S
from edgespec.tree.ledger import RetainSet
from edgespec.types.record import Record
from edgespec.types.tensor import Tensor
from edgespec.wire.client_messages import Cancel, Failed, Finished, Submit, Tokens
from edgespec.wire.codec import decode, packed
from edgespec.wire.messages import (
    Assign,
    CloseRequest,
    Connect,
    Fault,
    Goodbye,
    Heartbeat,
    Leave,
    Message,
    Retain,
)
from edgespec.wire.segment import Segment, StageTime
from edgespec.wire.snapshots import Subscribe, SubscribeActivity

INTS = st.integers(-(2**63), 2**64 - 1) | st.sampled_from(
    [0, 1, 2, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1]
)
INT64 = st.integers(-(2**63), 2**63 - 1) | st.integers(0, 40)
FLOATS = st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from(
    [5e-324, 1e-300, 1e308, 1.7e308, 0.0, 1e9]
)


MINE, NEXT = 10_001, 10_002
"""Tags that no fuzzer uses."""


def is_record(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Record)


def numeric(hint: Any) -> bool:
    """Whether a field of that type holds numbers."""
    if get_origin(hint) is tuple and is_record(get_args(hint)[0]):
        return numeric(get_args(hint)[0])
    if hint is Tensor:
        return False  # one whose shape and bytes differ cannot be made: the codec's tests send them
    if is_record(hint):  # a message of a conversation holds texts alone
        return any(map(numeric, get_type_hints(hint).values()))
    return hint in (int, float, tuple[int, ...], frozenset[int], memoryview)


def numbers_of(kind: type[Message]) -> list[str]:
    """Names of a message's fields that hold numbers, by its type hints."""
    hints = get_type_hints(kind)
    return [f.name for f in fields(kind) if numeric(hints[f.name])]


SENDERS: dict[str, list[type[Message]]] = {
    "client": sorted(MAY_SEND[CLIENT], key=lambda kind: kind.__name__),
    "stage 1": sorted(MAY_SEND[STAGE] - {Leave}, key=lambda kind: kind.__name__),
    "stage 2": [Segment],
    "coordinator": [Segment, Retain, CloseRequest, Assign, Connect, SubscribeActivity, Heartbeat],
}
WAYS = [(who, kind) for who, kinds in SENDERS.items() for kind in kinds if numbers_of(kind)]


def altered(draw: Any, message: Any) -> Any:
    """The same with other numbers in one to three of its fields."""
    hints = get_type_hints(type(message))
    names = [n for n in (f.name for f in fields(message)) if numeric(hints[n])]
    for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True)):
        message = structs.replace(
            message, **{name: _other(draw, hints[name], getattr(message, name))}
        )
    return message


def _other(draw: Any, hint: Any, value: Any) -> Any:
    if hint is int:
        return draw(INTS)
    if hint is float:
        return draw(FLOATS)
    if hint is memoryview:
        size = len(value)
        return np.array(draw(st.lists(INT64, min_size=size, max_size=size)), np.int64)
    if hint == tuple[int, ...]:
        return tuple(draw(st.lists(INT64, max_size=4)))
    if hint == frozenset[int]:
        return frozenset(draw(st.lists(INT64, max_size=4)))
    if is_record(hint):
        return altered(draw, value)
    return tuple(altered(draw, one) for one in value)


def admitted(message: Message) -> bool:
    """Whether the codec lets it through."""
    try:
        decode(packed(message))
    except RemoteProtocolError:
        return False
    return True


class Liar:
    """One of the nodes, which says one kind of message with other numbers, a few times."""

    def __init__(self, draw: Any, ring: MemoryRing, sender: str, kind: type[Message]) -> None:
        self._draw, self._ring, self._sender, self._kind = draw, ring, sender, kind
        self._after = draw(st.integers(0, 6))
        self.lies = 0

    def alter(self, sender: str, message: Message) -> Message:
        """A lie in place of what was to be said, if it can be said at all."""
        if sender != self._sender or type(message) is not self._kind or self.lies >= 3:
            return message
        self._after -= 1
        return message if self._after >= 0 else self._lie(message)

    def _lie(self, message: Message) -> Message:
        lie = altered(self._draw, message)
        if not admitted(lie):
            return message
        self.lies += 1
        return lie

    def speak_up(self) -> None:
        """Say one that nobody waits for."""
        to = "coordinator" if self._sender != "coordinator" else "stage 1"
        if self._kind is Segment and self._sender == "stage 1":
            to = "stage 2"
        base = Fuzzer(self._draw(st.integers(0, 50))).message(self._kind)
        lie = altered(self._draw, base)
        if admitted(lie):
            self._ring.say(self._sender, to, lie)
            self.lies += 1


@pytest.mark.parametrize(
    ("sender", "kind"), WAYS, ids=[f"{who} {kind.__name__}" for who, kind in WAYS]
)
@examples(
    10,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data(), policy=st.sampled_from(sorted(POLICIES)))
def test_no_number_of_a_peer_is_a_bug(
    sender: str, kind: type[Message], data: st.DataObject, policy: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        ring = MemoryRing(patch, 2)
        try:
            _lied_to(ring, Liar(data.draw, ring, sender, kind), policy)
        finally:
            ring.close()


def _lied_to(ring: MemoryRing, liar: Liar, policy: str) -> None:
    assert ring.until(lambda: ring.membership.status().ready, 100)
    ring.hand_in("client", Subscribe(5.0))
    ring.alter = liar.alter
    ring.ask(submit(MINE, "what is this", 12, policy))
    for _ in range(6):
        ring.round()
        liar.speak_up()
    event(f"lies: {min(liar.lies, 1)}")
    if not ring.until(lambda: bool(ring.ends(MINE)), 60):
        ring.hand_in("client", Cancel(MINE))  # a lie may keep it waiting, as silence may
        ring.round()
    ring.alter = lambda name, message: message
    ring.round()
    ring.coordinator.renew_soon(Renew("the test wants a new ring"), ring.now)
    second = submit(NEXT, "and that", 8, policy)
    ring.ask(second)
    assert ring.until(lambda: bool(ring.ends(NEXT)), 2000), "the next request hangs"
    (end,) = ring.ends(NEXT)
    assert isinstance(end, Finished), end
    assert end.text == ring.expected(second).text
    assert len(ring.ends(MINE)) == 1
    assert ring.bugs == []


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryRing]:
    made = MemoryRing(monkeypatch, 2)
    assert made.until(lambda: made.membership.status().ready, 100)
    yield made
    made.close()


def test_an_infinite_ratio_is_none(ring: MemoryRing) -> None:
    """What ended the coordinator's process: one figure of one segment."""

    def alter(name: str, message: Message) -> Message:
        if name == "stage 2" and isinstance(message, Segment):
            return changed(message, cost=(StageTime(1, 5e-324), StageTime(1, 1e308)))
        return message

    ring.alter = alter
    ask = submit(1, "hello", 20, "adaptive")
    ring.ask(ask)
    assert ring.until(lambda: bool(ring.ends(1)), 200)
    (end,) = ring.ends(1)
    assert isinstance(end, Finished)
    assert end.text == ring.expected(ask).text
    assert ring.bugs == []


@pytest.mark.parametrize("rounds", range(6))
def test_a_segment_read_with_the_next_ring_s_beginning_is_not_of_that_ring(
    ring: MemoryRing, rounds: int
) -> None:
    """Control is read first: a cache that it opened in the next ring stayed there."""
    ask = submit(1, "hello", 12, "flowspec")
    ring.ask(ask)
    for _ in range(rounds):
        ring.round()
    ring.coordinator.renew_soon(Renew("the test wants a new ring"), ring.now)
    assert ring.until(lambda: bool(ring.ends(1)), 400)
    (end,) = ring.ends(1)
    assert isinstance(end, Finished)
    assert end.text == ring.expected(ask).text
    for _ in range(20):
        ring.round()
    for stage in ring.nodes[1:]:
        assert stage.machine.ledgers() == {}  # type: ignore[attr-defined]


# --- bugs ---------------------------------------------------------------------------------------


def break_once(machine: object, kind: type[object]) -> None:
    """Let a machine raise at the next event of that kind."""
    handle = machine.handle  # type: ignore[attr-defined]
    broken = []

    def raising(event: Event, now: float) -> list[Effect]:
        effects: list[Effect] = handle(event, now)
        if isinstance(getattr(event, "message", event), kind) and not broken:
            broken.append(event)
            raise ZeroDivisionError("a test's bug")
        return effects

    machine.handle = raising  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("where", "kind", "fails"),
    [
        ("coordinator", SegmentArrived, True),
        ("coordinator", Submit, True),
        ("coordinator", Tick, True),
        ("stage", SegmentArrived, True),
        ("stage", Retain, True),
        ("membership", Heartbeat, False),
        ("membership", Submit, False),
        ("membership", Tick, False),
        ("member", Heartbeat, False),
    ],
)
@pytest.mark.parametrize("runs", tiered([True, False], [True]))
def test_after_a_bug_each_request_has_one_end_and_the_next_is_answered(
    ring: MemoryRing, where: str, kind: type[object], fails: bool, runs: bool
) -> None:
    """A coordinator machine that raised may hold anything: all its requests fail. A bug of a stage
    ends those whose rows it holds."""
    machine = {
        "coordinator": ring.machine,
        "membership": ring.membership,
        "stage": ring.nodes[1].machine,  # type: ignore[attr-defined]
        "member": ring.nodes[1].member,  # type: ignore[attr-defined]
    }[where]
    asks = [submit(tag, f"question {tag}", 20, "adaptive") for tag in (1, 2, 3)]
    if runs:
        ring.ask(asks[0])
        ring.round()
    break_once(machine, kind)
    for ask in asks[runs:]:
        ring.ask(ask)
    assert ring.until(lambda: all(ring.ends(ask.tag) for ask in asks), 600)
    asks.append(submit(4, "question 4", 20, "adaptive"))
    ring.ask(asks[3])
    assert ring.until(lambda: bool(ring.ends(4)), 600)
    assert len(ring.bugs) == 1
    ends = [ring.ends(ask.tag) for ask in asks]
    assert all(len(one) == 1 for one in ends)
    failed = [one[0] for one in ends if isinstance(one[0], Failed)]
    assert bool(failed) == fails
    assert len(failed) <= (3 if where == "coordinator" else 1)
    assert all(BUG in one.reason for one in failed)
    assert isinstance(ends[3][0], Finished)
    for ask, (end,) in zip(asks, ends, strict=True):
        if isinstance(end, Finished):
            assert end.text == ring.expected(ask).text


@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (Request, "handle"),
        (Request, "take_result"),
        (Request, "decide"),
        (Scheduler, "on_credit"),
        (Outbox, "next_part"),
        (Holdings, "leave"),  # the request has its end, which is lost
    ],
)
def test_a_bug_ends_each_live_request_once_and_the_next_ones_are_answered(
    ring: MemoryRing, monkeypatch: pytest.MonkeyPatch, owner: type[object], method: str
) -> None:
    ring.machine._ring = replace(ring.machine._ring, live=4)
    asks = [submit(tag, f"question {tag}", 20, "pipedec") for tag in range(1, 5)]
    for ask in asks:
        ring.ask(ask)
    came = ring.at_peer[CLIENT_PEER]

    def streamed(tag: int) -> str:
        told = [one.message for one in came if isinstance(one.message, Tokens)]
        return "".join(one.text for one in told if one.tag == tag)

    assert ring.until(lambda: all(streamed(ask.tag) for ask in asks), 300)
    assert ring.machine.load() == (4, 0)
    original, broken = getattr(owner, method), []

    def raising(self: Any, *args: Any, **named: Any) -> Any:
        if not broken:
            broken.append(self)
            raise ZeroDivisionError("a test's bug")
        return original(self, *args, **named)

    monkeypatch.setattr(owner, method, raising)
    assert ring.until(lambda: all(ring.ends(ask.tag) for ask in asks), 900)
    assert len(broken) == len(ring.bugs) == 1
    for ask in asks:
        (end,) = ring.ends(ask.tag)
        assert isinstance(end, Failed)
        assert BUG in end.reason
    again = [submit(10 + tag, f"question {tag}", 20, "pipedec") for tag in range(1, 5)]
    for ask in again:
        ring.ask(ask)
    assert ring.until(lambda: all(ring.ends(ask.tag) for ask in again), 900)
    for ask in again:
        (end,) = ring.ends(ask.tag)
        assert isinstance(end, Finished)
        assert end.text == streamed(ask.tag) == ring.expected(ask).text
    assert ring.machine.idle


def test_a_bug_that_comes_again_renews_the_ring_now_and_then(
    ring: MemoryRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising(event: Event, now: float) -> list[Effect]:
        raise ZeroDivisionError("a test's bug")

    renewed: list[float] = []
    to_ring = ring.coordinator.to_ring

    def noted(event: Event, now: float) -> list[Effect]:
        if isinstance(event, RingFaulty):
            renewed.append(now)
        return to_ring(event, now)

    monkeypatch.setattr(ring.coordinator, "to_ring", noted)
    monkeypatch.setattr(ring.machine, "handle", raising)
    start = ring.now
    for tag in range(100):
        ring.ask(submit(tag))
        ring.round()
    for tag in range(100):
        assert len(ring.ends(tag)) == 1
    assert 1 <= len(renewed) <= (ring.now - start) / RENEW_S + 1


def test_an_end_that_cannot_be_sent_is_replaced(ring: MemoryRing) -> None:
    ring.machine._ring = replace(ring.machine._ring, draft="half a pair: \ud800")
    ring.ask(submit(1))
    assert ring.until(lambda: bool(ring.ends(1)), 200)
    (end,) = ring.ends(1)
    assert isinstance(end, Failed)
    assert BUG in end.reason
    assert CLIENT_PEER in ring.at_peer


def test_an_address_that_a_coordinator_gives_ends_no_stage(ring: MemoryRing) -> None:
    ring.say("coordinator", "stage 1", Connect("x/y", 2**63, "11"))
    ask = submit(1)
    ring.round()
    ring.ask(ask)
    assert ring.until(lambda: bool(ring.ends(1)), 400)
    assert isinstance(ring.ends(1)[0], Finished)


def test_what_is_no_number_is_left_out() -> None:
    assert "reason" not in numbers_of(Fault)
    assert numbers_of(Goodbye) == []
    assert set(numbers_of(Retain)) == {"request", "keep"}
    assert set(numbers_of(RetainSet)) == {"epoch", "watermark", "accepted", "retained"}
