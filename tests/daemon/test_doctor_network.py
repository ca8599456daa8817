"""The doctor's look at the surroundings: what each leg says of each trouble, and that it ends."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.keys import OWN, everybody
from support.nodes import until

from edgespec.config import Address
from edgespec.daemon import doctor_network
from edgespec.daemon.cluster import ClusterFolder, ClusterSettings
from edgespec.daemon.doctor import BLOCKED, OK, WARNING, Finding
from edgespec.daemon.doctor_network import examine_network
from edgespec.net.access import Admits
from edgespec.net.discovery import Found
from edgespec.net.discovery_interfaces import interfaces_from
from edgespec.net.keys import Identity, KeyPair, short
from edgespec.net.zmq_transport import ZmqTransport
from edgespec.wire.client_messages import Status, StatusRequest
from edgespec.wire.codec import VERSION

HERE = "127.0.0.1"
MINE = KeyPair.from_words("this device")
NOWHERE = "192.0.2.1:7430"


@pytest.fixture(autouse=True)
def quiet_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """One interface, on which nobody is heard."""
    flags = type("State", (), {"isup": True, "flags": "up,broadcast,running,multicast"})
    number = type(
        "Number", (), {"family": socket.AF_INET, "address": "10.0.0.5", "netmask": "255.0.0.0"}
    )
    found = interfaces_from({"eth0": flags}, {"eth0": [number]})
    monkeypatch.setattr(doctor_network, "own_interfaces", lambda: found)
    hears(monkeypatch)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine has its time; a test that waits for nobody takes it back."""
    monkeypatch.setattr(doctor_network, "CONNECT_S", 60.0)
    monkeypatch.setattr(doctor_network, "ANSWER_S", 60.0)


def hears(monkeypatch: pytest.MonkeyPatch, *found: Found) -> None:
    """Let these coordinators be heard."""
    monkeypatch.setattr(doctor_network, "browse", lambda *_: list(found))


def device(folder: Path, address: str = NOWHERE) -> Path:
    """A cluster folder of a device."""
    ClusterFolder.remember(folder, MINE, OWN.public, "board7", address)
    return folder


def findings(
    folder: Path, told: Address | None = None, root: Path = Path("/")
) -> dict[str, Finding]:
    """What it finds, by name; no name twice."""
    found = list(examine_network(folder, told, root))
    assert all(one.text for one in found)
    assert len({one.name for one in found}) == len(found)
    return {one.name: one for one in found}


@contextmanager
def serving(admits: Admits = everybody, own: KeyPair = OWN, lag: float = 0.0) -> Iterator[Address]:
    """A coordinator that tells its status, `lag` seconds late."""
    transport = ZmqTransport.coordinator(Address(HERE, 0), Identity.of_coordinator(own), admits)
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            for incoming in transport.poll(0.05):
                if isinstance(incoming.message, StatusRequest):
                    time.sleep(lag)
                    transport.send_control(incoming.peer, Status(True, ()))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield Address(HERE, transport.control_port)
    finally:
        ended.set()
        thread.join()
        transport.close()


# --- this machine -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("synchronised", "state", "words"),
    [
        (True, OK, "synchronised"),
        (False, WARNING, "timedatectl set-ntp true"),
        (None, OK, "cannot be told here"),
    ],
)
def test_a_clock_that_may_be_wrong_is_named(
    synchronised: bool | None, state: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_network, "is_synchronised", lambda: synchronised)
    found = doctor_network.check_clock([])
    assert (found.name, found.state) == ("clock", state)
    assert words in found.text


def test_a_clock_of_1970_is_wrong_whatever_the_kernel_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_network, "is_synchronised", lambda: True)
    with monkeypatch.context() as early:
        early.setattr(time, "time", lambda: 86400.0)
        found = doctor_network.check_clock([])
    assert found.state == WARNING
    assert "1970-01-02 00:00 UTC, which is in the past" in found.text
    later = time.time() + 3 * 86400.0
    os.utime(tmp_path, (later, later))
    assert doctor_network.check_clock([tmp_path]).state == WARNING
    assert doctor_network.check_clock([tmp_path / "nothing"]).state == OK


def test_the_kernel_says_whether_its_clock_is_synchronised_or_nothing() -> None:
    assert doctor_network.is_synchronised() in (True, False, None)


def test_before_a_cluster_exists_nothing_is_wrong(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nothing"):
        found = findings(folder)
        assert list(found) == ["clock", "cluster", "mDNS", "coordinator"]
        assert {found[name].state for name in ("cluster", "mDNS", "coordinator")} == {OK}
        assert "none yet" in found["cluster"].text
        assert "edgespec join TOKEN" in found["cluster"].text
        assert "none is known yet" in found["coordinator"].text
    assert not (tmp_path / "nothing").exists()


def test_the_cluster_is_named(tmp_path: Path) -> None:
    text = findings(device(tmp_path / "device"))["cluster"].text
    assert short(OWN.public) in text
    assert "called board7 there" in text
    assert "expected at 192.0.2.1:7430" in text
    made = ClusterFolder.create(tmp_path / "own", ClusterSettings(host="::", port=7439))
    text = findings(tmp_path / "own")["cluster"].text
    assert made.cluster_id in text
    assert "is its coordinator" in text
    assert "expected at 127.0.0.1:7439" in text


@pytest.mark.parametrize("name", ["device.key", "membership.json", ""])
def test_a_folder_that_others_can_use_blocks(tmp_path: Path, name: str) -> None:
    folder = device(tmp_path / "device")
    (folder / name).chmod(0o777)
    found = findings(folder)
    assert found["cluster"].state == BLOCKED
    assert "chmod" in found["cluster"].text
    assert "key" not in found


def test_a_damaged_folder_blocks(tmp_path: Path) -> None:
    folder = device(tmp_path / "device")
    (folder / "membership.json").write_text("{", encoding="utf-8")
    assert findings(folder)["cluster"].state == BLOCKED
    (folder / "membership.json").unlink()
    (folder / "membership.json").mkdir()
    assert findings(folder)["cluster"].state == BLOCKED


# --- the network --------------------------------------------------------------------------------


def test_without_a_network_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_network, "own_interfaces", list)
    found = findings(tmp_path)["mDNS"]
    assert found.state == WARNING
    assert "no network is up here" in found.text


def test_a_port_5353_that_is_not_to_be_had_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(*_: object) -> list[Found]:
        raise OSError(98, "Address already in use")

    monkeypatch.setattr(doctor_network, "browse", taken)
    found = findings(tmp_path)["mDNS"]
    assert found.state == WARNING
    assert "UDP port 5353 is not to be had on eth0 (10.0.0.5)" in found.text
    assert "in use" in found.text


def test_our_coordinator_is_told_from_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving() as address:
        one = Found("d0", (HERE,), address.port, str(VERSION), "llama", "3", short(OWN.public))
        other = Found("e0", (HERE,), 9, str(VERSION), "qwen", "3", "0123456789ab")
        hears(monkeypatch, other, one)
        found = findings(device(tmp_path / "device"))
        assert (
            f"our coordinator d0 (llama, 3 stages), cluster {one.cluster} at" in found["mDNS"].text
        )
        assert "e0 (qwen, 3 stages), cluster 0123456789ab at 127.0.0.1:9 of another" in (
            found["mDNS"].text
        )
        assert found["coordinator"].state == OK
        assert f"{address} (by mDNS) takes connections" in found["coordinator"].text
        assert found["key"].state == OK


def test_without_a_cluster_it_does_not_choose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hears(monkeypatch, Found("d0", ("fe80::1%eth0",), 9), Found("e0", ("10.0.0.2",), 7430))
    found = findings(tmp_path)["coordinator"]
    assert found.state == OK
    assert "--coordinator [fe80::1%eth0]:9, or --coordinator 10.0.0.2:7430" in found.text


def test_a_coordinator_that_is_not_there_is_named_with_what_to_do(tmp_path: Path) -> None:
    with socket.create_server((HERE, 0)) as closing:
        gone = Address(HERE, closing.getsockname()[1])
    found = findings(device(tmp_path / "device", str(gone)))["coordinator"]
    assert found.state == WARNING
    assert f"{gone} (as remembered): nothing listens there; start `edgespec serve`" in found.text
    found = findings(tmp_path / "nothing", gone)["coordinator"]
    assert found.state == BLOCKED, "the user said that it is there"
    found = findings(tmp_path / "nothing", Address("no-such-host.invalid", 7430))["coordinator"]
    assert found.state == BLOCKED
    assert "'no-such-host.invalid' is unknown" in found.text


def test_a_name_server_that_is_silent_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()

    def silent(_: str) -> str:
        release.wait(600.0)
        return HERE

    monkeypatch.setattr(doctor_network, "number_of", silent)
    monkeypatch.setattr(doctor_network, "CONNECT_S", 0.1)
    monkeypatch.setattr(doctor_network, "SPARE_S", 0.1)
    found = findings(tmp_path, Address("board", 7430))["coordinator"]
    assert not release.is_set()
    release.set()
    assert "no answer within" in found.text


# --- the coordinator ----------------------------------------------------------------------------


def test_an_accepted_key_and_a_link_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_network, "MOST_TRIP_S", 60.0)  # this machine may be busy
    with serving() as address:
        found = findings(device(tmp_path / "device"), address)
    assert list(found) == ["clock", "cluster", "mDNS", "coordinator", "key", "link"]
    assert found["key"].text == "accepted, as that of board7"
    assert found["link"].state == OK
    assert "ms there and back, on this machine" in found["link"].text


def test_a_device_that_looks_is_not_logged_as_a_stranger(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving() as address:
        findings(device(tmp_path / "device"), address)
        assert caplog.messages == []
        findings(tmp_path / "nothing", address)  # one that has no key yet is a stranger
        until(lambda: caplog.messages)
    assert "has no key" in caplog.messages[0]


def test_a_key_that_is_not_accepted_blocks(tmp_path: Path) -> None:
    with serving(lambda _: "it was removed") as address:
        found = findings(device(tmp_path / "device"), address)
    assert found["key"].state == BLOCKED
    assert "does not accept the key of this machine" in found["key"].text
    assert "link" not in found


def test_a_coordinator_of_another_cluster_blocks(tmp_path: Path) -> None:
    with serving(own=KeyPair.new()) as address:
        found = findings(device(tmp_path / "device"), address)
    assert found["key"].state == BLOCKED
    assert "is not the coordinator of the cluster" in found["key"].text


def test_one_that_takes_connections_and_says_nothing_is_not_called_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_network, "ANSWER_S", 0.5)
    with socket.create_server((HERE, 0)) as mute:
        found = findings(device(tmp_path / "device"), Address(HERE, mute.getsockname()[1]))
    assert found["coordinator"].state == OK
    assert found["key"].state == WARNING
    assert "has it finished loading," in found["key"].text


@pytest.mark.parametrize(
    ("speed", "trip", "state", "words"),
    [
        ("1000", 0.0004, OK, "0.4 ms there and back by eth0, 1000 Mbit/s"),
        ("100", 0.0004, OK, "100 Mbit/s"),
        ("10", 0.0004, WARNING, "a cable or a port that does 1000 Mbit/s"),
        ("-1", 0.004, OK, "by eth0, which does not tell its speed"),
        ("1000", 0.03, WARNING, "30.0 ms there and back by eth0, 1000 Mbit/s; each token waits"),
    ],
)
def test_a_slow_link_is_named(
    speed: str,
    trip: float,
    state: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = tmp_path / "sys/class/net/eth0"
    place.mkdir(parents=True)
    (place / "speed").write_text(speed, encoding="ascii")
    monkeypatch.setattr(doctor_network, "own_address_towards", lambda _: "10.0.0.5")
    monkeypatch.setattr(doctor_network, "interface_of", lambda _: "eth0")
    found = doctor_network.check_link(Address("10.0.0.9", 7430), trip, tmp_path)
    assert (found.name, found.state) == ("link", state)
    assert words in found.text


def test_a_slow_coordinator_does_not_hold_it_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_network, "TRIPS", 100_000)  # it would take hours
    monkeypatch.setattr(doctor_network, "TRIPS_S", 0.5)
    with serving(lag=0.3) as address:
        found = findings(device(tmp_path / "device"), address)
    assert found["link"].state == WARNING
    assert "this machine is busy" in found["link"].text


def test_one_leg_that_fails_is_passed_on() -> None:
    def failing() -> Sequence[int]:
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        doctor_network.within(60.0, failing)
    assert doctor_network.within(60.0, lambda: 7) == 7
