"""Fit the planner's weights: what the slowest stage, the trip and D0 say about a token's time.

    python tools/fit_plan.py [RINGS]

simulates `adaptive` on 34 rings (or the first RINGS of them) in virtual time, with the bundled pair
and the questions of daemon/planning.py, which no report uses, prints a line for each, and then the
weights that make the sum of squared relative errors least (STEP_WEIGHT, TRIP_WEIGHT and
COORDINATOR_WEIGHT of edgespec/planning/plan.py) with the mean and the largest error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from msgspec import structs

from edgespec.bench.simulated import Setup, play
from edgespec.bench.workloads import Prompt
from edgespec.daemon.bundled_models import bundled
from edgespec.daemon.planning import QUESTIONS
from edgespec.daemon.profiles import profile_named
from edgespec.planning.cost_model import cost_model_named
from edgespec.planning.costs import RingCosts
from edgespec.planning.problem import coordinator_step
from edgespec.planning.profile import Figure, Profile
from edgespec.verify.sampling import Sampling

SEEN = 256  # cached rows that a stage reads
ROWS = 16  # of a segment
NEW_TOKENS = 64


@dataclass(frozen=True)
class Ring:
    """One ring that is simulated: D0's profile and those of the stages."""

    name: str
    cost_model: str
    profiles: tuple[Profile, ...]


def rings() -> Iterator[Ring]:
    """Nano boards alone, behind a larger D0, behind slow links, and mixed ones."""
    nano, plus, nx, agx = (
        # Memory does not matter here: a ring of one stage holds a model that no board could.
        structs.replace(profile_named(name), memory_bytes=Figure(1e12, "enough for any model"))
        for name in (
            "jetson-orin-nano-8gb",
            "jetson-orin-nano-super-8gb",
            "jetson-orin-nx-16gb",
            "jetson-agx-orin-64gb",
        )
    )
    slow = structs.replace(
        nano,
        link_latency=Figure(0.005, "a slow network"),
        link_bandwidth=Figure(12e6, "a slow network"),
    )
    made = [(f"{n} nano", (nano,) * (n + 1)) for n in (1, 2, 3, 4, 6, 8)]
    made += [(f"agx and {n} nano", (agx, *(nano,) * n)) for n in (2, 4, 8)]
    made += [(f"{n} nano, slow links", (slow,) * (n + 1)) for n in (2, 4, 8)]
    made += [
        ("nx, agx, 2 nano", (nx, agx, nano, nano)),
        ("agx, nano, agx, nx, super", (agx, nano, agx, nx, plus)),
        ("nano, agx", (nano, agx)),
        ("nano, 2 agx", (nano, agx, agx)),
        ("6 super", (plus,) * 7),
    ]
    for cost_model in ("llama-2-13b", "llama-2-7b"):
        for name, profiles in made:
            yield Ring(name, cost_model, profiles)


def token_seconds(setup: Setup) -> float:
    """Virtual seconds a token behind the first one."""
    answers = play(setup, "adaptive").answers
    seconds = sum(answer.seconds - answer.first_token_seconds for answer in answers)
    return float(seconds / sum(answer.new_tokens - 1 for answer in answers))


def setup_of(ring: Ring) -> Setup:
    """The bundled pair on a ring."""
    return Setup(
        model=bundled("base"),
        draft=bundled("draft"),
        dtype="float64",
        profiles=ring.profiles,
        cost_model=cost_model_named(ring.cost_model),
        link=None,
        prompts=tuple(Prompt(str(n), "", (text,)) for n, text in enumerate(QUESTIONS)),
        max_new_tokens=NEW_TOKENS,
        sampling=Sampling(0.0, 0, 1.0, 0.0, 0),
    )


def terms(costs: RingCosts) -> tuple[float, float, float]:
    """The slowest step, the trip, and D0's step, in seconds (docs/planning.md)."""
    links = costs.links
    link = max(one.seconds(costs.segment_bytes(ROWS, ran)) for ran, one in enumerate(links[1:], 1))
    slowest = max(link, *(stage.block_seconds(ROWS, SEEN) for stage in costs.stages))
    trip = sum(stage.block_seconds(1, SEEN) for stage in costs.stages)
    trip += sum(
        one.latency + one.seconds(costs.segment_bytes(1, number))
        for number, one in enumerate(links)
    )
    trip += costs.coordinator.head_seconds(1) + costs.coordinator.choose_seconds(1, "greedy")
    return slowest, trip, coordinator_step(costs.coordinator, SEEN // 2)


def main(count: int) -> None:
    """Simulate, then fit."""
    found = []
    for ring in list(rings())[:count]:
        setup = setup_of(ring)
        seconds = token_seconds(setup)
        found.append((seconds, *terms(setup.costs())))
        figures = ", ".join(f"{1000 * value:.1f}" for value in found[-1])
        print(
            f"{ring.cost_model}, {ring.name}: ms a token, slowest, trip, D0: {figures}", flush=True
        )
    measured, by_ring = np.array(found)[:, 0], np.array(found)[:, 1:]
    weights, *_ = np.linalg.lstsq(by_ring / measured[:, None], np.ones(len(found)), rcond=None)
    errors = np.abs(by_ring @ weights / measured - 1)
    print(
        f"weights {weights.round(3).tolist()}; relative error {errors.mean():.3f}, at most "
        f"{errors.max():.3f}"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10**6)
