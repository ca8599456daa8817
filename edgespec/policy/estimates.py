"""Estimates: what a coordinator has learnt of its ring and its draft source, for policies.

Times come from what the stages report and from when drafts come back, shares from which guesses
turned out right. Nothing here is set by hand for a device or a model, and nothing is read from a
profile: the ring that runs is the one that is measured.
"""

from __future__ import annotations

import math
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


SLOWEST = 4.0
"""Times as long a step may take for rows of a prompt in it, while others wait for answers: they
keep a quarter of their pace, and the prompt gets three quarters of what it would have alone."""

LEAST_CHUNK = 8
"""Rows of a prompt that leave together however long they take: else it would never be read. Beside
answers they are a multiple of so many."""

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
    `shared`: as `step`, by the answers in a segment without rows of prompts. `home`: seconds from
    a segment's return until what follows in each of its answers is known, by their number; `links`:
    what it is on its way beside the stages' work, on a ring that has no other.
    `ranks`: how often the model's token had which rank among the guesses of its level (None: it was
    not there). `calibrations`: one for each way of sampling, as scores are ranked differently for
    each; of MOST_CALIBRATIONS ways, those that were used last. `plain_time`: what
    a token took without guesses, where that was tried.
    """

    step: StepTimes = field(default_factory=StepTimes)
    draft: RowTimes = field(default_factory=RowTimes)
    head: RowTimes = field(default_factory=RowTimes)
    shared: StepTimes = field(default_factory=StepTimes)
    home: RowTimes = field(default_factory=RowTimes)
    links: RowTimes = field(default_factory=RowTimes)
    reach: float = 0.0
    ranks: Counter[int | None] = field(default_factory=Counter)
    calibrations: dict[object, Calibration] = field(default_factory=dict)
    plain_time: PlainTime = field(default_factory=PlainTime)
    _counts: dict[tuple[int, int], int] = field(default_factory=dict)  # since the last segment

    def segment(self, ran: Sequence[tuple[int, float]], stages: int, answers: int = 0) -> None:
        """A segment came back; rows and seconds at each of the `stages` that computed it. It had
        rows of so many answers, and none of a prompt; 0: it had such."""
        bounded = [(rows, min(seconds, LONGEST_S)) for rows, seconds in ran[:stages]]
        self.step.record(bounded, stages)
        self._counts.clear()
        if answers:
            self.shared.record([(answers, seconds) for _, seconds in bounded], stages)
        if bounded:
            ratio = self.step.reach(len(bounded))
            self.reach = self.reach + FADE * (ratio - self.reach) if self.reach else ratio

    def chunk(self, rows: int, most: int, stages: int) -> int:
        """Rows of a prompt that should travel together: `most`, or a half, a quarter … of it.

        Short chunks overlap along the ring, long ones cost less a row: of C chunks the last is
        back after stages + C - 1 steps. On one stage nothing overlaps.
        """
        sizes = [most >> halvings for halvings in range(4) if most >> halvings]
        if not self.step.sloped or stages == 1:
            return most
        return min(sizes, key=lambda c: (stages - 1 - rows // -c) * self.step.seconds(c))

    def chunk_beside(self, rows: int, most: int, stages: int, beside: int) -> int:
        """The same where other requests are live: `rows` are those of all prompts that wait, which
        overlap each other's. With `beside` rows of answers a step takes no more than SLOWEST times
        as long; the chunks are short as long as that is not known."""
        least = min(LEAST_CHUNK, most)
        if not self.step.sloped:
            return least if beside else most
        step, slowest = self.step.seconds, SLOWEST * self.step.seconds(max(beside, 1))
        sizes = range(most, least, -LEAST_CHUNK)
        fit = [size for size in sizes if not beside or step(beside + size) <= slowest]
        return min([*fit, least], key=lambda c: (stages - 1 - rows // -c) * step(beside + c))

    def pass_seconds(self, answers: int) -> float:
        """Of the slowest stage, for a segment of so many answers. Raises ValueError while nothing
        is known."""
        times = self.shared if self.shared.sloped else self.step
        return times.seconds(answers)

    def segments(self, answers: int, stages: int) -> int:
        """In how many segments so many answers should go round, of stages + 1 at most: those with
        which each of them gets its next token soonest.

        With C of them one round takes C passes of the slowest stage, and C times what D0 does for
        one; and no less than one segment's way round. A pass of more answers that takes hardly
        longer speaks for few segments, work at home and links for many, which overlap it.
        """
        if (answers, stages) not in self._counts:
            self._counts[answers, stages] = self._best_count(answers, stages)
        return self._counts[answers, stages]

    def _best_count(self, answers: int, stages: int) -> int:
        """See segments."""
        most = stages + 1
        if not self.step.known or not self.home.known:
            return most

        def seconds(share: int) -> float:
            """Of a round in which so many answers share a segment."""
            count, step = math.ceil(answers / share), self.pass_seconds(share)
            home = self.home.seconds(share)
            way = step * self.step.spread + self.links.for_one + home
            return max(count * step, count * home, way)

        shares = {count: math.ceil(answers / count) for count in range(most, 0, -1)}
        rounds = {share: seconds(share) for share in set(shares.values())}
        return min(shares, key=lambda count: rounds[shares[count]])

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
        return used(self.calibrations, sampling, Calibration)


def used(known: dict[K, V], key: K, new: Callable[[], V], most: int = MOST_CALIBRATIONS) -> V:
    """What is known for a key, or new; it stands last, and of more than `most` that goes which was
    not used for longest."""
    found = known[key] = known.pop(key) if key in known else new()
    if len(known) > most:
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
