"""Estimates: what a coordinator has learnt of its ring and its draft source, for policies.

Times come from what the stages report and from when drafts come back, shares from which guesses
turned out right. Nothing here is set by hand for a device or a model, and nothing is read from a
profile: the ring that runs is the one that is measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from edgespec.policy.calibration import Calibration
from edgespec.policy.pace import Pace, PlainTime
from edgespec.policy.row_times import LONGEST_S, RowTimes, StepTimes
from edgespec.tree.node import Advance

FADE = 0.1
"""Weight of a new time against the mean of the old ones, once there are some: contexts grow, and
devices heat up."""


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
    each; of MOST_CALIBRATIONS ways, those that were used last. `plain_time`: what
    a token took without guesses, where that was tried.
    """

    step: StepTimes = field(default_factory=StepTimes)
    draft: RowTimes = field(default_factory=RowTimes)
    head: RowTimes = field(default_factory=RowTimes)
    reach: float = 0.0
    ranks: Counter[int | None] = field(default_factory=Counter)
    calibrations: dict[object, Calibration] = field(default_factory=dict)
    plain_time: PlainTime = field(default_factory=PlainTime)

    def segment(self, ran: Sequence[tuple[int, float]], stages: int) -> None:
        """A segment came back; rows and seconds at each of the `stages` that computed it."""
        bounded = [(rows, min(seconds, LONGEST_S)) for rows, seconds in ran[:stages]]
        self.step.record(bounded, stages)
        if bounded:
            ratio = self.step.reach(len(bounded))
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
        return self.draft.for_one + self.head.for_one

    @property
    def saved(self) -> float:
        """Seconds that a row which is right comes home earlier than if it waited for the next
        segment: a step of the pipeline, or D0's work for a segment if that takes longer."""
        return max(self.step.seconds(1), self.own)

    @property
    def plain(self) -> float:
        """Seconds of a token of plain decoding: one row on all stages, and the head; without the
        time of messages. 0 if that is not known."""
        return self.step.one_row and self.step.one_row + self.head.for_one

    def came(self, pace: Pace, tokens: int, seconds: float) -> None:
        """So many tokens of a request that is alone, with that pace, came `seconds` after the one
        before them."""
        if self.step.known:
            # `plain` needs single rows, which a ring that guesses well hardly ever sends.
            plain = self.step.seconds(1) * self.step.spread + self.head.for_one
            pace.learn(tokens, seconds, plain)

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
    """What requests of each policy have taught, by its name: its own, so that policies stay
    comparable; nothing at first."""

    def __missing__(self, policy: str) -> RingEstimates:
        return self.setdefault(policy, RingEstimates())

    def plain_speed(self) -> float:
        """Tokens a second that plain decoding would give one request: the fastest of what the
        policies have learnt; 0 if it is not known."""
        known = [seconds for estimates in self.values() if (seconds := estimates.plain)]
        return 1 / min(known) if known else 0.0
