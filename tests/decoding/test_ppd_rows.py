"""Prompt rows on the ring: no token changes, each chain comes home once, none stays."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_draft import FakeDraft
from support.rings import FakeRing, assert_one_end, submit
from support.segments import run_block
from support.tiers import tiered

from edgespec.decoding.ppd_rows import MOST_ROWS, ChainValues
from edgespec.drafting.grower import NOTHING_FURTHER, Further
from edgespec.drafting.steps import Steps
from edgespec.policy.adaptive import Adaptive
from edgespec.policy.estimates import StepTimes
from edgespec.policy.registry import POLICIES
from edgespec.sim.toy import VOCABULARY
from edgespec.sim.toy_model import FakeBlock
from edgespec.tree.drafted import Children, DraftedTree
from edgespec.tree.ledger import Rows
from edgespec.types.features import NO_FEATURES, DraftNeeds, Features, PPDTable
from edgespec.types.tensor import Tensor
from edgespec.verify.rules import Grammar
from edgespec.verify.sampling import Sampling
from edgespec.wire.client_messages import Finished

DEPTH, COPIES = 3, 2
VECTORS = np.arange(DEPTH * COPIES, dtype=np.uint64) + np.uint64(10**6)
TABLE = PPDTable(DEPTH, COPIES, Tensor("uint64", (len(VECTORS), 1), VECTORS.tobytes()))
DRAFTING = sorted(name for name, policy in POLICIES.items() if policy.drafts)


@pytest.fixture(autouse=True)
def _small_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing costs anything, as here, the adaptive policy would guess without end."""
    monkeypatch.setitem(POLICIES, "adaptive", Adaptive(width=3, most_rows=6))


def plain_chain(tokens: Sequence[int], links: int, stages: int) -> list[int]:
    """The toy model's last hidden numbers of a chain behind `tokens`, copy by copy in runs of their
    own: a chain sees the tokens and its own copy, nothing else."""
    found: dict[tuple[int, int], int] = {}
    for copy in range(COPIES):
        count = len(tokens) + links
        ids = np.arange(count)
        chain = [-1 - (link * COPIES + copy) for link in range(links)]
        rows = Rows(ids, ids - 1, np.array([*tokens, *chain], np.int64), ids)
        hidden: Tensor | None = None
        for stage in range(stages):
            block = FakeBlock(stage)
            block.open(1, 0)
            sees = np.tri(count, dtype=np.bool_)
            job = run_block(1, 1, rows, hidden, 0, sees, ppd_tokens=TABLE.rows)
            hidden = block.run(job, lambda: False)
        assert hidden is not None
        values = np.frombuffer(hidden.data, np.uint64)[len(tokens) :].tolist()
        found |= {(link, copy): value for link, value in enumerate(values)}
    return [found[link, copy] for link in range(links) for copy in range(COPIES)]


class PromptedDraft(FakeDraft):
    """Checks what prompt rows it is given."""

    def __init__(self, stages: int, accuracy: float) -> None:
        super().__init__(stages, VOCABULARY, accuracy)
        self._stages = stages
        self.needs = DraftNeeds(ppd_tokens=TABLE)
        self.anchors: dict[int, list[int]] = {}

    def open(
        self, request: int, sampling: Sampling, grammar: Grammar | None = None, prompt: int = 0
    ) -> None:
        """Start a request."""
        super().open(request, sampling, grammar, prompt)
        self.anchors[request] = []

    def refreshing(
        self,
        request: int,
        context: Sequence[int],
        depth: int,
        width: int,
        features: Features = NO_FEATURES,
    ) -> Steps[DraftedTree]:
        """A tree."""
        self._check(request, context, features)
        return super().refreshing(request, context, depth, width)

    def expanding(
        self,
        request: int,
        context: Sequence[int],
        paths: Sequence[Sequence[int]],
        width: int,
        features: Features = NO_FEATURES,
        further: Further = NOTHING_FURTHER,
    ) -> Steps[Children]:
        """Children."""
        self._check(request, context, features)
        return super().expanding(request, context, paths, width, NO_FEATURES, further)

    def _check(self, request: int, context: Sequence[int], features: Features) -> None:
        assert features.final is None
        if features.ppd_rows is None:
            return
        values = np.frombuffer(features.ppd_rows.data, np.uint64).tolist()
        links = len(values) // COPIES
        assert features.anchor <= len(context) - 2, "of a token whose next one is committed"
        assert values == plain_chain(context[: features.anchor + 1], links, self._stages)
        self.anchors[request].append(features.anchor)


@pytest.mark.parametrize("policy", DRAFTING)
@pytest.mark.parametrize("accuracy", tiered([0.3, 0.9], [0.9]))
@pytest.mark.parametrize("stages", tiered([1, 3], [3]))
def test_chains_change_no_token_and_come_home(policy: str, accuracy: float, stages: int) -> None:
    draft = PromptedDraft(stages, accuracy)
    fake = FakeRing(stages, draft=draft, prefill_chunk=3)
    asks = [submit(tag, prompt, 20, policy) for tag, prompt in ((1, "hello you"), (2, "a"))]
    for ask in asks:
        fake.ring.submit(ask)
    fake.ring.run()
    for request, ask in enumerate(asks, start=1):
        end = assert_one_end(fake.ring.replies, ask.tag)
        assert isinstance(end, Finished)
        assert end.token_ids == fake.expected(ask).token_ids
        anchors = draft.anchors[request]
        assert end.prompt_rows > 0 or not anchors
        assert end.rows_wasted <= end.rows_sent
        assert anchors == sorted(set(anchors)), "every chain once, and never an older one"
    assert any(draft.anchors.values())
    fake.assert_nothing_left()


@pytest.mark.thorough
@given(st.integers(0, 2**32), st.sampled_from(DRAFTING), st.integers(1, 3))
def test_any_timing_and_a_lost_ring(seed: int, policy: str, stages: int) -> None:
    rng = random.Random(seed)
    draft = PromptedDraft(stages, rng.choice([0.3, 0.8]))
    fake = FakeRing(stages, draft=draft, prefill_chunk=3)
    ask = submit(1, "hello", 10, policy)
    fake.ring.submit(ask)
    for _ in range(rng.randrange(60)):
        steps = list(fake.ring.steps())
        if not steps:
            break
        fake.ring.take(rng.choice(steps))
        fake.assert_consistent()
    fake.ring.lose("gone")
    fake.take_turns(rng.randrange(5))
    fake.ring.mend()
    fake.ring.run()
    end = assert_one_end(fake.ring.replies, 1)
    assert isinstance(end, Finished)
    assert end.token_ids == fake.expected(ask).token_ids
    fake.assert_nothing_left()


def test_sources_without_prompt_rows_cost_nothing_more() -> None:
    fake = FakeRing(2)
    ask = submit(1, "hello", 10)
    fake.ring.submit(ask)
    fake.ring.run()
    end = assert_one_end(fake.ring.replies, 1)
    assert isinstance(end, Finished)
    assert end.prompt_rows == 0


# --- how long chains are ------------------------------------------------------------------------


def times(first: float, row: float) -> StepTimes:
    found = StepTimes()
    for rows in (1, 2, 4, 8, 16, 32, 64):
        found.record([(rows, first + row * rows)], 1)
    return found


def test_rows_that_cost_nothing_go_where_a_run_may_end() -> None:
    values = ChainValues(3)
    free = times(1.0, 0.0)
    assert values.lengths([1.0], [9], 1, 1, free) == [3]
    lengths = values.lengths([0.6, 0.3, 0.09, 0.001], [9, 9, 9, 9], 4, 1, free)
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 3
    assert lengths[-1] == 0
    assert values.lengths([1.0, 1.0], [1, 0], 2, 1, free) == [1, 0]
    assert sum(values.lengths([1.0] * 50, [9] * 50, 50, 2, free)) * 2 <= MOST_ROWS


def test_dear_rows_carry_shorter_chains() -> None:
    values = ChainValues(3)
    ends = [0.5, 0.2, 0.1]
    sums = [sum(values.lengths(ends, [3] * 3, 3, 1, times(1.0, row))) for row in (0, 0.05, 0.2, 9)]
    assert sums == sorted(sums, reverse=True)
    assert sums[0] > sums[2] >= 0 == sums[3]


def test_values_follow_what_is_learnt() -> None:
    values = ChainValues(2)
    for _ in range(2000):
        values.learn(1, True)
        values.learn(2, False)
    gains, made = values.gains()
    assert gains == pytest.approx([1.0, 0.0], abs=0.01)
    assert made == pytest.approx(1.0, abs=0.02)


def test_what_did_not_pay_is_tried_again() -> None:
    values = ChainValues(2)
    for _ in range(5000):
        values.learn(1, False)
    tried = [sum(values.lengths([1.0, 0.1], [9, 9], 2, 1, times(1.0, 0.1))) for _ in range(40)]
    assert tried.count(2) == 2
    assert sum(tried) == 4


@pytest.mark.parametrize("shares", [(0.7, 0.5, 0.2), (0.9, 0.1, 0.9)])
def test_the_state_model_is_the_average_of_many_rounds(shares: tuple[float, ...]) -> None:
    """Runs of guesses played by chance: tokens a round, with the chains of the model."""
    values = ChainValues(3)
    values._tried, values._right = [1.0] * 3, list(shares)
    values._lengths = chains = [3.0, 2.0, 1.0, 0.0]
    _, made = values.gains()
    rng = random.Random(5)
    state, total, rounds = 3, 0, 60_000
    for _ in range(rounds):
        level = 0
        while level < state and rng.random() < shares[level]:
            level += 1
        total += level
        state = int(chains[level])
    assert made == pytest.approx(total / rounds, rel=0.02)
