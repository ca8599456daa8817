"""What every daemon process needs: logging, ending with its parent, exit codes."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TextIO

from edgespec.errors import EXIT_FAILED, EXIT_OK
from edgespec.ring.effects import Stop
from edgespec.ring.health import LINE_CHARS, printable
from edgespec.ring.reports import STILL_S, report_pause

PARENT = "EDGESPEC_PARENT"
"""Environment variable: id of the process that this daemon must not outlive (set by `demo`)."""

BESIDE = "EDGESPEC_BESIDE"
"""Environment variable of the coordinator's own stage, set by `serve`: what Beside says."""

ENOUGH_FILES = 65536

TRACEBACK_CHARS = 20_000
"""Of one entry of the log."""

_PR_SET_PDEATHSIG = 1

_WAITED_FOR = re.compile(r"\b(still|waiting|loading|compiling|not here yet)\b")

_FORMAT = "%(asctime)s %(message)s"

ERASE = "\r\033[2K"
"""For a terminal: the line that the cursor is on."""

log = logging.getLogger(__name__)


def start_logging() -> None:
    """Log to standard error; of libraries only warnings."""
    lines = LogLines()
    lines.setFormatter(BoundedLines(_FORMAT, "%H:%M:%S"))
    logging.basicConfig(handlers=[lines])
    logging.getLogger("edgespec").setLevel(logging.INFO)


class LogLines(logging.StreamHandler[TextIO]):
    """Standard error, where what goes on takes little room.

    That is a line that begins with "still", or that says again, with other numbers alone, what is
    waited for. After the first minute it is told once a minute. On a terminal it is told each time,
    in one line: the cursor stays at its beginning, so that whatever is written next, by any
    process, replaces it.
    """

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self._rewrites = can_rewrite(sys.stderr)
        self._subject = ""
        self._since = self._told = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        subject, now = re.sub(r"[\d.]+", "", record.getMessage()), time.monotonic()
        again = subject == self._subject and _WAITED_FOR.search(subject) is not None
        goes_on = again or subject.startswith("still ")
        if not again:
            self._subject, self._since = subject, now
        elif not self._rewrites and now - self._told < report_pause(0.0, now - self._since):
            return
        self._told = now
        self.terminator = "\r" if goes_on and self._rewrites else "\n"
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if not self._rewrites:
            return text
        if self.terminator == "\r":
            text = text[: shutil.get_terminal_size().columns - 1]
        return ERASE + text

    def erase(self) -> None:
        """Remove the line about what goes on no more."""
        if self._rewrites and self.terminator == "\r":
            self.stream.write(ERASE)
            self.flush()


def can_rewrite(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal that can rewrite a line."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


class BoundedLines(logging.Formatter):
    """Whoever's words are in them: no message is longer than LINE_CHARS, no traceback than
    TRACEBACK_CHARS, of which the end is kept; and neither has control characters."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = _printable(record.message[: LINE_CHARS + 1])
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return _printable(super().formatException(ei)[-TRACEBACK_CHARS:])


def _printable(text: str) -> str:
    return "\n".join(printable(line, LINE_CHARS) for line in text.split("\n"))


@contextmanager
def going_on(what: str, every: float = STILL_S) -> Iterator[None]:
    """Log "still WHAT" every so many seconds until the step that is entered has ended."""
    began, over = time.monotonic(), threading.Event()

    def say() -> None:
        while not over.wait(every):
            log.info("still %s (%.0f s)", what, time.monotonic() - began)

    teller = threading.Thread(target=say, name="edgespec-still", daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()
        for handler in logging.getLogger().handlers:
            if isinstance(handler, LogLines):
                handler.erase()


class Logged:
    """Remarks of a command that runs on as a service: lines of the log."""

    def say(self, text: str) -> None:
        log.info(text)

    def waiting(self, text: str) -> AbstractContextManager[None]:
        return going_on(text)


@dataclass(frozen=True, slots=True)
class Beside:
    """What the coordinator's own stage is told; by default, as any other stage.

    `listen`: the address that its data socket listens on; `reserved`: bytes of the memory that are
    for the coordinator.
    """

    listen: str = ""
    reserved: int = 0

    @staticmethod
    def read() -> Beside:
        """From the environment."""
        words = os.environ.get(BESIDE, "").split(" ")
        return Beside(words[0], *map(int, words[1:]))

    @property
    def environment(self) -> dict[str, str]:
        """For the stage's process."""
        return {BESIDE: f"{self.listen} {self.reserved}"}


def take_file_descriptors() -> None:
    """Raise the limit of open files: each connection is one, and unknown peers, which keep theirs
    open for some seconds of handshake, must not use up those of the ring."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_FILES)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def end_with_parent() -> None:
    """If a parent is named, ask the kernel to terminate this process when that one dies.

    The coordinator's own stage is killed: without one, there is nothing that it could finish.
    """
    parent = os.environ.get(PARENT)
    if parent is None:
        return
    if sys.platform == "linux":
        number = signal.SIGKILL if BESIDE in os.environ else signal.SIGTERM
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != int(parent):  # it died before the kernel was asked
        sys.exit(EXIT_FAILED)


def leave(code: int) -> NoReturn:
    """End this process now: its sockets are closed, nothing else is left to do.

    An orderly exit of torch and transformers takes seconds on a small board, while other nodes wait
    for this process, and may crash if a forward pass is still running.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def exit_code(stop: Stop) -> int:
    """Log why a node ended and turn it into the process's exit code."""
    if stop.failed:
        log.error("error: %s", stop.reason)
        return EXIT_FAILED
    log.info(stop.reason)
    return EXIT_OK
