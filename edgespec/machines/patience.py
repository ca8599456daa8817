"""Patience: until when a lost ring is waited for, while what replaces it reports progress."""

from __future__ import annotations

MOST_WAITS = 10
"""A device that reports progress for ever must not be waited for for ever."""


def patience_ends(since: float, progressed: float, limit: float) -> float:
    """When `limit` seconds are over since the wait began, or since the last progress; in any case
    once the wait has taken MOST_WAITS times as long."""
    return min(max(since, progressed) + limit, since + MOST_WAITS * limit)
