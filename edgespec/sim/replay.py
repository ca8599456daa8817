"""Replay: plays a trace's scenario again and tells whether the same things happen."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from edgespec.sim.campaign import DEFAULT_PARTS, Parts, failure_words, play
from edgespec.sim.log import EventLog
from edgespec.sim.trace import FailureTrace, read_trace


@dataclass(frozen=True, slots=True)
class Replay:
    """What came of it. `failure`: how the run failed this time ("" if it did not).

    `diverged_at`: the index of the first event that was another one, None if all were the same.
    `recorded` and `played` are that event's two lines ("" beyond the end of one run).
    """

    trace: FailureTrace
    failure: str
    events: tuple[str, ...]
    diverged_at: int | None
    recorded: str = ""
    played: str = ""

    @property
    def same(self) -> bool:
        """Whether the very same failure came of the very same events."""
        return self.failure == self.trace.failure and self.diverged_at is None

    def words(self) -> str:
        """The outcome, fit for a person."""
        seed = self.trace.scenario.seed
        if self.same:
            return f"seed {seed} fails as recorded: {self.failure}"
        lines = [f"seed {seed} was recorded to fail: {self.trace.failure}"]
        lines.append(f"it fails now: {self.failure}" if self.failure else "it no longer fails")
        if self.diverged_at is not None:
            lines.append(f"diverged at event {self.diverged_at}")
            lines.append(f"  recorded: {self.recorded or '(nothing more)'}")
            lines.append(f"  now:      {self.played or '(nothing more)'}")
        return "\n".join(lines)


def replay(path: Path, parts: Parts = DEFAULT_PARTS) -> Replay:
    """Play the scenario in a trace file again; raises ConfigError if the file holds none."""
    trace = read_trace(path)
    log = EventLog(longest=None)
    failure = ""
    try:
        play(trace.scenario, log, parts)
    except Exception as problem:
        failure = failure_words(problem)
    return _compared(trace, failure, log)


def _compared(trace: FailureTrace, failure: str, log: EventLog) -> Replay:
    played = log.lines[trace.skipped :]
    pairs = zip_longest(trace.events, played, fillvalue="")
    for index, (was, now) in enumerate(pairs, trace.skipped):
        if was != now:
            return Replay(trace, failure, log.lines, index, was, now)
    return Replay(trace, failure, log.lines, None)
