"""A child process: its log, its restarts, and the end of a loop that hangs."""

from __future__ import annotations

import signal
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.daemon import child_process
from edgespec.daemon.child_process import ChildProcess, last_words

# Says who it is; then does what its first word says.
PROGRAM = """
import os, signal, sys, time
print(os.getpid(), *sys.argv[1:], file=sys.stderr, flush=True)
from edgespec.daemon.notify import Notifier
notifier = Notifier(slow=float(os.environ.get("SLOW", 1)))
if sys.argv[1] == "end":
    print("12:00:00 error: no more", file=sys.stderr)
    sys.exit(int(sys.argv[2]))
until = time.monotonic() + float(sys.argv[2])
while time.monotonic() < until:
    notifier._next_beat = 0.0
    notifier.beat()
    time.sleep(0.02)
if sys.argv[1] == "hang":
    notifier.ready("hangs soon")
    print("hanging", file=sys.stderr, flush=True)
    time.sleep(3600)
"""


class Child(ChildProcess):
    """Is started again `times` times."""

    def __init__(self, folder: Path, *words: str, times: int = 0, watched: bool = False) -> None:
        command = [sys.executable, "-c", PROGRAM, *words]
        self.log_file = folder / "log"
        self.codes: list[int] = []
        self.times = times
        super().__init__("it", command, {}, self.log_file, is_watched=watched)

    def again_after(self, code: int, lived: float) -> float | None:
        self.codes.append(code)
        assert lived > 0.0
        return 0.01 if len(self.codes) <= self.times else None

    @property
    def pids(self) -> list[int]:
        """Of all that have said who they are."""
        lines = self.log_file.read_text().splitlines() if self.log_file.exists() else []
        return [int(line.split()[0]) for line in lines if line[:1].isdecimal() and ":" not in line]


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def is_there(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_it_is_started_again_and_its_log_tells_of_every_time(tmp_path: Path) -> None:
    with Child(tmp_path, "end", "3", times=2) as child:
        assert isinstance(child, Child)
        until(lambda: len(child.codes) == 3)
        assert child.codes == [3, 3, 3]
        assert len(set(child.pids)) == 3
        assert child.last_words == "no more"
        assert stat.S_IMODE(child.log_file.stat().st_mode) == 0o600


def test_it_ends_when_it_is_left_and_is_not_started_again(tmp_path: Path) -> None:
    with Child(tmp_path, "run", "3600", times=9) as child:
        assert isinstance(child, Child)
        until(lambda: len(child.pids) == 1)
    assert not is_there(child.pids[0])
    assert child.codes == []


def test_a_loop_that_hangs_is_ended_and_one_that_never_began_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "STUCK_S", 0.5)
    monkeypatch.setattr(child_process, "LOOK_S", 0.05)
    with Child(tmp_path, "hang", "0.2", watched=True) as child:
        assert isinstance(child, Child)
        until(lambda: child.codes == [-signal.SIGABRT])
    (tmp_path / "log").unlink()
    with Child(tmp_path, "hang", "0", watched=True) as child:
        assert isinstance(child, Child)
        until(lambda: "hanging" in child.last_words)
        time.sleep(1.0)
        assert child.codes == []


def test_a_loop_on_a_slow_machine_has_more_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "STUCK_S", 0.25)
    monkeypatch.setattr(child_process, "LOOK_S", 0.05)
    monkeypatch.setenv("SLOW", "8")
    began = time.monotonic()
    with Child(tmp_path, "hang", "0.2", watched=True) as child:
        assert isinstance(child, Child)
        until(lambda: child.codes == [-signal.SIGABRT])
    assert "hanging" in child.last_words
    assert time.monotonic() - began > 2.0  # since its last beat


def test_a_log_that_has_grown_long_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "MOST_LOG", 100)
    (tmp_path / "log").write_text("old\n" * 26)
    with Child(tmp_path, "end", "0") as child:
        assert isinstance(child, Child)
        until(lambda: child.codes == [0])
    assert "old" not in (tmp_path / "log").read_text()


def test_a_log_that_cannot_be_written_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    with Child(tmp_path, "end", "0", times=1) as child:
        assert isinstance(child, Child)
        until(lambda: len(child.codes) == 2)
        assert child.codes == [1, 1]


def test_last_words_are_an_error_with_all_its_lines(tmp_path: Path) -> None:
    log_file = tmp_path / "log"
    log_file.write_text("12:00:00 loading\n12:00:01 error: one\n two\n")
    assert last_words(log_file) == "one\n two"
    log_file.write_text("12:00:00 loading\n12:00:01 stopped\n")
    assert last_words(log_file) == "stopped"
