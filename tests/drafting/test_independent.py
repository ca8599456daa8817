"""The independent draft against a brute-force tree: every path computed anew by transformers."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import case
from support.checkpoints import plain_logits, reference, write_checkpoint, write_family
from support.distribution import guess_log_scores
from support.growers import SoloGrower
from support.passes import rows_of
from transformers import PreTrainedModel

from edgespec.drafting.independent import IndependentGuesser
from edgespec.errors import LocalProtocolError
from edgespec.model.loader import Checkpoint
from edgespec.tree.drafted import FROM_ROOT, DraftedTree
from edgespec.types.boundaries import AHEAD
from edgespec.verify.sampling import Sampling

pytestmark = pytest.mark.usefixtures("usual_draft_temperature")

ROOM = 48  # the draft model's own context (see conftest.py)
GREEDY = Sampling()
WARM = Sampling(temperature=0.8, seed=11)


@dataclass
class Pair:
    """A draft source and the same model as transformers runs it."""

    draft: SoloGrower
    model: PreTrainedModel

    def fresh(self, context: list[int], sampling: Sampling, depth: int, width: int) -> DraftedTree:
        """A tree from an empty cache."""
        self.draft.open(999, sampling)
        return self.draft.refresh(999, context, depth, width)


@pytest.fixture(scope="module")
def pair(folder: Path) -> Pair:
    torch.set_num_threads(1)
    return Pair(SoloGrower(IndependentGuesser(Checkpoint(folder), "float64")), reference(folder))


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 96, count).tolist()


def brute_force(
    model: PreTrainedModel,
    context: list[int],
    sampling: Sampling,
    depth: int,
    width: int,
    room: int = ROOM,
) -> DraftedTree:
    """Every path from scratch, levels as drafting.base describes them."""
    nodes: list[tuple[int, int, float, list[int]]] = []  # parent, token, score, path
    frontier: list[tuple[int, float, list[int]]] = [(FROM_ROOT, 0.0, context)]
    for _ in range(depth):
        level: list[tuple[int, float, list[int]]] = []
        for index, score, path in frontier:
            if len(path) > room:
                continue
            logits = plain_logits(model, path)[None].numpy()
            scores = guess_log_scores(logits, np.array([len(path)]), sampling)[0]
            for token in np.lexsort((np.arange(len(scores)), -scores))[:width].tolist():
                total = score + min(float(scores[token]), 0.0)
                level.append((len(nodes), total, [*path, token]))
                nodes.append((index, token, total, [*path, token]))
        best = sorted(range(len(level)), key=lambda i: (-level[i][1], i))[:width]
        frontier = [level[i] for i in sorted(best)]
    if not nodes:
        return DraftedTree.empty()
    parents, names, scores, _ = zip(*nodes, strict=True)
    return DraftedTree(np.array(parents), np.array(names), np.array(scores))


def assert_same(one: DraftedTree, other: DraftedTree) -> None:
    assert one.parents.tolist() == other.parents.tolist()
    assert one.tokens.tolist() == other.tokens.tolist()
    # float32 inside RMSNorm (see tests/model/test_block.py) limits agreement.
    assert np.allclose(one.scores, other.scores, rtol=0, atol=1e-4)
    assert one.parents.dtype == one.tokens.dtype == np.int64
    assert one.scores.dtype == np.float64


def assert_well_formed(tree: DraftedTree, depth: int, width: int) -> None:
    assert len(tree) <= (width + (depth - 1) * width**2 if depth else 0)
    indices = np.arange(len(tree))
    assert (tree.parents < indices).all()
    inner = tree.parents != FROM_ROOT
    assert (tree.scores[inner] <= tree.scores[tree.parents[inner]]).all()
    assert (tree.scores <= 0).all()
    siblings = set(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
    assert len(siblings) == len(tree)


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize(("depth", "width"), [(1, 1), (1, 5), (3, 1), (4, 3), (3, 96), (2, 200)])
def test_a_tree_is_the_brute_force_tree(
    pair: Pair, sampling: Sampling, depth: int, width: int
) -> None:
    context = tokens(depth * 7 + width, 9)
    tree = pair.fresh(context, sampling, depth, width)
    assert_well_formed(tree, depth, width)
    if width <= 10:
        assert_same(tree, brute_force(pair.model, context, sampling, depth, width))
    else:  # all of the vocabulary below every node of the frontier
        assert len(tree) == 96 + (depth - 1) * 96 * 96


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
def test_deepening_in_parts_is_growing_at_once(pair: Pair, sampling: Sampling) -> None:
    context = tokens(3, 10)
    whole = brute_force(pair.model, context, sampling, 5, 3)
    pair.draft.open(1, sampling)
    assert_same(
        pair.draft.refresh(1, context, 1, 3), brute_force(pair.model, context, sampling, 1, 3)
    )
    pair.draft.deepen(1, 0, 3)
    pair.draft.deepen(1, 1, 3)
    assert_same(pair.draft.deepen(1, 3, 3), whole)
    # And from nothing: depth 0 draws no guess, but knows where the root is.
    pair.draft.open(1, sampling)
    assert len(pair.draft.refresh(1, context, 0, 3)) == 0
    assert_same(pair.draft.deepen(1, 5, 3), whole)


@pytest.mark.thorough
@given(
    seed=st.integers(0, 2**32 - 1),
    steps=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=6),
    sampling=st.sampled_from([GREEDY, WARM]),
)
@settings(max_examples=25)
def test_refreshing_after_any_acceptance_is_starting_afresh(
    pair: Pair, seed: int, steps: list[tuple[int, int]], sampling: Sampling
) -> None:
    """Contexts grow by some tokens of the tree, then by some that are not (or may not be) in it."""
    random = np.random.default_rng(seed)
    context = random.integers(0, 96, 5).tolist()
    pair.draft.open(1, sampling)
    tree = pair.draft.refresh(1, context, 4, 3)
    for along, beside in steps:
        node = FROM_ROOT
        for _ in range(along):
            children = np.flatnonzero(tree.parents == node)
            if not len(children):
                break
            node = int(random.choice(children))
            context.append(int(tree.tokens[node]))
        context += random.integers(0, 96, beside).tolist()
        if random.random() < 0.3:
            pair.draft.deepen(1, 1, 4)
        tree = pair.draft.refresh(1, context, 4, 3)
        assert_same(tree, pair.fresh(context, sampling, 4, 3))
        assert_well_formed(tree, 4, 3)


def test_accepted_guesses_are_not_computed_again(pair: Pair) -> None:
    context = tokens(1, 8)
    rows_of(pair.draft)
    pair.draft.open(1, GREEDY)
    tree = pair.draft.refresh(1, context, 4, 3)
    assert rows_of(pair.draft) == (8, 3, 3, 3)
    # A path of guesses that were run: each has children.
    second = int(tree.parents[tree.parents >= 3][0])
    first = int(tree.parents[second])
    context += [int(tree.tokens[first]), int(tree.tokens[second])]
    behind = pair.draft.refresh(1, context, 1, 3)
    assert rows_of(pair.draft) == ()
    # Of the three guesses behind it, those that were run are not run again either.
    grandchildren = np.flatnonzero(tree.parents == second)
    were_run = set(tree.parents.tolist()) & set(grandchildren.tolist())
    assert behind.tokens.tolist() == tree.tokens[grandchildren].tolist()
    assert were_run
    pair.draft.refresh(1, context, 2, 3)
    assert sum(rows_of(pair.draft)) == 3 - len(were_run)
    again = pair.draft.refresh(1, context, 2, 3)
    assert rows_of(pair.draft) == ()
    assert_same(again, brute_force(pair.model, context, GREEDY, 2, 3))


def test_a_long_prompt_is_prefilled_in_chunks(tmp_path: Path) -> None:
    folder = write_checkpoint(
        tmp_path / "m", num_hidden_layers=1, max_position_embeddings=2048, initializer_range=0.15
    )
    pair = Pair(SoloGrower(IndependentGuesser(Checkpoint(folder), "float64")), reference(folder))
    context = tokens(4, 700)
    tree = pair.fresh(context, GREEDY, 2, 3)
    assert rows_of(pair.draft) == (256, 256, 188, 3)
    assert_same(tree, brute_force(pair.model, context, GREEDY, 2, 3, room=2048))


class TestItsOwnContext:
    """Near the end of the draft model's positions there are fewer levels, then none."""

    @pytest.mark.parametrize(("length", "levels"), [(46, 3), (47, 2), (48, 1), (49, 0), (60, 0)])
    def test_levels_run_out(self, pair: Pair, length: int, levels: int) -> None:
        context = tokens(6, length)
        tree = pair.fresh(context, GREEDY, 6, 2)
        assert_same(tree, brute_force(pair.model, context, GREEDY, 6, 2))
        assert len(tree) == [0, 2, 6, 10][levels]
        assert len(pair.draft.deepen(999, 3, 2)) == len(tree)

    def test_a_request_may_grow_beyond_it(self, pair: Pair) -> None:
        context = tokens(7, 46)
        pair.draft.open(1, WARM)
        for count in (46, 47, 48, 49, 52):
            longer = context + tokens(8, count - 46)
            tree = pair.draft.refresh(1, longer, 4, 2)
            assert_same(tree, pair.fresh(longer, WARM, 4, 2))
        assert len(pair.draft.deepen(1, 2, 2)) == 0


@pytest.mark.parametrize(("depth", "width"), [(0, 4), (4, 0), (0, 0)])
def test_nothing_asked_for_is_nothing(pair: Pair, depth: int, width: int) -> None:
    assert len(pair.fresh(tokens(1, 5), GREEDY, depth, width)) == 0


def test_only_tokens_that_the_base_knows_are_guessed(folder: Path) -> None:
    draft = SoloGrower(IndependentGuesser(Checkpoint(folder), "float64", vocab_size=10))
    draft.open(1, GREEDY)
    tree = draft.refresh(1, [3, 4], 3, 10)
    assert len(tree) == 10 + 2 * 100
    assert tree.tokens.max() == 9
    larger = SoloGrower(IndependentGuesser(Checkpoint(folder), "float64", vocab_size=500))
    larger.open(1, GREEDY)
    assert larger.refresh(1, [3], 1, 500).tokens.max() == 95


def test_a_token_that_the_draft_lacks_ends_its_guessing(pair: Pair) -> None:
    pair.draft.open(1, GREEDY)
    assert len(pair.draft.refresh(1, [3, 4], 2, 2)) == 6
    assert len(pair.draft.refresh(1, [3, 4, 96], 2, 2)) == 0
    assert len(pair.draft.refresh(1, [3, 4, 96, 5], 2, 2)) == 0
    assert len(pair.draft.deepen(1, 2, 2)) == 0


def test_requests_do_not_touch_each_other(pair: Pair) -> None:
    one, other = tokens(20, 6), tokens(21, 9)
    pair.draft.open(1, GREEDY)
    pair.draft.open(2, WARM)
    pair.draft.refresh(1, one, 2, 3)
    pair.draft.refresh(2, other, 2, 3)
    assert_same(pair.draft.deepen(1, 1, 3), brute_force(pair.model, one, GREEDY, 3, 3))
    assert_same(pair.draft.deepen(2, 1, 3), brute_force(pair.model, other, WARM, 3, 3))
    pair.draft.close(1)
    pair.draft.close(1)
    assert len(pair.draft.refresh(2, other, 2, 3)) == 12


def test_calls_out_of_order_are_our_own_bug(pair: Pair) -> None:
    with pytest.raises(LocalProtocolError, match="not open"):
        pair.draft.refresh(77, [1], 1, 1)
    with pytest.raises(LocalProtocolError, match="not open"):
        pair.draft.deepen(77, 1, 1)
    pair.draft.open(1, GREEDY)
    assert len(pair.draft.deepen(1, 1, 1)) == 0
    pair.draft.refresh(1, [3, 4], 1, 1)
    for context in ([], [3], [3, 5]):
        with pytest.raises(LocalProtocolError, match="only grow"):
            pair.draft.refresh(1, context, 1, 1)


def test_a_draft_whose_layers_fold_rows_reads_again_what_it_no_longer_has(tmp_path: Path) -> None:
    """The base's may all attend: then requests begin anywhere in others, and trees are deep."""
    name = "granitemoehybrid-mamba"
    source = Checkpoint(write_family(tmp_path / name, name))
    text = tokens(5, 300)
    for ends in (False, True):
        draft = SoloGrower(IndependentGuesser(source))
        draft.open(1, GREEDY)
        draft.refresh(1, text, 1, 1)
        draft.open(2, GREEDY)
        draft.fork(2, 1, 90, ends)
        other = [*text[:90], *tokens(6, 20)]
        draft.open(3, GREEDY)
        with case(ends):
            again, plain = (draft.refresh(number, other, 3, 4) for number in (2, 3))
            assert again.tokens.tolist() == plain.tokens.tolist()
            assert np.array_equal(again.scores, plain.scores)


def test_a_draft_whose_layers_fold_rows_guesses_no_farther_than_these_go_back(
    tmp_path: Path,
) -> None:
    name = "granitemoehybrid-mamba"
    draft = SoloGrower(IndependentGuesser(Checkpoint(write_family(tmp_path / name, name))))
    text = tokens(5, 200)
    for number, end in ((1, len(text)), (2, 160)):
        draft.open(number, GREEDY)
        context = text[:end]
        draft.refresh(number, context, 1, 1)
        for length in (AHEAD - 1, AHEAD, 2 * AHEAD, 3 * AHEAD):
            deep = draft.expand(number, context, [tuple(tokens(7, length))], 2)
            assert bool(len(deep)) == (length <= AHEAD), length
        draft.refresh(number, [*context, 3], 1, 1)
