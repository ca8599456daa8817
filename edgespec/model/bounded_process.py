"""Bounded process: a child that does one kind of work, is stopped if it takes too long, and starts
again; and what that child does, which may take so much memory beside what it starts with.

It reads JSON, one line each: first an object with "parent" and "seconds", to which it answers {}
when it is ready, then one question a line, each of which it answers with an object.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import resource
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import IO, Any

import psutil

from edgespec.errors import ModelError
from edgespec.types.own_module import own_command


class BoundedProcess:
    """A process that answers JSON with JSON (see `serve`).

    It ends with this one, and with the thread that started it.
    """

    def __init__(
        self,
        module: str,
        what: str,
        first: Callable[[], dict[str, object]],
        seconds: float,
        patience: float = 1.0,
    ) -> None:
        """`module`: what it runs. `what` it is of, for messages. `first`: what it is told as it
        starts. `seconds`: its limit for each answer, of computing; `patience`: times as long it may
        take by the clock, on a machine that has other work."""
        self._module = module
        self._what = what
        self._first = first
        self.seconds = seconds
        self.patience = patience
        self.child: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the process, if it does not run; do not wait until it is ready.

        Raises ModelError if it cannot be started.
        """
        if self.child is not None and self.child.poll() is None:
            return
        self._stop()
        quiet = {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1", "OMP_NUM_THREADS": "1"}
        try:
            self.child = subprocess.Popen(
                own_command(self._module),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **quiet, "OPENBLAS_NUM_THREADS": "1"},
            )
        except OSError as problem:
            raise ModelError(
                f"cannot start the process of {self._what}: {problem.strerror}"
            ) from None
        # It gets ready meanwhile: what is asked first need not wait for it.
        self._tell({"parent": os.getpid(), "seconds": self.seconds, **self._first()})

    def ask(self, what: object) -> dict[str, str] | None:
        """Its answer; None if it took too much time or memory, or died.

        Raises ModelError if it cannot be started.
        """
        with self._lock:
            self.start()
            if not self._is_ready:
                if not self._gets_ready():
                    raise ModelError(f"the process of {self._what} does not start")
                self._is_ready = True
            answer = self._answer(self.seconds * self.patience, what)
            if answer is None:
                with contextlib.suppress(ModelError):
                    self.start()  # it gets ready for the next question
            return answer

    def close(self) -> None:
        child = self.child
        if child is not None:
            child.kill()  # the thread that waits for it gets an answer
        with self._lock:
            self._stop()

    def _gets_ready(self) -> bool:
        """It imports packages, on a board that is loading: that may take any time."""
        child = self.child
        assert child is not None
        assert child.stdout is not None
        if speaks(child.stdout, child.pid, STILL_S):
            return self._answer(self.seconds) is not None
        self._stop()
        return False

    def _tell(self, what: object) -> None:
        child = self.child
        assert child is not None
        assert child.stdin is not None
        with contextlib.suppress(OSError):  # it has died: there will be no answer
            child.stdin.write(json.dumps(what).encode() + b"\n")
            child.stdin.flush()

    def _answer(self, seconds: float, asked: object = None) -> dict[str, str] | None:
        """Its answer to what is asked now, or was told before; None, and the process is over, if
        there is none in time."""
        child = self.child
        assert child is not None
        assert child.stdout is not None
        late = threading.Timer(seconds, child.kill)
        late.daemon = True
        late.start()
        try:
            if asked is not None:
                self._tell(asked)
            line = child.stdout.readline()
        except OSError:
            line = b""
        finally:
            late.cancel()
        if line.endswith(b"\n"):
            answer: dict[str, str] = json.loads(line)
            return answer
        self._stop()
        return None

    def _stop(self) -> None:
        child, self.child, self._is_ready = self.child, None, False
        if child is None:
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # what was not written when it died
                pipe.close()


STILL_S = 60.0
"""A process that has neither computed nor read for so many seconds is given up: importing torch
from an SD card may take minutes."""


def speaks(stream: IO[bytes], writer: int, still_s: float) -> bool:
    """Whether its writer, a process, has said something or ended; waits for that, and no longer
    than the writer does something within `still_s` seconds."""
    worked = -1.0
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while not selector.select(still_s):
            before, worked = worked, _work_of(writer)
            if worked == before:
                return False
    return True


def _work_of(process: int) -> float:
    """A figure that grows while it computes, or reads from a disk: that is a switch each time."""
    try:
        of = psutil.Process(process)
        times, switches = of.cpu_times(), of.num_ctx_switches()
    except (psutil.Error, OSError):
        return 0.0
    return float(times.user + times.system + switches.voluntary)


MEMORY = 256 << 20
"""Bytes that it may take for its work."""

MOST_WORDS = 300
"""Characters of a problem that it tells."""

_PR_SET_PDEATHSIG = 1


def serve(prepare: Callable[[Mapping[str, Any]], Callable[[bytes], dict[str, str]]]) -> None:
    """Answer until there are no more questions; `prepare` makes what answers them, of what came
    first."""
    asked = json.loads(sys.stdin.buffer.readline())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != asked["parent"]:  # it died before the kernel was asked
        sys.exit(1)
    answer = prepare(asked)
    _bound_memory()
    _say({})
    for line in sys.stdin.buffer:
        _bound_time(asked["seconds"])
        _say(answer(line))


def _bound_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _bound_time(seconds: float) -> None:
    """The kernel ends this process after so much more computing, or up to a second more."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = math.ceil(used.ru_utime + used.ru_stime + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))


def _say(answer: dict[str, str]) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()
