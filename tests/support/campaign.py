"""Campaign: plays scenarios of toy rings, checks every event, and keeps failures to replay."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path

from support.event_log import EventLog
from support.faults import SmallCache, harms_segments
from support.faulty_world import FaultyWorld
from support.invariants import Checks, Promise
from support.scenario import Scenario, ScenarioRequest, draw, policies_of
from support.toy_answers import plain_answer

from edgespec.backends.base import BlockBackend, Head
from edgespec.backends.compute import FIRST
from edgespec.decoding.admission import CoordinatorSettings
from edgespec.decoding.answer import TextCodec
from edgespec.decoding.coordinator import CoordinatorMachine
from edgespec.decoding.stage import StageMachine
from edgespec.drafting.grower import TreeGrower
from edgespec.errors import ConfigError, EdgespecError
from edgespec.machines.effects import Effect, RunBlock
from edgespec.machines.events import Event
from edgespec.schema import FileStruct, json_text, read_as
from edgespec.sim.durations import Durations
from edgespec.sim.oracle import Oracle
from edgespec.sim.toy import VOCABULARY, ToyCodec
from edgespec.sim.toy_model import FakeBlock, FakeHead
from edgespec.sim.world import CoordinatorParts, StageParts
from edgespec.verify.sampling import Sampling

PLENTY = 100_000
"""Rows of a request that a stage may hold where no fault says otherwise."""

HYBRID_VOCABULARY = 2048

_FORMAT = ("format", 1)
WANTED = "give one of tests/benchmarks/campaign.py"


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run is built of; a test replaces a part to plant a bug."""

    coordinator: Callable[[CoordinatorSettings, TextCodec], CoordinatorMachine] = CoordinatorMachine
    stage: Callable[..., StageMachine] = StageMachine
    block: Callable[[int], FakeBlock] = FakeBlock
    draft: Callable[[random.Random, float], Oracle] = Oracle


DEFAULT_PARTS = Parts()


class RandomDurations:
    """Times drawn for every effect of one node: up to twice its `pace` (s), now and then none."""

    def __init__(
        self,
        rng: random.Random,
        head: float,
        pace: float,
        layers: int,
        draft: TreeGrower | None = None,
    ) -> None:
        """`head`: mean seconds of one, `pace`: of a block or a draft's pass, of so many layers.
        `draft`: the source, on D0."""
        self._rng, self._head, self._pace, self._layers = rng, head, pace, layers
        self._draft = draft
        self._passes = 0  # of the last draft

    def seconds(self, effect: Effect, done: Event | None) -> float:
        """A draft is charged for every pass. What is neither a block nor a head costs a stage a
        tenth of a block."""
        work = self._draft.take_work() if self._draft else ()
        if isinstance(effect, FIRST):
            return self._draw(self._head)
        if self._draft:
            self._passes = len(work)
            return self._draw(self._pace) * self._passes
        return self._draw(self._pace) * (1.0 if isinstance(effect, RunBlock) else 0.1)

    def parts(self, effect: Effect) -> Sequence[float]:
        if self._draft:
            return (1.0,) * (self._layers * self._passes)
        return (1.0,) * (self._layers if isinstance(effect, RunBlock) else 1)

    def _draw(self, pace: float) -> float:
        factor = self._rng.random() * 2.0
        return 0.0 if factor < 0.2 else pace * factor


class FailureTrace(FileStruct, frozen=True):
    """A scenario, how it failed, and its events; the first `skipped` of them were not kept."""

    scenario: Scenario
    failure: str
    events: tuple[str, ...]
    skipped: int = 0


class ScenarioFailed(EdgespecError):
    """A scenario broke a promise; the text says which and how to see it again."""


def play(scenario: Scenario, log: EventLog | None = None, parts: Parts = DEFAULT_PARTS) -> None:
    """Run a scenario to its end; raises InvariantViolated, or whatever a machine raises."""
    with policies_of(scenario):
        world, checks = build(scenario, log, parts)
        world.run()
        checks.drained(world)


def build(
    scenario: Scenario, log: EventLog | None = None, parts: Parts = DEFAULT_PARTS
) -> tuple[FaultyWorld, Checks]:
    """The world of a scenario, with its requests booked, and its checks.

    Its policies must be registered (`policies_of`) while it runs.
    """
    stages, codec = scenario.stages, ToyCodec(frozenset(scenario.eos_ids))
    head: Head = FakeHead(VOCABULARY)
    block: Callable[[int], BlockBackend] = parts.block
    if scenario.hybrid:
        from support.hybrid_rings import hybrid_block, hybrid_head  # late: torch takes seconds

        head, block = hybrid_head(), partial(hybrid_block, stages=stages)
    draft = parts.draft(random.Random(f"{scenario.seed} draft"), scenario.accuracy)
    ring = CoordinatorSettings(
        stages,
        scenario.context_length,
        "oracle",
        scenario.prefill_chunk,
        recovery=scenario.recovery,
        needs=draft.needs,
        head_last=scenario.head_last,
        live=scenario.live,
        kept_rows=scenario.kept_rows,
        vocabulary=HYBRID_VOCABULARY if scenario.hybrid else VOCABULARY,
        folds=scenario.hybrid,
    )
    limits = {f.stage: f.rows for f in scenario.faults if isinstance(f, SmallCache)}
    promises = {ask.tag: _promise(scenario, ask, codec) for ask in scenario.asks}
    for promise in promises.values():
        if promise.expected is not None:
            draft.tell(promise.expected.whole)

    def make_stages() -> list[StageParts]:
        return [
            StageParts(
                parts.stage(is_first=n == 1, is_last=n == stages, row_limit=limits.get(n, PLENTY)),
                block(n - 1),
                head if scenario.head_last and n == stages else None,
            )
            for n in range(1, stages + 1)
        ]

    chance = random.Random(f"{scenario.seed} durations"), scenario.head_pace
    stages_of = zip(scenario.stage_paces, scenario.layers, strict=True)
    checks = Checks(promises, scenario.live)
    world = FaultyWorld(
        parts.coordinator(ring, codec),
        CoordinatorParts(None if scenario.head_last else head, draft),
        make_stages,
        Durations(
            [
                RandomDurations(*chance, scenario.draft_pace, scenario.layers[0], draft),
                *(RandomDurations(*chance, *one) for one in stages_of),
            ]
        ),
        scenario.network,
        scenario.seed,
        faults=scenario.faults,
        watch=checks.after,
        log=log,
    )
    for ask in scenario.asks:
        world.submit(promises[ask.tag].submit, ask.at)
        if ask.cancel_at is not None:
            world.cancel(ask.tag, ask.cancel_at)
    return world, checks


FRUITLESS = "rings in a row gave it no token"
"""How a request may fail in a ring whose stages cannot go on with it, or lose segments."""


def _promise(scenario: Scenario, ask: ScenarioRequest, codec: ToyCodec) -> Promise:
    submit, following = ask.submit(), None
    if scenario.hybrid:
        from support.hybrid_rings import PlainHybrid

        submit = ask.submit(float(ask.seed % 2))
        following = PlainHybrid(Sampling(submit.temperature, seed=submit.seed))
    limits = [f.rows for f in scenario.faults if isinstance(f, SmallCache)]
    reasons = tuple(f"more than the {n} rows" for n in limits)
    if limits or any(map(harms_segments, scenario.faults)):
        reasons += (FRUITLESS,)
    expected = None
    if len(codec.encode(submit.prompt)) >= scenario.context_length:
        reasons += (f"context is {scenario.context_length}",)
    else:
        length = scenario.context_length
        expected = plain_answer(codec, submit, scenario.stages, length, following)
    return Promise(submit, expected, ask.cancel_at, reasons, ask.at, scenario.recovery)


def play_and_trace(scenario: Scenario, folder: Path, parts: Parts = DEFAULT_PARTS) -> None:
    """Run a scenario; if it fails, write its trace and raise ScenarioFailed with the way back."""
    log = EventLog()
    try:
        play(scenario, log, parts)
    except Exception as problem:
        path = folder / f"seed-{scenario.seed}.json"
        failure = failure_words(problem)
        trace = FailureTrace(scenario, failure, log.lines, log.skipped)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json_text(trace, _FORMAT), encoding="utf-8")
        raise ScenarioFailed(
            f"the scenario of seed {scenario.seed} failed: {failure}\n"
            f"trace: {path}\nsee it again with: python tests/benchmarks/campaign.py --replay {path}"
        ) from problem


def read_trace(path: Path) -> FailureTrace:
    """The trace in a file; raises ConfigError if there is none."""
    try:
        content = path.read_bytes()
    except OSError as problem:
        raise ConfigError(f"{path} cannot be read: {problem}") from problem
    return read_as(FailureTrace, content, str(path), WANTED, _FORMAT)


def run_campaign(
    seeds: Iterable[int],
    folder: Path,
    drawn: Callable[[int], Scenario] = draw,
    parts: Parts = DEFAULT_PARTS,
) -> int:
    """Play the scenarios of these seeds up to the first that fails; returns how many passed."""
    played = 0
    for seed in seeds:
        play_and_trace(drawn(seed), folder, parts)
        played += 1
    return played


def failure_words(problem: BaseException) -> str:
    """How a failure is written down and compared."""
    return f"{type(problem).__name__}: {problem}"


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
    pairs = zip_longest(trace.events, log.lines[trace.skipped :], fillvalue="")
    for index, (was, now) in enumerate(pairs, trace.skipped):
        if was != now:
            return Replay(trace, failure, log.lines, index, was, now)
    return Replay(trace, failure, log.lines, None)
