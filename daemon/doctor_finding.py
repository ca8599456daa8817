"""A finding of `edgespec doctor`."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARNING, BLOCKED = "ok", "warning", "blocked"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `state`: OK, WARNING (edgespec runs) or BLOCKED."""

    name: str
    state: str
    text: str
