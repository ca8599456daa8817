"""What the log says while a step goes on, and how much of what others say."""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from support.terminals import Terminal

from edgespec.daemon import process
from edgespec.daemon.process import TRACEBACK_CHARS, BoundedLines, LogLines, going_on
from edgespec.ring.health import LINE_CHARS


def test_a_step_that_lasts_is_told_until_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "edgespec")
    told = threading.Event()

    class Twice(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if len(caplog.messages) >= 2:
                told.set()

    logging.getLogger("edgespec").addHandler(watching := Twice())
    try:
        with going_on("counting", every=0.01):
            assert told.wait(60.0)
    finally:
        logging.getLogger("edgespec").removeHandler(watching)
    said = caplog.messages
    assert all(re.fullmatch(r"still counting \(\d+ s\)", words) for words in said)
    threading.Event().wait(0.05)
    assert caplog.messages == said, "it has ended"


def test_a_step_that_fails_is_no_longer_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "edgespec")
    with pytest.raises(ValueError, match="no"), going_on("counting", every=60.0):
        raise ValueError("no")
    assert threading.active_count() == len(threading.enumerate())
    assert not [one for one in threading.enumerate() if one.name == "edgespec-still"]
    assert caplog.messages == []


# --- lines of the log -----------------------------------------------------------------------------

WAIT = [f"stage 1 (board): loading {n} of 40 layers" for n in range(1, 4)]
LINES = ["stage 1 (board) joined", "stage 2 (board) joined", *WAIT, "the ring is up"]


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, float], None]:
    """Writes a line at a time."""
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: now))
    handlers: list[LogLines] = []
    now = 0.0

    def write(text: str, at: float) -> None:
        nonlocal now
        now = at
        if not handlers:
            handlers.append(LogLines())  # the streams are those of the test by now
        handlers[0].handle(logging.makeLogRecord({"msg": text}))

    return write


def test_on_a_terminal_what_goes_on_is_one_line(logged: Callable[[str, float], None]) -> None:
    with Terminal(10, 30) as terminal:
        for number, line in enumerate(LINES):
            logged(line, number)
        logged("still importing torch, which is a long line (3 s)", 99.0)
        lines = terminal.raw.split(process.ERASE)[1:]
    kept = [*LINES[:3], LINES[-1]]
    assert [line.rstrip() for line in lines if line.endswith("\n")] == kept
    assert [line for line in lines if not line.endswith("\n")] == [
        f"{line[:29]}\r" for line in (*WAIT[1:], "still importing torch, which i")
    ]


def test_elsewhere_what_goes_on_is_told_once_a_minute(
    logged: Callable[[str, float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    for second in range(0, 300, 2):
        logged(f"still importing torch ({second} s)", second)
    logged("the ring is up", 300.0)
    said = capsys.readouterr().err.splitlines()
    told = [*range(0, 60, 2), 118, 178, 238, 298]
    assert said == [*(f"still importing torch ({second} s)" for second in told), LINES[-1]]


def test_what_others_say_is_cut_before_the_log() -> None:
    long = "\x1b[2J\u202e" + 1_000 * ("x" * 5_000 + "\n")
    try:
        raise ValueError(long)
    except ValueError:
        raised = sys.exc_info()
    lines = BoundedLines("%(asctime)s %(message)s", "%H:%M:%S")
    short = logging.LogRecord("edgespec", logging.INFO, "", 1, "a line\nand another", (), None)
    assert lines.format(short)[8:] == " a line\nand another"
    for raises, most in ((None, LINE_CHARS + 20), (raised, LINE_CHARS + TRACEBACK_CHARS + 40)):
        record = logging.LogRecord("edgespec", logging.INFO, "", 1, "it is: %s", (long,), raises)
        text = lines.format(record)
        assert len(text) <= most
        assert all(line.isprintable() for line in text.split("\n"))
        assert text[8:14] == " it is"
