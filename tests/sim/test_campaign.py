"""Campaign: random scenarios keep every promise; failures are written down and can be replayed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from benchmarks import campaign as by_hand
from msgspec import structs, to_builtins
from support.campaign import (
    Parts,
    ScenarioFailed,
    build,
    play,
    play_and_trace,
    read_trace,
    replay,
    run_campaign,
)
from support.event_log import EventLog
from support.faults import Crash, Late, SmallCache, harms_segments
from support.scenario import Scenario, Setting, draw, draw_hybrid, draw_losses, policies_of
from support.tiers import thorough, tiered
from support.worlds import CALM, CALM_ASK

from edgespec.decoding.coordinator import CoordinatorMachine
from edgespec.errors import ConfigError
from edgespec.machines.effects import Effect, SendPeer
from edgespec.machines.events import Event
from edgespec.policy.registry import POLICIES
from edgespec.schema import as_type
from edgespec.sim.oracle import Oracle
from edgespec.types.boundaries import AHEAD, STRIDE
from edgespec.types.features import DraftNeeds, PPDTable
from edgespec.types.tensor import Tensor
from edgespec.wire.client_messages import Finished, Tokens

RUNS = 300
CRASHES = 25
CHUNK = 50
SLOW_RUNS = 10_000
SLOW_CHUNK = 1_000


@pytest.mark.parametrize(
    ("first", "count"), [(0, 12), *(thorough(first, CHUNK) for first in range(0, RUNS, CHUNK))]
)
def test_random_scenarios_keep_every_promise(first: int, count: int, tmp_path: Path) -> None:
    assert run_campaign(range(first, first + count), tmp_path) == count


@pytest.mark.parametrize(("first", "count"), [(0, 4), thorough(4, CHUNK)])
def test_random_scenarios_of_a_hybrid_keep_every_promise(
    first: int, count: int, tmp_path: Path
) -> None:
    """Its layers compute, over caches and states as stages have them."""
    seeds = range(first, first + count)
    assert run_campaign(seeds, tmp_path, draw_hybrid) == count
    asks = [ask for seed in seeds for ask in draw_hybrid(seed).asks]
    assert max(len(ask.prompt) + ask.max_new_tokens for ask in asks) > AHEAD + STRIDE, "none folds"


class Prompted(Oracle):
    """An oracle whose guesses carry PPD tokens."""

    def __init__(self, rng: random.Random, accuracy: float) -> None:
        super().__init__(rng, accuracy)
        table = PPDTable(3, 2, Tensor("uint64", (6, 1), bytes(range(48))))
        self.needs = DraftNeeds(ppd_tokens=table)


@pytest.mark.parametrize("seeds", [range(8), thorough(range(8, 30))])
def test_random_scenarios_with_ppd_tokens_keep_every_promise(seeds: range) -> None:
    for seed in seeds:
        play(structs.replace(draw(seed), head_last=False), parts=Parts(draft=Prompted))


@pytest.mark.parametrize(
    ("first", "count"),
    [(0, 8), thorough(8, 12), *(thorough(first, CHUNK) for first in range(20, RUNS, CHUNK))],
)
def test_wherever_the_head_is_every_promise_is_kept(first: int, count: int) -> None:
    for seed in range(first, first + count):
        scenario = draw(seed)
        play(structs.replace(scenario, head_last=not scenario.head_last))


def test_where_the_head_is_changes_nothing_else_of_a_scenario() -> None:
    places = [draw(seed).head_last for seed in range(RUNS)]
    assert 60 < sum(places) < 120
    # As seed 1 was before scenarios had a place of the head, and company.
    own = [ask for ask in draw(1).asks if ask.tag < 100]
    assert (draw(1).recovery, own[-1].prompt) == (0.005, "edi")


def test_nothing_leaves_for_a_ring_that_is_gone() -> None:
    """Of several live requests that failed with it, the end of one let rows of the next leave."""
    scenario = draw(246)
    assert (scenario.live, scenario.recovery) == (5, 0.0)
    play(scenario)


def test_the_end_of_a_request_is_no_fault_of_those_that_it_shared_a_segment_with() -> None:
    """The last stage chose no tokens of the part whose request had ended meanwhile."""
    assert draw(118).live > 1
    play(draw(118))


def test_stages_share_what_is_counted_in_whatever_order_openings_leave() -> None:
    """Two began with rows of one request, and the second one's opening left first."""
    play(draw(1789))


def test_a_stage_that_is_lost_at_its_heads_waits_for_no_block() -> None:
    play(draw(101542))


def test_the_last_of_several_goes_on_alone() -> None:
    """Another one's answer ended with the same segment, and nothing was ever sent again."""
    play(draw(200336))


@pytest.mark.parametrize(
    ("policy", "runs"), [("adaptive", 8), *(thorough(one, CRASHES) for one in sorted(POLICIES))]
)
def test_whatever_crashes_when_the_answer_is_the_plain_one(policy: str, runs: int) -> None:
    """Several crashes a run, also before anything is noticed, during prefill and recovery."""
    recoveries = 0
    for seed in range(runs):
        scenario = crashing(seed, policy)
        with policies_of(scenario):
            world, checks = build(scenario)
            world.run()
            checks.drained(world)
        ends = [r.message for r in world.replies if isinstance(r.message, Finished)]
        assert len(ends) == len(scenario.asks), "there was time enough"
        recoveries += sum(end.recoveries for end in ends)
    assert recoveries > runs


@pytest.mark.parametrize("seeds", [8, thorough(400)])
def test_whatever_segments_are_lost_every_request_of_several_ends(
    seeds: int, tmp_path: Path
) -> None:
    recoveries = 0
    for seed in range(seeds):
        scenario = losing(seed)
        log = EventLog(longest=None)
        play(scenario, log)
        recoveries += sum("a new ring" in line for line in log.lines)
    assert recoveries > seeds / 20, "some were lost, and were missed"


@pytest.mark.parametrize("seed", tiered([1247, 1925], [1247]))
def test_a_ring_with_a_part_that_did_not_fit_gathers_no_rows(seed: int) -> None:
    """Rows of the part before it were booked, which no cache held: an IndexError in the worker."""
    play(losing(seed))


def losing(seed: int) -> Scenario:
    """Two or more requests at once on a ring that loses segments, or changes them."""
    scenario = draw(seed)
    others = tuple(f for f in scenario.faults if not harms_segments(f))
    asks = tuple(structs.replace(ask, at=ask.at / 10) for ask in scenario.asks)
    return structs.replace(
        scenario,
        faults=others + draw_losses(seed, 1.0),
        live=max(scenario.live, 2),
        asks=asks,
        recovery=60.0,
    )


def crashing(seed: int, policy: str) -> Scenario:
    """Some requests of one policy on a ring that is lost up to five times."""
    rng = random.Random(f"{seed} crashes")
    scenario = draw(seed)
    paces = [pace for pace in (*scenario.stage_paces, scenario.head_pace) if pace]
    pace = sum(paces) / max(len(paces), 1)
    crashes, at = [], 0.0
    for _ in range(rng.randint(1, 5)):
        at += rng.random() * 30 * pace
        stage = rng.randint(1, scenario.stages)
        crashes.append(Crash(stage, at, rng.random() * 5 * pace, rng.random() * 5 * pace))
    asks = (
        structs.replace(ask, policy=policy, settings=(), cancel_at=None, prompt=ask.prompt[:9])
        for ask in scenario.asks
    )
    others = tuple(
        f
        for f in scenario.faults
        if not isinstance(f, Crash | SmallCache) and not harms_segments(f)
    )
    return structs.replace(scenario, faults=(*others, *crashes), asks=tuple(asks), recovery=60.0)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(RUNS, RUNS + SLOW_RUNS, SLOW_CHUNK))
def test_many_more_scenarios_keep_every_promise(first: int, tmp_path: Path) -> None:
    assert run_campaign(range(first, first + SLOW_CHUNK), tmp_path) == SLOW_CHUNK


def test_scenarios_play_every_published_policy_and_every_fault() -> None:
    scenarios = [draw(seed) for seed in range(RUNS)]
    assert {ask.policy for s in scenarios for ask in s.asks} == set(POLICIES)
    told = [to_builtins(fault) for s in scenarios for fault in s.faults]
    assert {f"{one['kind']} {one.get('what', '')}".strip() for one in told} == {
        *("delay", "duplicate", "lose retain", "late"),
        *("lose segment", "bent"),
        *("slow_stage", "small_cache", "crash", "change"),
    }


@pytest.mark.parametrize("seed", tiered(range(10), range(3)))
def test_the_same_scenario_runs_alike(seed: int) -> None:
    logs = [EventLog(), EventLog()]
    for log in logs:
        play(draw(seed), log)
    assert logs[0].lines == logs[1].lines
    assert len(logs[0].lines) > 10


def test_a_scenario_that_was_written_down_runs_alike() -> None:
    for seed in range(40):
        scenario = draw(seed)
        again = as_type(Scenario, json.loads(json.dumps(to_builtins(scenario))), "x")
        assert again == scenario


def test_variants_of_policies_are_known_while_the_run_lasts() -> None:
    before = dict(POLICIES)
    with policies_of(CALM):
        policy: Any = POLICIES["flowspec#0"]
        assert (policy.name, policy.nodes, policy.longest) == ("flowspec", 10, 2)
    assert before == POLICIES


def test_a_setting_that_a_policy_does_not_have_is_refused() -> None:
    ask = structs.replace(CALM_ASK, settings=(Setting("speed", 3),))
    with pytest.raises(ConfigError, match="no parameters"):
        play(structs.replace(CALM, asks=(ask,)))


def test_a_log_keeps_the_last_lines() -> None:
    log = EventLog(longest=2)
    for what in "abc":
        log.add(1.5, "D0", what)
    assert (log.lines, log.skipped) == (("1.5 D0 b", "1.5 D0 c"), 1)


# --- replay -------------------------------------------------------------------------------------


class Stammers(CoordinatorMachine):
    """Tells the fifth piece of an answer twice."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._pieces = 0

    def handle(self, event: Event, now: float) -> list[Effect]:
        effects = super().handle(event, now)
        for effect in list(effects):
            if isinstance(effect, SendPeer) and isinstance(effect.message, Tokens):
                self._pieces += 1
                if self._pieces == 5:
                    effects.append(effect)
        return effects


BUGGY = Parts(coordinator=Stammers)


@pytest.fixture
def trace_path(tmp_path: Path) -> Path:
    with pytest.raises(ScenarioFailed) as caught:
        play_and_trace(CALM, tmp_path / "traces", BUGGY)
    path = tmp_path / "traces" / "seed-7.json"
    text = str(caught.value)
    assert "seed 7" in text
    assert f"campaign.py --replay {path}" in text
    assert "InvariantViolated: plain answer" in text
    return path


def test_a_trace_holds_what_is_needed(trace_path: Path) -> None:
    content = json.loads(trace_path.read_text())
    assert content["format"] == 1
    assert content["scenario"]["seed"] == 7
    assert content["events"][0] == "0 D0 the ring is up"
    assert content["failure"].startswith("InvariantViolated: plain answer")
    assert read_trace(trace_path).scenario == CALM


def test_a_replay_shows_the_same_failure(trace_path: Path) -> None:
    outcome = replay(trace_path, BUGGY)
    assert outcome.same
    assert outcome.events == outcome.trace.events
    assert outcome.words().startswith("seed 7 fails as recorded: InvariantViolated: plain answer")


def test_a_replay_tells_that_it_no_longer_fails(trace_path: Path) -> None:
    outcome = replay(trace_path)
    assert not outcome.same
    assert "it no longer fails" in outcome.words()
    # The same events up to the one that went wrong, and then more.
    assert outcome.diverged_at is not None
    assert outcome.recorded.endswith("tells Tokens 0")
    assert outcome.events[: outcome.diverged_at] == outcome.trace.events[: outcome.diverged_at]


def test_a_replay_tells_where_it_diverges(trace_path: Path) -> None:
    content = json.loads(trace_path.read_text())
    content["events"][3] = "0 V1 something else"
    trace_path.write_text(json.dumps(content))
    outcome = replay(trace_path, BUGGY)
    assert (outcome.diverged_at, outcome.recorded) == (3, "0 V1 something else")
    assert "diverged at event 3" in outcome.words()
    assert "it fails now" in outcome.words()


def test_a_replay_compares_only_what_was_kept(trace_path: Path) -> None:
    content = json.loads(trace_path.read_text())
    content["events"] = content["events"][10:]
    content["skipped"] = 10
    trace_path.write_text(json.dumps(content))
    assert replay(trace_path, BUGGY).same


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no json", "is not JSON in UTF-8"),
        ("[]", "it must be an object; give one of tests.benchmarks.campaign.py"),
        ('{"format": 2}', "has format 2, and this edgespec reads format 1"),
        ('{"format": 1}', "the key 'scenario' is missing"),
        (
            '{"format": 1, "failure": "", "events": [], "scenario": 3}',
            "scenario is 3; it must be an object",
        ),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


def _with(change: dict[str, Any]) -> dict[str, Any]:
    return {**to_builtins(CALM), **change}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (_with({"colour": "red"}), "unknown key 'colour'"),
        ({"seed": 1}, "the key 'accuracy' is missing"),
        (_with({"seed": "7"}), "seed is '7'; it must be a whole number"),
        (_with({"seed": True}), "seed is True; it must be a whole number"),
        (_with({"faults": 3}), "faults is 3; it must be a list"),
        (_with({"faults": [{"kind": "meteor"}]}), r"faults\[0\].kind is 'meteor': invalid value"),
        (_with({"faults": [7]}), r"faults\[0\] is 7; it must be an object"),
    ],
)
def test_json_that_is_no_scenario_is_refused(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        as_type(Scenario, value, "x")


def test_faults_and_gaps_come_back_from_json() -> None:
    faults = (Crash(1, 0.5, 0, 1), SmallCache(2, 5), Late(0.5, 1.0))
    ask = structs.replace(CALM_ASK, cancel_at=2.5)
    scenario = structs.replace(
        CALM, faults=faults, asks=(ask, structs.replace(ask, tag=1, cancel_at=None))
    )
    assert as_type(Scenario, to_builtins(scenario), "x") == scenario


# --- by hand ------------------------------------------------------------------------------------


def plant(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    """Let a function of the simulator build its runs of the buggy parts unless told otherwise."""
    monkeypatch.setattr(function, "__defaults__", (*function.__defaults__[:-1], BUGGY))


def test_a_campaign_counts_what_passed(capsys: pytest.CaptureFixture[str]) -> None:
    assert by_hand.main(["3", "--jobs", "1"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("3 scenarios kept every promise: seeds 0 to 2, ")
    for wrong in (["0"], ["1", "--seed", "-1"], [], ["1", "--replay", "x"]):
        with pytest.raises(SystemExit):
            by_hand.main(wrong)


def test_a_failure_names_seed_trace_and_the_way_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(monkeypatch, run_campaign)
    traces = tmp_path / "traces"
    assert by_hand.main(["20", "--seed", "5", "--traces", str(traces), "--jobs", "1"]) == 1
    (trace,) = traces.iterdir()
    seed = trace.stem.removeprefix("seed-")
    assert int(seed) >= 5
    told = capsys.readouterr().err
    assert f"the scenario of seed {seed} failed" in told
    assert f"campaign.py --replay {trace}" in told


def test_a_replay_fails_while_the_bug_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ScenarioFailed):
        play_and_trace(CALM, tmp_path, BUGGY)
    trace = str(tmp_path / "seed-7.json")
    assert by_hand.main(["--replay", trace]) == 0
    assert "it no longer fails" in capsys.readouterr().out
    plant(monkeypatch, replay)
    assert by_hand.main(["--replay", trace]) == 1
    assert capsys.readouterr().out.startswith("seed 7 fails as recorded: InvariantViolated")
    assert by_hand.main(["--replay", str(tmp_path / "none")]) == 1
    assert "cannot be read" in capsys.readouterr().err
