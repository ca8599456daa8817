"""What every daemon process needs: logging, ending with its parent, exit codes."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NoReturn, TextIO

from edgespec.ring.effects import Stop
from edgespec.ring.reports import STILL_S, report_pause

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

_PR_SET_PDEATHSIG = 1

ERASE = "\r\033[2K"
"""For a terminal: the line that the cursor is on."""

log = logging.getLogger(__name__)


def start_logging() -> None:
    """Log to standard error; of libraries only warnings."""
    stream = sys.stderr
    rewrites = stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
    handler = (OneLine if rewrites else logging.StreamHandler)(stream)
    logging.basicConfig(handlers=[handler], format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("edgespec").setLevel(logging.INFO)


class OneLine(logging.StreamHandler[TextIO]):
    """For a terminal: what goes on is one line, which the next one of its kind replaces.

    Such a line begins with "still", or differs from the last one in its numbers alone. The cursor
    stays at its beginning, so that whatever is written next, by any process, replaces it too.
    """

    _subject = ""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text, before = self.format(record), self._subject
            self._subject = re.sub(r"[\d.]+", "", record.getMessage())
            end = "\n"
            if self._subject == before or self._subject.startswith("still "):
                text, end = text[: os.get_terminal_size(self.stream.fileno()).columns - 1], "\r"
            self.stream.write(f"{ERASE}{text}{end}")
            self.flush()
        except Exception:
            self.handleError(record)

    def erase(self) -> None:
        """Remove what goes on no more."""
        with self.lock or nullcontext():
            self.stream.write(ERASE)
            self.flush()


def is_one_line() -> bool:
    """Whether the log is a terminal, where a line that comes often disturbs nothing."""
    return any(isinstance(handler, OneLine) for handler in logging.getLogger().handlers)


@contextmanager
def going_on(what: str, every: float = STILL_S) -> Iterator[Callable[[str], None]]:
    """Log "still WHAT" every so many seconds, once a minute after the first one, until the step
    that is entered has ended. Yields a function that sets WHAT."""
    began, over, doing = time.monotonic(), threading.Event(), [what]

    def say() -> None:
        waited = 0.0
        while not over.wait(every if is_one_line() else report_pause(every, waited)):
            waited = time.monotonic() - began
            log.info("still %s (%.0f s)", doing[0], waited)

    teller = threading.Thread(target=say, name="edgespec-still", daemon=True)
    teller.start()
    try:
        yield lambda text: doing.__setitem__(0, text)
    finally:
        over.set()
        teller.join()
        for handler in logging.getLogger().handlers:
            if isinstance(handler, OneLine):
                handler.erase()


class Logged:
    """Remarks of a command that runs on as a service: lines of the log."""

    def say(self, text: str) -> None:
        log.info(text)

    def waiting(self, text: str) -> AbstractContextManager[Callable[[str], None]]:
        return going_on(text)


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
