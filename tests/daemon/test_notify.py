"""What systemd hears of a daemon: read from a socket that stands where systemd's would."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.service_manager import Manager

from edgespec.daemon.notify import Notifier

# A loop as a daemon's: it beats once a turn until it is told what to do, and ends with a reason.
LOOP = """
import select, sys, time
from edgespec.daemon.notify import Notifier
notifier = Notifier()
notifier.ready("waiting for 1 stage")
print("up", flush=True)
while not select.select([sys.stdin], [], [], 0.005)[0]:
    notifier.beat()
if sys.stdin.readline() == "hang\\n":
    print("hanging", flush=True)
    time.sleep(3600)
notifier.stopping("stopped by SIGTERM")
"""


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    """A manager at a path, and one at an abstract name."""
    abstract = f"@edgespec-test-{os.getpid()}-{time.monotonic_ns()}"
    found = Manager(abstract if request.param == "abstract" else str(tmp_path / "notify"))
    yield found
    found.close()


class Clock:
    """Time that a test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_a_daemon_says_arrives(manager: Manager) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": manager.name})
    notifier.ready("waiting for 3 stages")
    notifier.status("2 of 3 stages are here")
    notifier.stopping("stopped by SIGTERM")
    notifier.close()
    assert manager.heard() == [
        "READY=1\nSTATUS=waiting for 3 stages",
        "STATUS=2 of 3 stages are here",
        "STOPPING=1\nSTATUS=stopped by SIGTERM",
    ]


def test_the_same_status_is_said_once(manager: Manager) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": manager.name})
    notifier.ready("waiting")
    for text in ("waiting", "the ring is up", "the ring is up", "waiting"):
        notifier.status(text)
    notifier.close()
    assert manager.heard()[1:] == ["STATUS=the ring is up", "STATUS=waiting"]


def test_a_status_cannot_smuggle_in_another_message(manager: Manager) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": manager.name})
    notifier.status("stage 1: bad\nMAINPID=1\r\n" + "x" * 100_000)
    notifier.close()
    (heard,) = manager.heard()
    assert heard.startswith("STATUS=stage 1: bad MAINPID=1 xxx")
    assert "\n" not in heard
    assert len(heard) < 600


def beats_in_ten_seconds(notifier: Notifier, clock: Clock, manager: Manager) -> int:
    """What the manager hears of a main loop with ten turns a second."""
    heard = 0
    for _ in range(100):
        notifier.beat()
        heard += len(manager.heard())
        clock.now += 0.1
    return heard


def test_the_watchdog_is_fed_at_half_its_interval(manager: Manager) -> None:
    clock = Clock()
    notifier = Notifier({"NOTIFY_SOCKET": manager.name, "WATCHDOG_USEC": "4000000"}, clock)
    assert beats_in_ten_seconds(notifier, clock, manager) == 5
    notifier.close()


def test_a_slow_machine_asks_for_a_patient_watchdog(manager: Manager) -> None:
    clock = Clock()
    given = {"NOTIFY_SOCKET": manager.name, "WATCHDOG_USEC": "4000000"}
    notifier = Notifier(given, clock, slow=2.5)
    notifier.ready("waiting")
    assert manager.heard() == ["READY=1\nSTATUS=waiting\nWATCHDOG_USEC=10000000"]
    assert beats_in_ten_seconds(notifier, clock, manager) == 2
    notifier.close()


@pytest.mark.parametrize(
    "extra",
    [{}, {"WATCHDOG_USEC": "rubbish"}, {"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}],
    ids=["no watchdog", "rubbish", "another process's"],
)
def test_no_beat_without_a_watchdog_for_this_process(
    manager: Manager, extra: dict[str, str]
) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": manager.name, **extra})
    notifier.beat()
    notifier.close()
    assert manager.heard() == []


def test_the_watchdog_may_name_this_process(manager: Manager) -> None:
    watchdog = {"WATCHDOG_USEC": "1000", "WATCHDOG_PID": str(os.getpid())}
    notifier = Notifier({"NOTIFY_SOCKET": manager.name, **watchdog})
    notifier.beat()
    notifier.close()
    assert manager.heard() == ["WATCHDOG=1"]


@pytest.mark.parametrize("path", ["", "relative", "vsock:2:1234", "/nowhere/at/all", "@nobody"])
def test_nobody_to_tell_is_no_error(path: str) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "1000"})
    for _ in range(3):
        notifier.ready("up")
        notifier.beat()
        notifier.stopping("done")
    notifier.close()


def test_without_the_variable_nothing_is_opened() -> None:
    notifier = Notifier({})
    notifier.ready("up")
    notifier.beat()
    notifier.close()


def test_a_manager_that_goes_away_or_never_reads_is_no_error(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
        deaf.bind(path)
        notifier = Notifier({"NOTIFY_SOCKET": path})
        for turn in range(2_000):  # far more than a socket's queue takes: to wait would be for ever
            notifier.status(f"turn {turn}")
    notifier.status("alone")
    notifier.close()


def test_a_close_is_final(manager: Manager) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": manager.name})
    notifier.close()
    notifier.status("after the end")
    notifier.close()
    assert manager.heard() == []


def run_loop(manager: Manager) -> subprocess.Popen[str]:
    """LOOP as a process of its own, as systemd would start it, once it is up."""
    environment = {**os.environ, "NOTIFY_SOCKET": manager.name, "WATCHDOG_USEC": "200000"}
    process = subprocess.Popen(
        [sys.executable, "-c", LOOP],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def test_a_loop_is_ready_beats_and_stops(manager: Manager) -> None:
    started = time.monotonic()
    process = run_loop(manager)
    heard: list[str] = []
    while heard.count("WATCHDOG=1") < 5:
        heard += manager.heard(timeout=0.1)
    process.communicate("end\n")
    seconds = time.monotonic() - started
    assert process.returncode == 0
    first, *beats, last = heard + manager.heard()
    assert first == "READY=1\nSTATUS=waiting for 1 stage"
    assert last == "STOPPING=1\nSTATUS=stopped by SIGTERM"
    assert set(beats) == {"WATCHDOG=1"}
    assert len(beats) <= 1 + seconds / 0.1, "one at half the watchdog's interval, and no more"


def test_a_loop_that_is_stuck_is_heard_no_more(manager: Manager) -> None:
    process = run_loop(manager)
    try:
        manager.until("WATCHDOG=1")
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("hang\n")
        process.stdin.flush()
        assert process.stdout.readline() == "hanging\n"
        manager.heard()
        assert manager.heard(timeout=1.0) == []  # longer than ten of its beats
        assert process.poll() is None, "it must be alive, and silent"
    finally:
        process.kill()
        process.communicate()
