"""Experience: what a coordinator has learnt of its ring and its draft source, for policies.

Times come from what the stages report and from when drafts come back, shares from which guesses
turned out right. Nothing here is set by hand for a device or a model, and nothing is read from a
profile: the ring that runs is the one that is measured.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from edgespec.tree.draft_tree import Advance

FADE = 0.1
"""Weight of a new time against the mean of the old ones, once there are some: contexts grow, and
devices heat up."""


class RowTimes:
    """Learnt seconds of something that is done to rows, by their number.

    Times are averaged in classes 1, 2, 3-4, 5-8, 9-16, … and joined by straight lines; they never
    fall with more rows.
    """

    def __init__(self) -> None:
        self._classes: dict[int, tuple[float, float, int]] = {}  # mean rows, mean seconds, count
        self._line: list[tuple[float, float]] = []

    def record(self, rows: int, seconds: float) -> None:
        """`rows` rows took so long; rows >= 1."""
        key = (rows - 1).bit_length()
        mean_rows, mean_seconds, count = self._classes.get(key, (0.0, 0.0, 0))
        weight = max(1 / (count + 1), FADE)
        self._classes[key] = (
            mean_rows + weight * (rows - mean_rows),
            mean_seconds + weight * (seconds - mean_seconds),
            count + 1,
        )
        self._line = []
        highest = 0.0
        for _, (at, mean, _) in sorted(self._classes.items()):
            highest = max(highest, mean)
            self._line.append((at, highest))

    @property
    def known(self) -> bool:
        """Whether anything was recorded."""
        return bool(self._line)

    @property
    def sloped(self) -> bool:
        """Whether more than one class is known, so that what a row adds is more than a guess."""
        return len(self._line) > 1

    def seconds(self, rows: float) -> float:
        """Expected seconds; raises ValueError while nothing is known.

        Below the smallest known number of rows the time is that of the smallest, but with one
        class alone known it is taken as proportional: what a row cost there is all there is to go
        by. Beyond the largest the last slope goes on.
        """
        line = self._line
        if not line:
            raise ValueError("no times are known")
        if len(line) == 1:
            return line[0][1] * rows / line[0][0]
        if rows <= line[0][0]:
            return line[0][1]
        right = min(bisect_left(line, (rows,)), len(line) - 1)
        (r0, t0), (r1, t1) = line[right - 1], line[right]
        return t0 + (t1 - t0) * (rows - r0) / (r1 - r0)


PRIOR_WEIGHT = 8.0
"""How many observations a draft source's own word counts for in a class of scores."""

RAREST = 1e-4
"""Shares below this, and those as near to 1, are not told apart."""


class Calibration:
    """How often guesses of a certain score turned out right, given that their parent was.

    Scores fall into classes of one unit of log-odds. In each, the share that was right, against
    what the draft had expected, says how far the log-odds of its guesses are off; the draft's own
    word counts for PRIOR_WEIGHT observations. So guesses of one class still differ as they did.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, int, float]] = {}  # class: guesses, right, expected to be

    def learn(self, score: float, was_right: bool) -> None:
        """A guess with that own natural-log score was, or was not, the model's token."""
        expected = _share(score)
        guesses, right, total = self._seen.get(_class_of(expected), (0, 0, 0.0))
        self._seen[_class_of(expected)] = (guesses + 1, right + was_right, total + expected)

    def score(self, score: float) -> float:
        """The natural log of the calibrated probability; never above 0."""
        expected = _share(score)
        guesses, right, total = self._seen.get(_class_of(expected), (0, 0, 0.0))
        weight = guesses + PRIOR_WEIGHT
        found = (right + PRIOR_WEIGHT * expected) / weight
        usual = (total + PRIOR_WEIGHT * expected) / weight
        odds = _odds(expected) * _odds(found) / _odds(usual)
        return math.log(odds / (1.0 + odds))


def _share(score: float) -> float:
    """The probability that a natural-log score stands for."""
    return min(max(math.exp(score), RAREST), 1.0 - RAREST)


def _odds(share: float) -> float:
    return share / (1.0 - share)


def _class_of(share: float) -> int:
    return round(math.log(_odds(share)))


MOST_CALIBRATIONS = 64
"""Ways of sampling that are told apart: clients may choose any temperature."""


@dataclass(slots=True)
class Experience:
    """All that is learnt; it outlives the requests that it was learnt from.

    `step`: seconds of the busiest stage by rows of a segment. `spread`: a segment's time on all
    stages together in times of its busiest one, so about the number of stages if they are equal.
    `draft`: seconds of one forward pass of the draft source by rows. `ranks`: how often the model's
    token had which rank among the guesses of its level (None: it was not there).
    `calibrations`: one for each way of sampling, as scores are ranked differently for each; of
    MOST_CALIBRATIONS ways, those that were used last.
    """

    step: RowTimes = field(default_factory=RowTimes)
    draft: RowTimes = field(default_factory=RowTimes)
    spread: float = 0.0
    ranks: Counter[int | None] = field(default_factory=Counter)
    calibrations: dict[object, Calibration] = field(default_factory=dict)

    def segment(self, rows: int, busiest: float, total: float) -> None:
        """A segment came back; `rows` on its busiest stage."""
        if rows == 0:
            return
        self.step.record(rows, busiest)
        if busiest <= 0.0:
            return  # too quick for the clock, or a ring whose time stands still: no ratio
        ratio = total / busiest
        self.spread = self.spread + FADE * (ratio - self.spread) if self.spread else ratio

    def chunk(self, rows: int, most: int, stages: int) -> int:
        """Rows of a prompt that should travel together: `most`, or a half, a quarter … of it.

        Short chunks overlap along the ring, long ones cost less a row: of C chunks the last is
        back after stages + C - 1 steps.
        """
        sizes = [most >> halvings for halvings in range(4) if most >> halvings]
        if not self.step.sloped:
            return most
        return min(sizes, key=lambda c: (stages - 1 - rows // -c) * self.step.seconds(c))

    @property
    def levels(self) -> int:
        """How many levels were checked."""
        return self.ranks.total()

    def hit_share(self, width: int) -> float:
        """Share of levels whose best `width` guesses held the model's token."""
        hits = sum(n for rank, n in self.ranks.items() if rank is not None and rank < width)
        return hits / self.levels

    def verified(self, sampling: object, step: Advance) -> None:
        """Guesses that were asked for with that way of sampling turned out right or wrong."""
        calibration = self.calibration(sampling)
        for score, was_right in step.outcomes:
            calibration.learn(score, was_right)
        self.ranks.update(step.ranks)

    def calibration(self, sampling: object) -> Calibration:
        """The calibration for that way of sampling."""
        found = self.calibrations.pop(sampling, None) or Calibration()
        self.calibrations[sampling] = found  # the newest stands last
        if len(self.calibrations) > MOST_CALIBRATIONS:
            del self.calibrations[next(iter(self.calibrations))]
        return found
