"""Faults: what may go wrong in a run, as plain data, and the dice that decide when it does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.wire.messages import CloseRequest, Message, Retain, Segment


@dataclass(frozen=True, slots=True)
class Delay:
    """Any message takes up to `seconds` more with this probability; those behind it wait too."""

    probability: float
    seconds: float
    kind: str = "delay"


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A Segment, Retain or End comes a second time, up to `seconds` after the first."""

    probability: float
    seconds: float
    kind: str = "duplicate"


@dataclass(frozen=True, slots=True)
class LoseRetain:
    """A retained set is lost on its way to one stage with this probability."""

    probability: float
    kind: str = "lose_retain"


@dataclass(frozen=True, slots=True)
class LateRetain:
    """A retained set is up to `seconds` late and may be overtaken by what was sent after it."""

    probability: float
    seconds: float
    kind: str = "late_retain"


@dataclass(frozen=True, slots=True)
class SlowStage:
    """Work that stage `stage` begins between `start` and `end` (s) takes `factor` as long."""

    stage: int
    factor: float
    start: float
    end: float
    kind: str = "slow_stage"


@dataclass(frozen=True, slots=True)
class SmallCache:
    """Stage `stage` holds at most `rows` rows of a request; one that needs more must fail."""

    stage: int
    rows: int
    kind: str = "small_cache"


@dataclass(frozen=True, slots=True)
class Crash:
    """Stage `stage` is gone at `at` (s), with all that it holds; what is sent to it vanishes.

    `noticed_after` seconds later the coordinator learns of it and the ring ends; another
    `restart_after` seconds later a ring of fresh stages is up.
    """

    stage: int
    at: float
    noticed_after: float
    restart_after: float
    kind: str = "crash"


@dataclass(frozen=True, slots=True)
class Change:
    """The devices get other layers: from `at` (s) no further request begins, and once none runs,
    which is looked at every `beat` s, there is no ring for `seconds`. The next has the same stages,
    which hold nothing."""

    at: float
    beat: float
    seconds: float
    kind: str = "change"


Fault = Delay | Duplicate | LoseRetain | LateRetain | SlowStage | SmallCache | Crash | Change


class Dice:
    """Decides, message by message, which of the faults strike; repeatable for a given `rng`."""

    def __init__(self, faults: Sequence[Fault], rng: random.Random) -> None:
        self._rng = rng
        self._delays = [f for f in faults if isinstance(f, Delay)]
        self._duplicates = [f for f in faults if isinstance(f, Duplicate)]
        self._losses = [f for f in faults if isinstance(f, LoseRetain)]
        self._late = [f for f in faults if isinstance(f, LateRetain)]
        self._slow = [f for f in faults if isinstance(f, SlowStage)]

    def loses(self, message: Message) -> bool:
        """Whether this message never arrives."""
        return isinstance(message, Retain) and any(
            self._rng.random() < fault.probability for fault in self._losses
        )

    def delay(self) -> float:
        """Seconds that a message takes longer, and those behind it."""
        return sum(self._strike(fault) for fault in self._delays)

    def lateness(self, message: Message) -> float:
        """Seconds that this message alone comes later than it should."""
        if not isinstance(message, Retain):
            return 0.0
        return sum(self._strike(fault) for fault in self._late)

    def repeats(self, message: Message) -> list[float]:
        """Seconds after the first delivery at which the message comes again."""
        if not self._duplicates or not isinstance(message, Segment | Retain | CloseRequest):
            return []
        return [
            self._rng.random() * fault.seconds
            for fault in self._duplicates
            if self._rng.random() < fault.probability
        ]

    def slowness(self, stage: int, now: float) -> float:
        """The factor on the duration of work that a stage begins now."""
        factor = 1.0
        for fault in self._slow:
            if fault.stage == stage and fault.start <= now < fault.end:
                factor *= fault.factor
        return factor

    def _strike(self, fault: Delay | LateRetain) -> float:
        struck = self._rng.random() < fault.probability
        return self._rng.random() * fault.seconds if struck else 0.0
