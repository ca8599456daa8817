"""Block transfer over real sockets: offers, refusals, strangers, resuming, stopping."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq
from support.block_site import DATA, Site, member
from support.keys import OWN, everybody
from support.sockets import DEVICE, HOST, PATIENCE_S, BareSockets

from edgespec.blocks.receiver import TransferProgress
from edgespec.config import Address
from edgespec.errors import (
    AccessRefused,
    CapacityError,
    ConfigError,
    EdgespecError,
    ModelError,
    PeerLost,
    RemoteProtocolError,
)
from edgespec.net import block_transfer
from edgespec.net.block_server import CHUNK_BYTES, BlockServer, ServedBlock
from edgespec.net.block_transfer import FetchedBlock
from edgespec.net.keys import Identity, KeyPair
from edgespec.wire.block_messages import BlockOffer, BlockRequest, PieceRequest
from edgespec.wire.codec import encode
from edgespec.wire.messages import Heartbeat


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A served block; no thread is left behind."""
    before = set(threading.enumerate())
    made = Site(tmp_path)
    made.server.start()
    try:
        yield made
    finally:
        made.server.stop()
    left = {t.name for t in set(threading.enumerate()) - before if t.name.startswith("edgespec")}
    assert not left


# --- a transfer -----------------------------------------------------------------------------------


def test_a_block_is_fetched_with_its_texts(site: Site) -> None:
    shown: list[TransferProgress] = []
    offers: list[BlockOffer] = []

    def place(offer: BlockOffer) -> Path:
        offers.append(offer)
        return site.goal

    fetched = site.fetch(progress=shown.append, place=place)
    assert fetched == FetchedBlock(site.goal, '{"format": 1}', "{}")
    assert site.goal.read_bytes() == DATA
    assert not site.part.exists()
    assert site.server.sent_bytes == len(DATA)
    assert [(offer.size, offer.sha256) for offer in offers] == [(len(DATA), site.sha256)]
    texts = [each.text for each in shown]
    assert "quantising layer 1 of 1" in texts
    assert (shown[-1].done, shown[-1].total) == (len(DATA), len(DATA))


def test_several_receivers_get_it_and_it_is_prepared_once(site: Site, tmp_path: Path) -> None:
    goals = [tmp_path / f"fetched-{number}" for number in range(4)]
    threads = [
        threading.Thread(target=site.fetch, kwargs={"place": lambda _, goal=goal: goal})
        for goal in goals
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(goal.read_bytes() == DATA for goal in goals)
    assert site.prepared == [1]
    assert site.server.sent_bytes == len(goals) * len(DATA)


def test_it_arrives_while_the_ring_is_busy_too(site: Site) -> None:
    site.busy = True
    site.fetch()
    assert site.goal.read_bytes() == DATA


def test_a_stopped_transfer_goes_on_where_it_was(site: Site) -> None:
    site.busy = True  # slow enough to be stopped in the middle

    def stop() -> bool:
        return site.part.exists() and site.part.stat().st_size > CHUNK_BYTES

    with pytest.raises(EdgespecError, match="was stopped"):
        site.fetch(stop=stop)
    there = site.part.stat().st_size
    assert CHUNK_BYTES < there < len(DATA)
    assert site.part.read_bytes() == DATA[:there]
    site.busy = False
    before = site.server.sent_bytes
    site.fetch()
    assert site.goal.read_bytes() == DATA
    assert site.server.sent_bytes - before <= len(DATA) - there + CHUNK_BYTES


def test_a_sender_that_restarts_is_waited_for(site: Site, tmp_path: Path) -> None:
    site.busy = True
    thread = threading.Thread(target=site.fetch)
    thread.start()
    while not site.part.exists() or site.part.stat().st_size < CHUNK_BYTES:
        time.sleep(0.002)
    site.server.stop()
    sent = site.server.sent_bytes
    site.busy = False
    site.server = site.serving(site.server.port, site.prepare)
    site.server.start()
    thread.join()
    assert site.goal.read_bytes() == DATA
    assert sent + site.server.sent_bytes <= len(DATA) + CHUNK_BYTES


def test_a_block_that_is_there_already_is_not_fetched(site: Site) -> None:
    site.goal.write_bytes(DATA)
    site.fetch()
    assert site.server.sent_bytes == 0
    assert not site.part.exists()


def test_a_damaged_block_that_is_there_is_replaced(site: Site) -> None:
    site.goal.write_bytes(bytes([DATA[0] ^ 1]) + DATA[1:])
    site.fetch()
    assert site.goal.read_bytes() == DATA


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "reason"),
    [
        (257, "no block 257"),
        (-1, "no block -1"),
        (2, "the model has no layers for it"),
        (3, "ZeroDivisionError: layers"),
        (4, "not what its manifest says"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(
    site: Site, stage: int, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        site.fetch(stage)
    site.fetch()
    assert site.goal.read_bytes() == DATA


def test_a_file_that_shrinks_is_refused_then_prepared_again(site: Site) -> None:
    site.fetch()
    site.goal.unlink()
    with site.file.open("r+b") as file:
        file.truncate(CHUNK_BYTES)
    with pytest.raises(ConfigError, match="shorter"):
        site.fetch()
    site.file.write_bytes(DATA)
    site.fetch()
    assert site.goal.read_bytes() == DATA
    assert site.prepared == [1, 1]


def test_a_file_that_changed_ends_in_an_error_that_names_the_chunk(site: Site) -> None:
    site.fetch()
    site.goal.unlink()
    with site.file.open("r+b") as file:
        file.seek(CHUNK_BYTES + 7)
        file.write(b"changed")
    with pytest.raises(RemoteProtocolError, match="chunk 1 of block 1"):
        site.fetch()


def test_a_full_disk_is_told_before_anything_is_fetched(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    with pytest.raises(CapacityError, match="has 1 MB free"):
        site.fetch()
    assert site.server.sent_bytes == 0


def test_a_folder_that_is_not_there_is_named(site: Site, tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match="missing"):
        site.fetch(place=lambda _: tmp_path / "missing" / "file")


def test_two_programs_do_not_fetch_into_one_file(site: Site) -> None:
    site.busy = True
    with ExitStack() as stack:
        thread = threading.Thread(target=site.fetch)
        thread.start()
        stack.callback(thread.join)
        while not site.part.exists() or not site.part.stat().st_size:
            time.sleep(0.002)
        with pytest.raises(ConfigError, match="another program"):
            site.fetch()
    assert site.goal.read_bytes() == DATA


def test_an_error_of_the_place_is_passed_on(site: Site) -> None:
    def place(offer: BlockOffer) -> Path:
        raise ModelError(f"no use for {offer.sha256}")

    with pytest.raises(ModelError, match=f"no use for {site.sha256}"):
        site.fetch(place=place)


# --- strangers ------------------------------------------------------------------------------------


def test_who_is_not_admitted_gets_nothing_and_is_told(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    other = Identity(KeyPair.new(), OWN.public)
    with pytest.raises(AccessRefused, match=r"127\.0\.0\.1:\d+ does not send blocks to this"):
        site.fetch(identity=other)
    assert "refused a connection: 127.0.0.1 wants to use the block channel" in caplog.text
    assert "it is not that of a stage" in caplog.text
    assert site.prepared == []


def test_who_has_no_key_gets_nothing(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    with BareSockets() as bare:
        stranger = bare.connect(zmq.DEALER, site.server.port)
        stranger.send(encode(BlockRequest(1)))
        assert not stranger.poll(300)
    assert "has no key, takes this for" in caplog.text
    assert site.prepared == []


def test_who_is_removed_meanwhile_gets_no_more(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    send = site.server._send_piece

    def removed_behind_it(peer: bytes, request: PieceRequest) -> None:
        send(peer, request)
        site.admitted.clear()

    monkeypatch.setattr(site.server, "_send_piece", removed_behind_it)
    with pytest.raises(ConfigError, match="no part of the cluster any more"):
        site.fetch()
    assert 0 < site.server.sent_bytes < len(DATA)


def test_a_sender_with_another_key_is_told_and_believed_nothing(site: Site) -> None:
    other = Identity(DEVICE.own, KeyPair.new().public)
    with pytest.raises(PeerLost, match=r"127\.0\.0\.1:\d+ .*no connection"):
        site.fetch(identity=other, silence=0.5)
    assert site.prepared == []


def test_a_sender_that_is_not_there_is_lost(site: Site) -> None:
    with pytest.raises(PeerLost, match=r"127\.0\.0\.1:1 .*no connection"):
        site.fetch(source=Address(HOST, 1), silence=0.3)


RUBBISH: list[list[bytes]] = [
    [b""],
    [b"\xff" * 100],
    [b"x"] * 50,
    [b"GET / HTTP/1.1\r\n\r\n"],
    [encode(Heartbeat())],
    [encode(PieceRequest("0" * 64, 0, 100, 0))],
    [b"x" * 100_000],
]


@pytest.mark.parametrize("number", range(len(RUBBISH)))
def test_a_server_survives_rubbish(number: int, site: Site) -> None:
    with member(site.server.port) as sender:
        sender.send_multipart(RUBBISH[number])
        site.fetch()
    assert site.goal.read_bytes() == DATA


def test_a_piece_beyond_the_file_is_not_served(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.fetch()
    sent = site.server.sent_bytes
    with member(site.server.port) as sender:
        for offset, length in ((len(DATA), 1), (len(DATA) - 5, 6), (2**62, 9), (0, CHUNK_BYTES)):
            request = PieceRequest(site.sha256, offset, length, 0)
            sender.send(encode(request))
        sender.send(encode(BlockRequest(1)))
        sender.recv_multipart()  # the offer: all before it was read
    assert site.server.sent_bytes == sent
    assert "not in the block" in caplog.text


def test_a_receiver_that_never_reads_holds_up_nobody(site: Site) -> None:
    site.fetch()
    site.goal.unlink()
    with member(site.server.port, takes=1) as greedy:
        for _ in range(300):
            request = PieceRequest(site.sha256, 0, CHUNK_BYTES // 4, 0)
            greedy.send(encode(request))
        site.fetch()
    assert site.goal.read_bytes() == DATA


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"\x00", r"127\.0\.0\.1:\d+ sent a malformed message"),
        (b"", "malformed"),
        (encode(Heartbeat()), "sent a Heartbeat instead"),
    ],
)
def test_a_sender_that_breaks_the_protocol_is_named(
    site: Site, answer: bytes, problem: str
) -> None:
    with BareSockets() as bare:
        evil = bare.open(zmq.ROUTER)
        evil.curve_server = True
        evil.curve_secretkey = OWN.secret.encode()
        port = evil.bind_to_random_port(f"tcp://{HOST}")

        def reply() -> None:
            peer = evil.recv_multipart()[0]
            evil.send_multipart([peer, answer])

        thread = threading.Thread(target=reply)
        thread.start()
        with pytest.raises(RemoteProtocolError, match=problem):
            site.fetch(source=Address(HOST, port))
        thread.join()


# --- starting and stopping ------------------------------------------------------------------------


def test_a_port_that_is_taken_is_a_config_error(site: Site) -> None:
    with pytest.raises(ConfigError, match="cannot listen"):
        site.serving(site.server.port, site.prepare)


def test_a_server_that_never_started_can_be_stopped(tmp_path: Path) -> None:
    Site(tmp_path).server.stop()


def test_stopping_ends_a_long_preparation(tmp_path: Path) -> None:
    began = threading.Event()

    def prepare(stage: int, tell: Callable[[str], None]) -> ServedBlock:
        for layer in range(100_000):
            tell(f"quantising layer {layer} of 100000")
            began.set()
            time.sleep(0.01)
        raise AssertionError("it was not stopped")

    server = BlockServer(Address(HOST, 0), OWN, everybody, prepare, lambda: False)
    server.start()
    with member(server.port) as asking:
        asking.send(encode(BlockRequest(1)))
        assert began.wait(PATIENCE_S)
        server.stop()
    assert not [t for t in threading.enumerate() if t.name == "edgespec-prepare"]


def test_a_server_answers_while_it_prepares(tmp_path: Path) -> None:
    go_on = threading.Event()
    site = Site(tmp_path)

    def prepare(stage: int, tell: Callable[[str], None]) -> ServedBlock:
        assert go_on.wait(PATIENCE_S)
        return site.prepare(stage, tell)

    server = site.serving(0, prepare)
    server.start()
    shown: list[str] = []

    def progress(said: TransferProgress) -> None:
        shown.append(said.text)
        if len(shown) == 2:  # the receiver asked again, and was answered
            go_on.set()

    try:
        site.fetch(source=Address(HOST, server.port), progress=progress)
    finally:
        go_on.set()
        server.stop()
        site.server.stop()
    assert shown[:2] == ["block 1 waits for its turn to be prepared"] * 2
    assert site.goal.read_bytes() == DATA


def test_moving_bytes_loads_no_torch() -> None:
    code = f"import sys, {block_transfer.__name__}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
