"""Roles: what the coordinator takes from the holders of which keys, and keys that are removed."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import pytest
from msgspec import structs
from support.cases import case
from support.keys import OWN, OWNER_IDENTITY, ListedKeys
from support.nodes import HOST, NodeRing, NodeThread, until
from support.rings import submit
from support.segments import one_part, retain_message
from support.sockets import PATIENCE_S
from support.tiers import tiered

from edgespec.errors import AccessRefused
from edgespec.machines.effects import (
    Effect,
)
from edgespec.machines.events import (
    Event,
    MessageArrived,
)
from edgespec.net import access
from edgespec.net.keys import Identity, KeyPair
from edgespec.net.zmq_transport import ZmqTransport
from edgespec.runtime.access_policy import CLIENT, MAY_SEND, OWNER, STAGE, TOKEN, admits
from edgespec.types.tensor import Tensor
from edgespec.wire.block_messages import (
    BlockOffer,
    BlockPreparing,
    BlockRefused,
    BlockRequest,
    Piece,
    PieceRequest,
)
from edgespec.wire.client_messages import (
    Cancel,
    Echoed,
    Failed,
    Finished,
    Progress,
    Status,
    StatusRequest,
    Tokens,
)
from edgespec.wire.codec import TAGS
from edgespec.wire.messages import (
    Assign,
    CloseRequest,
    Connect,
    Connected,
    Credit,
    Enrol,
    Enrolled,
    Fault,
    Goodbye,
    Health,
    Heartbeat,
    Join,
    Leave,
    Loading,
    Message,
    Ready,
    Refuse,
    Removed,
    StandBy,
)
from edgespec.wire.segment import Segment
from edgespec.wire.snapshots import Snapshot, StageActivity, Subscribe, SubscribeActivity

HASH = "0" * 64
IDS = np.arange(2, dtype=np.int64)
SENT: list[Message] = [
    one_part(1, 1, 0, False, 0, 2, IDS, IDS, IDS, IDS, None),
    retain_message(1, 1, 4, (2,), (3,)),
    CloseRequest(1),
    Assign(1, 1, 0, 1, "m", "f", "float32", "none", 1, 7, "x"),
    Connect(HOST, 1, OWN.public),
    Refuse("x"),
    Goodbye("x"),
    StandBy("x"),
    SubscribeActivity(1.0),
    Join(1, "x", 1, HOST, 9, OWN.public),
    Loading("x"),
    Ready(1.0),
    Fault(-1, "x"),
    Heartbeat(),
    Credit(1),
    Health(40.0, 90.0, 1, 1, 1.0, False, "x"),
    StageActivity(()),
    Connected(1),
    Enrol(OWN.public, "x"),
    Enrolled("x"),
    Leave(),
    Removed("x"),
    submit(),
    Cancel(1),
    Progress(1, "x"),
    Echoed(1),
    Tokens(1, (1,), "x"),
    Finished(1, "ab", (1, 2), "length", "p", "d", 1, 1, 2, 1.0, 0.5, 1.0, (1,), 2, 0, 0, 0.1),
    Failed(1, "x"),
    StatusRequest(),
    Status(True, ("stage 1: ready",)),
    Subscribe(1.0),
    Snapshot("idle", 0, "", 0, 0.0, -1, (), (), ()),
    BlockRequest(1),
    PieceRequest(HASH, 0, 1, 0),
    BlockPreparing("x"),
    BlockOffer("{}", "{}", 1, HASH, 1 << 16, Tensor("uint8", (1, 32), bytes(32))),
    BlockRefused("x"),
    Piece(HASH, 0, Tensor("uint8", (1,), b"x")),
]


def test_no_message_is_forgotten_here() -> None:
    kinds = [type(message) for message in SENT]
    assert len(kinds) == len(set(kinds))
    assert set(kinds) == set(TAGS.values())


# --- roles ----------------------------------------------------------------------------------------


@dataclass
class Door:
    """A coordinator node whose machines only write down what reaches them."""

    ring: NodeRing
    reached: list[Message]

    def connect(self, who: Identity) -> ZmqTransport:
        """Somebody's control channel."""
        return ZmqTransport.client(self.ring.address, who)

    def answer(self, client: ZmqTransport) -> Message | None:
        """What it is told; None if its message came to the machines."""
        limit = time.monotonic() + PATIENCE_S
        while not self.reached:
            assert time.monotonic() < limit, "it was neither taken nor answered"
            for incoming in client.poll(0.02):
                return incoming.message
        return None


@pytest.fixture(scope="module")
def door() -> Iterator[Door]:
    """One for all roles and messages."""
    ring = NodeRing(1)
    ring.start_coordinator()
    made = Door(ring, [])

    def write_down(event: Event, now: float) -> list[Effect]:
        if isinstance(event, MessageArrived):
            made.reached.append(event.message)
        return []

    ring.threads[0].node.route = write_down  # type: ignore[method-assign]
    yield made
    ring.__exit__()


@pytest.fixture(autouse=True)
def forget(request: pytest.FixtureRequest) -> None:
    """Nothing reached the machines before a test."""
    if "door" in request.fixturenames:
        request.getfixturevalue("door").reached.clear()


def who_has(door: Door, role: str) -> Identity:
    """Somebody new with that role."""
    if role == OWNER:
        return OWNER_IDENTITY
    return door.ring.keys.add(f"{role} {len(door.ring.keys.roles)}", role)


@pytest.mark.parametrize("role", list(MAY_SEND))
def test_a_role_may_say_what_it_may_and_nothing_else(door: Door, role: str) -> None:
    for message in SENT:
        with case(type(message).__name__):
            door.reached.clear()
            assert_allowed_or_refused(door, role, message)


def assert_allowed_or_refused(door: Door, role: str, message: Message) -> None:
    """What becomes of a message that a new peer of that role sends."""
    who = who_has(door, role)
    if isinstance(message, Join):
        message = structs.replace(message, key=who.own.public)
    if isinstance(message, Enrol):
        message = structs.replace(message, key=KeyPair.new().public)
    with closing(door.connect(who)) as client:
        client.send_control(b"", message)
        if isinstance(message, Segment):  # the socket itself takes none
            client.send_control(b"", retain_message(1, 1, 4, (), ()))
        answer = door.answer(client)
    if type(message) not in MAY_SEND[role]:
        assert isinstance(answer, Refuse)
        assert answer.reason.startswith(f"a key with the role {role} does not allow that")
    elif isinstance(message, Enrol):
        assert answer == Enrolled("x")
    elif isinstance(message, Leave):
        assert answer == Goodbye("this device is forgotten")
        assert door.ring.keys.role_of(who.own.public) is None
    else:
        assert answer is None
        assert [type(m) for m in door.reached] == [type(message)]
        return
    assert door.reached == []


def test_the_table_is_what_the_design_says() -> None:
    """Told again in full, so that a slip in one place shows."""
    asking = {Cancel, Heartbeat, StatusRequest, Subscribe, type(submit())}
    serving = {Join, Loading, Ready, Connected, Fault, Credit, Health, StageActivity}
    serving |= {Goodbye}
    assert {
        OWNER: asking | serving,
        STAGE: asking | serving | {Leave},
        CLIENT: asking | {Leave},
        TOKEN: {Enrol},
    } == MAY_SEND


@pytest.mark.parametrize("role", [OWNER, STAGE])
def test_nobody_joins_with_the_key_of_another(door: Door, role: str) -> None:
    who, other = who_has(door, role), door.ring.keys.add("another stage")
    with closing(door.connect(who)) as client:
        client.send_control(b"", Join(1, "x", 1, HOST, 9, other.own.public))
        assert door.answer(client) == Refuse("a stage joins with the key that it connects with")
    assert door.reached == []


def test_blocks_are_for_the_owner_and_stages() -> None:
    keys = ListedKeys()
    roles = {role: keys.add(role, role).own.public for role in (STAGE, CLIENT, TOKEN)}
    roles[OWNER] = OWN.public
    for role, key in roles.items():
        assert admits(keys, key) == ""
        why = admits(keys, key, blocks=True)
        assert why == ("" if role in (OWNER, STAGE) else f"it is that of a {role}")
    unknown = KeyPair.new().public
    for blocks in (False, True):
        assert admits(keys, unknown, blocks=blocks) == "it is not known"


# --- keys that are removed ------------------------------------------------------------------------


def test_a_key_that_is_removed_counts_no_more_on_its_old_connection(
    door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    who = who_has(door, STAGE)
    with closing(door.connect(who)) as client:
        client.send_control(b"", Heartbeat())
        assert door.answer(client) is None
        door.ring.keys.forget(who.own.public)
        door.reached.clear()
        for message in (Heartbeat(), Join(1, "x", 1, HOST, 9, who.own.public), Leave()):
            client.send_control(b"", message)
            assert door.answer(client) == Removed("this key counts no more: it is not known")
    assert door.reached == []


def test_a_client_whose_key_is_removed_says_so() -> None:
    with NodeRing(1) as ring, ring.client() as client:
        ring.await_up()
        ring.blocks[0].delay = 0.2
        answer = client.ask(submit(max_new_tokens=300))
        next(answer)  # its answer ends there and then, not when it has been silent for a minute
        ring.keys.forget(ring.keys.add("client").own.public)
        with pytest.raises(AccessRefused, match="refused: this key counts no more"):
            list(answer)
        ring.assert_free()


def test_a_stage_that_is_removed_ends_and_a_spare_goes_on() -> None:
    ask = submit(max_new_tokens=150, policy="flowspec")
    with NodeRing(3) as ring:
        ring.await_up()
        ring.start_spare()
        until(ring.has_spare)
        for block in ring.blocks:
            block.delay = 0.003
        who = ring.threads[2].node.transport.identity
        with ring.client() as client:
            answer = client.ask(ask)
            got = [next(answer) for _ in range(8)]
            ring.keys.forget(who.own.public)
            got += answer
        end = got[-1]
        assert isinstance(end, Finished)
        ring.assert_right(ask, end)
        assert end.recoveries == 1
        notes = [m.text for m in got if isinstance(m, Progress)]
        assert any("was removed from the cluster" in note for note in notes)
        with pytest.raises(AccessRefused, match="the coordinator refused: this "):
            ring.threads[2].ended()
        ring.threads[2] = again = NodeThread(ring.stage_node(2, who=who))
        with pytest.raises(AccessRefused, match="does not accept the key of this machine"):
            again.ended()
        ring.assert_free()


# --- crowds ---------------------------------------------------------------------------------------


@contextmanager
def crowded(
    number: int, milliseconds: int, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[NodeRing, list[socket.socket]]]:
    """A coordinator at which so many connect and say nothing, for which they have so long."""
    monkeypatch.setattr(access, "HANDSHAKE_MS", milliseconds)
    ring = NodeRing(1)
    ring.start_coordinator()
    with ExitStack() as stack:
        stack.callback(ring.__exit__)
        address = HOST, ring.address.port
        yield ring, [stack.enter_context(socket.create_connection(address)) for _ in range(number)]


CROWDS = tiered([90, 500], [90])  # the first is as many as wait at once to be accepted


@pytest.mark.parametrize("number", CROWDS)
def test_silent_connections_keep_no_stage_out(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with crowded(number, 600_000, monkeypatch) as (ring, crowd):
        ring.start_stage(1)
        ask = submit(max_new_tokens=10)
        ring.assert_right(ask, ring.ask(ask))
        for opened in crowd:
            opened.setblocking(False)
            with suppress(BlockingIOError):
                while part := opened.recv(4096):
                    pass
                assert part, "it was cut off before its time"


@pytest.mark.parametrize("number", CROWDS)
def test_silent_connections_are_cut_off(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with crowded(number, 1_000, monkeypatch) as (_, crowd):
        for opened in crowd:
            opened.settimeout(PATIENCE_S)
            while opened.recv(4096):
                pass
