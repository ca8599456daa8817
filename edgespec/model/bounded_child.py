"""Bounded child: what a process does that may take little time and memory, and is killed otherwise.

Its parent (model/bounded_process.py) kills it when its time is over; and it may take so much memory
beside what it starts with. It reads JSON, one line each: first an object with "parent" and
"seconds", to which it answers {} when it is ready, then one question a line, each of which it
answers with an object.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

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
