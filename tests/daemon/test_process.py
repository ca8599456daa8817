"""What the log says while a step goes on, and how much of what others say."""

from __future__ import annotations

import logging
import re
import sys
import threading

import pytest

from edgespec.daemon.process import TRACEBACK_CHARS, BoundedLines, going_on
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
