"""Progress: whether a process that is still silent does anything; slow machines get their time."""

from __future__ import annotations

import selectors
from typing import IO

import psutil

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
