"""Reports: how often the log says that something which takes long goes on."""

from __future__ import annotations

STILL_S = 2.5
"""Seconds without news while a ring comes up, after which the log says what is still done."""

LONG_REPORT_S = 60.0
"""The same once that has gone on for longer than so many seconds."""


def report_pause(usual: float, waited: float) -> float:
    """Seconds from one line to the next about what has taken `waited` seconds so far; `usual`: at
    the beginning."""
    return usual if waited < LONG_REPORT_S else LONG_REPORT_S
