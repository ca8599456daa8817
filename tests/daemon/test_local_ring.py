"""The ring of child processes: what is said about one that ended, and that all of them end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from support.commands import COMMAND

from edgespec.config import Address, CoordinatorConfig
from edgespec.daemon import local_ring
from edgespec.daemon.local_ring import LocalRing
from edgespec.daemon.process import PARENT
from edgespec.errors import ConfigError, PeerLost

CONFIG = CoordinatorConfig("model", "", 1, "float32", Address("127.0.0.1", 0))
Spawn = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalRing]:
    """A ring that starts nothing by itself."""
    monkeypatch.setattr(local_ring, "END_S", 1.0)
    monkeypatch.setattr(LocalRing, "_start", lambda self: None)
    with LocalRing(CONFIG) as made:
        yield made


def add(ring: LocalRing, name: str, script: str, log: str = "") -> subprocess.Popen[bytes]:
    """A process of the ring that runs a shell script, with what it logged."""
    process = subprocess.Popen(["/bin/sh", "-c", script])
    ring._processes[name] = process
    ring._log(name).write_text(log)
    return process


def test_nothing_is_said_while_all_live(ring: LocalRing) -> None:
    add(ring, "coordinator", "exec sleep 600")
    ring.check()
    assert ring.pids == {"coordinator": ring._processes["coordinator"].pid}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_killed_process_is_named_with_the_signal(ring: LocalRing, number: signal.Signals) -> None:
    process = add(ring, "stage 2", f"kill -{int(number)} $$", "10:00:00 the ring is up\n")
    process.wait()
    with pytest.raises(PeerLost) as lost:
        ring.check()
    assert str(lost.value) == (f"the stage 2 process ({process.pid}) was killed by {number.name}")


@pytest.mark.parametrize(
    ("code", "log", "words"),
    [
        (1, "10:00:00 up\n10:00:01 error: stage 1 has been silent\n", "stage 1 has been silent"),
        (1, "edgespec: error: no route\nto it\n", "no route\nto it"),
        (1, "Traceback (most recent call last):\n  x\nValueError: y\n", "ValueError: y"),
        (0, "10:00:00 up\n10:00:01 stopped by SIGTERM\n", "stopped by SIGTERM"),
        (3, "", "its exit code is 3"),
    ],
)
def test_a_process_that_ended_is_named_with_its_last_words(
    ring: LocalRing, code: int, log: str, words: str
) -> None:
    process = add(ring, "stage 1", f"exit {code}", log)
    process.wait()
    with pytest.raises(PeerLost) as lost:
        ring.check()
    assert str(lost.value) == f"the stage 1 process ({process.pid}) ended: {words}"


def test_a_wrong_setting_stays_a_wrong_setting(ring: LocalRing) -> None:
    add(ring, "coordinator", "exit 2", "edgespec: error: there is no model folder /x\n").wait()
    with pytest.raises(ConfigError, match=r"^there is no model folder /x$"):
        ring.check()


def test_the_one_that_was_killed_is_the_cause(ring: LocalRing) -> None:
    add(ring, "coordinator", "exit 1", "10:00:00 error: stage 2 has been silent").wait()
    add(ring, "stage 1", "exit 1", "10:00:00 error: the coordinator ended the ring").wait()
    add(ring, "stage 2", "kill -9 $$").wait()
    with pytest.raises(PeerLost, match=r"stage 2 process \(\d+\) was killed by SIGKILL"):
        ring.check()


@pytest.mark.parametrize(
    "script",
    [
        "exec sleep 600",
        "trap '' TERM; while :; do sleep 0.1; done",
        "kill -STOP $$; exec sleep 600",
    ],
)
def test_leaving_ends_every_process_even_stubborn_and_stopped_ones(
    ring: LocalRing, script: str
) -> None:
    processes = [add(ring, f"stage {n}", script) for n in (1, 2)]
    time.sleep(0.1)
    started = time.monotonic()
    ring.__exit__()
    assert time.monotonic() - started < 60.0, "their 600 s were waited for"
    for process in processes:
        assert not psutil.pid_exists(process.pid)


def test_a_start_that_fails_ends_what_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(self: LocalRing) -> None:
        started.append(add(self, "coordinator", "exec sleep 600"))
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalRing, "_start", start)
    with pytest.raises(KeyboardInterrupt):
        LocalRing(CONFIG).__enter__()
    assert started[0].poll() is not None


def test_a_daemon_does_not_outlive_a_parent_that_died_before_it_looked() -> None:
    done = subprocess.run(
        [*COMMAND, "serve", "--stages", "1", "--port", "0"],
        env={**os.environ, PARENT: "1"},
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert done.stdout == b""


def test_a_signal_while_a_process_is_born_ends_that_process_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    born: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def bear(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        born.append(start(*arguments, **options))
        signal.raise_signal(signal.SIGTERM)
        return born[-1]

    def end(number: int, frame: object) -> None:
        raise SystemExit(number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        monkeypatch.setattr(subprocess, "Popen", bear)
        with pytest.raises(SystemExit), LocalRing(CONFIG):
            pass
        assert len(born) == 1
        assert born[0].poll() is not None
        assert signal.getsignal(signal.SIGTERM) is end
    finally:
        signal.signal(signal.SIGTERM, before)
