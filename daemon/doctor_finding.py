"""A finding: one thing that `edgespec doctor` looked at, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARNING, BLOCKED = "ok", "warning", "blocked"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `state`: OK, WARNING (it runs all the same) or BLOCKED."""

    name: str
    state: str
    text: str
