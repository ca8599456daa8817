"""The fake backend: its ring is its plain definition, and whoever errs is caught by it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.fake_draft import FakeDraft
from support.segments import run_block

from edgespec.backends.base import Walk
from edgespec.errors import LocalProtocolError, RemoteProtocolError
from edgespec.machines.effects import RunBlock
from edgespec.sim.toy import VOCABULARY
from edgespec.sim.toy_model import FakeBlock, FakeHead, toy_next
from edgespec.tree.drafted import FROM_ROOT
from edgespec.tree.ledger import BoolArray, Rows
from edgespec.types.tensor import Layers, Tensor
from edgespec.verify.sampling import Sampling


def never() -> bool:
    return False


def rows(tokens: list[int], first: int = 0) -> Rows:
    """Rows of a chain at positions from `first` on."""
    ids = np.arange(first, first + len(tokens), dtype=np.int64)
    return Rows(ids, ids - 1, np.array(tokens, np.int64), ids)


def run(
    blocks: list[FakeBlock], what: Rows, committed: int, sees: BoolArray | None = None
) -> Tensor:
    """Through all stages."""
    sees = np.tri(len(what), dtype=np.bool_) if sees is None else sees
    hidden: Tensor | None = None
    for block in blocks:
        hidden = block.run(run_block(1, 1, what, hidden, committed, sees), never)
        assert hidden is not None
    assert hidden is not None
    return hidden


def opened(stages: int) -> list[FakeBlock]:
    """Blocks with request 1 open."""
    blocks = [FakeBlock(stage) for stage in range(stages)]
    for block in blocks:
        block.open(1, 64)
    return blocks


@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_blocks_and_head_are_the_plain_definition(stages: int, chunk: int) -> None:
    context = [3, 1, 4, 1, 5, 9, 2, 6]
    blocks = opened(stages)
    head = FakeHead(VOCABULARY)
    tokens: list[int] = []
    for first in range(0, len(context), chunk):
        part = rows(context[first : first + chunk], first)
        hidden = run(blocks, part, first)
        for row in range(len(part)):
            alone = np.array([row])
            walk = Walk(hidden.take(alone), part.take(alone), Sampling(seed=5))
            ((choice, _),) = head.choose([walk])
            tokens += choice.tokens.tolist()
    plain = [toy_next(context[: n + 1], stages, VOCABULARY, 5) for n in range(len(context))]
    assert tokens == plain


def test_what_a_row_sees_changes_what_comes_out() -> None:
    base = rows([1, 2, 3])
    guesses = Rows(np.array([3, 4]), np.array([2, 2]), np.array([7, 8]), np.array([3, 3]))
    apart = np.eye(2, dtype=np.bool_)
    outputs = set()
    for sees in (apart, np.tri(2, dtype=np.bool_), np.ones((2, 2), np.bool_)):
        blocks = opened(2)
        run(blocks, base, 0)
        outputs.add(bytes(run(blocks, guesses, 3, sees).data))
    for changed in (
        Rows(guesses.ids, guesses.parents, guesses.tokens + 1, guesses.positions),
        Rows(guesses.ids, guesses.parents, guesses.tokens, guesses.positions + 1),
    ):
        blocks = opened(2)
        run(blocks, base, 0)
        outputs.add(bytes(run(blocks, changed, 3, apart).data))
    assert len(outputs) == 5


def test_gather_moves_rows_and_changes_nothing_else() -> None:
    guesses = Rows(np.array([3, 4, 5]), np.array([2, 2, 4]), np.array([7, 8, 9]), np.array([3] * 3))
    sees = np.array([[1, 0, 0], [0, 1, 0], [0, 1, 1]], np.bool_)
    last = rows([6], 5)
    outputs = []
    for gathered in (False, True):
        blocks = opened(2)
        run(blocks, rows([1, 2, 3]), 0)
        run(blocks, guesses, 3, sees)
        if gathered:
            for block in blocks:
                block.gather(1, 3, np.array([1, 2]))
            outputs.append(run(blocks, last, 4, np.array([[True, True]])))
        else:
            outputs.append(run(blocks, last, 3, np.array([[False, True, True, True]])))
    assert outputs[0] == outputs[1]
    assert blocks[0].slots(1) == 6


def test_an_aborted_job_leaves_slots_that_nobody_may_see() -> None:
    block = opened(1)[0]
    job = run_block(1, 1, rows([1, 2]), None, 0, np.tri(2, dtype=np.bool_))
    assert block.run(job, lambda: True) is None
    assert block.slots(1) == 2
    clean = opened(1)[0]
    clean.run(job, never)
    after = run_block(2, 1, rows([3], 2), None, 2, np.ones((1, 1), np.bool_))
    assert block.run(after, never) != clean.run(after, never)


@pytest.mark.parametrize("left_out", [None, 1, 2, 3])
def test_parts_of_several_requests_give_what_each_gives_alone(left_out: int | None) -> None:
    joint, apart = FakeBlock(0), FakeBlock(0)
    parts = []
    for request in (1, 2, 3):
        for block in (joint, apart):
            block.open(request, 64)
            block.run(
                run_block(1, request, rows([request] * 4), None, 0, np.tri(4, dtype=bool)), never
            )
        guesses = rows([7, 8, 9][:request], 4)
        sees = np.tri(len(guesses), dtype=np.bool_)
        parts.append(run_block(2, request, guesses, None, 4, sees).parts[0])
    job = RunBlock(2, tuple(parts), None, Layers((0,)))

    def stop(request: int | None = None) -> bool:
        return request is not None and request == left_out

    out = joint.run(job, stop)
    alone = [apart.run(replace(job, parts=(part,)), never) for part in parts]
    assert out is not None
    taken = 0
    for part, own in zip(parts, alone, strict=True):
        assert own is not None
        index = np.arange(taken, taken + len(part.rows))
        taken += len(part.rows)
        wanted = bytes(own.data) if part.request != left_out else bytes(8 * len(index))
        assert bytes(out.take(index).data) == wanted
        same = bool((joint._cache[part.request] == apart._cache[part.request]).all())
        assert same == (part.request != left_out)
        assert joint.slots(part.request) == 4 + len(index)


def test_jobs_that_do_not_fit_are_refused() -> None:
    block = opened(1)[0]
    one = np.ones((1, 1), np.bool_)
    with pytest.raises(LocalProtocolError):
        block.run(run_block(1, 2, rows([1]), None, 0, one), never)
    with pytest.raises(LocalProtocolError):
        block.run(run_block(1, 1, rows([1]), None, 1, one), never)
    with pytest.raises(LocalProtocolError):
        block.gather(2, 0, np.zeros(0, np.int64))
    second = FakeBlock(1)
    second.open(1, 1)
    with pytest.raises(RemoteProtocolError):
        second.run(run_block(1, 1, rows([1]), None, 0, one), never)
    second.close(1)
    second.close(1)
    assert (second.open_requests, block.slots(1)) == (0, 0)


def test_the_draft_repeats_itself_and_is_as_accurate_as_it_says() -> None:
    shares = []
    for accuracy in (0.0, 0.5, 1.0):
        right = 0
        for first in range(200):
            draft = FakeDraft(2, VOCABULARY, accuracy)
            draft.open(1, Sampling())
            tree = draft.refresh(1, [first, 5], 1, 4)
            again = FakeDraft(2, VOCABULARY, accuracy)
            again.open(1, Sampling())
            assert again.refresh(1, [first, 5], 1, 4).tokens.tolist() == tree.tokens.tolist()
            right += int(tree.tokens[0]) == toy_next([first, 5], 2, VOCABULARY, 0)
        shares.append(right / 200)
    assert shares[0] == 0.0
    assert 0.4 < shares[1] < 0.6
    assert shares[2] == 1.0


def test_draft_trees_are_well_formed() -> None:
    draft = FakeDraft(1, VOCABULARY, 0.7)
    draft.open(1, Sampling())
    shallow = draft.refresh(1, [1, 2], 2, 3)
    deep = draft.deepen(1, 2, 3)
    assert len(shallow) == 3 + 9
    assert len(deep) == 3 + 9 * 3
    assert deep.tokens[: len(shallow)].tolist() == shallow.tokens.tolist()
    for index, parent in enumerate(deep.parents.tolist()):
        assert parent < index
        assert deep.scores[index] < (0.0 if parent == FROM_ROOT else deep.scores[parent])
    draft.close(1)
    assert draft.open_requests == 0
