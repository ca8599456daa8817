"""Row times: how long rows take, learnt from what they took, whatever else the devices were at.

Noise only ever adds to a time: a device that is busy, throttled or swapping is late, never early.
So what counts is the quicker half of the newest times. A mean took one late job in a hundred for
the price of rows; then fewer rows were sent, and the many never timed again.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence

RECENT = 15
"""Newest times that count, of each class of rows: contexts grow, and devices heat up."""

PROBE = 64
"""Every so many times, those classes are left out that none of the last PROBE times was of, if more
rows look cheaper without them: they are timed again."""

ENOUGH = 8
"""Times of a class from which on it is well known."""

OFF = 0.1
"""A stage that is further from the shape of all stages has one of its own: another kind of device.
"""

MOST_TIMES = 1000.0
"""No stage is believed to be further than this from what is usual, whatever it says."""

LONGEST_S = 3600.0
"""No stage is believed to take longer than this for a segment, whatever it says."""

Points = list[tuple[float, float]]
"""Seconds by rows, both ascending; straight lines lie between them."""


class Newest:
    """The newest times of one thing, each with the rows that it was of."""

    def __init__(self, most: int = RECENT) -> None:
        self._most = most
        self._times: deque[tuple[float, float]] = deque()
        self._in_order: list[tuple[float, float]] = []
        self._low: tuple[float, float] | None = None
        self.at = 0
        """When the last one came, by the count of whoever keeps this."""
        self.is_off = False
        """Whether this is well known, and was another time than it was compared with last."""

    def __len__(self) -> int:
        return len(self._times)

    def add(self, seconds: float, rows: int, at: int) -> None:
        """One more."""
        if len(self._times) == self._most:
            del self._in_order[bisect_left(self._in_order, self._times.popleft())]
        self._times.append((seconds, rows))
        insort(self._in_order, (seconds, rows))
        self._low, self.at = None, at

    def compare(self, line: Points, factor: float) -> None:
        """With `factor` times what that line says."""
        rows, seconds = self.low
        usual = factor * _at(line, rows)
        self.is_off = len(self) >= ENOUGH and abs(seconds - usual) > OFF * usual

    @property
    def low(self) -> tuple[float, float]:
        """The mean rows and seconds of the quicker half."""
        if self._low is None:
            half = self._in_order[: (len(self) + 1) // 2]
            seconds, rows = map(sum, zip(*half, strict=True))
            self._low = rows / len(half), seconds / len(half)
        return self._low


class _Line:
    """Seconds by rows, as straight lines between points that are learnt."""

    def __init__(self) -> None:
        self._line: Points = []
        self._seconds: dict[float, float] = {}  # what was asked for since something was learnt

    def _changes(self) -> None:
        """Something is learnt."""
        self._line = []
        self._seconds.clear()

    @property
    def line(self) -> Points:
        """What is learnt: of each class the rows and the seconds."""
        if not self._line:
            self._line = self._learnt()
        return self._line

    def seconds(self, rows: float) -> float:
        """Expected seconds; raises ValueError while nothing is known.

        Below the smallest known number of rows the time is that of the smallest, but with one
        class alone known it is taken as proportional: what a row cost there is all there is to go
        by. Beyond the largest the last slope goes on.
        """
        found = self._seconds.get(rows)
        if found is None:
            found = self._seconds[rows] = _at(self.line, rows)
        return found

    def _learnt(self) -> Points:
        raise NotImplementedError


class RowTimes(_Line):
    """Learnt seconds of something that is done to rows, by their number.

    Times fall into classes of 1, 2, 3-4, 5-8, 9-16, … rows, joined by straight lines. They never
    fall with more rows: fewer that took longer were late, or more of them were not timed lately.
    And no row adds more than the fewest rows take: it could go by itself.
    """

    def __init__(self, most: int = RECENT) -> None:
        """`most`: newest times of a class that count."""
        super().__init__()
        self._most = most
        self._classes: dict[int, Newest] = {}
        self._count = 0

    def record(self, rows: int, seconds: float) -> Newest:
        """`rows` rows took so long; rows >= 1. Returns what is known of their class."""
        self._count += 1
        key = (rows - 1).bit_length()
        if key not in self._classes:
            self._classes[key] = Newest(self._most)
        self._classes[key].add(seconds, rows, self._count)
        self._changes()
        return self._classes[key]

    @property
    def known(self) -> bool:
        return bool(self._classes)

    def knows(self, rows: int) -> bool:
        """Whether rows of that class were timed, and neither fewer nor more than any were."""
        between = self.known and self.line[0][0] <= rows <= self.line[-1][0]
        return between and (rows - 1).bit_length() in self._classes

    @property
    def sloped(self) -> bool:
        """Whether more than one class is known, so that what a row adds is more than a guess."""
        return len(self._classes) > 1

    @property
    def one_row(self) -> float:
        """Seconds of a single row; 0 as long as none was timed."""
        return self._classes[0].low[1] if 0 in self._classes else 0.0

    @property
    def is_off(self) -> bool:
        """Whether a class takes another time than it was compared with last."""
        return any(one.is_off for one in self._classes.values())

    def _learnt(self) -> Points:
        line = _rising(self._classes.values())
        if self._count % PROBE:
            return line
        since = self._count - PROBE
        fresh = _rising(one for one in self._classes.values() if one.at > since)
        if len(fresh) < 2:
            return line
        return [(rows, min(seconds, _at(fresh, rows))) for rows, seconds in line]


def _rising(classes: Iterable[Newest]) -> Points:
    """See RowTimes. Where more rows were quicker long ago, the device has become slower."""
    known = sorted([(*one.low, one.at) for one in classes])
    line: Points = []
    least = math.inf  # of more rows
    for place in range(len(known) - 1, -1, -1):
        rows, seconds, at = known[place]
        for fewer in known[:place]:
            if fewer[2] > at + PROBE:
                seconds = max(seconds, fewer[1])
        least = min(seconds, least)
        line.append((rows, least))
    line.reverse()
    for at in range(1, len(line)):
        (before, least), (rows, seconds) = line[at - 1], line[at]
        line[at] = rows, min(seconds, least + line[0][1] * (rows - before))
    return line


def _at(line: Points, rows: float) -> float:
    if not line:
        raise ValueError("no times are known")
    if len(line) == 1:
        return line[0][1] * rows / line[0][0]
    if rows <= line[0][0]:
        return line[0][1]
    right = min(bisect_left(line, (rows,)), len(line) - 1)
    (r0, t0), (r1, t1) = line[right - 1], line[right]
    return t0 + (t1 - t0) * (rows - r0) / (r1 - r0)


def _median(values: Sequence[float]) -> float:
    """Of an even number of values, the lower one of the two in the middle."""
    return sorted(values)[(len(values) - 1) // 2]


class StepTimes(_Line):
    """Learnt seconds of a ring's slowest stage, by the rows of a segment.

    All stages share one shape: what rows take, in times of each other. Each has a factor of its
    own. So a late job at one stage is one of many, and late stages, which hardly ever compute many
    rows, as guesses are dropped on their way, are known by the early ones. A stage that clearly has
    another shape is known by what it took itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self._shape = RowTimes()
        # Of each stage, its newest seconds over the shape's. Their median counts: they are too low
        # where the shape knows late jobs alone.
        self._ratios: list[deque[float]] = []
        self._factors: list[float] = []  # of the stages that have computed something: the first
        self._own: list[RowTimes] = []

    def record(self, ran: Sequence[tuple[int, float]], stages: int) -> None:
        """Rows and seconds of a segment at each stage that computed it, of `stages` in all; those
        of a ring of another length are forgotten."""
        if not ran:
            return
        if len(self._ratios) != stages:
            self._shape = RowTimes(RECENT * stages)
            self._ratios, self._factors = [deque(maxlen=RECENT) for _ in range(stages)], []
            self._own = [RowTimes() for _ in range(stages)]
        factors = self._factors + [1.0] * (len(ran) - len(self._factors))
        told = list(zip(self._ratios, factors, ran, strict=False))
        for stage, factor, (rows, seconds) in told:
            if not self._shape.knows(rows):
                self._shape.record(rows, min(seconds / factor, LONGEST_S))
            elif known := self._shape.seconds(rows):
                stage.append(min(max(seconds / known, 1 / MOST_TIMES), MOST_TIMES))
        usual = [_median(stage or (1.0,)) for stage in self._ratios[: len(factors)]]
        middle = _median(usual)
        self._factors = [ratio / middle for ratio in usual]
        for (rows, seconds), factor in zip(ran, self._factors, strict=False):
            self._shape.record(rows, min(seconds / factor, LONGEST_S))
        for own, (rows, seconds), factor in zip(self._own, ran, self._factors, strict=False):
            own.record(rows, seconds).compare(self._shape.line, factor)
        self._changes()

    @property
    def known(self) -> bool:
        return self._shape.known

    @property
    def sloped(self) -> bool:
        """Whether more than one class of rows is known."""
        return self._shape.sloped

    def _learnt(self) -> Points:
        shape, alike, lines = self._shape.line, 0.0, list[Points]()
        for own, factor in zip(self._own, self._factors, strict=False):
            if own.is_off:
                lines.append(own.line)
            else:
                alike = max(alike, factor)
        return [(r, max([t * alike, *(_at(line, r) for line in lines)])) for r, t in shape]

    @property
    def spread(self) -> float:
        """Seconds of one row on all stages together, in times of the slowest: from 1 to the number
        of stages; 0 if nothing is known, or takes no time. Stages of which nothing is known count
        as the mean of the others."""
        known = len(self._factors)
        return max(self.reach(known) * len(self._ratios) / known, 1.0) if known else 0.0

    def reach(self, stages: int) -> float:
        """Seconds of a row on the first stages, in times of the slowest of them; 0 if nothing is
        known of them."""
        factors = self._factors[:stages]
        return sum(factors) / max(factors) if factors else 0.0

    @property
    def one_row(self) -> float:
        """Seconds of one row on all stages together; 0 if that is not known."""
        everywhere = len(self._factors) == len(self._ratios)
        return self._shape.one_row * sum(self._factors) if everywhere else 0.0
