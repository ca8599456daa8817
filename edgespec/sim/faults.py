"""Faults: what may go wrong in a run, as plain data, and the dice that decide when it does."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence

from msgspec.structs import replace

from edgespec.schema import FileStruct
from edgespec.wire.hints import Hint
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
    """A Segment, Retain, Hint or End comes a second time, up to `seconds` after the first."""

    probability: float
    seconds: float


class LoseRetain(FaultStruct, frozen=True):
    """A retained set is lost on its way to one stage with this probability."""

    probability: float


class LateRetain(FaultStruct, frozen=True):
    """A retained set is up to `seconds` late and may be overtaken by what was sent after it."""

    probability: float
    seconds: float


class LoseSegment(FaultStruct, frozen=True):
    """A segment is lost on its way to the next node with this probability, which TCP would not
    allow: a node dropped it."""

    probability: float


class BentSegment(FaultStruct, frozen=True):
    """A segment of guesses names other rows than were sent with this probability."""

    probability: float


class LoseHint(FaultStruct, frozen=True):
    """A hint is lost with this probability."""

    probability: float


class LateHint(FaultStruct, frozen=True):
    """A hint is up to `seconds` late, so that its rows may be back, or gone."""

    probability: float
    seconds: float


class BentHint(FaultStruct, frozen=True):
    """A hint says something else than the stage did: it is of another request, of another stage, or
    of rows that there are not."""

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


Fault = (
    Delay
    | Duplicate
    | LoseRetain
    | LateRetain
    | LoseSegment
    | BentSegment
    | LoseHint
    | LateHint
    | BentHint
    | SlowStage
    | SmallCache
    | Crash
    | Change
)


class Dice:
    """Decides, message by message, which of the faults strike; repeatable for a given `rng`."""

    def __init__(self, faults: Sequence[Fault], rng: random.Random) -> None:
        self._rng = rng
        self._delays = [f for f in faults if isinstance(f, Delay)]
        self._duplicates = [f for f in faults if isinstance(f, Duplicate)]
        self._losses: dict[type[Message], Sequence[LoseRetain | LoseSegment | LoseHint]] = {
            Segment: [f for f in faults if isinstance(f, LoseSegment)],
            Retain: [f for f in faults if isinstance(f, LoseRetain)],
            Hint: [f for f in faults if isinstance(f, LoseHint)],
        }
        self._late: dict[type[Message], Sequence[LateRetain | LateHint]] = {
            Retain: [f for f in faults if isinstance(f, LateRetain)],
            Hint: [f for f in faults if isinstance(f, LateHint)],
        }
        self._bent_hints = [f for f in faults if isinstance(f, BentHint)]
        self._bent_segments = [f for f in faults if isinstance(f, BentSegment)]
        self._slow = [f for f in faults if isinstance(f, SlowStage)]

    def loses(self, message: Message) -> bool:
        """Whether this message never arrives."""
        losses = self._losses.get(type(message), ())
        return any(self._rng.random() < fault.probability for fault in losses)

    def bent(self, message: Message) -> Message:
        """The message as it is said."""
        if isinstance(message, Segment):
            for _ in range(sum(self._rng.random() < f.probability for f in self._bent_segments)):
                parts = [p if p.committed else replace(p, ids=p.ids + 1000) for p in message.parts]
                message = replace(message, parts=tuple(parts))
            return message
        if not isinstance(message, Hint):
            return message
        for fault in self._bent_hints:
            if self._rng.random() < fault.probability:
                field = self._rng.choice(("request", "stage", "ids"))
                by = self._rng.randint(1, 3)
                message = replace(message, **{field: getattr(message, field) + by})
        return message

    def delay(self) -> float:
        """Seconds that a message takes longer, and those after it."""
        return sum(self._strike(fault) for fault in self._delays)

    def lateness(self, message: Message) -> float:
        """Seconds that this message alone comes later than it should."""
        return sum(self._strike(fault) for fault in self._late.get(type(message), ()))

    def repeats(self, message: Message) -> list[float]:
        """Seconds after the first delivery at which the message comes again."""
        if not self._duplicates or not isinstance(message, Segment | Retain | Hint | CloseRequest):
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

    def _strike(self, fault: Delay | LateRetain | LateHint) -> float:
        struck = self._rng.random() < fault.probability
        return self._rng.random() * fault.seconds if struck else 0.0
