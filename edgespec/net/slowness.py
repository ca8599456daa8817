"""Slowness: how slow this machine is, as the start of this program has shown.

Limits that are there against strangers and stuck loops grow with it, as what they wait for does.
"""

from __future__ import annotations

import time

import psutil

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
    took: float = time.time() - psutil.Process().create_time()
    _slowness = min(max(took / USUAL_START_S, 1.0), MOST)
    return _slowness
