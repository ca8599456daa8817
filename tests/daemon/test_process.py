"""What the log says while a step goes on."""

from __future__ import annotations

import logging
import re
import threading

import pytest

from edgespec.daemon.process import going_on


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
