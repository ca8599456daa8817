"""What is learnt of times and guesses."""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from itertools import pairwise
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.rings import FakeRing
from support.rings import submit as ask_of
from support.spans import Span
from support.tiers import examples, tiered
from support.toy_answers import plain_answer
from support.worlds import submit, toy_world

from edgespec.daemon.profiles import profile_named
from edgespec.planning.cost_model import cost_model_named
from edgespec.planning.costs import RingCosts, ring_costs
from edgespec.policy.calibration import PRIOR_WEIGHT, RAREST, Calibration
from edgespec.policy.estimates import MOST_CALIBRATIONS, RingEstimates
from edgespec.policy.registry import POLICIES
from edgespec.policy.row_times import PROBE, RECENT, RowTimes
from edgespec.sim.durations import charged_durations, network_of
from edgespec.sim.oracle import Oracle
from edgespec.sim.toy import ToyCodec
from edgespec.wire.client_messages import Finished

NANO = "jetson-orin-nano-8gb"
ROWS = st.integers(1, 300)
SECONDS = st.floats(0.0, 100.0)
RECORDS = st.lists(st.tuples(ROWS, SECONDS), min_size=1, max_size=40)


def times_of(*records: tuple[int, float]) -> RowTimes:
    """What was recorded, in order."""
    times = RowTimes()
    for rows, seconds in records:
        times.record(rows, seconds)
    return times


@given(RECORDS, st.lists(st.floats(0.5, 600.0), min_size=2, max_size=20))
def test_times_never_fall_with_more_rows(
    records: list[tuple[int, float]], asked: list[float]
) -> None:
    times = times_of(*records)
    assert times.known
    seconds = [times.seconds(rows) for rows in sorted(asked)]
    assert all(a <= b + 1e-9 * (1 + b) for a, b in pairwise(seconds))
    assert seconds[0] >= 0.0


@given(st.dictionaries(st.sampled_from([1, 2, 4, 7, 16, 20, 50, 100]), SECONDS, min_size=2), ROWS)
def test_between_two_known_numbers_of_rows_lies_the_time(
    known: dict[int, float], asked: int
) -> None:
    """One record a class; fewer rows that took longer were late, and no row adds more than the
    fewest rows take."""
    times = times_of(*known.items())
    rows = sorted(known)
    level = {r: min(known[more] for more in rows if more >= r) for r in rows}
    for before, r in pairwise(rows):
        level[r] = min(level[r], level[before] + level[rows[0]] * (r - before))
    for r in rows:
        assert times.seconds(r) == pytest.approx(level[r])
    below = [r for r in rows if r <= asked]
    above = [r for r in rows if r >= asked]
    if not below:
        assert times.seconds(asked) == pytest.approx(level[rows[0]]), "no less than the smallest"
    elif above:
        assert times.seconds(asked) >= level[below[-1]] - 1e-9
        assert times.seconds(asked) <= level[above[0]] + 1e-9
    else:
        slope = (level[rows[-1]] - level[rows[-2]]) / (rows[-1] - rows[-2])
        assert times.seconds(asked) == pytest.approx(level[rows[-1]] + slope * (asked - rows[-1]))


@given(ROWS, SECONDS, ROWS)
def test_one_known_number_of_rows_is_scaled(rows: int, seconds: float, at: int) -> None:
    assert times_of((rows, seconds)).seconds(at) == pytest.approx(seconds * at / rows)


@given(st.lists(SECONDS, min_size=1, max_size=60))
def test_of_the_newest_times_the_quicker_half_counts(seconds: list[float]) -> None:
    times = times_of(*((8, each) for each in seconds))
    newest = sorted(seconds[-RECENT:])
    assert times.seconds(8) == pytest.approx(fmean(newest[: (len(newest) + 1) // 2]))


def test_late_jobs_are_not_taken_for_the_price_of_rows() -> None:
    """One in twenty takes 100 ms more, and so does each stage's first one of many rows."""
    rng, estimates = random.Random(5), RingEstimates()

    def price(rows: int) -> float:
        return 0.04 + 0.0005 * rows

    for turn in range(200):
        rows = (1, 4, 8, 16)[turn % 4]
        late = turn == 3 or rng.random() < 0.05
        ran = [(rows, price(rows) + 0.1 * (late and stage == turn % 3)) for stage in range(4)]
        estimates.segment(ran, 4)
        if turn >= 3:
            for asked in (1, 4, 8, 16):
                assert estimates.step.seconds(asked) == pytest.approx(price(asked), rel=0.02)
    assert estimates.step.spread == pytest.approx(4.0, rel=0.02)


def test_a_stage_of_another_kind_is_known_by_its_own_times() -> None:
    """A CPU beside GPUs: each further row costs it as much as the first."""
    estimates = RingEstimates()
    for turn in range(100):
        rows = (1, 4, 8, 16)[turn % 4]
        estimates.segment([(rows, 0.04), (rows, 0.02 * rows), (rows, 0.04), (rows, 0.04)], 4)
    for rows in (4, 8, 16):
        assert estimates.step.seconds(rows) == pytest.approx(0.02 * rows)
    assert estimates.step.seconds(1) == pytest.approx(0.04)


def test_rows_that_were_dear_once_are_timed_again() -> None:
    """As many are not sent while they look dear: now and then they look as the fewer ones do."""
    times = times_of(*[(16, 0.5)] * RECENT)
    seen = []
    for turn in range(4 * PROBE):
        rows = (2, 4, 8)[turn % 3]
        times.record(rows, 0.04 + 0.001 * rows)
        seen.append(times.seconds(16))
    cheap = [turn for turn, seconds in enumerate(seen) if seconds < 0.06]
    assert 3 <= len(cheap) <= 4
    for _ in range(RECENT):
        times.record(16, 0.056)
    assert times.seconds(16) == pytest.approx(0.056)


def test_a_device_that_stood_still_once_does_not_make_rows_look_free() -> None:
    """The slow one row stays, since no single row is sent while more are free."""
    usual = [(rows, 0.04 + 0.002 * rows) for rows in (2, 4, 8, 16)] * 100
    times, undisturbed = times_of((1, 0.5), *usual), times_of((1, 0.042), *usual)
    for rows in (4, 8, 16):
        assert times.seconds(rows) == pytest.approx(undisturbed.seconds(rows), rel=0.01)
    assert times.seconds(2) == pytest.approx(undisturbed.seconds(2), rel=0.1)


def test_a_device_that_changes_is_followed() -> None:
    times = times_of(*[(8, 1.0)] * 1_000, *[(8, 2.0)] * 60)
    assert times.seconds(8) == pytest.approx(2.0, abs=0.01)


def test_a_device_that_became_slower_is_not_held_to_what_it_once_took() -> None:
    times = times_of((8, 0.01), *[(1, 0.01)] * 5, *[(1, 1.0)] * 2 * PROBE)
    assert times.seconds(1) == times.seconds(8) == 1.0


def test_nothing_is_known_of_nothing() -> None:
    times = RowTimes()
    assert not times.known
    with pytest.raises(ValueError, match="no times"):
        times.seconds(1)


# --- calibration ----------------------------------------------------------------------------------

SCORES = st.floats(-50.0, 0.0)


def worth(calibration: Calibration, score: float) -> float:
    """The calibrated score of one guess, which has the odds that it says of it."""
    found = float(calibration.scores(np.array([score]))[0])
    odds = calibration.odds(score)
    assert found == pytest.approx(math.log(odds / (1.0 + odds)))
    return found


@given(st.lists(st.tuples(SCORES, st.booleans()), max_size=60), SCORES)
def test_a_calibrated_score_is_a_probability(
    learnt: list[tuple[float, bool]], score: float
) -> None:
    calibration = Calibration()
    calibration.learn(learnt)
    assert -50.0 < worth(calibration, score) <= 1e-12
    assert math.isfinite(worth(calibration, score))


@given(st.floats(math.log(RAREST), math.log(1 - RAREST)))
def test_the_draft_is_believed_at_the_start(score: float) -> None:
    assert worth(Calibration(), score) == pytest.approx(score)


@pytest.mark.parametrize(("said", "true"), [(0.9, 0.2), (0.1, 0.6), (0.5, 0.5), (0.02, 0.0)])
def test_calibration_converges_to_the_true_share(said: float, true: float) -> None:
    calibration, rng = Calibration(), random.Random(3)
    score = math.log(said)
    errors = []
    for count in range(1, 4_001):
        calibration.learn([(score, rng.random() < true)])
        if count in (40, 4_000):
            errors.append(abs(math.exp(worth(calibration, score)) - true))
    assert errors[1] < 0.02
    assert errors[1] <= errors[0] + 0.01
    other = math.log(0.999) if said < 0.5 else math.log(0.001)
    assert worth(calibration, other) == pytest.approx(other), "other scores know nothing of it"


def test_the_prior_counts_for_so_many_observations() -> None:
    calibration = Calibration()
    for _ in range(int(PRIOR_WEIGHT)):
        calibration.learn([(math.log(0.5), False)])
    assert math.exp(worth(calibration, math.log(0.5))) == pytest.approx(0.25)


def test_guesses_of_one_class_still_differ_as_the_draft_had_it() -> None:
    calibration = Calibration()
    for _ in range(400):
        calibration.learn([(math.log(0.6), False)])
        calibration.learn([(math.log(0.6), True)])
    low, high = (math.exp(worth(calibration, math.log(share))) for share in (0.55, 0.62))
    assert low < 0.5 < high
    # The odds are in the same proportion as those of 0.55 and 0.62, and 0.6 is at one half.
    assert (high / (1 - high)) / (low / (1 - low)) == pytest.approx((62 / 38) / (55 / 45), rel=0.05)


# --- all of it ------------------------------------------------------------------------------------


def test_segments_tell_what_a_step_takes_and_how_it_spreads() -> None:
    estimates = RingEstimates()
    estimates.segment([], 4)  # emptied at the first stage: it tells nothing
    assert not estimates.step.known
    assert estimates.step.spread == 0.0
    estimates.segment([(8, 1.0)] * 4, 4)
    assert (estimates.step.seconds(8), estimates.step.spread) == (1.0, 4.0)
    for _ in range(2 * RECENT):
        estimates.segment([(8, 3.0), (8, 1.0), (8, 1.0), (8, 1.0)], 4)
    assert (estimates.step.seconds(8), estimates.step.spread) == (3.0, 2.0)


def test_a_segment_that_was_emptied_on_its_way_teaches_the_stages_that_ran_it() -> None:
    estimates = RingEstimates()
    estimates.segment([(8, 1.0), (8, 2.0)], 2)
    for _ in range(50):
        estimates.segment([(1, 0.9)], 2)
    assert estimates.step.seconds(8) == pytest.approx(2.0)
    assert estimates.step.seconds(1) == pytest.approx(1.8), "twice the first stage's time"
    assert estimates.step.spread == pytest.approx(1.5)
    assert estimates.reach == pytest.approx(1.0, abs=0.01), "but few come so far"


def test_a_ring_of_another_length_is_learnt_anew() -> None:
    estimates = RingEstimates()
    estimates.segment([(8, 1.0)] * 4, 4)
    estimates.segment([], 2)
    assert estimates.step.seconds(8) == 1.0, "until it tells something"
    estimates.segment([(8, 2.0)] * 2, 2)
    assert (estimates.step.seconds(8), estimates.step.spread) == (2.0, 2.0)


@given(st.lists(st.lists(st.tuples(ROWS, st.floats(0.0, 1e308)), max_size=6), max_size=30))
def test_whatever_stages_say_the_ratios_are_those_of_a_ring(
    reports: list[list[tuple[int, float]]],
) -> None:
    estimates = RingEstimates()
    for ran in reports:
        estimates.segment(ran, 4)
        for ratio in (estimates.step.spread, estimates.reach):
            assert ratio == 0.0 or 1.0 - 1e-9 <= ratio <= 4.0 + 1e-9
        if estimates.step.known:
            seconds = [estimates.step.seconds(rows) for rows in range(1, 70)]
            assert all(0.0 <= one < 1e9 for one in seconds)
            assert all(a <= b + 1e-9 * (1 + b) for a, b in pairwise(seconds))


RINGS = {
    "even": ((NANO,) * 4, ()),
    "heavy-last": ((NANO,) * 4, (9, 9, 10, 12)),
    "mixed": (("jetson-orin-nx-16gb",) * 3 + (NANO,), ()),
}


def ring_named(name: str) -> RingCosts:
    """What it charges for llama-2-13b."""
    stages, split = RINGS[name]
    profiles = [profile_named(each) for each in (NANO, *stages)]
    return ring_costs(profiles, cost_model_named("llama-2-13b"), split)


def check(estimates: RingEstimates, costs: RingCosts, seen: int, rows: Collection[int]) -> None:
    """Of all these numbers of rows the time learnt is about the one charged; so is the spread."""
    for each in rows:
        charged = [stage.block_seconds(each, seen) for stage in costs.stages]
        assert estimates.step.seconds(each) == pytest.approx(max(charged), rel=0.1), each
    one = [stage.block_seconds(1, seen) for stage in costs.stages]
    assert estimates.step.spread == pytest.approx(sum(one) / max(one), rel=0.1)


def passing(most: int) -> st.SearchStrategy[list[int]]:
    """Rows of a segment at each of four stages: it loses some on its way, or all."""
    rows = st.lists(st.integers(0, most), min_size=1, max_size=4)
    return rows.map(lambda found: [n for n in sorted(found, reverse=True) if n])


@pytest.mark.parametrize("ring", RINGS)
@given(
    st.lists(passing(8) | passing(64), min_size=99, max_size=99),
    st.integers(1, 300),
    st.integers(0, 99),
)
@examples(25)
def test_times_and_spread_are_those_charged_in_whatever_order_segments_come(
    ring: str, segments: list[list[int]], prompt: int, place: int
) -> None:
    """The prompt alone has been everywhere."""
    costs, estimates = ring_named(ring), RingEstimates()
    segments = [*segments[:place], [prompt] * 4, *segments[place:]]
    for rows in segments:
        stages = zip(rows, costs.stages, strict=False)
        estimates.segment([(n, stage.block_seconds(n, 200)) for n, stage in stages], 4)
    check(estimates, costs, 200, {n for rows in segments for n in rows})


@pytest.mark.parametrize("prompt", tiered([1, 20, 300], [20]))
@pytest.mark.parametrize("ring", RINGS)
def test_times_and_spread_are_those_charged_after_a_hundred_segments(
    ring: str, prompt: int
) -> None:
    """On a simulated ring, with guesses that are often wrong: most segments are emptied."""
    costs, draft = ring_named(ring), Oracle(random.Random("draft"), 0.7)
    ask = submit(prompt="h" * prompt, limit=80, policy="adaptive")
    draft.tell(plain_answer(ToyCodec(), ask, 4, 2000).whole)
    spans: list[Span] = []
    world = toy_world(
        charged_durations(costs, draft), network=network_of(costs), draft=draft, spans=spans
    )
    world.submit(ask)
    world.run()
    ran = [span for span in spans if span.kind == "RunBlock" and not span.stopped]
    assert sum(span.node == 1 for span in ran) >= 100
    estimates = world.coordinator.learnt["adaptive"]
    rows = {span.rows for span in ran}
    check(estimates, costs, prompt + 30, rows)


@pytest.mark.parametrize("ring", tiered(RINGS, ["even"]))
def test_what_plain_decoding_would_take_is_learnt_from_any_policy(ring: str) -> None:
    """Within a tenth, and never slower than it is: messages take time too."""

    def speeds(policy: str) -> tuple[float, float]:
        """Tokens a second: what is said of plain decoding, and what this policy had."""
        costs, draft = ring_named(ring), Oracle(random.Random("draft"), 0.7)
        ask = submit(prompt="h" * 20, limit=80, policy=policy)
        draft.tell(plain_answer(ToyCodec(), ask, 4, 2000).whole)
        world = toy_world(charged_durations(costs, draft), network=network_of(costs), draft=draft)
        assert world.coordinator.learnt.plain_speed() == 0.0, "nothing is known yet"
        world.submit(ask)
        world.run()
        end = world.replies[-1].message
        assert isinstance(end, Finished)
        seconds = end.seconds - end.first_token_seconds
        return world.coordinator.learnt.plain_speed(), (end.new_tokens - 1) / seconds

    _, plain = speeds("autoregressive")
    for policy in ("autoregressive", "adaptive", "flowspec"):
        said, _ = speeds(policy)
        assert plain <= said <= 1.1 * plain, policy


def test_what_is_learnt_of_drafts_is_their_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No head that interrupted one, and no wait behind one, makes drafts look dear. How long a head
    waited for the end of a layer counts as the head's."""
    costs, draft = ring_named(next(iter(RINGS))), Oracle(random.Random("draft"), 0.7)
    ask = submit(prompt="h" * 20, limit=80, policy="adaptive")
    draft.tell(plain_answer(ToyCodec(), ask, 4, 2000).whole)
    world = toy_world(
        charged_durations(costs, draft, loop_free=True),
        network=network_of(costs),
        draft=draft,
        spans=(spans := list[Span]()),
    )
    learnt: list[float] = []
    times = world.coordinator.learnt["adaptive"].draft
    monkeypatch.setattr(times, "record", lambda rows, seconds: learnt.append(seconds))
    world.submit(ask)
    world.run()
    stretches = [span for span in spans if span.kind == "Draft"]
    own: dict[int, float] = {}
    for span in stretches:
        own[span.job] = own.get(span.job, 0.0) + span.end - span.start
    assert len(stretches) - len(own) >= 10, "drafts are interrupted"
    assert len(learnt) >= 10
    each = set(own.values())
    assert all(any(0.95 * one < seconds < one + 1e-9 for one in each) for seconds in learnt)


def test_a_ring_whose_time_stands_still_is_known_too() -> None:
    """A policy may rely on costs once a prompt was round, whatever the clock's grain."""
    estimates = RingEstimates()
    estimates.segment([(5, 0.0)], 1)
    assert estimates.step.known
    assert estimates.step.seconds(64) == 0.0


@pytest.mark.parametrize("policy", sorted(name for name, p in POLICIES.items() if p.drafts))
def test_costs_are_known_before_the_first_token(policy: str) -> None:
    fake = FakeRing(2, prefill_chunk=3)
    fake.ring.submit(ask_of(1, "hello", 5, policy))
    request = fake.coordinator.accepts(1)
    assert request is not None
    estimates = request.estimates
    while fake.take_turns(1) and fake.coordinator.accepts(1):
        if request.answer.token_ids:
            assert estimates.step.known
            assert estimates.draft.known or request.drafting.running is not None


@given(st.lists(st.none() | st.integers(0, 70), min_size=1, max_size=50))
def test_hit_share_is_the_share_of_levels_that_held_the_token(ranks: list[int | None]) -> None:
    estimates = RingEstimates()
    estimates.ranks.update(ranks)
    assert estimates.levels == len(ranks)
    for width in (1, 4, 8, 64, 71):
        held = sum(rank is not None and rank < width for rank in ranks)
        assert estimates.hit_share(width) == pytest.approx(held / len(ranks))


def test_ways_of_sampling_are_calibrated_apart() -> None:
    estimates = RingEstimates()
    for _ in range(100):
        estimates.calibration("greedy").learn([(math.log(0.5), True)])
    assert worth(estimates.calibration("hot"), math.log(0.5)) == pytest.approx(math.log(0.5))
    assert worth(estimates.calibration("greedy"), math.log(0.5)) > math.log(0.9)


def test_of_many_ways_of_sampling_those_used_last_are_remembered() -> None:
    estimates = RingEstimates()
    kept = estimates.calibration("often")
    for number in range(10 * MOST_CALIBRATIONS):
        estimates.calibration(number)
        assert estimates.calibration("often") is kept
    assert len(estimates.calibrations) == MOST_CALIBRATIONS
