"""Stage hints: what a stage expects behind rows that it has handed on, told to the coordinator.

It is said after the segment has left, of live guesses alone, and nothing waits for it. Where it
fails or comes late, nothing is said.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from edgespec.decoding.effects import RunLens
from edgespec.decoding.events import LensDone
from edgespec.machines.effects import Effect, SendCoordinator
from edgespec.types.record import IntArray
from edgespec.types.tensor import Tensor
from edgespec.wire.hints import Hint
from edgespec.wire.segment import Segment


@dataclass(frozen=True, slots=True)
class _LensJob:
    """A lens job: when it was asked for, at which stage, and each row's request and id."""

    at: float
    stage: int
    requests: IntArray
    ids: IntArray


@dataclass(slots=True)
class StageHints:
    """The lens jobs of one stage that have not come back."""

    _asked: dict[int, _LensJob] = field(default_factory=dict)

    def clear(self) -> list[int]:
        """A new ring begins: the jobs of which what still comes back is of no use."""
        jobs = list(self._asked)
        self._asked.clear()
        return jobs

    def ask(self, job: int, segment: Segment, now: float) -> list[Effect]:
        """Have the rows of guesses read in a segment that this stage has computed."""
        parts = segment.parts
        guessed = np.concatenate([np.full(len(p.ids), not p.committed) for p in parts])
        places = np.flatnonzero(guessed)
        if segment.hidden is None or not len(places):
            return []
        requests = np.concatenate([np.full(len(p.ids), p.request) for p in parts])[places]
        ids = np.concatenate([part.ids for part in parts])[places]
        self._asked[job] = _LensJob(now, len(segment.cost), requests, ids)
        return [RunLens(job, int(requests[0]), segment.hidden.take(places))]

    def told(
        self, done: LensDone, keeps: Callable[[int, IntArray], IntArray], now: float
    ) -> list[Effect]:
        """A hint for each request; `keeps`: places of a request's rows that are still wanted."""
        asked = self._asked.pop(done.job, None)
        if asked is None:
            return []
        effects: list[Effect] = []
        for request in dict.fromkeys(asked.requests.tolist()):
            own = np.flatnonzero(asked.requests == request)
            own = own[keeps(request, asked.ids[own])]
            if len(own):
                scores = np.ascontiguousarray(done.log_probs[own], "<f4")
                told = Tensor("float32", scores.shape, scores.tobytes())
                rows = asked.ids[own], done.tokens[own].reshape(-1), told
                effects.append(
                    SendCoordinator(Hint(request, asked.stage, max(now - asked.at, 0.0), *rows))
                )
        return effects

    def failed(self, job: int) -> bool:
        """Whether that was a job of these; it is forgotten."""
        return self._asked.pop(job, None) is not None
