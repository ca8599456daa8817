"""What a draft source ran."""

from __future__ import annotations

from typing import Protocol

from edgespec.types.draft_pass import DraftPass, DraftWork


class Working(Protocol):
    """A guesser or draft source."""

    sources: tuple[str, ...]

    def take_work(self) -> tuple[DraftWork, ...]:
        """What it did."""


def rows_of(source: Working) -> tuple[int, ...]:
    """Rows of its passes since the last call, each of them one of its members'."""
    work = source.take_work()
    assert all(one.source in source.sources for one in work)
    return tuple(one.rows for one in work if isinstance(one, DraftPass))
