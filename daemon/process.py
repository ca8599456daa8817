"""What every daemon process needs: logging, ending with its parent, exit codes."""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from edgespec.ring.effects import Stop
from edgespec.ring.health import LINE_CHARS, printable
from edgespec.ring.reports import STILL_S

PARENT = "EDGESPEC_PARENT"
"""Environment variable: id of the process that this daemon must not outlive (set by `demo`)."""

BESIDE = "EDGESPEC_BESIDE"
"""Environment variable of the coordinator's own stage, set by `serve`: what Beside says."""

ENOUGH_FILES = 65536

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_CANCELLED = 130
"""Ended with Ctrl-C, as shells have it."""
EXIT_NO_READER = 141
"""What read the output went away: what shells have of a program that SIGPIPE ends."""

TRACEBACK_CHARS = 20_000
"""Of one entry of the log."""

_PR_SET_PDEATHSIG = 1

log = logging.getLogger(__name__)


def start_logging() -> None:
    """Log to standard error; of libraries only warnings."""
    logging.basicConfig(stream=sys.stderr)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(BoundedLines("%(asctime)s %(message)s", "%H:%M:%S"))
    logging.getLogger("edgespec").setLevel(logging.INFO)


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


@dataclass(frozen=True, slots=True)
class Beside:
    """What the coordinator's own stage is told; by default, as any other stage.

    `listen`: the address that its data socket listens on; `reserved`: bytes of the memory that are
    for the coordinator; `shared_device`: see config.StageConfig.
    """

    listen: str = ""
    reserved: int = 0
    shared_device: int = -1

    @staticmethod
    def read() -> Beside:
        """From the environment."""
        words = os.environ.get(BESIDE, "").split(" ")
        return Beside(words[0], *map(int, words[1:]))

    @property
    def environment(self) -> dict[str, str]:
        """For the stage's process."""
        return {BESIDE: f"{self.listen} {self.reserved} {self.shared_device}"}


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
