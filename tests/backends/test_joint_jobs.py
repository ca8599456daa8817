"""Joint jobs: heads and drafts of several requests give each what it gets alone, and cost less."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.cases import case
from support.checkpoints import write_checkpoint
from support.fake_draft import FakeDraft

from edgespec.backends.compute import CoordinatorCompute, StageCompute
from edgespec.backends.jobs import Drafts, JointDone, ReadPart, RunHeads
from edgespec.backends.timed import CoordinatorDurations, StageDurations
from edgespec.backends.torch_backend import TorchHead
from edgespec.daemon.profiles import profile_named
from edgespec.decoding.effects import Draft, OpenDraft, RunHead
from edgespec.decoding.events import Drafted, HeadDone
from edgespec.drafting.grower import TreeGrower
from edgespec.drafting.independent import IndependentGuesser
from edgespec.machines.events import ComputeFailed, Event
from edgespec.model.ends import OutputHead
from edgespec.model.loader import Checkpoint
from edgespec.model.tensors import from_torch
from edgespec.planning.cost_model import cost_model_named
from edgespec.planning.costs import ring_costs
from edgespec.policy.base import Expand, Grow
from edgespec.sim.toy_model import FakeBlock
from edgespec.tree.ledger import Rows
from edgespec.types.draft_pass import DraftPass, RankedRows
from edgespec.verify.sampling import Sampling

NANO = profile_named("jetson-orin-nano-8gb")
COSTS = ring_costs([NANO] * 3, cost_model_named("llama-2-13b"))
SAMPLINGS = (Sampling(), Sampling(0.9, seed=4), Sampling(1.0, top_k=9, seed=5), Sampling(seed=1))


def never(request: int | None = None) -> bool:
    return False


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers."""
    return write_checkpoint(tmp_path_factory.mktemp("joint") / "m", num_hidden_layers=2)


def head_of(number: int, rows: int, seed: int = 0) -> RunHead:
    """A walk of so many random rows, of which some may be on the path."""
    dice = random.Random(seed)
    ids = np.arange(5, 5 + rows)
    parents = np.array([4] + [dice.randint(5, 4 + row) for row in range(1, rows)], np.int64)
    tokens = np.array([dice.randrange(96) for _ in range(rows)], np.int64)
    generator = torch.Generator().manual_seed(seed)
    hidden = from_torch(torch.randn((rows, 32), generator=generator, dtype=torch.float64))
    positions = np.array([9] + [9] * (rows - 1), np.int64)
    sampling = SAMPLINGS[number % len(SAMPLINGS)]
    return RunHead(10 + number, number, hidden, Rows(ids, parents, tokens, positions), sampling)


def led_down(compute: CoordinatorCompute | StageCompute, head: RunHead) -> RunHead:
    """The walk with rows for its first targets, so that its path is longer than one row."""
    rows = head.rows
    for row in range(1, len(rows)):
        done = compute.perform(head, never)
        assert isinstance(done, HeadDone)
        last = int(done.choice.rows[-1])
        parents, tokens, positions = (
            rows.parents.copy(),
            rows.tokens.copy(),
            rows.positions.copy(),
        )
        parents[row], tokens[row] = rows.ids[last], done.choice.tokens[-1]
        positions[row] = positions[last] + 1
        rows = Rows(rows.ids, parents, tokens, positions)
        head = replace(head, rows=rows)
    return head


def assert_same(one: Event, other: Event) -> None:
    assert isinstance(one, HeadDone)
    assert isinstance(other, HeadDone)
    assert (one.job, one.request) == (other.job, other.request)
    assert one.choice.rows.tolist() == other.choice.rows.tolist()
    assert one.choice.tokens.tolist() == other.choice.tokens.tolist()
    np.testing.assert_allclose(one.choice.margins, other.choice.margins, rtol=0, atol=1e-9)
    assert (one.top_logprobs is None) == (other.top_logprobs is None)
    if one.top_logprobs is not None and other.top_logprobs is not None:
        for found, wanted in zip(
            vars_of(one.top_logprobs), vars_of(other.top_logprobs), strict=True
        ):
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-9)


def vars_of(value: object) -> list[np.ndarray]:
    """The arrays of a dataclass."""
    return [getattr(value, one.name) for one in fields(value)]  # type: ignore[arg-type]


def both_computes(folder: Path) -> Sequence[CoordinatorCompute | StageCompute]:
    head = TorchHead(OutputHead(Checkpoint(folder), "float64"))
    return CoordinatorCompute(head, None), StageCompute(FakeBlock(0), head)


def test_walks_of_several_requests_are_chosen_as_alone(folder: Path) -> None:
    paths = 0
    for compute in both_computes(folder):
        for seed in range(5):
            heads = [head_of(n, 1 + (n + seed) % 4, seed * 10 + n) for n in range(1, 5)]
            heads = [led_down(compute, one) for one in heads]
            heads[1] = replace(heads[1], top=2)
            done = compute.perform(RunHeads(tuple(heads)), never)
            assert isinstance(done, JointDone)
            for head, event in zip(heads, done.events, strict=True):
                with case(seed, head.request):
                    alone = compute.perform(head, never)
                    assert alone is not None
                    assert_same(event, alone)
                    assert isinstance(event, HeadDone)
                    paths += len(event.choice.rows) > 1
    assert paths > 10


def test_a_walk_that_fails_fails_alone(folder: Path) -> None:
    narrow = from_torch(torch.zeros((1, 31), dtype=torch.float64))
    infinite = from_torch(torch.full((1, 32), float("nan"), dtype=torch.float64))
    for compute in both_computes(folder):
        heads = [head_of(n, 1, n) for n in range(1, 5)]
        heads[1] = replace(heads[1], hidden=narrow)
        heads[3] = replace(heads[3], hidden=infinite)
        done = compute.perform(RunHeads(tuple(heads)), never)
        assert isinstance(done, JointDone)
        first, bad, third, worse = done.events
        assert isinstance(bad, ComputeFailed)
        assert (bad.job, bad.request) == (12, 2)
        assert "same model and dtype" in bad.reason
        assert isinstance(worse, ComputeFailed)
        assert "no token can be taken" in worse.reason
        for head, event in ((heads[0], first), (heads[2], third)):
            alone = compute.perform(head, never)
            assert alone is not None
            assert_same(event, alone)


def test_one_product_is_charged_for_all_walks(folder: Path) -> None:
    for durations, compute in zip(
        (CoordinatorDurations(COSTS.coordinator), StageDurations(COSTS.stages[0])),
        both_computes(folder),
        strict=True,
    ):
        heads = [head_of(n, n, n) for n in (1, 2, 3)]
        job = RunHeads(tuple(heads))
        each = sum(durations.seconds(one, compute.perform(one, never)) for one in heads)
        fresh = type(durations)(durations._costs)  # it made the noise of those positions
        node = COSTS.coordinator
        saved = sum(node.head_seconds(rows) for rows in (1, 2, 3)) - node.head_seconds(6)
        assert fresh.seconds(job, compute.perform(job, never)) == pytest.approx(each - saved)
        assert saved > 0.3 * each
        done = compute.perform(job, never)
        assert isinstance(done, JointDone)
        failed = ComputeFailed(12, 2, "no")
        less = JointDone((done.events[0], failed, done.events[2]))
        assert fresh.seconds(job, less) < fresh.seconds(job, done)


# --- drafts -------------------------------------------------------------------------------------


def opened(folder: Path, *requests: int) -> CoordinatorCompute:
    guesser = IndependentGuesser(Checkpoint(folder), "float64")
    compute = CoordinatorCompute(None, TreeGrower(guesser))
    for request in requests:
        compute.perform(OpenDraft(request, SAMPLINGS[request % 2]), never)
    return compute


def expand(request: int, context: Sequence[int]) -> Draft:
    plan = Expand((1, 2), 3, 8)
    return Draft(20 + request, request, plan, tuple(context), ((), (7, request)))


def test_drafts_of_several_requests_are_guessed_as_alone(folder: Path) -> None:
    drafts = [expand(n, range(n, 9)) for n in (1, 2, 3)]
    trees = [replace(one, plan=Grow(1 + one.request, 2, 9), paths=()) for one in drafts]
    together, alone = opened(folder, 1, 2, 3), opened(folder, 1, 2, 3)
    for kind in (drafts, trees):
        done = together.perform(Drafts(tuple(kind)), never)
        assert isinstance(done, JointDone)
        for draft, event in zip(kind, done.events, strict=True):
            wanted = alone.perform(draft, never)
            assert isinstance(event, Drafted)
            assert isinstance(wanted, Drafted)
            assert (event.job, event.request) == (draft.job, draft.request)
            assert event.guesses.tokens.tolist() == wanted.guesses.tokens.tolist()
            np.testing.assert_allclose(
                event.guesses.scores, wanted.guesses.scores, rtol=0, atol=1e-9
            )


def test_a_draft_that_fails_fails_alone(folder: Path) -> None:
    compute = opened(folder, 1, 3)
    done = compute.perform(Drafts(tuple(expand(n, (4, 5)) for n in (1, 2, 3))), never)
    assert isinstance(done, JointDone)
    first, bad, third = done.events
    assert isinstance(first, Drafted)
    assert bad == ComputeFailed(22, 2, "request 2 is not open on this draft source")
    assert isinstance(third, Drafted)
    with pytest.raises(TypeError, match="without a draft source"):
        CoordinatorCompute(None, None).perform(Drafts((expand(1, (4,)),)), never)


def test_heads_are_let_into_a_joint_draft_and_into_parts_of_a_text(folder: Path) -> None:
    compute, calls = opened(folder, 1, 2), 0

    def stop(request: int | None = None) -> bool:
        nonlocal calls
        calls += 1
        return False

    assert compute.perform(ReadPart(1, (1, 2, 3, 4), 3), stop) is None
    assert calls == 2, "two layers"
    compute.perform(Drafts((expand(1, (1, 2, 3, 4)), expand(2, (5,)))), stop)
    assert calls == 2 + 2 + 2 + 1, "a pass to read, one for the guesses, and the output matrix"


def test_a_joint_pass_is_charged_its_rows_once() -> None:
    node = COSTS.coordinator
    drafts = Drafts((expand(1, (1,) * 40), expand(2, (1,) * 60)))
    work = (
        DraftPass(7, "independent", (1, 2)),
        DraftPass(3, "independent", (2,)),
        RankedRows((40, 41), "independent", "greedy", 0, product=5),
        RankedRows((60, 61, 61), "independent", "greedy", 0, product=0),
    )
    durations = CoordinatorDurations(node)
    seconds = durations.seconds(drafts, None, work)
    rank = NANO.ranking.greedy.seconds
    vocab = node.model.draft_of("independent").vocab
    wanted = node.draft_seconds(7, 100, "independent", 2) + node.draft_seconds(3, 60, "independent")
    wanted += node._head(5, node.model.draft_of("independent").head)
    wanted += rank(2 * vocab) + rank(3 * vocab)
    assert seconds == pytest.approx(wanted)
    layers = node.model.draft_of("independent").layers
    assert len(durations.parts(drafts)) == 2 * layers + 1, "ranked in one part"
    each = sum(
        durations.seconds(one, None, (DraftPass(rows, "independent", (one.request,)),))
        for one, rows in zip(drafts.effects, (4, 3), strict=True)
    )
    both = durations.seconds(drafts, None, work[:1])
    assert both < 0.8 * each
    part = ReadPart(3, (1,) * 300, 256)
    alone = durations.seconds(part, None, (DraftPass(256, "independent", (3,)),))
    assert alone == pytest.approx(node.draft_seconds(256, 300, "independent"))
    assert len(durations.parts(part)) == layers


def test_what_a_toy_guesses_for_several_requests_is_noted_for_each() -> None:
    draft = FakeDraft(2, 40, 0.7)
    compute = CoordinatorCompute(None, draft)
    for request in (1, 2):
        compute.perform(OpenDraft(request, Sampling()), never)
    compute.perform(Drafts((expand(1, (4,)), expand(2, (5, 6)))), never)
    assert [(one.rows, one.requests) for one in draft.take_work()] == [(2, (1,)), (2, (2,))]  # type: ignore[union-attr]
