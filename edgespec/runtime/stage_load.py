"""Stage load: how busy a stage is, and how fast compared with its own best."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from msgspec.structs import replace

from edgespec.machines.effects import Effect, RunBlock
from edgespec.machines.events import BlockDone, ComputeFailed, Event
from edgespec.wire.messages import Health

RECENT_S = 5.0
"""Seconds of the past that a report covers."""

WINDOW = 7
"""The best time is the lowest median of so many runs: a single one may be quick by chance."""

FEW_ROWS = 16
"""Most rows of a run that is reported: prompts, which come in longer chunks, would blur them."""


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of the block; `ratio`: its time over the best time, None without one."""

    ended: float
    rows: int
    seconds: float
    ratio: float | None


@dataclass(slots=True)
class _SizeClass:
    """Times of runs of about the same size."""

    latest: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    best: float | None = None

    def add(self, seconds: float) -> float | None:
        """Returns the time over the best time, None if there is none yet."""
        self.latest.append(seconds)
        if len(self.latest) == WINDOW:
            now = median(self.latest)
            self.best = now if self.best is None else min(self.best, now)
        return seconds / self.best if self.best else None


class StageLoad:
    """The share of its time that a stage computes, and its times over its own best times.

    Times are compared between runs of about as many rows that see about as many rows, since both
    cost time on a healthy device too.
    """

    def __init__(self) -> None:
        self._running: dict[int, tuple[float, RunBlock]] = {}  # by job, and since when
        self._free_at = self._told_at = float("-inf")
        self._busy = 0.0
        self._classes: dict[tuple[int, int], _SizeClass] = {}
        self._recent: deque[_Run] = deque(maxlen=1024)
        self._block: object = None

    def take_place(self, block: object) -> None:
        """A ring begins; forget the times of another block."""
        if block != self._block:
            self._block = block
            self._classes.clear()
            self._recent.clear()

    def asked(self, effects: Iterable[Effect], now: float) -> None:
        for effect in effects:
            if isinstance(effect, RunBlock):
                self._running[effect.job] = now, effect

    def ended(self, event: Event, now: float) -> None:
        if not isinstance(event, BlockDone | ComputeFailed):
            return
        begun = self._running.pop(event.job, None)
        if begun is None:
            return
        start = max(begun[0], self._free_at)
        self._busy += max(now - max(start, self._told_at), 0.0)
        self._free_at = now
        if isinstance(event, BlockDone) and event.hidden is not None:
            self._add(begun[1], now - start, now)

    def _add(self, run: RunBlock, seconds: float, now: float) -> None:
        rows = len(run.rows)
        # A context below 512 rows costs next to nothing beside the layers' weights.
        key = ((rows - 1).bit_length(), max(run.slots >> 9, 0).bit_length())
        ratio = self._classes.setdefault(key, _SizeClass()).add(seconds)
        self._recent.append(_Run(now, rows, seconds, ratio))

    def health(self, device: Health, now: float) -> Health:
        """The device's health with the load added; begins a new period."""
        if self._running:
            start = max(min(since for since, _ in self._running.values()), self._free_at)
            self._busy += max(now - max(start, self._told_at), 0.0)
        passed = now - self._told_at
        busy, self._busy, self._told_at = self._busy, 0.0, now
        recent = [run for run in self._recent if now - run.ended <= RECENT_S]
        few = [run.seconds for run in recent if 1 < run.rows <= FEW_ROWS]
        return replace(
            device,
            busy=min(busy / passed, 1.0) if passed > 0.0 else 0.0,
            slowdown=_median([run.ratio for run in recent if run.ratio is not None]),
            one_row=_median([run.seconds for run in recent if run.rows == 1]),
            few_rows=_median(few),
        )


def _median(values: list[float]) -> float:
    return median(values) if values else 0.0
