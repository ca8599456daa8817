"""Timing work and round trips: several runs, within a budget of time; medians and spreads."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from edgespec.config import Address
from edgespec.net.keys import Identity
from edgespec.runtime.client import Client

LEAST_RUNS = 3
"""Runs of each piece of work after the warm-up run, if OVERRUN allows it."""
OVERRUN = 2
"""Times the budget after which fewer runs, even the one that warms up, have to do."""
MOST_RUNS = 1000
BURST_SECONDS = 0.02
"""Short work is repeated for so long before it is the next piece's turn."""

Clock = Callable[[], float]
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Sample:
    """How long the runs of one piece of work took, in seconds."""

    seconds: tuple[float, ...]

    @property
    def least(self) -> float:
        """The fastest run, the least disturbed one."""
        return min(self.seconds)

    @property
    def median(self) -> float:
        """The median run, which disturbed runs do not change."""
        return median(self.seconds)

    def __str__(self) -> str:
        return (
            f"median of {len(self.seconds)} runs, {shown(self.least)} to {shown(max(self.seconds))}"
        )


def timed(
    works: Mapping[Key, Callable[[], object]], seconds: float, clock: Clock = time.perf_counter
) -> dict[Key, Sample]:
    """Run every piece of work by turns for about `seconds` in all.

    By turns, so that what changes while they are measured (clocks, heat, other processes) meets
    all of them. Each piece must be done when it returns. One run of each comes first and does not
    count, unless these alone take far too long.
    """
    start = clock()
    first = {key: _run(work, clock) for key, work in works.items()}
    if clock() - start >= OVERRUN * seconds:
        return {key: Sample((took,)) for key, took in first.items()}
    runs: dict[Key, list[float]] = {key: [] for key in works}
    while True:
        for key, work in works.items():
            runs[key] += _burst(work, clock)
        fewest, elapsed = min(map(len, runs.values())), clock() - start
        limit = seconds if fewest >= LEAST_RUNS else OVERRUN * seconds
        if elapsed >= limit or fewest >= MOST_RUNS:
            break
    return {key: Sample(tuple(measured)) for key, measured in runs.items()}


def round_trips(
    coordinator: Address,
    identity: Identity,
    wait_s: float,
    most: int,
    seconds: float = math.inf,
    clock: Clock = time.perf_counter,
) -> Sample:
    """From asking a coordinator for its status to having it: at most `most` runs in `seconds`.

    Raises PeerLost if there is no answer within `wait_s`, AccessRefused for a key not accepted.
    """
    found: list[float] = []
    with Client(coordinator, identity, wait_s) as client:
        client.status()  # connecting is not a trip
        end = clock() + seconds
        while len(found) < most and clock() < end:
            found.append(_run(client.status, clock))
    return Sample(tuple(found))


def _burst(work: Callable[[], object], clock: Clock) -> list[float]:
    found: list[float] = []
    while sum(found) < BURST_SECONDS:
        found.append(_run(work, clock))
    return found


def _run(work: Callable[[], object], clock: Clock) -> float:
    start = clock()
    work()
    return clock() - start


def shown(seconds: float) -> str:
    """A time with its unit, three digits."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"
