"""The independent draft's `expand`, and rows that stay: guesses as from scratch, but fewer rows."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import plain_logits, reference
from support.distribution import guess_log_scores
from support.growers import SoloGrower
from support.passes import rows_of
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from edgespec.drafting.independent import GuessCache, IndependentGuesser
from edgespec.errors import LocalProtocolError
from edgespec.model.loader import Checkpoint
from edgespec.model.row_math import Norm
from edgespec.tree.drafted import FROM_ROOT, Children, DraftedTree
from edgespec.verify.sampling import Sampling

pytestmark = pytest.mark.usefixtures("usual_draft_temperature")

ROOM = 48  # the draft model's own context (see conftest.py)
GREEDY = Sampling()
WARM = Sampling(temperature=0.8, seed=11)
SAMPLINGS = pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
CONTEXT = [7, 3, 50, 21, 9, 3]


@pytest.fixture(scope="module", autouse=True)
def _exact_norms() -> Iterator[None]:
    """RMSNorm in the model's float64: transformers' float32 there would allow no bound of 1e-9."""

    def forward(self: LlamaRMSNorm, hidden: torch.Tensor) -> torch.Tensor:
        mean = hidden.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden * torch.rsqrt(mean + self.variance_epsilon))

    def norm(self: Norm, rows: torch.Tensor) -> torch.Tensor:
        return torch.rms_norm(rows, self._shape, self._gain, self.eps)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamaRMSNorm, "forward", forward)
        patch.setattr(Norm, "__call__", norm)
        yield


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return reference(folder)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> SoloGrower:
    torch.set_num_threads(1)
    return SoloGrower(IndependentGuesser(Checkpoint(folder), "float64"))


@pytest.fixture
def draft(loaded: SoloGrower) -> SoloGrower:
    """The draft source with a fresh, greedy request 1."""
    for request in (1, 2, 3):  # whichever the last test opened
        loaded.close(request)
    rows_of(loaded)
    loaded.open(1, GREEDY)
    return loaded


def plain_children(
    model: PreTrainedModel,
    context: Sequence[int],
    paths: Sequence[Sequence[int]],
    width: int,
    sampling: Sampling = GREEDY,
) -> Children:
    """Every path from scratch, as drafting.base describes it."""
    found: list[tuple[int, int, float]] = []
    for index, path in enumerate(paths):
        whole = [*context, *path]
        if len(whole) > ROOM or max(whole) >= 96:
            continue
        logits = plain_logits(model, whole)[None].numpy()
        scores = guess_log_scores(logits, np.array([len(whole)]), sampling)[0]
        best = np.lexsort((np.arange(len(scores)), -scores))[:width].tolist()
        found += [(index, token, min(float(scores[token]), 0.0)) for token in best]
    parents, tokens, own = zip(*found, strict=True) if found else ((), (), ())
    return Children(np.array(parents, int), np.array(tokens, int), np.array(own, float))


def assert_same(one: Children | DraftedTree, other: Children | DraftedTree) -> None:
    assert one.parents.tolist() == other.parents.tolist()
    assert one.tokens.tolist() == other.tokens.tolist()
    assert np.allclose(one.scores, other.scores, rtol=0, atol=1e-9)
    assert one.parents.dtype == one.tokens.dtype == np.int64
    assert one.scores.dtype == np.float64


def kept(draft: SoloGrower, request: int = 1) -> GuessCache:
    """What is kept of a request."""
    rows = draft._guesser._rows[request]
    assert isinstance(rows, GuessCache)
    return rows


def assert_consistent(draft: SoloGrower, request: int = 1) -> None:
    """What a request remembers is what its cache holds."""
    rows = kept(draft, request)
    ledger, hidden = rows._ledger, rows._hidden
    assert rows._kv.length == len(ledger)
    assert ledger.committed == len(rows.context)
    assert sorted(rows._row_behind.values()) == sorted(ledger.speculative)
    if hidden is not None:
        assert hidden.shape[0] == 1 + len(ledger.speculative)
        assert hidden.untyped_storage().nbytes() == hidden.numel() * hidden.element_size()


def guesses_held(draft: SoloGrower) -> int:
    """How many guesses' rows request 1 keeps."""
    return len(kept(draft)._ledger.speculative)


@SAMPLINGS
@pytest.mark.parametrize(
    ("paths", "rows"),
    [
        ([()], ()),
        ([(4,), (5,), (95,)], (3,)),
        ([(), (4,), (4, 5), (4, 5, 6)], (3,)),  # a chain, whose rows lie in one pass
        ([(4, 5, 6), (4, 5), (4,)], (3,)),  # the same, asked for from its end
        ([(1, 2, 3)], (3,)),  # missing ancestors, which nobody asks about
        ([(1, 2, 3), (1, 2, 4), (1, 5), (9, 2, 3)], (8,)),
        ([(4,), (4,), (), (4,), ()], (1,)),  # twice the same
        ([], ()),
    ],
)
def test_children_are_those_of_a_plain_forward(
    draft: SoloGrower,
    model: PreTrainedModel,
    sampling: Sampling,
    paths: list[tuple[int, ...]],
    rows: tuple[int, ...],
) -> None:
    draft.open(1, sampling)
    children = draft.expand(1, CONTEXT, paths, 4)
    assert rows_of(draft) == (len(CONTEXT), *rows)
    assert_same(children, plain_children(model, CONTEXT, paths, 4, sampling))
    assert_consistent(draft)


def test_nothing_is_run_twice(draft: SoloGrower, model: PreTrainedModel) -> None:
    tree = draft.refresh(1, CONTEXT, 2, 3)
    assert rows_of(draft) == (len(CONTEXT), 3)
    firsts = [(int(token),) for token in tree.tokens[:3]]
    stranger = next(t for t in range(96) if (t,) not in firsts)
    # What refresh ran, expand does not.
    assert_same(draft.expand(1, CONTEXT, firsts, 5), plain_children(model, CONTEXT, firsts, 5))
    assert rows_of(draft) == ()
    # What expand ran, refresh, deepen and expand do not.
    everything = [(int(tree.tokens[tree.parents[i]]), int(tree.tokens[i])) for i in range(3, 12)]
    paths = [*everything, (stranger, 8)]
    assert_same(draft.expand(1, CONTEXT, paths, 2), plain_children(model, CONTEXT, paths, 2))
    assert rows_of(draft) == (11,)
    deep = draft.deepen(1, 1, 3)
    assert len(deep) == 3 + 9 + 9
    assert rows_of(draft) == ()
    assert_same(draft.refresh(1, CONTEXT, 3, 3), deep)
    draft.expand(1, CONTEXT, [(stranger,), *reversed(paths)], 7)
    assert rows_of(draft) == ()


def test_what_lies_behind_an_accepted_path_stays(draft: SoloGrower, model: PreTrainedModel) -> None:
    paths = [(4,), (4, 5), (4, 5, 6), (4, 5, 6, 7), (4, 5, 8), (4, 9), (10,), (10, 5)]
    draft.expand(1, CONTEXT, paths, 1)
    assert rows_of(draft) == (6, 8)
    longer = [*CONTEXT, 4, 5]
    children = draft.expand(1, longer, [(), (6,), (6, 7), (8,), (9,), (6, 3)], 4)
    assert rows_of(draft) == (2,)  # (9,) and (6, 3)
    assert_same(children, plain_children(model, longer, [(), (6,), (6, 7), (8,), (9,), (6, 3)], 4))
    assert guesses_held(draft) == 3 + 2
    assert_consistent(draft)
    # Accepted, and one more that nobody guessed: nothing stays.
    longer += [6, 11]
    assert_same(draft.expand(1, longer, [(7,)], 4), plain_children(model, longer, [(7,)], 4))
    assert rows_of(draft) == (1, 1)
    assert guesses_held(draft) == 1
    assert_consistent(draft)


def test_refresh_uses_what_stayed(draft: SoloGrower) -> None:
    tree = draft.refresh(1, CONTEXT, 4, 3)
    rows_of(draft)
    best = int(tree.parents[tree.parents >= 0][0])  # of the first level, with children
    longer = [*CONTEXT, int(tree.tokens[best])]
    again = draft.refresh(1, longer, 4, 3)
    work = rows_of(draft)
    draft.open(2, GREEDY)
    assert_same(again, draft.refresh(2, longer, 4, 3))
    assert sum(work) < sum(rows_of(draft)) - len(longer)


def test_memory_is_bounded_by_what_lies_behind_the_context(draft: SoloGrower) -> None:
    context = list(CONTEXT)
    draft.refresh(1, context, 1, 1)
    for step in range(20):
        firsts = [(token,) for token in range(10)]
        draft.expand(1, context, [*firsts, *((1, token) for token in range(10))], 2)
        assert guesses_held(draft) == 20
        context.append(step % 3)
        draft.expand(1, context, [], 2)
        assert guesses_held(draft) == (10 if step % 3 == 1 else 0)
        assert_consistent(draft)


@pytest.mark.parametrize("length", [45, 47, 48, 49, 60])
def test_paths_end_where_the_models_context_does(
    draft: SoloGrower, model: PreTrainedModel, length: int
) -> None:
    context = [(5 * i) % 96 for i in range(length)]
    paths = [(1, 2, 3, 4), (), (1,), (1, 2), (1, 2, 3), (2,)]
    children = draft.expand(1, context, paths, 3)
    assert_same(children, plain_children(model, context, paths, 3))
    asked = {45: 5, 47: 3, 48: 1, 49: 0, 60: 0}[length]
    assert len(children) == 3 * asked
    draft.open(2, GREEDY)
    assert_same(draft.refresh(1, context, 3, 2), draft.refresh(2, context, 3, 2))


def test_tokens_that_the_draft_lacks_have_no_children(
    draft: SoloGrower, model: PreTrainedModel
) -> None:
    paths = [(96,), (3,), (3, 500, 4), (3, 4)]
    children = draft.expand(1, CONTEXT, paths, 3)
    assert_same(children, plain_children(model, CONTEXT, paths, 3))
    assert children.parents.tolist() == [1, 1, 1, 3, 3, 3]
    assert rows_of(draft) == (6, 2)
    for context in ([*CONTEXT, 96], [*CONTEXT, 96, 3]):
        assert len(draft.expand(1, context, [(), (3,)], 3)) == 0
    assert rows_of(draft) == ()


def test_only_tokens_that_the_base_knows_are_guessed(folder: Path) -> None:
    draft = SoloGrower(IndependentGuesser(Checkpoint(folder), "float64", vocab_size=10))
    draft.open(1, GREEDY)
    children = draft.expand(1, [3, 4], [(), (40,)], 50)
    assert children.parents.tolist() == [0] * 10 + [1] * 10
    assert set(children.tokens.tolist()) == set(range(10))


def test_no_width_is_no_children(draft: SoloGrower) -> None:
    assert len(draft.expand(1, CONTEXT, [(), (3,)], 0)) == 0
    assert rows_of(draft) == (6,)


def test_deepen_goes_on_with_the_last_refreshed_tree(draft: SoloGrower) -> None:
    tree = draft.refresh(1, CONTEXT, 2, 3)
    draft.expand(1, CONTEXT, [(1,), (int(tree.tokens[0]), 5)], 3)
    deep = draft.deepen(1, 2, 3)
    draft.open(2, GREEDY)
    assert_same(deep, draft.refresh(2, CONTEXT, 4, 3))
    # It ends to grow once expand was told that its root is not the last token.
    draft.expand(1, [*CONTEXT, int(tree.tokens[0])], [()], 3)
    assert_same(draft.deepen(1, 2, 3), deep)


def test_requests_do_not_touch_each_other(draft: SoloGrower, model: PreTrainedModel) -> None:
    draft.open(2, WARM)
    other = [8, 8, 1]
    paths = [(4,), (4, 4), (6,)]
    for _ in range(2):
        assert_same(draft.expand(1, CONTEXT, paths, 3), plain_children(model, CONTEXT, paths, 3))
        assert_same(draft.expand(2, other, paths, 3), plain_children(model, other, paths, 3, WARM))
        other.append(4)
    assert rows_of(draft) == (6, 3, 3, 3, 2)  # the other's second 4 was there
    rows = weakref.ref(kept(draft))
    draft.close(1)
    assert rows() is None
    assert_same(draft.expand(2, other, paths, 3), plain_children(model, other, paths, 3, WARM))
    with pytest.raises(LocalProtocolError, match="not open"):
        draft.expand(1, CONTEXT, paths, 3)


def test_contexts_only_grow(draft: SoloGrower) -> None:
    draft.expand(1, CONTEXT, [], 3)
    for context in ([], CONTEXT[:-1], [*CONTEXT[:-1], 1]):
        with pytest.raises(LocalProtocolError, match="only grow"):
            draft.expand(1, context, [()], 3)


@dataclass
class _Told:
    """What the last refresh and the deepens behind it asked for, to be asked again from scratch."""

    context: list[int]
    depth: int
    width: int
    deepens: list[tuple[int, int]] = field(default_factory=list)

    def afresh(self, draft: SoloGrower, sampling: Sampling) -> DraftedTree:
        """The same tree from an empty cache."""
        draft.open(999, sampling)
        tree = draft.refresh(999, self.context, self.depth, self.width)
        for levels, width in self.deepens:
            tree = draft.deepen(999, levels, width)
        draft.close(999)
        return tree


@pytest.mark.thorough
@given(
    seed=st.integers(0, 2**32 - 1),
    steps=st.lists(st.sampled_from("rdeeegx"), min_size=1, max_size=12),
    sampling=st.sampled_from([GREEDY, WARM]),
)
@settings(max_examples=150, deadline=None)
def test_any_order_of_calls_gives_what_calls_from_scratch_give(
    loaded: SoloGrower,
    model: PreTrainedModel,
    seed: int,
    steps: list[str],
    sampling: Sampling,
) -> None:
    """Refresh, deepen, expand, contexts that grow along what was run (g) and beside it (x)."""
    random = np.random.default_rng(seed)
    context = random.integers(0, 8, int(random.integers(1, 42))).tolist()
    loaded.open(1, sampling)
    told: _Told | None = None
    told_root = 0  # length of the context when the tree grew
    committed = 0  # length of the context that the draft source took last
    pool: list[list[int]] = [[]]  # paths behind the context that were run, or nearly

    def grow(news: list[int]) -> None:
        nonlocal context, pool
        context = context + news
        pool = [p[len(news) :] for p in pool if p[: len(news)] == news] or [[]]

    for step in steps:
        depth, width = int(random.integers(0, 4)), int(random.integers(1, 5))
        if step == "r":
            told, told_root = _Told(list(context), depth, width), len(context)
            tree = loaded.refresh(1, context, depth, width)
            committed = len(context) if len(context) <= ROOM else committed
            assert_same(tree, told.afresh(loaded, sampling))
            grown: list[list[int]] = []
            for parent, token in zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True):
                grown.append([*([] if parent == FROM_ROOT else grown[parent]), token])
            pool += grown
        elif step == "d":
            if told is not None and told_root == committed:
                told.deepens.append((depth, width))
            tree = loaded.deepen(1, depth, width)
            assert_same(
                tree, DraftedTree.empty() if told is None else told.afresh(loaded, sampling)
            )
        elif step == "e":
            paths = [_path_near(pool, random) for _ in range(int(random.integers(0, 6)))]
            children = loaded.expand(1, context, paths, width)
            committed = len(context) if len(context) <= ROOM else committed
            assert_same(children, plain_children(model, context, paths, width, sampling))
            pool += paths
        elif step == "g":
            path = pool[int(random.integers(len(pool)))]
            grow(path[: int(random.integers(0, len(path) + 1))])
        else:
            grow(random.integers(0, 8, int(random.integers(1, 3))).tolist())
        assert_consistent(loaded)


def _path_near(pool: list[list[int]], random: np.random.Generator) -> list[int]:
    """A path of the pool, cut and extended at random: few tokens, so that paths often meet."""
    path = pool[int(random.integers(len(pool)))]
    path = path[: int(random.integers(0, len(path) + 1))]
    return path + random.integers(0, 8, int(random.integers(0, 3))).tolist()
