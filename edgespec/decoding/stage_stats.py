"""Stage stats: what a stage has done since it started, in growing numbers, for its metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

ROW_CLASSES = ("1", "2", "3-4", "5-8", "9-16", "17-32", "33-64", "65+")
"""Sizes of blocks that are told apart, in rows."""


@dataclass(slots=True)
class BlockTimes:
    """Blocks of about as many rows: how many, and the seconds that they took together."""

    blocks: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class StageStats:
    """`segments`: handed on; `emptied` of them with no row left. `rows`: computed; `wasted` of them
    for guesses that were pruned before they were done. `faults`: requests that it had to
    end. `rings`: that it had a place in. `times[c]`: of the blocks of ROW_CLASSES[c]."""

    segments: int = 0
    emptied: int = 0
    rows: int = 0
    wasted: int = 0
    faults: int = 0
    rings: int = 0
    times: tuple[BlockTimes, ...] = field(
        default_factory=lambda: tuple(BlockTimes() for _ in ROW_CLASSES)
    )

    def ran(self, rows: int, kept: int, seconds: float) -> None:
        """A block of that many rows (at least 1) has ended; so many of them are wanted still."""
        self.rows += rows
        self.wasted += rows - kept
        times = self.times[min((rows - 1).bit_length(), len(ROW_CLASSES) - 1)]
        times.blocks += 1
        times.seconds += max(seconds, 0.0)
