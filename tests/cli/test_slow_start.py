"""Boards that start slowly, played by a process that holds its interpreter, or gets little of a
core: the ring comes up, and nothing gives up."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.commands import COMMAND, Command, run, to_prompt
from support.rings import submit
from support.starting import at_start

from edgespec.config import Address, Timing
from edgespec.daemon import local_ring
from edgespec.daemon.bundled_models import bundled
from edgespec.daemon.cluster import ClusterFolder, folder_of
from edgespec.runtime.client import Client

# Python's lock is held meanwhile, as by a large library that is being loaded.
HOLD = """
import builtins, ctypes
real = builtins.__import__
def slow(name, *rest, **more):
    if name == "torch" and builtins.__import__ is slow:
        builtins.__import__ = real
        print("holding", file=sys.stderr, flush=True)
        ctypes.PyDLL(None).sleep({seconds})
    return real(name, *rest, **more)
builtins.__import__ = slow
"""


def free_port() -> str:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        return str(reserved.getsockname()[1])


def answers_after_holding(seconds: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that is held at the import of torch, with two stages that started with it and
    keep their process, all with usual options."""
    port = free_port()
    address = f"127.0.0.1:{port}"
    with ExitStack() as stack:
        at_start(monkeypatch, folder, "serve", HOLD.format(seconds=seconds))
        coordinator = stack.enter_context(
            Command("serve", "--stages", "2", "--port", port, "--http", "none")
        )
        stages = [
            stack.enter_context(Command("join", "--stage", str(stage), "--coordinator", address))
            for stage in (1, 2)
        ]
        coordinator.until_err("holding")
        done = run(*to_prompt(address, "--raw", "Once", "--max-new-tokens", "4", "--wait", "600"))
        assert done.code == 0, done.err
        for stage in stages:
            assert stage.process.poll() is None  # it never ended, so that a unit stays as it is
            assert stage.err.count("the ring is up") == 1, stage.err


@pytest.mark.thorough
def test_stages_wait_for_a_coordinator_that_is_held_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than five of its handshakes may take."""
    answers_after_holding(20, tmp_path, monkeypatch)


@pytest.mark.slow
def test_stages_wait_for_a_coordinator_that_takes_a_minute_to_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers_after_holding(75, tmp_path, monkeypatch)


@pytest.mark.thorough
def test_a_coordinator_that_started_slowly_tells_its_clients_to_wait_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    usual = Timing()
    at_start(monkeypatch, tmp_path, "serve", "import time; time.sleep(8)")  # four times the usual
    options = ("--port", port, "--http", "none", "--silence", "2")
    with Command("serve", "--stages", "1", *options) as coordinator:
        coordinator.until_err("waiting for 1 stage")
        identity = ClusterFolder.open(folder_of("")).identity
        with Client(Address("127.0.0.1", int(port)), identity, 600.0) as client:
            client.send(submit())
            while client._silence == usual.answer_silence:
                client._receive()
    assert 4 * usual.answer_silence < client._silence <= 10 * usual.answer_silence


@pytest.mark.slow
def test_a_ring_with_a_tenth_of_a_core_starts_and_answers() -> None:
    """By the quota of a control group of this test's own: all three processes in a tenth of one."""
    group = quota(10)
    if group is None:
        pytest.skip("no control group with a quota can be made here")
    inside = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *COMMAND]
    demo = ("demo", "--stages", "2", "--model", bundled("base"), "--draft", bundled("draft"))
    try:
        with Command(*demo, "--max-new-tokens", "4", "--json", command=inside) as ring:
            assert ring.process.wait(1500) == 0, ring.err
            assert json.loads(ring.out)["new_tokens"] == 4
    finally:
        group.rmdir()


def quota(percent: int) -> Path | None:
    """A control group, of either version, that has so much of one core; None if none can be."""
    ways = (
        ("cpu", {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": f"{percent * 1000}"}),
        (".", {"cpu.max": f"{percent * 1000} 100000"}),
    )
    for controller, settings in ways:
        group = Path("/sys/fs/cgroup") / controller / f"edgespec-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            for name, value in settings.items():
                (group / name).write_text(value)
        except OSError:
            group.rmdir()
            continue
        return group
    return None


def test_a_coordinator_is_given_up_only_if_it_does_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_ring, "STILL_S", 10.0)
    late = "import time\nwhile time.process_time() < 1.5: pass\nprint('at 1', flush=True)"
    for code, line in ((late, "at 1"), ("import time; time.sleep(600)", ""), ("pass", "")):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            try:
                assert local_ring._read_line(process.stdout, process.pid) == line
            finally:
                process.kill()
