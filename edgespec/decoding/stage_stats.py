"""Stage stats: what a stage has done, in growing numbers for its metrics, and run by run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from edgespec.machines.effects import Effect, SendCoordinator
from edgespec.wire.snapshots import MOST_RUNS, StageActivity, StageRun

ROW_CLASSES = ("1", "2", "3-4", "5-8", "9-16", "17-32", "33-64", "65+")
"""Sizes of blocks that are told apart, in rows."""

RAN_S = 1 / 4
"""Seconds between two messages in which a stage tells its runs."""

LONGEST_WATCH_S = 30.0
"""A subscription lasts so many seconds at most, so that a client that is gone soon costs
nothing."""


@dataclass(slots=True)
class BlockTimes:
    """Blocks of about as many rows: how many, and the seconds that they took together."""

    blocks: int = 0
    seconds: float = 0.0

    def ran(self, seconds: float) -> None:
        """One has ended."""
        self.blocks += 1
        self.seconds += max(seconds, 0.0)


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
        self.times[min((rows - 1).bit_length(), len(ROW_CLASSES) - 1)].ran(seconds)

    def handed_on(self, rows: int) -> None:
        """A segment with so many rows has left."""
        self.segments += 1
        self.emptied += not rows

    def refused(self) -> None:
        """A request had to end."""
        self.faults += 1

    def joined(self) -> None:
        """It has a place in another ring."""
        self.rings += 1


@dataclass(slots=True)
class RunLog:
    """A stage's runs, as long as the coordinator observes them."""

    _until: float = float("-inf")
    _next: float = float("-inf")
    _runs: deque[tuple[float, StageRun]] = field(default_factory=lambda: deque(maxlen=MOST_RUNS))

    def observe(self, seconds: float, now: float) -> None:
        """Tell runs for so long."""
        self._until = now + min(seconds, LONGEST_WATCH_S)

    def ended(self, request: int, seq: int, since: float, rows: int, kept: int, now: float) -> None:
        """The stage has computed `rows` since then, of which `kept` are wanted still."""
        if now < self._until:
            run = StageRun(0, request, seq, 0.0, max(now - since, 0.0), rows, rows - kept)
            self._runs.append((now, run))

    def deadline(self) -> float | None:
        """When there is something to be told."""
        return self._next if self._runs else None

    def tell(self, now: float) -> list[Effect]:
        """The runs, if it is time for them."""
        if not self._runs or now < self._next:
            return []
        self._next = now + RAN_S
        runs = aged(self._runs, now)
        self._runs.clear()
        return [SendCoordinator(StageActivity(runs))]


def aged(runs: Iterable[tuple[float, StageRun]], now: float) -> tuple[StageRun, ...]:
    """Runs and when they ended, as they are told now."""
    return tuple(replace(run, ago=max(now - ended, 0.0)) for ended, run in runs)
