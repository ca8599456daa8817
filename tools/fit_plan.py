"""Fit the planner's weights: what the slowest stage, the trip and D0 say about a token's time.

    python tools/fit_plan.py [independent|ngram] [RINGS]

simulates `adaptive` on 62 rings (or the first RINGS of them) in virtual time, with the bundled pair
(or with n-grams) and the questions of daemon/played_plans.py, which no report uses, prints a line
for each, and then the weights that make the sum of squared relative errors least (MODEL_DRAFT or
TOKEN_DRAFT of edgespec/planning/problem.py), with the mean and the largest error that they and the
planner's own leave: of all rings, of those whose coordinator's board carries layers, and of those
whose last stage has the output head.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from msgspec import structs

from edgespec.bench.report import Played
from edgespec.bench.setup import Setup
from edgespec.bench.together import play_together
from edgespec.bench.workloads import Prompt
from edgespec.config import HEADS
from edgespec.daemon.bundled_models import bundled
from edgespec.daemon.played_plans import QUESTIONS
from edgespec.daemon.profiles import profile_named
from edgespec.drafting.choice import parse_draft
from edgespec.planning.cost_model import NO_DRAFT, cost_model_named
from edgespec.planning.costs import RingCosts
from edgespec.planning.partition import split_layers
from edgespec.planning.problem import (
    CHOSEN_ROWS,
    MODEL_DRAFT,
    TOKEN_DRAFT,
    coordinator_step,
    head_seconds,
)
from edgespec.planning.profile import Figure, Profile
from edgespec.verify.sampling import Sampling

SEEN = 256  # cached rows that a stage reads
ROWS = 16  # of a segment
NEW_TOKENS = 64

LEAST = 0.02
"""The slowest step's weight is no smaller: where D0 decides alone, boards are to be used all the
same, as they are what helps with a lighter draft."""


@dataclass(frozen=True)
class Ring:
    """One ring that is simulated: D0's profile and those of the stages.

    `own`: layers of the last stage, which is on D0's board; 0: they are spread evenly over others.
    `head_last`: the last stage has the output head.
    """

    name: str
    cost_model: str
    profiles: tuple[Profile, ...]
    own: int = 0
    head_last: bool = False


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
    for cost_model in ("llama-2-13b", "llama-3.1-8b"):
        for n in (1, 4, 8):
            yield Ring(f"{n} nano, head", cost_model, (nano,) * (n + 1), head_last=True)
    shared: list[tuple[str, tuple[Profile, ...], tuple[int, ...]]] = [
        ("nano alone", (nano,), (1,)),
        ("agx alone", (agx,), (1,)),
        ("nano, 1 nano", (nano,) * 2, (2, 4)),
        ("nano, 3 nano", (nano,) * 4, (4, 8)),
        ("nano, 7 nano", (nano,) * 8, (8,)),
        ("agx, 2 nano", (agx, nano, nano), (2, 3)),
        ("nano, 3 nano, slow links", (slow,) * 4, (6,)),
        ("super, nano, nx", (plus, nano, nx), (5,)),
    ]
    for cost_model in ("llama-2-13b", "llama-3.1-8b"):
        layers = cost_model_named(cost_model).layers
        for name, profiles, parts in shared:
            for part in parts:
                label = f"{name}, 1 / {part} on D0's board"
                yield Ring(label, cost_model, (*profiles, profiles[0]), layers // part)


def token_seconds(played: Played) -> float:
    """Virtual seconds a token behind the first one."""
    answers = played.answers
    seconds = sum(answer.seconds - answer.first_token_seconds for answer in answers)
    return float(seconds / sum(answer.new_tokens - 1 for answer in answers))


def setup_of(ring: Ring, source: str) -> Setup:
    """The bundled base and this draft source on a ring."""
    costs, others = cost_model_named(ring.cost_model), len(ring.profiles) - 1 - (ring.own > 0)
    split: tuple[int, ...] = ()
    if ring.own:
        shares = split_layers(costs.layers - ring.own, others) if others else []
        split = (*(end - first for first, end in shares), ring.own)
    if source == "ngram":
        costs = replace(costs, draft=replace(NO_DRAFT, name=source))
    return Setup(
        model=bundled("base"),
        draft=str(parse_draft(source, bundled)),
        dtype="float64",
        profiles=ring.profiles,
        cost_model=costs,
        link=None,
        prompts=tuple(Prompt(str(n), "", (text,)) for n, text in enumerate(QUESTIONS)),
        max_new_tokens=NEW_TOKENS,
        sampling=Sampling(0.0, 0, 1.0, 0.0, 0),
        split=split,
        with_stage=len(split) if ring.own else 0,
        head=HEADS[ring.head_last],
    )


def terms(costs: RingCosts, head_last: bool) -> tuple[float, float, float, float]:
    """The slowest step, the trip, D0's step, and that of the stage on D0's board, in seconds
    (docs/planning.md)."""
    links, last = costs.links, costs.stages[-1]
    steps = [stage.block_seconds(ROWS, SEEN) for stage in costs.stages]
    if head_last:
        steps[-1] += head_seconds(last, ROWS, CHOSEN_ROWS)
    link = max(one.seconds(costs.segment_bytes(ROWS, ran)) for ran, one in enumerate(links[1:], 1))
    trip = sum(stage.block_seconds(1, SEEN) for stage in costs.stages)
    trip += sum(
        one.latency + one.seconds(costs.segment_bytes(1, number))
        for number, one in enumerate(links)
    )
    trip += head_seconds(last if head_last else costs.coordinator, 1, 1)
    shared = costs.stages[costs.with_stage - 1].block_seconds(ROWS, SEEN) if costs.with_stage else 0
    step = coordinator_step(costs.coordinator, SEEN // 2, head_last)
    return max(link, *steps), trip, step, shared


def main(source: str, count: int) -> None:
    """Simulate, then fit."""
    chosen = list(rings())[:count]
    setups = [setup_of(ring, source) for ring in chosen]
    plays = play_together([(setup, "adaptive") for setup in setups])
    found = []
    for ring, setup, played in zip(chosen, setups, plays, strict=True):
        found.append((token_seconds(played), *terms(setup.costs(), ring.head_last)))
        figures = ", ".join(f"{1000 * value:.1f}" for value in found[-1])
        print(
            f"{ring.cost_model}, {ring.name}: ms a token, slowest, trip, D0, shared: {figures}",
            flush=True,
        )
    measured, by_ring = np.array(found)[:, 0], np.array(found)[:, 1:]
    shares, ones = by_ring / measured[:, None], np.ones(len(found))
    weights, *_ = np.linalg.lstsq(shares, ones, rcond=None)
    if weights[0] < LEAST:
        rest, *_ = np.linalg.lstsq(shares[:, 1:], ones - LEAST * shares[:, 0], rcond=None)
        weights = np.array([LEAST, *rest])
    head_last = np.array([ring.head_last for ring in chosen])
    for name, used in (
        ("the planner's", np.array(TOKEN_DRAFT if source == "ngram" else MODEL_DRAFT)),
        ("fitted", weights),
    ):
        print(f"{name} weights {used.round(3).tolist()}")
        errors = np.abs(by_ring @ used / measured - 1)
        kinds = (("all", ones > 0), ("shared", by_ring[:, 3] > 0), ("head on V_N", head_last))
        for kind, which in kinds:
            if which.any():
                mean, worst = errors[which].mean(), errors[which].max()
                print(f"  {kind}: relative error {mean:.3f}, at most {worst:.3f}")


if __name__ == "__main__":
    asked = sys.argv[1:]
    main(
        asked.pop(0) if asked[:1] in (["ngram"], ["independent"]) else "independent",
        int(asked[0]) if asked else 10**6,
    )
