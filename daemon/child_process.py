"""Child process: a program beside the coordinator, watched, started again, and ended with it."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from edgespec.daemon.process import PARENT
from edgespec.errors import EXIT_FAILED

END_S = 5.0
"""Seconds that it gets to end by itself."""

STUCK_S = 30.0
"""One that says that it is alive, and then nothing for so long, is ended: as in the units. One that
asks for more time gets it, as from systemd."""

LOOK_S = 1.0
"""Seconds between two looks at whether it is alive."""

LOG_TAIL = 4_000
"""Characters of a failed process's log that are looked at."""

MOST_LOG = 1 << 20
"""Bytes of a log from which on it begins anew, at a start."""

_ERROR = re.compile(r"^(?:\d\d:\d\d:\d\d|edgespec:) error: (.*)\Z", re.MULTILINE | re.DOTALL)
_TIME = re.compile(r"^\d\d:\d\d:\d\d ")

log = logging.getLogger(__name__)


class ChildProcess(ABC):
    """Runs a command while it is entered; the kernel ends it if this process dies.

    `log_file`: where its standard error goes; None: to ours. With `is_watched` it reports as to
    systemd (daemon.notify), and is ended if its loop hangs.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log_file: Path | None = None,
        *,
        is_watched: bool = False,
    ) -> None:
        own = {PARENT: str(os.getpid())}
        # What systemd gave this process is for this process alone.
        kept = {k: v for k, v in os.environ.items() if k not in ("NOTIFY_SOCKET", "WATCHDOG_PID")}
        self.name = name
        self.command = list(command)
        self.environment = {**kept, **own, **environment}
        self.log_file = log_file
        self._is_watched = is_watched
        self._beats: _Beats | None = None
        self._log_begins = 0
        self._over = threading.Event()
        self.child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        # The kernel ends a child with the thread that started it: this one lives to the end.
        self.thread = threading.Thread(target=self._run, name=f"edgespec-{name}", daemon=True)

    @abstractmethod
    def again_after(self, code: int, lived: float) -> float | None:
        """Seconds until it is started again, after an exit code (minus a signal) and `lived`
        seconds; None: never. It says so in the log."""

    def __enter__(self) -> ChildProcess:
        self._beats = _Beats() if self._is_watched else None
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._over.set()
            child = self.child
        if child is not None:
            _end(child, signal.SIGTERM)
        self.thread.join(END_S)
        if self._beats is not None:
            self._beats.close()

    @property
    def last_words(self) -> str:
        """The error that it logged since its last start, or else its last line; "" without a log
        of its own."""
        return last_words(self.log_file, self._log_begins) if self.log_file is not None else ""

    def _run(self) -> None:
        while True:
            started, code = time.monotonic(), EXIT_FAILED
            try:
                child = self._start()
                if child is not None:
                    code = self._await_end(child)
            except OSError as problem:  # no memory for a process, or no place for its log
                log.warning("%s cannot be started: %s", self.name, problem.strerror or problem)
            if self._over.is_set():
                return
            pause = self.again_after(code, time.monotonic() - started)
            if pause is None or self._over.wait(pause):
                return

    def _await_end(self, child: subprocess.Popen[bytes]) -> int:
        # Without a limit, as a wait with one looks twenty times a second.
        if self._beats is None:
            return child.wait()
        over = threading.Event()
        watch = threading.Thread(target=self._watch, args=(child, self._beats, over), daemon=True)
        watch.start()
        code = child.wait()
        over.set()
        watch.join()
        return code

    def _watch(self, child: subprocess.Popen[bytes], beats: _Beats, over: threading.Event) -> None:
        while not over.wait(LOOK_S):
            if beats.silence() > beats.limit:
                log.warning("%s has hung for %.0f s; it is ended", self.name, beats.limit)
                _end(child, signal.SIGABRT)

    def _start(self) -> subprocess.Popen[bytes] | None:
        with self._lock, contextlib.ExitStack() as stack:
            if self._over.is_set():
                return None
            environment = self.environment
            if self._beats is not None:
                environment = {**environment, **self._beats.begin()}
            stderr = None
            if self.log_file is not None:
                stderr = stack.enter_context(_log_at(self.log_file))
                self._log_begins = stderr.tell()
            self.child = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # the coordinator's is one line, its address
                stderr=stderr,
                env=environment,
                start_new_session=True,  # a Ctrl-C is for the parent, which then ends it
            )
            return self.child


def last_words(log_file: Path, since: int = 0) -> str:
    """The error that a process logged, or else its last line; "" if there is none.

    `since`: bytes of the log before that are of others."""
    try:
        raw = log_file.read_bytes()[since:]
    except OSError:
        return ""
    text = raw.decode(errors="replace")[-LOG_TAIL:].strip()
    error = _ERROR.search(text)
    return error[1] if error else _TIME.sub("", text.rpartition("\n")[2])


def _end(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    child.send_signal(number)
    try:
        child.wait(END_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


@contextlib.contextmanager
def _log_at(path: Path) -> Iterator[IO[bytes]]:
    """The end of a log that only its owner may read."""
    begins_anew = path.exists() and path.stat().st_size > MOST_LOG
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags | (os.O_TRUNC if begins_anew else 0), 0o600)
    with open(descriptor, "ab") as file:
        yield file


class _Beats:
    """What a child reports by sd_notify: whether its loop still turns."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)
        self._socket.bind("")  # an abstract name that the kernel chooses
        self._heard: float | None = None
        self.limit = STUCK_S

    def begin(self) -> dict[str, str]:
        """The environment of a new child."""
        self.silence()
        self._heard, self.limit = None, STUCK_S
        name = self._socket.getsockname().decode().replace("\0", "@")
        return {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": str(round(STUCK_S * 1e6))}

    def silence(self) -> float:
        """Seconds since it reported last; 0 before the first time."""
        with contextlib.suppress(BlockingIOError):
            while True:
                for line in self._socket.recv(1024).split(b"\n"):
                    name, _, value = line.partition(b"=")
                    if line == b"WATCHDOG=1":
                        self._heard = time.monotonic()
                    elif name == b"WATCHDOG_USEC" and value.isdigit():
                        self.limit = int(value) / 1e6
        return 0.0 if self._heard is None else time.monotonic() - self._heard

    def close(self) -> None:
        self._socket.close()
