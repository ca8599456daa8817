"""What every draft source promises (see drafting.base), whoever guesses."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.alive import alive
from support.cases import case
from support.checkpoints import write_checkpoint
from support.draft_sources import Chained, dspark, eagle, easyspec, mtp
from support.fake_draft import FakeDraft
from support.growers import SoloGrower, SoloOracle
from support.passes import rows_of

from edgespec.backends.compute import CoordinatorCompute
from edgespec.decoding.effects import CloseDraft, Draft, OpenDraft
from edgespec.drafting.hybrid import MOST_AGREED, HybridGuesser
from edgespec.drafting.independent import IndependentGuesser
from edgespec.drafting.ngram import NgramGuesser
from edgespec.drafting.ranking import Ranking
from edgespec.machines.effects import Effect
from edgespec.model import layer_plan
from edgespec.model.ends import OutputHead
from edgespec.model.kv_cache import TwoRegionCache
from edgespec.model.loader import Checkpoint
from edgespec.planning.memory import STEP
from edgespec.policy.base import Expand
from edgespec.sim.toy import VOCABULARY
from edgespec.sim.toy_model import toy_next
from edgespec.tree.drafted import FROM_ROOT, Children, DraftedTree
from edgespec.types.draft_pass import RankedRows
from edgespec.types.features import Features
from edgespec.verify.rules import Answer, Mask
from edgespec.verify.sampling import Sampling

CONTEXT = [5, 1, 30, 2, 5, 1, 7, 5]
QUIET = ("ngram", "ppd")
"""Sources that have nothing to say about some paths, and run no model."""
PATHS = [(3, 4, 5), (), (3,), (3, 4), (3, 4), (7, 0), ()]


ONE_PASS = ("dspark",)
"""Sources that guess all levels of a tree in one pass."""
LEVEL_BY_LEVEL = ("eagle", "eagle3", "mtp")
"""Sources that read their own output: each level of missing guesses is a pass of its own."""


def oracle() -> SoloOracle:
    draft = SoloOracle(random.Random(3), 0.7)
    draft.tell([*CONTEXT, 3, 4, 5, 6])
    return draft


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base of the heads."""
    return write_checkpoint(
        tmp_path_factory.mktemp("base"), num_hidden_layers=5, vocab_size=VOCABULARY
    )


@pytest.fixture(
    params=[
        "independent",
        "ngram",
        "hybrid",
        "eagle",
        "eagle3",
        "eagle3-part",
        "dspark",
        "dspark-part",
        "dspark-shown",
        "mtp",
        "ppd",
        "easyspec",
        "fake",
        "oracle",
    ]
)
def draft(request: pytest.FixtureRequest, folder: Path, base: Path, tmp_path: Path) -> SoloGrower:
    """Every draft source there is, with request 1 open."""
    makers: dict[str, Callable[[], SoloGrower]] = {
        "independent": lambda: SoloGrower(
            IndependentGuesser(Checkpoint(folder), vocab_size=VOCABULARY)
        ),
        "ngram": lambda: SoloGrower(NgramGuesser()),
        "hybrid": lambda: SoloGrower(
            HybridGuesser(
                [
                    NgramGuesser(),
                    IndependentGuesser(Checkpoint(folder), vocab_size=VOCABULARY),
                ]
            )
        ),
        "eagle": lambda: eagle("eagle-llama3", VOCABULARY, base, tmp_path),
        "eagle3": lambda: eagle("eagle3-pickled", VOCABULARY, base, tmp_path),
        "eagle3-part": lambda: eagle("eagle3-official", VOCABULARY // 2, base, tmp_path),
        "dspark": lambda: dspark("deepspec", VOCABULARY, base, tmp_path),
        "dspark-part": lambda: dspark("own", VOCABULARY // 2, base, tmp_path),
        "dspark-shown": lambda: dspark("own-shown", VOCABULARY // 2, base, tmp_path),
        "mtp": lambda: mtp(tmp_path),
        "ppd": lambda: Chained(base),
        "easyspec": lambda: easyspec(base),
        "fake": lambda: FakeDraft(2, VOCABULARY, 0.7),
        "oracle": oracle,
    }
    source = makers[request.param]()
    source.open(1, Sampling())
    return source


def assert_children(children: Children, paths: int, width: int, least: int = 1) -> None:
    parents, tokens, scores = children.parents, children.tokens, children.scores
    assert len(parents) == len(tokens) == len(scores) == len(children)
    assert parents.dtype == tokens.dtype == np.int64
    assert scores.dtype == np.float64
    assert children.made_by.shape == tokens.shape
    assert (children.made_by > 0).all()
    assert (np.diff(parents) >= 0).all()
    assert set(parents.tolist()) <= set(range(paths))
    assert ((tokens >= 0) & (tokens < VOCABULARY)).all()
    assert (scores <= 0).all()
    for path in range(paths):
        own = parents == path
        assert least <= own.sum() <= width
        assert len(set(tokens[own].tolist())) == own.sum()
        assert (np.diff(scores[own]) <= 0).all()


def test_children_are_well_formed(draft: SoloGrower) -> None:
    least = 0 if draft.name in QUIET else 1
    every: list[list[tuple[int, ...]]] = [PATHS, [()], [(1, 2)], []]
    for request, (paths, width) in enumerate(product(every, (1, 3, 10, VOCABULARY + 5)), start=2):
        draft.open(request, Sampling())
        for context in (CONTEXT, [*CONTEXT, 3]):
            with case(context, paths, width):
                children = draft.expand(request, context, paths, width)
                assert_children(children, len(paths), width, least)
        draft.close(request)


def assert_tree(tree: DraftedTree) -> None:
    assert (tree.parents < np.arange(len(tree))).all()
    inner = tree.parents != FROM_ROOT
    assert (tree.scores <= 0).all()
    assert (tree.scores[inner] <= tree.scores[tree.parents[inner]]).all()
    siblings = set(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
    assert len(siblings) == len(tree)


def test_trees_are_well_formed_and_go_on_where_they_were(draft: SoloGrower) -> None:
    shallow = draft.refresh(1, CONTEXT, 2, 3)
    draft.expand(1, CONTEXT, PATHS, 4)
    deep = draft.deepen(1, 2, 3)
    assert 0 < len(shallow) < len(deep)
    for tree in (shallow, deep):
        assert_tree(tree)
        assert len(tree) <= 3 + 3 * 9
    assert deep.tokens[: len(shallow)].tolist() == shallow.tokens.tolist()
    assert deep.parents[: len(shallow)].tolist() == shallow.parents.tolist()


def test_work_is_told_once(draft: SoloGrower, request: pytest.FixtureRequest) -> None:
    assert rows_of(draft) == ()
    draft.refresh(1, CONTEXT, 3, 2)
    if draft.name in QUIET:
        assert rows_of(draft) == ()
        return
    work = rows_of(draft)
    if draft.name in ONE_PASS and request.node.callspec.params["draft"] != "dspark-shown":
        assert len(work) == 1
        draft.deepen(1, 2, 2)
        draft.expand(1, CONTEXT, [(39, 38), (39,)], 2)
        assert rows_of(draft) == ()
        return
    assert len(work) == 3
    assert all(1 <= rows <= 2 for rows in work[1:])
    assert rows_of(draft) == ()
    draft.deepen(1, 2, 2)
    work = rows_of(draft)
    assert len(work) == 2
    assert all(1 <= rows <= 2 for rows in work)
    strange = [(39, 38), (39, 37), (38, 39)]
    draft.expand(1, CONTEXT, [path[:1] for path in strange[::2]], 2)
    assert len(rows_of(draft)) <= 1
    draft.expand(1, CONTEXT, strange, 2)
    work = rows_of(draft)
    assert len(work) <= (2 if draft.name in LEVEL_BY_LEVEL else 1)
    assert 1 <= sum(work) <= 3
    draft.expand(1, CONTEXT, [], 2)
    assert rows_of(draft) == ()


RANKS_NOTHING = {"fake", "oracle"}


def test_what_is_ranked_is_noted_with_its_positions_and_its_way(draft: SoloGrower) -> None:
    if draft.name in RANKS_NOTHING:
        return
    for request, sampling in enumerate((Sampling(), Sampling(1.0, seed=3), Sampling(1.0, 2)), 7):
        draft.open(request, sampling)
        draft.take_work()
        draft.expand(request, CONTEXT, [(), (4,)], 2)
        ranked = [one for one in draft.take_work() if isinstance(one, RankedRows)]
        assert {(one.way, one.seed) for one in ranked} <= {(sampling.way, sampling.seed)}
        assert {one.source for one in ranked} <= set(draft.sources)
        positions = [position for one in ranked for position in one.positions]
        assert set(positions) <= {len(CONTEXT), len(CONTEXT) + 1}
        if len(draft.sources) == 1 and not draft.needs.hidden and not draft.needs.ppd_tokens:
            assert sorted(positions) == [len(CONTEXT), len(CONTEXT) + 1]


@pytest.mark.parametrize("ends", [True, False])
def test_what_was_read_of_another_request_is_not_read_again(draft: SoloGrower, ends: bool) -> None:
    draft.refresh(1, CONTEXT, 2, 2)
    draft.expand(1, [*CONTEXT, 3], [(4,)], 2)
    again = [*CONTEXT[:6], 9, 4, 30]
    if isinstance(draft, SoloOracle):
        return  # it says something else each time
    for request in (7, 8):
        draft.open(request, Sampling())
    draft.fork(7, 1, 6, ends)
    if ends:
        draft.close(1)
    draft.take_work()
    went_on = draft.refresh(7, again, 2, 2)
    short = sum(rows_of(draft))
    anew = draft.refresh(8, again, 2, 2)
    whole = sum(rows_of(draft))
    assert went_on.tokens.tolist() == anew.tokens.tolist()
    np.testing.assert_allclose(went_on.scores, anew.scores, rtol=0, atol=1e-4)
    if whole and draft.name != "fake":
        assert whole - short >= 5
    if not ends:  # the other one goes on as if nothing had been
        longer = [*CONTEXT, 3, 4]
        draft.open(6, Sampling())
        one, other = draft.refresh(1, longer, 2, 2), draft.refresh(6, longer, 2, 2)
        assert one.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(one.scores, other.scores, rtol=1e-4, atol=1e-4)
    draft.open(9, Sampling())
    draft.fork(9, 99, 6, True)
    assert draft.refresh(9, again, 2, 2).tokens.tolist() == anew.tokens.tolist()


CALLS = {"independent": 2 * 2 + 2, "hybrid:ngram+independent": 2 * 2 + 2, "easyspec": 5 + 3 + 2}
CALLS |= dict.fromkeys(LEVEL_BY_LEVEL, 2 * 1 + 2)
CALLS |= dict.fromkeys(ONE_PASS, 2 + 2)
"""Before each layer of two passes, or of one, and before two output matrices; a fuzzy pass runs
groups."""


def test_work_is_let_in_between_layers_and_changes_no_guess(
    draft: SoloGrower,
    base: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layer_plan, "LOOK", 1)  # else all layers of a small draft are one call
    head, calls = OutputHead(Checkpoint(base)), 0

    def call() -> None:
        nonlocal calls
        calls += 1
        head.logits(torch.ones((2, 32)))

    draft.open(2, Sampling())
    quiet = draft.refresh(1, CONTEXT, 2, 3)
    draft.let_in(call)
    tree = draft.refresh(2, CONTEXT, 2, 3)
    shown = request.node.callspec.params["draft"] == "dspark-shown"
    assert calls == (2 * 2 + 2 if shown else CALLS.get(draft.name, 0))
    if not isinstance(draft, SoloOracle):  # it says something else each time
        assert tree.tokens.tolist() == quiet.tokens.tolist()
        assert tree.scores.tolist() == quiet.scores.tolist()


def test_a_request_takes_no_more_room_than_what_was_read_for_it(
    draft: SoloGrower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answered requests stay open for the next turn: hundreds of short ones in the rows of one."""
    made: list[TwoRegionCache] = []
    init = TwoRegionCache.__init__

    def noted(cache: TwoRegionCache, **shape: Any) -> None:
        init(cache, **shape)
        made.append(cache)

    monkeypatch.setattr(TwoRegionCache, "__init__", noted)
    draft.open(2, Sampling())
    draft.expand(2, CONTEXT, [()], 3)
    assert all(cache.capacity <= STEP for cache in made), [cache.capacity for cache in made]
    assert made or draft.name in ("ngram", "ppd", "fake", "oracle")


def test_requests_are_apart(draft: SoloGrower) -> None:
    draft.open(2, Sampling(seed=4))
    draft.refresh(2, CONTEXT[:1], 1, 2)
    draft.expand(1, CONTEXT, PATHS, 3)
    draft.expand(2, CONTEXT[:2], PATHS, 3)
    draft.close(2)
    least = 0 if draft.name in QUIET else 1
    assert_children(draft.expand(1, CONTEXT, PATHS, 3), len(PATHS), 3, least)


def test_the_names_of_the_members_fit_the_bits(draft: SoloGrower) -> None:
    children = draft.expand(1, CONTEXT, PATHS, 5)
    tree = draft.refresh(1, CONTEXT, 3, 3)
    for made_by in (children.made_by, tree.made_by):
        assert (made_by < 1 << len(draft.sources)).all()


def test_the_fake_guesses_the_same_in_a_tree_and_alone() -> None:
    draft = FakeDraft(2, VOCABULARY, 0.7)
    draft.open(1, Sampling(seed=9))
    tree = draft.refresh(1, CONTEXT, 2, 3)
    firsts = [(token,) for token in tree.tokens[:3].tolist()]
    children = draft.expand(1, CONTEXT, [(), *firsts], 3)
    below = np.isin(tree.parents, np.arange(3))
    assert children.tokens[:3].tolist() == tree.tokens[:3].tolist()
    assert sorted(children.tokens[3:].tolist()) == sorted(tree.tokens[below].tolist())
    assert children.scores[:3].tolist() == tree.scores[:3].tolist()


@pytest.mark.parametrize("accuracy", [0.0, 0.5, 1.0])
def test_the_fakes_truth_is_where_its_accuracy_says(accuracy: float) -> None:
    draft = FakeDraft(2, VOCABULARY, accuracy)
    draft.open(1, Sampling(seed=9))
    paths = [(first, second) for first in range(20) for second in range(10)]
    children = draft.expand(1, CONTEXT, paths, 2)
    truth = [toy_next([*CONTEXT, *path], 2, VOCABULARY, 9) for path in paths]
    best = children.tokens[np.searchsorted(children.parents, np.arange(len(paths)))]
    assert abs(float((best == truth).mean()) - accuracy) < 0.1


@pytest.mark.parametrize("accuracy", [0.0, 1.0])
def test_the_oracle_knows_what_it_was_told(accuracy: float) -> None:
    draft = SoloOracle(random.Random(1), accuracy)
    draft.open(1, Sampling())
    answer = list(range(20, 40))
    draft.tell([*CONTEXT, *answer])
    found = 0
    for length in range(19):
        children = draft.expand(1, CONTEXT, [answer[:length]], 3)
        found += answer[length] in children.tokens.tolist()
    assert found == 19 if accuracy else found < 8


class _Odd:
    """A grammar of odd tokens."""

    def allowed(self, answer: Answer) -> Mask:
        return np.arange(VOCABULARY) % 2 == 1

    def has_ended(self, answer: Answer) -> bool:
        return False


def test_what_was_asked_is_forgotten(draft: SoloGrower) -> None:
    """Also where nobody is charged for it."""
    if isinstance(draft, SoloOracle):
        return  # it knows the texts
    compute = CoordinatorCompute(None, draft)
    found = []
    for request in range(10, 26):
        sampling = Sampling(0.5 + request % 4 / 10, seed=request)
        held = _Odd() if request % 2 else None
        effects: list[Effect] = [OpenDraft(request, sampling, grammar=held)]
        for context in (CONTEXT, [*CONTEXT, 3], [*CONTEXT, 3, 5]):
            effects.append(Draft(1, request, Expand((0,), 2, 2), tuple(context), ((),)))
        for effect in (*effects, CloseDraft(request)):
            compute.perform(effect, lambda: False)
        found.append(alive(draft))
    grown = found[-1] - found[7]
    assert grown.pop("tuple", 0) < 20, "what a hybrid learns of a score, of which there are few"
    assert grown == Counter()


def test_ways_of_sampling_that_are_long_gone_are_forgotten() -> None:
    two = HybridGuesser([NgramGuesser(), NgramGuesser()])
    noted = Ranking(lambda positions, sampling, product: None)
    found = []
    for request in range(2 * MOST_AGREED):
        sampling = Sampling(0.5 + request / MOST_AGREED / 2)
        noted.open(request, sampling)
        noted.close(request)
        two.open(request, sampling)
        for length in (6, 7):
            two.read(request, CONTEXT[:length], Features())
            two.guess(request, [()], 2)
        two.close(request)
        two.take_work()
        if request + 1 in (MOST_AGREED, 2 * MOST_AGREED):
            found.append(alive(noted, two))
    assert found[1] - found[0] == Counter()
