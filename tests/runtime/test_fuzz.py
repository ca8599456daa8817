"""A ring at work under attack: real sockets and CURVE; attackers in other processes."""

from __future__ import annotations

import base64
import dataclasses
import logging
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import zmq
from msgspec.structs import replace
from support.attackers import Target, sent, start
from support.block_site import Site
from support.capture import Tap
from support.keys import OWN
from support.nodes import HOST, NodeRing, until
from support.rings import submit
from support.sockets import DEVICE, BareSockets
from support.tiers import thorough

from edgespec.config import Address, Timing
from edgespec.errors import ModelError, RequestFailed
from edgespec.net import access
from edgespec.net.block_server import ServedBlock
from edgespec.net.control import CONTROL_BYTES
from edgespec.net.keys import KeyPair
from edgespec.net.zmq_transport import CONTROL_WAITING, ZmqTransport
from edgespec.runtime.access_policy import CLIENT
from edgespec.wire.block_messages import BlockOffer, BlockRequest
from edgespec.wire.client_messages import Finished, Status, StatusRequest, Submit
from edgespec.wire.codec import MOST_BYTES, decode, encode
from edgespec.wire.messages import Credit, Fault, Goodbye, Join, Message, StandBy

SEED = int(os.environ.get("EDGESPEC_FUZZ_SEED", "0")) or random.randrange(1, 2**32)
CALM = Timing(beat=1.0, silence=20.0, answer_silence=20.0, client_silence=20.0, retry=0.5)
"""The machine is busy with the attack itself: only what an attacker does may end a ring here."""

FLOODS = 2
"""Connections of insiders over which frames come that are as long as they may be."""

MOST_MEMORY = FLOODS * CONTROL_WAITING * CONTROL_BYTES + 8 * MOST_BYTES
"""What the coordinator's control socket may keep of each insider, and what eight strangers can send
at the same time before their handshakes fail. All nodes of the ring are in this process."""

PER_KIND = 10
"""Lines of log at once; after that, one a second."""


class Lines(logging.Handler):
    """Every line that was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.records.append(record)

    def kinds(self) -> Counter[tuple[str, ...]]:
        """How many of each node and kind: the format, and what it is about."""
        return Counter(
            (str(r.threadName), str(r.msg).partition(" (")[0], str(r.args[:1] if r.args else ""))
            for r in self.records
        )


@pytest.fixture
def lines() -> Iterator[Lines]:
    """What every node logs, from INFO on."""
    root, kept = logging.getLogger(), Lines()
    before = root.level
    root.addHandler(kept)
    root.setLevel(logging.INFO)
    yield kept
    root.removeHandler(kept)
    root.setLevel(before)


class OneBlock(Site):
    """A served block, and no other."""

    def prepare(self, stage: int, tell: Callable[[str], None]) -> ServedBlock:
        """Stage 1 is there."""
        if stage != 1:
            raise ModelError(f"there is no stage {stage}")
        return super().prepare(stage, tell)


@dataclass
class Snapshot:
    """A ring at work, a block server beside it, and what attackers know of them."""

    ring: NodeRing
    site: Site
    handshake: str = ""
    recorded: list[tuple[str, ...]] = field(default_factory=list)

    def target(self, kind: str, seconds: float, own: str = "", cluster: str = "") -> Target:
        """For one attacker."""
        transports = [thread.node.transport for thread in self.ring.threads.values()]
        return Target(
            kind,
            SEED,
            seconds,
            self.ring.address.port,
            self.site.server.port,
            tuple((t.data_port, t.identity.own.public) for t in transports),
            own,
            cluster or OWN.public,
            self.handshake,
            tuple(self.recorded[:300]),
        )


@contextmanager
def scene(folder: Path) -> Iterator[Snapshot]:
    """Everything is up, and a real handshake and real messages are recorded."""
    made = Snapshot(NodeRing(2, timing=CALM), OneBlock(folder))
    with made.ring as ring:
        made.site.server.start()
        try:
            ring.await_up()
            _record(made)
            yield made
        finally:
            made.site.server.stop()


def _record(made: Snapshot) -> None:
    """A stage's connection, as bytes; all control messages of an answer, as frames."""
    ring = made.ring
    with Tap(ring.address.port) as aux_layer:
        client = ZmqTransport.client(Address(HOST, aux_layer.port), ring.keys.add("recorded"))
        client.send_control(b"", StatusRequest())
        until(lambda: any(isinstance(i.message, Status) for i in client.poll(0.1)))
        client.close()
    made.handshake = base64.b64encode(aux_layer.said).decode()
    node = ring.threads[0].node
    admit = node.admit

    def record(incoming: object) -> bool:
        message: Message = incoming.message  # type: ignore[attr-defined]
        if not isinstance(message, Submit):
            made.recorded.append((base64.b64encode(encode(message)).decode(),))
        return admit(incoming)  # type: ignore[arg-type]

    node.admit = record  # type: ignore[method-assign]
    ring.ask(submit())
    node.admit = admit  # type: ignore[method-assign]
    assert len(made.recorded) > 20


def attack(made: Snapshot, kinds: dict[str, tuple[str, str]], seconds: float) -> Counter[str]:
    """Let them all loose; `kinds`: of each the words for its key, and the coordinator expected."""
    attackers = [
        start(made.target(kind.partition(" ")[0], seconds, *how)) for kind, how in kinds.items()
    ]
    total: Counter[str] = Counter()
    done = [sent(attacker, seconds + 60.0) for attacker in attackers]
    for kind, counted in zip(kinds, done, strict=True):
        print(f"  {kind}: {dict(counted)}")
        if kind.partition(" ")[0] not in ("raw", "crowd") and kinds[kind][0] not in INSIDERS:
            continue  # ZeroMQ keeps what it cannot send: nothing of it was on the wire
        assert counted, f"{kind} did nothing"
        total += counted
    return total


THIEF = KeyPair.from_words("a thief")
INSIDERS = ("a bad stage", "a bad client")
ATTACKERS = {
    "raw 1": ("", ""),
    "crowd": ("", ""),
    "without a key": ("", ""),
    "unknown": ("a thief", ""),
    "other cluster's": ("a thief", THIEF.public),
    "removed": ("a removed device", ""),
    "stage": ("a bad stage", ""),
    "client": ("a bad client", ""),
}


def check(made: Snapshot, lines: Lines, kinds: dict[str, tuple[str, str]], seconds: float) -> int:
    """An answer that runs all the while is right, and everybody lives; returns how many frames."""
    print(f"\nattacked with seed {SEED}; EDGESPEC_FUZZ_SEED={SEED} repeats it")
    ring, process = made.ring, psutil.Process()
    ring.keys.add("a bad client", CLIENT)
    made.site.admitted.add(ring.keys.add("a bad stage").own.public)
    ring.keys.forget(ring.keys.add("a removed device").own.public)
    memory, files, peak = process.memory_info().rss, process.num_fds(), 0
    over, answers = threading.Event(), 0
    lines.records.clear()
    started = time.monotonic()

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.05):
            peak = max(peak, process.memory_info().rss - memory)

    total: Counter[str] = Counter()
    watcher = threading.Thread(target=watch)
    attacker = threading.Thread(target=lambda: total.update(attack(made, kinds, seconds)))
    watcher.start()
    attacker.start()
    try:
        while attacker.is_alive() or not answers:
            ask = submit(max_new_tokens=100, seed=answers)
            answer = ring.ask(ask)
            ring.assert_right(ask, answer)
            assert answer.recoveries == 0
            answers += 1
    finally:
        attacker.join()
        over.set()
        watcher.join()
    seconds = time.monotonic() - started
    ring.assert_free()
    for thread in ring.threads.values():
        assert (thread.stop, thread.crash) == (None, None), "all still run"
    assert len(ring.membership.stage_peers) == 2
    assert_served(made)
    until(lambda: process.num_fds() <= files + 4)
    frames = sum(n for where, n in total.items() if where != "connections")
    print(
        f"{frames} frames, {total['connections']} connections in {seconds:.0f} s; {answers} right "
        f"answers meanwhile; memory grew by {peak / 1e6:.0f} MB at most (bound "
        f"{MOST_MEMORY / 1e6:.0f} MB); {len(lines.records)} lines of log"
    )
    assert peak < MOST_MEMORY
    assert_quiet(lines, seconds)
    return frames


def assert_served(made: Snapshot) -> None:
    """The block server still serves."""
    with BareSockets() as bare:
        asking = bare.connect(zmq.DEALER, made.site.server.port, DEVICE.own)
        asking.send(encode(BlockRequest(1)))
        until_told(asking, BlockOffer)


def until_told(asking: zmq.Socket[bytes], kind: type[Message]) -> None:
    """Read what comes, heartbeats too, up to the first message of that kind."""
    while not isinstance(decode(asking.recv()), kind):
        pass


def assert_quiet(lines: Lines, seconds: float) -> None:
    """No node was surprised, and none was made to fill the log."""
    for record in lines.records:
        assert record.exc_info is None, record.getMessage()
        assert record.levelno < logging.ERROR, record.getMessage()
    for kind, count in lines.kinds().items():
        assert count <= seconds + PER_KIND, (kind, count)


FEW = ("raw 1", "unknown", "stage", "client")
"""One of each sort: bytes, a key that counts nowhere, and insiders. Each is a process."""


@pytest.mark.parametrize(
    ("kinds", "seconds"), [(FEW, 1.5), thorough(tuple(ATTACKERS), 2.5)], ids=["few", "all"]
)
def test_an_answer_under_attack_is_the_right_one(
    kinds: tuple[str, ...],
    seconds: float,
    tmp_path: Path,
    lines: Lines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(access, "HANDSHAKE_MS", 1_000)  # so that all strangers are gone early
    with scene(tmp_path) as made:
        check(made, lines, {kind: ATTACKERS[kind] for kind in kinds}, seconds)


def test_who_listens_sends_no_pings(tmp_path: Path) -> None:
    """libzmq 4.3.5 aborts the process if one is due when a peer that waits to be read is gone."""
    with scene(tmp_path) as made:
        bound = [made.site.server._router]
        for thread in made.ring.threads.values():
            transport = thread.node.transport
            bound += [transport.pull]
        bound.append(made.ring.transport.control)
        assert [opened.getsockopt(zmq.HEARTBEAT_IVL) for opened in bound] == [0] * 5
        stage = made.ring.threads[1].node.transport
        for connected in (stage.control, stage.push):
            assert connected.getsockopt(zmq.HEARTBEAT_IVL) > 0
            assert connected.getsockopt(zmq.HEARTBEAT_TTL) > 0


def test_a_stage_without_a_place_ends_no_request_and_takes_no_others_address() -> None:
    with NodeRing(2, timing=CALM) as ring:
        ring.await_up()
        for block in ring.blocks:
            block.delay = 0.003
        who = ring.keys.add("a bad stage")
        join = ring.members[1].join
        ask = submit(max_new_tokens=60)
        with ring.client() as client, BareSockets() as bare:
            answer = client.ask(ask)
            next(answer)
            spare = bare.connect(zmq.DEALER, ring.address.port, who.own)
            spare.send(encode(replace(join, stage=0, key=who.own.public)))
            until_told(spare, StandBy)
            for number in range(20):
                spare.send(encode(Fault(number, "forged")))
                spare.send(encode(Credit(number)))
            *_, end = answer
        assert isinstance(end, Finished)
        ring.assert_right(ask, end)
        assert end.recoveries == 0


def test_a_members_words_reach_no_terminal_as_they_are() -> None:
    with NodeRing(1, timing=CALM) as ring, ring.client() as client:
        ring.await_up()
        ring.blocks[0].delay = 0.01
        answer = client.ask(submit(max_new_tokens=200))
        next(answer)
        stage = ring.threads[1].node.transport
        for number in range(1, 4):
            stage.send_control(b"", Fault(number, "\x1b[2J" + "x" * 2_000))
        with pytest.raises(RequestFailed, match=r"stage 1 \(.*\):  \[2Jx+…$") as failed:
            list(answer)
        assert len(str(failed.value)) < 600


def test_who_comes_and_goes_all_day_does_not_fill_the_log(lines: Lines) -> None:
    often = dataclasses.replace(CALM, beat=0.005)  # heartbeats come between the answers
    with NodeRing(1, timing=often) as ring, BareSockets() as bare:
        ring.await_up()
        who = ring.keys.add("a bad stage")
        spare = bare.connect(zmq.DEALER, ring.address.port, who.own)
        started = time.monotonic()
        for _ in range(300):
            spare.send(encode(Join(0, "x", 1, HOST, 9, who.own.public)))
            until_told(spare, StandBy)
            spare.send(encode(Goodbye("x")))
        assert_quiet(lines, time.monotonic() - started)
        assert any("stands by" in record.getMessage() for record in lines.records)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_answers_under_a_long_attack_are_the_right_ones(tmp_path: Path, lines: Lines) -> None:
    with scene(tmp_path) as made:
        assert check(made, lines, ATTACKERS, 150.0) > 10_000
