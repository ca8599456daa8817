"""Draft passes: what a draft source ran, for charging it."""

from __future__ import annotations

from typing import NamedTuple


class DraftPass(NamedTuple):
    """A forward pass over so many rows, by the draft source of that name."""

    rows: int
    source: str
