"""Faults: what may go wrong in a run, as plain data, and the dice that decide when it does."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from typing import Literal

from msgspec.structs import replace

from edgespec.schema import FileStruct
from edgespec.wire.messages import CloseRequest, Message, Retain
from edgespec.wire.segment import Segment


def _tag(name: str) -> str:
    return re.sub(r"(?<=.)([A-Z])", r"_\1", name).lower()


class FaultStruct(FileStruct, frozen=True, tag=_tag, tag_field="kind"):
    """Base of all faults; in a file `kind` tells which one it is."""


class Delay(FaultStruct, frozen=True):
    """Any message takes up to `seconds` more with this probability; those after it wait too."""

    probability: float
    seconds: float


class Duplicate(FaultStruct, frozen=True):
    """A Segment, Retain or End comes a second time, up to `seconds` after the first."""

    probability: float
    seconds: float


class Lose(FaultStruct, frozen=True):
    """A segment or a retained set is lost on its way to a node with this probability. Of a
    segment TCP would not allow it: a node dropped it."""

    what: Literal["segment", "retain"]
    probability: float


class Late(FaultStruct, frozen=True):
    """A retained set is up to `seconds` late with this probability, and may be overtaken by what
    was sent after it."""

    probability: float
    seconds: float


class Bent(FaultStruct, frozen=True):
    """With this probability a segment of guesses names other rows than were sent."""

    probability: float


class SlowStage(FaultStruct, frozen=True):
    """Work that stage `stage` begins between `start` and `end` (s) takes `factor` as long."""

    stage: int
    factor: float
    start: float
    end: float


class SmallCache(FaultStruct, frozen=True):
    """Stage `stage` holds at most `rows` rows of a request; one that needs more must fail."""

    stage: int
    rows: int


class Crash(FaultStruct, frozen=True):
    """Stage `stage` is gone at `at` (s), with all that it holds; what is sent to it vanishes.

    `noticed_after` seconds later the coordinator learns of it and the ring ends; another
    `restart_after` seconds later a ring of fresh stages is up.
    """

    stage: int
    at: float
    noticed_after: float
    restart_after: float


class Change(FaultStruct, frozen=True):
    """The devices get other layers: from `at` (s) no further request begins, and once none runs,
    which is looked at every `beat` s, there is no ring for `seconds`. The next has the same stages,
    which hold nothing."""

    at: float
    beat: float
    seconds: float


Fault = Delay | Duplicate | Lose | Late | Bent | SlowStage | SmallCache | Crash | Change


def harms_segments(fault: Fault) -> bool:
    """Whether segments are lost or wrong by it, which ends a ring."""
    return isinstance(fault, Bent) or (isinstance(fault, Lose) and fault.what == "segment")


class Dice:
    """Decides, message by message, which of the faults strike; repeatable for a given `rng`."""

    def __init__(self, faults: Sequence[Fault], rng: random.Random) -> None:
        self._rng = rng
        self._delays = [f for f in faults if isinstance(f, Delay)]
        self._duplicates = [f for f in faults if isinstance(f, Duplicate)]
        self._losses = [f for f in faults if isinstance(f, Lose)]
        self._late = [f for f in faults if isinstance(f, Late)]
        self._bent = [f for f in faults if isinstance(f, Bent)]
        self._slow = [f for f in faults if isinstance(f, SlowStage)]

    def loses(self, message: Message) -> bool:
        """Whether this message never arrives."""
        what = {Segment: "segment", Retain: "retain"}.get(type(message))
        return any(self._rng.random() < f.probability for f in self._losses if f.what == what)

    def bent(self, message: Message) -> Message:
        """The message as it is said."""
        if not isinstance(message, Segment):
            return message
        for fault in self._bent:
            if self._rng.random() < fault.probability:
                parts = [p if p.committed else replace(p, ids=p.ids + 1000) for p in message.parts]
                message = replace(message, parts=tuple(parts))
        return message

    def delay(self) -> float:
        """Seconds that a message takes longer, and those after it."""
        return sum(self._strike(fault) for fault in self._delays)

    def lateness(self, message: Message) -> float:
        """Seconds that this message alone comes later than it should."""
        return sum(map(self._strike, self._late if isinstance(message, Retain) else ()))

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
        return math.prod(
            f.factor for f in self._slow if f.stage == stage and f.start <= now < f.end
        )

    def _strike(self, fault: Delay | Late) -> float:
        struck = self._rng.random() < fault.probability
        return self._rng.random() * fault.seconds if struck else 0.0
