"""Campaign: plays scenarios of toy rings, checks every event, and writes down what fails."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from edgespec.decoding.admission import Ring
from edgespec.decoding.answer import TextCodec
from edgespec.decoding.coordinator import CoordinatorMachine
from edgespec.decoding.stage import StageMachine
from edgespec.errors import EdgespecError
from edgespec.sim.checks import Checks, Promise
from edgespec.sim.durations import RandomDurations
from edgespec.sim.faults import SmallCache
from edgespec.sim.log import EventLog
from edgespec.sim.oracle import Oracle
from edgespec.sim.scenario import Scenario, ScenarioRequest, draw, policies_of
from edgespec.sim.toy import VOCABULARY, ToyCodec, plain_answer
from edgespec.sim.toy_model import FakeBlock, FakeHead
from edgespec.sim.trace import FailureTrace, write_trace
from edgespec.sim.world import CoordinatorParts, StageParts, World

PLENTY = 100_000
"""Rows of a request that a stage may hold where no fault says otherwise."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run is built of; a test replaces a part to plant a bug."""

    coordinator: Callable[[Ring, TextCodec], CoordinatorMachine] = CoordinatorMachine
    stage: Callable[..., StageMachine] = StageMachine
    block: Callable[[int], FakeBlock] = FakeBlock
    draft: Callable[[random.Random, float], Oracle] = Oracle


DEFAULT_PARTS = Parts()


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
) -> tuple[World, Checks]:
    """The world of a scenario, with its requests booked, and its checks.

    Its policies must be registered (`policies_of`) while it runs.
    """
    stages = scenario.stages
    codec = ToyCodec(frozenset(scenario.eos_ids))
    draft = parts.draft(random.Random(f"{scenario.seed} draft"), scenario.accuracy)
    ring = Ring(
        stages,
        scenario.context_length,
        "oracle",
        scenario.prefill_chunk,
        recovery=scenario.recovery,
        needs=draft.needs,
    )
    limits = {f.stage: f.rows for f in scenario.faults if isinstance(f, SmallCache)}
    promises = {ask.tag: _promise(scenario, ask, codec) for ask in scenario.asks}
    for promise in promises.values():
        if promise.expected is not None:
            draft.tell(promise.expected.whole)

    def make_stages() -> list[StageParts]:
        return [
            StageParts(
                parts.stage(
                    is_first=number == 1,
                    is_last=number == stages,
                    row_limit=limits.get(number, PLENTY),
                ),
                parts.block(number - 1),
            )
            for number in range(1, stages + 1)
        ]

    checks = Checks(promises)
    world = World(
        parts.coordinator(ring, codec),
        CoordinatorParts(FakeHead(VOCABULARY), draft),
        make_stages,
        RandomDurations(
            random.Random(f"{scenario.seed} durations"),
            scenario.head_pace,
            scenario.draft_pace,
            scenario.stage_paces,
            scenario.layers,
        ),
        scenario.network,
        scenario.faults,
        scenario.seed,
        checks,
        log,
    )
    for ask in scenario.asks:
        world.submit(ask.submit(), ask.at)
        if ask.cancel_at is not None:
            world.cancel(ask.tag, ask.cancel_at)
    return world, checks


def _promise(scenario: Scenario, ask: ScenarioRequest, codec: ToyCodec) -> Promise:
    submit = ask.submit()
    limits = [f.rows for f in scenario.faults if isinstance(f, SmallCache)]
    reasons = tuple(f"more than {rows} rows" for rows in limits)
    reasons = (*reasons, "a stage lost rows") if limits else ()
    expected = None
    if len(codec.encode(submit.prompt)) >= scenario.context_length:
        reasons = (f"context is {scenario.context_length}",)
    else:
        expected = plain_answer(codec, submit, scenario.stages, scenario.context_length)
    return Promise(submit, expected, ask.cancel_at, reasons, ask.at, scenario.recovery)


def play_and_trace(scenario: Scenario, folder: Path, parts: Parts = DEFAULT_PARTS) -> None:
    """Run a scenario; if it fails, write its trace and raise ScenarioFailed with the way back."""
    log = EventLog()
    try:
        play(scenario, log, parts)
    except Exception as problem:
        path = folder / f"seed-{scenario.seed}.json"
        failure = failure_words(problem)
        write_trace(path, FailureTrace(scenario, failure, log.lines, log.skipped))
        raise ScenarioFailed(
            f"the scenario of seed {scenario.seed} failed: {failure}\n"
            f"trace: {path}\nsee it again with: edgespec simulate --replay {path}"
        ) from problem


def run_campaign(seeds: Iterable[int], folder: Path, parts: Parts = DEFAULT_PARTS) -> int:
    """Play the scenarios of these seeds up to the first that fails; returns how many passed."""
    played = 0
    for seed in seeds:
        play_and_trace(draw(seed), folder, parts)
        played += 1
    return played


def failure_words(problem: BaseException) -> str:
    """How a failure is written down and compared."""
    return f"{type(problem).__name__}: {problem}"
