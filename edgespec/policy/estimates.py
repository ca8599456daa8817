"""Estimates: what a coordinator has learnt of its ring and its draft source, for policies.

Times come from what the stages report and from when drafts come back, shares from which guesses
turned out right. Nothing here is set by hand for a device or a model, and nothing is read from a
profile: the ring that runs is the one that is measured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from edgespec.policy.calibration import Calibration
from edgespec.policy.hint_mix import HintMix
from edgespec.policy.pace import Pace
from edgespec.tree.node import Advance

FADE = 0.1
"""Weight of a new time against the mean of the old ones, once there are some: contexts grow, and
devices heat up."""


LONGEST_S = 3600.0
"""No stage is believed to take longer than this for a segment, whatever it says."""

Points = list[tuple[float, float]]
"""Seconds by rows, both ascending; straight lines lie between them."""


class RowTimes:
    """Learnt seconds of something that is done to rows, by their number.

    Times are averaged in classes 1, 2, 3-4, 5-8, 9-16, … and joined by straight lines; they never
    fall with more rows: classes that do are taken together, by how often they were seen.
    """

    def __init__(self) -> None:
        self.classes: dict[int, tuple[float, float, int]] = {}  # mean rows, mean seconds, count
        self._line: Points = []

    def record(self, rows: int, seconds: float) -> None:
        """`rows` rows took so long; rows >= 1."""
        key = (rows - 1).bit_length()
        mean_rows, mean_seconds, count = self.classes.get(key, (0.0, 0.0, 0))
        weight = max(1 / (count + 1), FADE)
        self.classes[key] = (
            mean_rows + weight * (rows - mean_rows),
            mean_seconds + weight * (seconds - mean_seconds),
            count + 1,
        )
        self._line = []

    @property
    def known(self) -> bool:
        return bool(self.classes)

    @property
    def sloped(self) -> bool:
        """Whether more than one class is known, so that what a row adds is more than a guess."""
        return len(self.classes) > 1

    def seconds(self, rows: float) -> float:
        """Expected seconds; raises ValueError while nothing is known.

        Below the smallest known number of rows the time is that of the smallest, but with one
        class alone known it is taken as proportional: what a row cost there is all there is to go
        by. Beyond the largest the last slope goes on.
        """
        if not self._line:
            self._line = _rising(self.classes.values())
        return _at(self._line, rows)

    def filled(self, others: Mapping[int, RowTimes]) -> Points:
        """The line of what is recorded here, and in classes that are not of what one of `others`
        knows: in proportion to the nearest class that both do, or as it is if there is none."""
        means = list(self.classes.values())
        for key, other in others.items():
            if key not in self.classes:
                rows, seconds, count = other.classes[key]
                means.append((rows, min(seconds * self._slowness(other, key), LONGEST_S), count))
        return _rising(means)

    def _slowness(self, other: RowTimes, key: int) -> float:
        """How many times as long rows take as in `other`, by the class nearest to that one."""
        common = self.classes.keys() & other.classes.keys()
        if not common:
            return 1.0
        rows, seconds, _ = self.classes[min(common, key=lambda known: (abs(known - key), known))]
        there = other.seconds(rows)
        return min(seconds / there, LONGEST_S) if there else 1.0  # finite, whatever was told


def _rising(means: Iterable[tuple[float, float, int]]) -> Points:
    """Rows, seconds and count in order of the rows, none below one before it: the rising line that
    is nearest, by squares (pool adjacent violators).

    A device that stood still for once while it computed few rows would else make more rows look
    free: they are sent then, and the few never timed again.
    """
    levels: list[tuple[float, int, list[float]]] = []
    for rows, seconds, count in sorted(means):
        seen = [rows]
        while levels and levels[-1][0] > seconds:
            higher, often, before = levels.pop()
            seconds = (seconds * count + higher * often) / (count + often)
            count, seen = count + often, before + seen
        levels.append((seconds, count, seen))
    return [(rows, seconds) for seconds, _, seen in levels for rows in seen]


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


class StepTimes:
    """Learnt seconds of a ring's slowest stage, by the rows of a segment.

    Each stage is learnt by itself: guesses are dropped on their way, so that a segment has another
    number of rows at each stage, and none after the one that emptied it. Which stage took longest
    for a segment says therefore little of which is the slowest for as many rows. Late stages hardly
    ever compute many rows: what one of them has not computed yet is taken from an earlier one
    (RowTimes.filled).
    """

    def __init__(self) -> None:
        self._stages: list[RowTimes] = []
        self._line: Points = []
        self._spread = 0.0

    def record(self, ran: Sequence[tuple[int, float]], stages: int) -> None:
        """Rows and seconds of a segment at each stage that computed it, of `stages` in all; those
        of a ring of another length are forgotten."""
        if not ran:
            return
        if len(self._stages) != stages:
            self._stages = [RowTimes() for _ in range(stages)]
        for stage, (rows, seconds) in zip(self._stages, ran, strict=False):
            stage.record(rows, seconds)
        self._line = []

    @property
    def known(self) -> bool:
        return bool(self._stages)

    @property
    def sloped(self) -> bool:
        """Whether more than one class of rows is known of the first stage."""
        return self.known and self._stages[0].sloped

    def seconds(self, rows: float) -> float:
        """Expected seconds of the slowest stage; see RowTimes.seconds."""
        return _at(self._learnt(), rows)

    @property
    def spread(self) -> float:
        """Seconds of one row on all stages together, in times of the slowest: from 1 to the number
        of stages; 0 if nothing is known, or takes no time. Stages of which nothing is known count
        as the mean of the others."""
        self._learnt()
        return self._spread

    @property
    def one_row(self) -> float:
        """Seconds of one row on all stages together; 0 if not every stage has computed a single
        row."""
        classes = [stage.classes.get(0) for stage in self._stages]
        return 0.0 if None in classes else sum(one[1] for one in classes if one is not None)

    def _learnt(self) -> Points:
        """The slowest stage's line; it keeps the spread, too."""
        if not self._line and self.known:
            known = [stage for stage in self._stages if stage.known]
            widest = {key: stage for stage in reversed(known) for key in stage.classes}
            lines = [stage.filled(widest) for stage in known]
            ends = sorted({rows for rows, _ in lines[0]})
            self._line = [(rows, max(_at(line, rows) for line in lines)) for rows in ends]
            lowest = [_at(line, ends[0]) for line in lines]
            slowest, count = max(lowest), len(self._stages)
            usual = sum(lowest) / len(lowest)
            self._spread = min(max(count * (usual / slowest), 1.0), count) if slowest else 0.0
        return self._line


MOST_CALIBRATIONS = 64
"""Ways of sampling that are told apart: clients may choose any temperature."""

K = TypeVar("K")
V = TypeVar("V")


@dataclass(slots=True)
class RingEstimates:
    """All that is learnt; it outlives the requests that it was learnt from.

    `step`: seconds of the slowest stage by rows of a segment. `reach`: seconds of a segment on all
    stages that computed it, in times of its longest; below `step.spread`, as segments lose rows on
    their way, or all of them. `draft`: seconds of one forward pass of the draft source by rows;
    `head`: of the output head by the rows of a result; nothing where the last stage has it.
    `ranks`: how often the model's token had which rank among the guesses of its level (None: it was
    not there). `calibrations`: one for each way of sampling, as scores are ranked differently for
    each; of MOST_CALIBRATIONS ways, those that were used last. `hint_mixes`: likewise, for each way
    of sampling and stage. `pace`: whether guesses pay, for one request alone.
    """

    step: StepTimes = field(default_factory=StepTimes)
    draft: RowTimes = field(default_factory=RowTimes)
    head: RowTimes = field(default_factory=RowTimes)
    reach: float = 0.0
    ranks: Counter[int | None] = field(default_factory=Counter)
    calibrations: dict[object, Calibration] = field(default_factory=dict)
    hint_mixes: dict[tuple[object, int], HintMix] = field(default_factory=dict)
    pace: Pace = field(default_factory=Pace)

    def segment(self, ran: Sequence[tuple[int, float]], stages: int) -> None:
        """A segment came back; rows and seconds at each of the `stages` that computed it."""
        bounded = [(rows, min(seconds, LONGEST_S)) for rows, seconds in ran[:stages]]
        self.step.record(bounded, stages)
        longest = max((seconds for _, seconds in bounded), default=0.0)
        if longest <= 0.0:
            return  # too quick for the clock, or a ring whose time stands still: no ratio
        ratio = sum(seconds / longest for _, seconds in bounded)
        self.reach = self.reach + FADE * (ratio - self.reach) if self.reach else ratio

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
    def own(self) -> float:
        """Seconds that D0 works for one segment: a pass of the draft, and the head; of what is
        known."""
        return sum(work.seconds(1) for work in (self.draft, self.head) if work.known)

    @property
    def plain(self) -> float:
        """Seconds of a token of plain decoding: one row on all stages, and the head; without the
        time of messages. 0 if that is not known."""
        head = self.head.seconds(1) if self.head.known else 0.0
        return self.step.one_row and self.step.one_row + head

    def came(self, tokens: int, seconds: float) -> None:
        """So many tokens of a request that is alone came `seconds` after the one before them."""
        if self.step.known:
            # `plain` needs single rows, which a ring that guesses well hardly ever sends.
            head = self.head.seconds(1) if self.head.known else 0.0
            self.pace.learn(tokens, seconds, self.step.seconds(1) * self.step.spread + head)

    @property
    def levels(self) -> int:
        return self.ranks.total()

    def hit_share(self, width: int) -> float:
        """Share of levels whose best `width` guesses held the model's token."""
        hits = sum(n for rank, n in self.ranks.items() if rank is not None and rank < width)
        return hits / self.levels

    def rank_shares(self, width: int, tries: float) -> list[float]:
        """Share of levels whose guess of each rank was right, the best `width` of them; `tries`:
        levels whose best guess is taken to have been right before any was seen."""
        seen = [self.ranks[rank] + (0.0 if rank else tries) for rank in range(width)]
        return [count / (self.levels + tries) for count in seen]

    def verified(self, sampling: object, step: Advance) -> None:
        """Guesses that were asked for with that way of sampling turned out right or wrong."""
        self.calibration(sampling).learn(step.outcomes)
        self.ranks.update(step.ranks)

    def hint_mix(self, sampling: object, stage: int) -> HintMix:
        """What hints of that stage are worth, for that way of sampling."""
        return _used(self.hint_mixes, (sampling, stage), HintMix)

    def calibration(self, sampling: object) -> Calibration:
        """What the draft's scores are worth, for that way of sampling."""
        return _used(self.calibrations, sampling, Calibration)


def _used(known: dict[K, V], key: K, new: Callable[[], V]) -> V:
    """What is known for a key, or new; it stands last, and what was not used for longest goes."""
    found = known[key] = known.pop(key) if key in known else new()
    if len(known) > MOST_CALIBRATIONS:
        del known[next(iter(known))]
    return found


class Learnt(dict[str, RingEstimates]):
    """What requests of each policy have taught, by its name."""

    def plain_speed(self) -> float:
        """Tokens a second that plain decoding would give one request: the fastest of what the
        policies have learnt; 0 if it is not known."""
        known = [seconds for estimates in self.values() if (seconds := estimates.plain)]
        return 1 / min(known) if known else 0.0
