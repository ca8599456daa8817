"""Slowness: how slow this machine is, as the start of this program has shown.

Limits that are there against strangers and stuck loops grow with it, as what they wait for does.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

USUAL_START_S = 2.0
"""Seconds that a program takes until its modules, torch not among them, are imported: 0.6 on an
x86 core, if they are in memory."""

MOST = 10.0
"""A board that has just been switched on may read for minutes."""

_slowness = 1.0


def slowness() -> float:
    """How many times as long as usual things take here: 1 to MOST, 1 until `started` was called."""
    return _slowness


def started() -> float:
    """Called as soon as the modules of a command are imported: see how long that took, and return
    what `slowness` returns from now on."""
    global _slowness
    _slowness = min(max(_age() / USUAL_START_S, 1.0), MOST)
    return _slowness


def _age() -> float:
    """Seconds since this process began, whatever becomes of the time of day meanwhile: that of a
    board without a battery for its clock jumps by years while the first programs start."""
    behind_name = Path("/proc/self/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    began = int(behind_name[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began
