"""Load: when requests come, what is measured of them, and that their texts stay what they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf, nan

import pytest
from msgspec import structs
from support.plays import play_all
from support.tiers import thorough, tiered
from support.torch_rings import BASE, DRAFT

from edgespec.bench.load import Course, Load, LoadFigures, load_figures, span
from edgespec.bench.report import ALONE, Run, run_of
from edgespec.bench.setup import Setup
from edgespec.bench.simulated import play, simulate
from edgespec.bench.workloads import default_prompts
from edgespec.daemon.profiles import profile_named
from edgespec.errors import ConfigError
from edgespec.planning.cost_model import cost_model_named
from edgespec.policy.registry import POLICIES
from edgespec.verify.sampling import Sampling

NANO = profile_named("jetson-orin-nano-8gb")
SETUP = Setup(
    model=BASE,
    draft=DRAFT,
    dtype="float64",
    profiles=(NANO,) * 3,
    cost_model=cost_model_named("llama-2-13b"),
    link=None,
    prompts=tuple(default_prompts(3)),
    max_new_tokens=8,
    sampling=Sampling(temperature=0.8, seed=3),
)
LOADS = {"two": Load(live=2), "all": Load(live=9), "arrivals": Load(arrivals=1.5)}


# --- what is measured -----------------------------------------------------------------------------


def test_figures_are_those_of_all_tokens_together() -> None:
    quick = Course(0.0, (1.0, 1.0, 2.0, 3.0), 3.0)
    slow = Course(1.0, (3.0, 7.0), 7.0)
    assert span([quick, slow]) == 7.0
    assert load_figures(Load(live=2), [quick, slow]) == LoadFigures(
        live=2,
        ttft_mean=1.5,
        tbt_mean=6.0 / 4,  # gaps of 0, 1, 1 and 4 s
        tbt_p99=4.0,
        slowest_ratio=4.0 / 1.5,
    )
    # With arrivals it is measured how many there are at once.
    assert load_figures(Load(arrivals=1.0), [quick, slow]).live == (3.0 + 6.0) / 7.0


def test_one_of_a_hundred_gaps_may_be_longer_than_the_99th_percentile() -> None:
    regular = Course(0.0, tuple(map(float, range(100))), 99.0)
    late = Course(0.0, (0.0, 50.0), 50.0)
    assert load_figures(Load(live=2), [regular, late]).tbt_p99 == 1.0
    assert load_figures(Load(live=2), [late]).tbt_p99 == 50.0


def test_answers_of_a_token_have_no_time_between_tokens() -> None:
    figures = load_figures(Load(live=1), [Course(0.0, (1.0,), 1.0), Course(0.0, (), 2.0)])
    assert figures == LoadFigures(1, 1.0, 0.0, 0.0, 0.0)


def test_arrivals_follow_from_the_seed_and_have_their_rate() -> None:
    times = Load(arrivals=4.0).times(2000, seed=7)
    assert times == Load(arrivals=4.0).times(2000, seed=7) != Load(arrivals=4.0).times(2000, 8)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(2000 / 4.0, rel=0.1)
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    squares = sum(gap * gap for gap in gaps) / len(gaps)
    assert squares == pytest.approx(2 / 4.0**2, rel=0.2)  # of an exponential distribution


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Load(live=0), "live is 0; it must be at least 1"),
        (lambda: Load(arrivals=0.0), "arrivals is 0; it must be above 0"),
        (lambda: Load(arrivals=-2.0), "arrivals is -2"),
        (lambda: Load(arrivals=inf), "arrivals is inf"),
        (lambda: Load(arrivals=nan), "arrivals is nan"),
        (lambda: Load(2, 2.0), "--live and --arrivals exclude each other"),
    ],
)
def test_a_load_that_cannot_be_is_refused(make: Callable[[], Load], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


# --- answers under load ---------------------------------------------------------------------------


@pytest.mark.parametrize("load", tiered(LOADS, {"two"}))
def test_under_load_what_is_looked_up_plays_as_what_is_computed(load: str) -> None:
    """To the last digit, and each text is that of the request alone."""
    setup = replace(SETUP, load=LOADS[load])
    policies = ("naive_tree", "adaptive")
    together = play_all(setup, policies)
    alone = play_all(SETUP, ["autoregressive"])["autoregressive"]
    for policy in policies:
        computed, looked_up = play(setup, policy), together[policy]
        assert looked_up.tokens == computed.tokens == alone.tokens
        assert looked_up.courses == computed.courses
        assert (looked_up.elapsed, looked_up.busy) == (computed.elapsed, computed.busy)


@pytest.mark.parametrize(
    ("load", "policies"),
    [
        ("two", ["autoregressive"]),
        thorough("two", list(POLICIES)),
        thorough("all", list(POLICIES)),
        thorough("arrivals", list(POLICIES)),
    ],
)
def test_every_policy_gives_the_texts_of_requests_alone(load: str, policies: list[str]) -> None:
    setup = replace(SETUP, load=LOADS[load])
    for run in simulate(setup, policies):
        assert run.exact, run.policy
        assert run.new_tokens == 24
        assert run.tokens_per_second == pytest.approx(24 / run.virtual_seconds)
        assert run.load is not None
        assert run.load.ttft_mean >= run.first_token_seconds * (1 - 1e-9)
        assert run.load.tbt_p99 >= run.load.tbt_mean > 0
        assert run.load.slowest_ratio >= 1


@pytest.mark.thorough
def test_stages_have_room_for_all_that_are_live() -> None:
    """More rows together than one request may have."""
    prompts = tuple(default_prompts(40)) * 2
    crowd = replace(SETUP, load=Load(live=80), prompts=prompts, max_new_tokens=2)
    played = play_all(crowd, ["specpipe"])["specpipe"]
    assert [answer.new_tokens for answer in played.answers] == [2] * 80


def test_the_next_one_is_asked_as_soon_as_one_ends() -> None:
    played = play_all(replace(SETUP, load=Load(live=2)), ["autoregressive"])["autoregressive"]
    asked = [course.asked for course in played.courses]
    ends = sorted(course.ended for course in played.courses)
    assert asked == [0.0, 0.0, ends[0]]
    assert all(len(course.tokens) == 8 for course in played.courses)
    assert played.seconds == ends[-1] <= played.elapsed


def test_one_at_once_is_as_fast_as_one_after_the_other() -> None:
    """But for the next question, which does not wait until the ring is empty."""
    (alone,) = simulate(SETUP, ["autoregressive"])
    (one,) = simulate(replace(SETUP, load=Load(live=1)), ["autoregressive"])
    assert one.tokens_per_second == pytest.approx(alone.tokens_per_second, rel=0.01)


def test_wrong_tokens_under_load_are_noticed() -> None:
    """`exact` compares with requests alone, not with what the same load gave."""
    loaded = play_all(replace(SETUP, load=Load(live=2)), ["autoregressive"])["autoregressive"]
    alone = play_all(SETUP, ["autoregressive"])["autoregressive"]

    def run(wrong: bool) -> Run:
        answers = loaded.answers
        if wrong:
            other = structs.replace(answers[0], token_ids=(*answers[0].token_ids[:-1], 0))
            answers = (other, *answers[1:])
        results = {"autoregressive": replace(loaded, answers=answers), ALONE: alone}
        return run_of("autoregressive", results, ["a"] * 3, "m")

    assert run(wrong=False).exact
    assert not run(wrong=True).exact
