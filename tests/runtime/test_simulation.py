"""Thousands of rings with random timing: every answer equals plain decoding, nothing is left."""

from __future__ import annotations

import random

import pytest
from support.rings import PLENTY, Chaos, FakeRing, Faults, assert_one_end, submit
from support.tiers import thorough

from edgespec.policy.adaptive import Adaptive
from edgespec.policy.base import Policy
from edgespec.policy.flowspec import FlowSpec
from edgespec.policy.naive_tree import NaiveTree
from edgespec.policy.pipedec import PipeDec
from edgespec.policy.pruned import Pruned
from edgespec.policy.registry import POLICIES
from edgespec.policy.specpipe import SpecPipe
from edgespec.sim.oracle import Oracle
from edgespec.sim.toy import VOCABULARY
from edgespec.sim.toy_model import toy_next
from edgespec.wire.client_messages import Failed, Finished, Submit

FEW = 25
RUNS = 1_200
CHUNK = 100
SLOW_RUNS = 40_000

SMALL: dict[str, Policy] = {
    "naive_small": NaiveTree(nodes=10, depth=3, width=3),
    "flowspec_small": FlowSpec(
        nodes=10, depth=3, width=3, longest=3, merge_nodes=7, merge_depth=3, deepen_nodes=5
    ),
    "flowspec_tiny": FlowSpec(
        nodes=3, depth=2, width=2, longest=1, merge_nodes=2, merge_depth=1, deepen_nodes=1
    ),
    "pruned_small": Pruned(nodes=10, depth=3, width=3, longest=2),
    "pipedec_small": PipeDec(width=3, children=2),
    "specpipe_small": SpecPipe(width=4, children=3),
    "adaptive_small": Adaptive(width=3, most_rows=5),
}
"""Policies with small trees: a run costs little, and crowds every limit."""

POLICY_NAMES = [
    *["autoregressive", "naive_small", "flowspec_tiny"] * 6,
    *["pruned_small", "pipedec_small", "specpipe_small"] * 6,
    *["flowspec_small", "adaptive_small"] * 15,
    *sorted(POLICIES),
]


@pytest.fixture(autouse=True)
def _small_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, policy in SMALL.items():
        monkeypatch.setitem(POLICIES, name, policy)


class Run:
    """One random ring with random requests; everything follows from the seed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.oracle = Oracle(rng, accuracy=rng.choice((0.0, 0.3, 0.7, 0.9, 1.0)))
        self.fake = FakeRing(
            rng.choice((1, 1, 2, 2, 3, 4, 5, 8)),
            draft=self.oracle,
            eos_ids=rng.sample(range(VOCABULARY), rng.choice((0, 0, 1, 3))),
            prefill_chunk=rng.randint(1, 8),
            context_length=rng.choice((2000, 2000, 16)),
        )
        lose = rng.choice((0.0, 0.15, 0.5, 1.0))
        faults = Faults(lose, repeat=rng.choice((0, 0.2)), reorder=rng.choice((0, 0.5, 1)))
        self.chaos = Chaos(self.fake, rng, faults)
        self.asks = [self._ask(tag) for tag in range(rng.choice((1, 1, 2, 3)))]
        for ask in self.asks:
            prompt = list(self.fake.codec.encode(ask.prompt))
            for _ in range(ask.max_new_tokens + 1):
                prompt.append(toy_next(prompt, self.fake.stages, VOCABULARY, ask.seed))
            self.oracle.tell(prompt)
        self.cancel_at = {ask.tag: rng.randint(0, 200) for ask in self.asks if rng.random() < 0.15}

    def _ask(self, tag: int) -> Submit:
        rng = self.rng
        letters = "abcdefghij"
        stops = ["".join(rng.choices(letters, k=rng.randint(1, 3))) for _ in range(3)]
        return submit(
            tag,
            "".join(rng.choices(letters, k=rng.randint(1, 12))),
            rng.randint(1, 16),
            rng.choice(POLICY_NAMES),
            rng.randint(0, 3),
            tuple(stops[: rng.choice((0, 0, 1, 3))]),
        )

    def play(self) -> None:
        ring = self.fake.ring
        todo = list(self.asks)
        steps = 0
        while True:
            if todo and (not list(ring.steps()) or self.rng.random() < 0.1):
                self.chaos.trace.append(f"submit {todo[0]}")
                ring.submit(todo.pop(0))
            for tag, at in self.cancel_at.items():
                if at == steps:
                    self.chaos.trace.append(f"cancel {tag}")
                    ring.cancel(tag)
            if not self.chaos.step() and not todo:
                break
            if steps % 4 == 0:
                self.fake.assert_consistent()
            steps += 1
            assert steps < PLENTY, "it does not end"

    def check(self) -> None:
        for ask in self.asks:
            end = assert_one_end(self.fake.ring.replies, ask.tag)
            if isinstance(end, Failed):
                assert "context is 16" in end.reason
                assert len(ask.prompt) >= 16
                continue
            expected = self.fake.expected(ask)
            if end.finish_reason == "cancelled":
                assert ask.tag in self.cancel_at
                assert expected.token_ids[: len(end.token_ids)] == end.token_ids
                continue
            assert (end.token_ids, end.text) == (expected.token_ids, expected.text)
            assert end.finish_reason == expected.finish_reason
            _check_figures(end)
        self.fake.assert_nothing_left()


def _check_figures(end: Finished) -> None:
    assert end.new_tokens == len(end.token_ids)
    assert 0 <= end.rows_wasted <= end.rows_sent
    # The first token comes of the prompt, every other one of a row.
    assert end.rows_sent - end.rows_wasted == end.new_tokens - 1
    counted = sum(n * times for n, times in enumerate(end.accepted_histogram))
    assert counted >= end.new_tokens - 1
    assert end.trips > 0


def play(seed: int) -> None:
    """One run; on failure, what is needed to repeat it and what happened."""
    run = Run(seed)
    try:
        run.play()
        run.check()
    except BaseException as problem:
        print(f"seed {seed}; {run.asks}; cancels {run.cancel_at}")
        print("\n".join(run.chaos.trace[-400:]))
        raise AssertionError(f"run with seed {seed} failed: {problem!r}") from problem


@pytest.mark.parametrize(
    "seeds",
    [range(FEW), *(thorough(range(first, first + CHUNK)) for first in range(FEW, RUNS, CHUNK))],
    ids=lambda seeds: seeds.start,
)
def test_any_timing_gives_the_plain_answer(seeds: range) -> None:
    for seed in seeds:
        play(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(RUNS, RUNS + SLOW_RUNS, 1_000))
def test_any_timing_gives_the_plain_answer_in_many_more_runs(first: int) -> None:
    for seed in range(first, first + 1_000):
        play(seed)
