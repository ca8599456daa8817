"""What systemd hears of `serve` and `join`, by a socket that stands where systemd's would."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.commands import Command
from support.service_manager import Manager

BEAT_S = 0.5  # half of the watchdog's interval


@pytest.mark.thorough
def test_systemd_hears_how_the_daemons_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", str(int(2e6 * BEAT_S)))
    with ExitStack() as stack:
        managers = {name: Manager(str(tmp_path / name)) for name in ("coordinator", "stage")}
        for manager in managers.values():
            stack.callback(manager.close)

        def start(name: str, *arguments: str) -> Command:
            monkeypatch.setenv("NOTIFY_SOCKET", managers[name].name)
            return stack.enter_context(Command(*arguments))

        coordinator = start("coordinator", "serve", "--stages", "1", "--port", "0")
        coordinator.until_out("coordinator at ")
        address = coordinator.out.split()[-1]
        assert "STATUS=waiting for 1 stage" in managers["coordinator"].until("READY=1")
        managers["coordinator"].until("WATCHDOG=1")

        stage = start("stage", "join", "--stage", "1", "--coordinator", address)
        managers["stage"].until("READY=1")
        managers["stage"].until("STATUS=the ring is up")
        managers["coordinator"].until("STATUS=the ring is up")
        managers["stage"].until("WATCHDOG=1")

        # The loop stands still: not a word, until it goes on.
        stage.signal(signal.SIGSTOP)
        managers["stage"].heard(timeout=BEAT_S)
        assert managers["stage"].heard(timeout=4 * BEAT_S) == []
        stage.signal(signal.SIGCONT)
        managers["stage"].until("WATCHDOG=1")

        for name, command in (("stage", stage), ("coordinator", coordinator)):
            managers[name].heard()
            command.signal(signal.SIGTERM)
            assert managers[name].until("STOPPING=1").endswith("STATUS=stopped by SIGTERM")
            assert command.done().code == 0
