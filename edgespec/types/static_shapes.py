"""Static shapes: for which numbers of rows and slots, and of how many layers, passes are captured.

What runs layers on CUDA (model.static_pass) and what charges for it (planning.costs) share them.
"""

from __future__ import annotations

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
"""Rows of a captured pass; fewer are padded, more are never captured."""

GROUP_LAYERS = 4
"""Layers of one graph. Between two graphs a pass may end early, or let a head in."""

_LEAST_SLOTS = 256


def row_bucket(rows: int) -> int | None:
    """The rows of the captured pass that runs `rows` >= 1 rows; None if none does."""
    return next((most for most in ROW_BUCKETS if rows <= most), None)


def slot_bucket(slots: int) -> int:
    """How many slots a captured pass attends to where `slots` >= 1 are in use.

    Multiples of 256; from 1024 on four steps each time the context doubles, so that at most a
    fifth of what is read is no row.
    """
    step = max(_LEAST_SLOTS, 1 << max(0, (slots - 1).bit_length() - 3))
    return -(-slots // step) * step


def room_for(slots: int) -> int:
    """Slots that a cache is to have whose passes are captured where it lies, if `slots` are used:
    it must not move each time that some more are."""
    return -(-slots // _LEAST_SLOTS) * _LEAST_SLOTS


def groups(layers: int) -> list[tuple[int, int]]:
    """First layer and end of each graph of a block of so many layers, counted in the block."""
    starts = range(0, layers, GROUP_LAYERS)
    return [(first, min(first + GROUP_LAYERS, layers)) for first in starts]
