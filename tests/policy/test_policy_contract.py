"""What every policy must keep to, on random views in any order of events."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator

import pytest
from support.cases import case
from support.growers import SoloOracle
from support.rounds import Round

from edgespec.errors import ConfigError
from edgespec.policy.adaptive import Adaptive
from edgespec.policy.base import Policy
from edgespec.policy.estimates import RingEstimates
from edgespec.policy.flowspec import FlowSpec
from edgespec.policy.naive_tree import NaiveTree
from edgespec.policy.pipedec import PipeDec
from edgespec.policy.pruned import Pruned
from edgespec.policy.registry import POLICIES, policy_named
from edgespec.policy.specpipe import SpecPipe

VARIANTS: dict[str, Policy] = {
    **POLICIES,
    "naive_small": NaiveTree(nodes=7, depth=2, width=2),
    "pruned_small": Pruned(nodes=9, depth=3, width=3, longest=2),
    "flowspec_small": FlowSpec(
        nodes=9, depth=3, width=3, longest=3, merge_nodes=6, merge_depth=2, deepen_nodes=4
    ),
    "pipedec_small": PipeDec(width=2, children=2),
    "specpipe_small": SpecPipe(width=4, children=3),
    "specpipe_narrow": SpecPipe(width=1, children=1),
    "adaptive_small": Adaptive(width=2, most_rows=3),
}


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS.keys())
def policy(request: pytest.FixtureRequest) -> Policy:
    """Every policy there is."""
    chosen: Policy = request.param
    return chosen


def random_cost(rng: random.Random) -> Callable[[int], float]:
    """What rows take: nothing at all (a ring whose time stands still), or anything."""
    base, slope, noise = rng.choice((0.0, 1e-3, 1.0)), rng.choice((0.0, 1e-4, 1.0)), rng.random()
    return lambda rows: (base + slope * rows) * (1.0 + noise * rng.random())


def random_experience(
    rng: random.Random, cost: Callable[[int], float], stages: int, knows_draft: bool
) -> RingEstimates:
    """A prompt has been round the ring, and maybe much else, which need not make sense."""
    estimates = RingEstimates()
    prompt = rng.randint(1, 100)
    estimates.segment([(prompt, cost(prompt))] * stages, stages)
    if knows_draft:
        estimates.draft.record(prompt, cost(prompt) / 2)
    if rng.random() < 0.5:
        for _ in range(rng.randint(1, 30)):
            seconds = rng.choice((0.0, 1e-6, rng.random(), 100.0))
            met = rng.randint(0, stages)
            ran = [(rng.randint(1, 80), seconds * rng.random()) for _ in range(met)]
            estimates.segment(ran, stages)
            if knows_draft:
                estimates.draft.record(rng.randint(1, 80), rng.random())
        places = [None, *range(64)]
        estimates.ranks.update(rng.choice(places) for _ in range(rng.choice((5, 31, 32, 200))))
    return estimates


SOME_OR_MORE = pytest.mark.parametrize(
    "seeds",
    [range(4), pytest.param(range(4, 40), marks=pytest.mark.thorough)],
    ids=["some", "more"],
)


def rounds(policy: Policy, seeds: Iterable[int]) -> Iterator[tuple[int, Round]]:
    """Random rounds, from no accuracy to all of it, with anything learnt before."""
    for seed in seeds:
        rng = random.Random(seed)
        stages = rng.choice((1, 2, 3, 4, 8))
        cost = random_cost(rng)
        reads_prompt = rng.random() < 0.5
        estimates = random_experience(rng, cost, stages, knows_draft=not reads_prompt)
        oracle = SoloOracle(rng, rng.choice((0.0, 0.5, 0.8, 1.0)))
        depth = rng.randint(0, 25)
        yield seed, Round(policy, rng, stages, depth, oracle, estimates, cost, reads_prompt)


@SOME_OR_MORE
def test_the_contract_holds_and_every_answer_ends(policy: Policy, seeds: range) -> None:
    """Live unsent nodes only, parents first, window, purity, depth, and never a standstill."""
    for seed, game in rounds(policy, seeds):
        with case("seed", seed):
            game.play()


@pytest.mark.parametrize(
    "seeds",
    [range(2), pytest.param(range(2, 16), marks=pytest.mark.thorough)],
    ids=["some", "more"],
)
def test_asking_again_changes_nothing_but_what_is_of_use(policy: Policy, seeds: range) -> None:
    """Asked once more without any event, a policy may go on, but not for ever."""
    for _, game in rounds(policy, seeds):
        for _ in range(200):
            while game.decide():
                pass
            game.happen()
            if game.over:
                break


def test_names() -> None:
    for name, policy in POLICIES.items():
        assert policy_named(name) is policy
        assert policy.name == name
        assert policy.window(1) >= 1
    with pytest.raises(ConfigError, match="flowspec"):
        policy_named("flow_spec")
