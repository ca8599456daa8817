"""One-pass heads as draft sources: what they guess, against their arithmetic row by row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpoints import write_checkpoint
from support.dspark_heads import FORMS, HIDDEN, LAYERS, TAPS, VOCAB, Form, Reference, write_dspark
from support.growers import SoloGrower
from support.passes import rows_of

from edgespec.config import Quantisation
from edgespec.drafting.dspark.format import MOST_SLOTS, read_head
from edgespec.drafting.dspark.guesser import DSparkGuesser, load_dspark
from edgespec.drafting.grower import Further
from edgespec.drafting.hybrid import HybridGuesser
from edgespec.drafting.independent import IndependentGuesser
from edgespec.drafting.ngram import NgramGuesser
from edgespec.errors import ModelError
from edgespec.model.aux_hidden import packed, unpacked
from edgespec.model.ends import OutputHead
from edgespec.model.loader import Checkpoint
from edgespec.model.quantised.linear import dequantised, pack
from edgespec.tree.drafted import Children
from edgespec.types.draft_pass import DraftPass, RankedRows
from edgespec.types.features import NO_FEATURES, Features
from edgespec.types.tensor import Layers
from edgespec.verify.rules import Answer, Grammar, Mask
from edgespec.verify.sampling import Sampling

CONTEXT = [5, 9, 90, 33, 7, 61, 2]
PATHS: list[list[int]] = [[], [4], [8], [4, 77], [8, 8, 50], [4, 77, 3]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("base"), seed=3, num_hidden_layers=LAYERS)


def guesser(base: Path, head: Path) -> DSparkGuesser:
    source = Checkpoint(base)
    return load_dspark(head, source, OutputHead(source, "float64"), "float64")


def given_rows(count: int, first: int = 0) -> tuple[torch.Tensor, Features]:
    """What the base gives for `count` committed rows from `first` on, as the reference and as the
    guesser take it."""
    random = torch.Generator().manual_seed(1)
    rows = [torch.randn((300, HIDDEN), generator=random)[first : first + count] for _ in range(4)]
    # They come from the ring in the order of the layers, and others with them.
    aux_hidden = packed([rows[3], *rows[:3]])
    known = unpacked(aux_hidden, 4, HIDDEN)[:, 1:].flatten(1).double()
    return known, Features(aux_hidden=aux_hidden, aux_layers=Layers((0, *TAPS)))


def opened(draft: DSparkGuesser, context: list[int] = CONTEXT) -> torch.Tensor:
    """Request 1 of `draft` has read that context; returns what the base gave."""
    rows, features = given_rows(len(context) - 1)
    draft.open(1, Sampling())
    assert draft.read(1, context, features)
    return rows


def assert_guessed(
    draft: DSparkGuesser, reference: Reference, rows: torch.Tensor, context: list[int]
) -> None:
    """What follows PATHS behind request 1's context is what the reference says."""
    shows = reference.form is FORMS["own-shown"]
    children = draft.guess(1, PATHS, 5)
    for index, path in enumerate(PATHS):
        out = reference.block(rows, [context[-1], *path] if shows else context[-1:])
        wanted = reference.log_probs(out, context, path)
        best = wanted.argsort(descending=True, stable=True)[:5]
        mine = children.parents == index
        assert children.tokens[mine].tolist() == reference.token_of[best].tolist()
        np.testing.assert_allclose(children.scores[mine], wanted[best], rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", FORMS)
def test_guesses_are_those_of_the_papers_arithmetic(name: str, base: Path, tmp_path: Path) -> None:
    tensors = write_dspark(tmp_path, FORMS[name])
    draft = guesser(base, tmp_path)
    rows = opened(draft)
    assert_guessed(draft, Reference(FORMS[name], tensors, base), rows, CONTEXT)


@pytest.mark.parametrize("name", ["deepspec", "z-lab-window", "jetspec"])
def test_how_the_rows_came_makes_no_difference(
    name: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one with guesses in between, or more at once than fit beside a block."""
    monkeypatch.setattr("edgespec.drafting.dspark.rows.PASS_ROWS", 4)
    tensors = write_dspark(tmp_path, FORMS[name])
    draft = guesser(base, tmp_path)
    draft.open(1, Sampling())
    for end in range(1, len(CONTEXT) + 1):
        features = given_rows(1, end - 2)[1] if end > 1 else Features()
        assert draft.read(1, CONTEXT[:end], features)
        draft.guess(1, PATHS, 4)
    rows, _ = given_rows(len(CONTEXT) - 1)
    reference = Reference(FORMS[name], tensors, base)
    assert_guessed(draft, reference, rows, CONTEXT)
    rows_of(draft)
    draft.close(1)
    opened(draft)
    assert rows_of(draft) == (4,), "the last two wait for the block"
    assert_guessed(draft, reference, rows, CONTEXT)
    assert rows_of(draft) == (2 + FORMS[name].block,)


def test_guesses_are_shown_to_a_head_that_learnt_it(base: Path, tmp_path: Path) -> None:
    """What follows a path is what a block says that holds it, however long; one pass runs all that
    is missing, and what was run stays while it lies behind the context."""
    form = FORMS["own-shown"]
    tensors = write_dspark(tmp_path, form)
    draft, reference = guesser(base, tmp_path), Reference(form, tensors, base)
    rows = opened(draft)
    asked = [[], [4], [4, 77], [8], [4, 77, 3, 9, 1]]
    assert len(asked[-1]) > form.settings["revealed_tokens"]
    children = draft.guess(1, asked, 5)
    assert rows_of(draft) == (len(CONTEXT) - 1 + 7,), "the context, the anchor, six guesses"
    for index, path in enumerate(asked):
        out = reference.block(rows, [CONTEXT[-1], *path])
        wanted = reference.log_probs(out, CONTEXT, path)
        best = wanted.argsort(descending=True, stable=True)[:5]
        mine = children.parents == index
        assert children.tokens[mine].tolist() == reference.token_of[best].tolist(), path
        np.testing.assert_allclose(children.scores[mine], wanted[best], rtol=0, atol=1e-9)
    again = draft.guess(1, [[4, 77]], 5)
    assert again.tokens.tolist() == children.tokens[children.parents == 2].tolist()
    draft.guess(1, [[4, 77, 3]], 5)
    assert rows_of(draft) == ()

    longer = [*CONTEXT, 4]
    assert draft.read(1, longer, given_rows(1, len(CONTEXT) - 1)[1])
    more, _ = given_rows(len(longer) - 1)
    first = draft.guess(1, [[]], 5)
    assert rows_of(draft) == (2,), "the row that is known now, and the anchor anew"
    wanted = reference.log_probs(reference.block(more, [4]), longer, [])
    best = wanted.argsort(descending=True, stable=True)[:5]
    assert first.tokens.tolist() == reference.token_of[best].tolist()
    np.testing.assert_allclose(first.scores, wanted[best], rtol=0, atol=1e-9)
    draft.guess(1, [[77], [77, 3]], 5)
    assert rows_of(draft) == (), "they stay as they were run"
    draft.guess(1, [[77, 3, 2], [8]], 5)
    assert rows_of(draft) == (2,), "8 lay elsewhere"
    assert draft.read(1, [*longer, 9], given_rows(1, len(CONTEXT))[1])
    draft.guess(1, [[77]], 5)
    assert rows_of(draft) == (3,), "nothing that was run lies behind 9"


def test_tokens_whose_rows_are_not_here_yet_are_shown_too(base: Path, tmp_path: Path) -> None:
    form = FORMS["own-shown"]
    tensors = write_dspark(tmp_path, form)
    draft, reference = guesser(base, tmp_path), Reference(form, tensors, base)
    draft.open(1, Sampling())
    known = len(CONTEXT) - 3
    rows, features = given_rows(known)
    assert draft.read(1, CONTEXT, features)
    found = draft.guess(1, [[], [4]], 5)
    assert rows_of(draft) == (known + 3 + 1,)

    def assert_as_shown(children: Children, rows: torch.Tensor, path: list[int]) -> None:
        shown = [*CONTEXT[len(rows) :], *path]
        out = reference.block(rows, shown)
        wanted = reference.log_probs(out, CONTEXT[: len(rows) + 1], shown[1:])
        best = wanted.argsort(descending=True, stable=True)[:5]
        assert children.tokens.tolist() == reference.token_of[best].tolist()
        np.testing.assert_allclose(children.scores, wanted[best], rtol=0, atol=1e-9)

    for index, path in enumerate(([], [4])):
        mine = found.parents == index
        part = replace(found, tokens=found.tokens[mine], scores=found.scores[mine])
        assert_as_shown(part, rows, path)
    more = given_rows(3, known)[1]
    assert not draft.read(1, CONTEXT, more), "nothing stands for what comes next"
    assert draft.read(1, [*CONTEXT, 4], Features())
    draft.guess(1, [[]], 5)
    assert rows_of(draft) == (3 + 1,)


@pytest.mark.parametrize("ends", [True, False])
def test_a_turn_that_is_shown_guesses_goes_on_from_committed_rows(
    ends: bool, base: Path, tmp_path: Path
) -> None:
    form = FORMS["own-shown"]
    tensors = write_dspark(tmp_path, form)
    draft = guesser(base, tmp_path)
    opened(draft)
    draft.guess(1, PATHS, 4)
    assert draft.read(1, [*CONTEXT, *PATHS[-1]], given_rows(len(PATHS[-1]), len(CONTEXT) - 1)[1])
    draft.guess(1, [[], [7]], 4)
    rows_of(draft)
    draft.open(2, Sampling())
    draft.fork(2, 1, 5, ends)
    if ends:
        draft.close(1)
    rows, _ = given_rows(len(CONTEXT) - 1)
    assert draft.read(2, CONTEXT, given_rows(len(CONTEXT) - 6, 5)[1])
    found = draft.guess(2, [[4]], 5)
    assert rows_of(draft) == (len(CONTEXT) - 6 + 2,)
    reference = Reference(form, tensors, base)
    wanted = reference.log_probs(reference.block(rows, [CONTEXT[-1], 4]), CONTEXT, [4])
    best = wanted.argsort(descending=True, stable=True)[:5]
    np.testing.assert_allclose(found.scores, wanted[best], rtol=0, atol=1e-9)


class Thirds:
    """A grammar: a third of all tokens may come, another one after every token; and nothing but 61
    after a multiple of 5."""

    def allowed(self, answer: Answer) -> Mask:
        """See Grammar."""
        tokens = np.arange(VOCAB)
        last = answer[-1] if answer else 1
        found: Mask = tokens == 61 if last % 5 == 0 else tokens % 3 == last % 3
        return found

    def has_ended(self, answer: Answer) -> bool:
        """See Grammar."""
        return False


@pytest.mark.parametrize("grammar", [None, Thirds()])
@pytest.mark.parametrize("most", [3, 20, 200])
@pytest.mark.parametrize("least", [-3.0, -7.0])
def test_one_request_expands_the_best_guesses_of_all_levels(
    most: int,
    least: float,
    grammar: Grammar | None,
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if one after the other was asked for, the best path first; in one pass."""
    monkeypatch.setattr("edgespec.drafting.grower.AT_ONCE", 1)
    write_dspark(tmp_path, FORMS["deepspec"])
    source = SoloGrower(guesser(base, tmp_path))
    for request in (1, 2):
        source.open(request, Sampling(), grammar, len(CONTEXT))
    features = given_rows(len(CONTEXT) - 1)[1]
    asked, scores = [(4,), (9, 5)], [-0.5, -1.5]
    source.expand(1, CONTEXT, [()], 1, features)
    source.expand(2, CONTEXT, [()], 1, features)
    source.take_work()
    found = source.expand(1, CONTEXT, asked, 3, NO_FEATURES, Further(scores, most, least))
    assert not [one for one in source.take_work() if isinstance(one, DraftPass)]
    wanted: dict[tuple[int, ...], float] = {}
    waiting = dict(zip(asked, scores, strict=True))
    expanded = 0
    while waiting and expanded < max(most, len(asked)):
        # Those that are asked for are expanded in any case.
        first = [path for path in asked if path in waiting] or sorted(
            waiting, key=lambda path: (-waiting[path], path)
        )
        path = first[0]
        above = waiting.pop(path)
        if path not in asked and above < least:
            break
        expanded += 1
        below = source.expand(2, CONTEXT, [path], 3)
        for token, score in zip(below.tokens.tolist(), below.scores.tolist(), strict=True):
            wanted[(*path, token)] = waiting[(*path, token)] = above + score
    every = [*asked]
    for at, token in zip(found.parents.tolist(), found.tokens.tolist(), strict=True):
        every.append((*every[at], token))
    assert set(every[len(asked) :]) == set(wanted)
    assert len(every) - len(asked) == len(wanted)
    assert found.further(len(asked)) <= expanded - len(asked)
    if grammar is not None:
        assert all(grammar.allowed(path[:-1])[path[-1]] for path in every[len(asked) :])
        below = [every[at][-1] for at in found.parents[found.certain].tolist()]
        assert below
        assert all(last % 5 == 0 for last in below)
        assert found.chains == ((1, (61,)),)


def test_a_block_runs_once_for_all_its_levels(base: Path, tmp_path: Path) -> None:
    write_dspark(tmp_path, FORMS["deepspec"])
    draft = guesser(base, tmp_path)
    opened(draft)
    draft.guess(1, PATHS, 4)
    work = draft.take_work()
    assert [one.rows for one in work if not isinstance(one, RankedRows)] == [6 + 6]
    assert [one.product for one in work if isinstance(one, RankedRows)] == [6]
    draft.guess(1, [[4, 77, 3, 3], [1]], 4)
    again = draft.take_work()
    assert [one.product for one in again if isinstance(one, RankedRows)] == [0] == [len(again) - 1]
    assert draft.read(1, [*CONTEXT, 4], given_rows(1, 6)[1])
    draft.guess(1, [[]], 4)
    assert rows_of(draft) == (1 + 6,), "the context has grown"


@pytest.mark.parametrize("name", ["own", "deepspec"])
def test_a_pass_tells_what_the_head_is_made_of_and_which_rows_are_new(
    name: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.drafting.dspark.rows.PASS_ROWS", 4)
    write_dspark(tmp_path, FORMS[name])
    draft = guesser(base, tmp_path)
    opened(draft)
    draft.guess(1, PATHS, 4)
    passes = [one for one in draft.take_work() if isinstance(one, DraftPass)]
    assert sum(one.joined for one in passes) == len(CONTEXT) - 1
    assert passes[0].rows == passes[0].joined, "rows alone"
    (form,) = {one.form for one in passes}
    assert form is not None
    assert (form.layers, form.own_matrix) == (2, FORMS[name].ends)


def test_a_hybrid_charges_what_the_head_does_alone(base: Path, tmp_path: Path) -> None:
    """One pass for the block and one product, then only the ranking of each level."""
    write_dspark(tmp_path, FORMS["deepspec"])
    single = guesser(base, tmp_path)
    both = HybridGuesser([NgramGuesser(), guesser(base, tmp_path)])
    features = given_rows(len(CONTEXT) - 1)[1]
    sources = [SoloGrower(one) for one in (single, both)]
    levels: list[list[tuple[int, ...]]] = [[()], [(4,), (8,)], [(4, 77)], [(4, 77, 3), (8, 8, 50)]]
    for source in sources:
        source.open(1, Sampling())
    for number, paths in enumerate(levels):
        given = NO_FEATURES if number else features
        wanted = sources[0].expand(1, CONTEXT, paths, 3, given)
        found = sources[1].expand(1, CONTEXT, paths, 3, given)
        heads = (found.made_by & 2).astype(bool)
        assert heads.any()
        for path in range(len(paths)):
            mine = found.tokens[heads & (found.parents == path)].tolist()
            assert set(mine) <= set(wanted.tokens[wanted.parents == path].tolist())
        own = [one for one in sources[1].take_work() if one.source == "dspark"]
        assert own == list(sources[0].take_work())
        assert sum(isinstance(one, DraftPass) for one in own) == (number == 0)


def test_a_hybrid_of_members_without_further_passes_guesses_below_its_guesses(
    base: Path, folder: Path, tmp_path: Path
) -> None:
    """In one request, as the head alone does: or its deeper levels leave a segment later. As soon
    as a member needs a pass for each level, level by level."""
    write_dspark(tmp_path, FORMS["deepspec"])
    both = HybridGuesser([NgramGuesser(), guesser(base, tmp_path)])
    source, features = SoloGrower(both), given_rows(len(CONTEXT) - 1)[1]
    source.open(1, Sampling())
    found = source.expand(1, CONTEXT, [()], 3, features, Further([0.0], 9, -99.0))
    assert found.further(1) == 8
    work = [one for one in source.take_work() if one.source == "dspark"]
    assert [one.rows for one in work if isinstance(one, DraftPass)] == [6 + 6]
    assert sum(one.product or 0 for one in work if isinstance(one, RankedRows)) == 6
    every: list[tuple[int, ...]] = [()]
    for at, token in zip(found.parents.tolist(), found.tokens.tolist(), strict=True):
        every.append((*every[at], token))
    for at in set(found.parents.tolist()):
        below = source.expand(1, CONTEXT, [every[at]], 3)
        assert below.tokens.tolist() == found.tokens[found.parents == at].tolist()
        assert below.scores.tolist() == found.scores[found.parents == at].tolist()
        assert below.made_by.tolist() == found.made_by[found.parents == at].tolist()
    small = IndependentGuesser(Checkpoint(folder), vocab_size=96)
    slow = SoloGrower(HybridGuesser([NgramGuesser(), small]))
    slow.open(1, Sampling())
    assert not slow.expand(1, CONTEXT, [()], 3, features, Further([0.0], 9, -99.0)).further(1)


@pytest.mark.parametrize(("name", "depths"), [("deepspec", 6), ("z-lab", 5), ("own", 8)])
def test_nothing_follows_the_end_of_the_block(
    name: str, depths: int, base: Path, tmp_path: Path
) -> None:
    write_dspark(tmp_path, FORMS[name])
    draft = guesser(base, tmp_path)
    opened(draft)
    paths = [[3] * length for length in range(10)]
    assert set(draft.guess(1, paths, 2).parents.tolist()) == set(range(depths))
    rows_of(draft)
    assert not len(draft.guess(1, paths[depths:], 2))
    assert rows_of(draft) == ()


def test_nothing_is_guessed_while_features_are_missing(base: Path, tmp_path: Path) -> None:
    tensors = write_dspark(tmp_path, FORMS["deepspec"])
    draft = guesser(base, tmp_path)
    draft.open(1, Sampling())
    assert not draft.read(1, CONTEXT, given_rows(4)[1])
    assert draft.read(1, CONTEXT, given_rows(2, 4)[1])
    reference = Reference(FORMS["deepspec"], tensors, base)
    assert_guessed(draft, reference, given_rows(6)[0], CONTEXT)


@pytest.mark.parametrize("ends", [True, False])
def test_a_request_goes_on_from_anothers_rows(ends: bool, base: Path, tmp_path: Path) -> None:
    tensors = write_dspark(tmp_path, FORMS["deepspec"])
    reference = Reference(FORMS["deepspec"], tensors, base)
    context = [*CONTEXT[:5], 40, 41]
    for rows, guessed in ((5, True), (5, False), (8, True)):
        draft = guesser(base, tmp_path)
        draft.open(2, Sampling())
        draft.read(2, CONTEXT, given_rows(6)[1])
        if guessed:  # some rows are in the cache then, and one waits
            draft.guess(2, PATHS, 3)
            draft.read(2, [*CONTEXT, 8], given_rows(1, 6)[1])
        draft.open(1, Sampling())
        draft.fork(1, 2, rows, ends)
        if ends:
            draft.close(2)
        if rows == 8:
            assert not draft.read(1, [*CONTEXT, 8, 3], Features()), "one will never come"
            continue
        assert draft.read(1, context, given_rows(1, 5)[1])
        assert_guessed(draft, reference, given_rows(6)[0], context)


def test_a_token_that_the_base_lacks_has_no_children(base: Path, tmp_path: Path) -> None:
    write_dspark(tmp_path, FORMS["deepspec"])
    draft = guesser(base, tmp_path)
    opened(draft)
    assert set(draft.guess(1, [[VOCAB], [3]], 2).parents.tolist()) == {1}


@pytest.mark.parametrize("name", ["specforge-vocabulary", "own"])
def test_a_quantised_head_guesses_as_one_with_the_rounded_matrices(
    name: str, base: Path, tmp_path: Path
) -> None:
    int8 = Quantisation.parse("int8")
    write_dspark(tmp_path, FORMS[name])
    files = read_head(tmp_path, HIDDEN, VOCAB, LAYERS)

    def held(weight: torch.Tensor) -> torch.Tensor:
        return dequantised(pack(weight, int8), weight.shape, int8, torch.float64)

    plain = ("markov_w1", "direct_maps.up")
    rounded = {
        key: held(weight)
        if weight.ndim == 2 and len(weight) > 1 and not any(one in key for one in plain)
        else weight
        for key, weight in files.weights.items()
    }
    source = Checkpoint(base)
    assert files.tokens is not None
    matrix = held(source.tensor("lm_head.weight")[files.tokens])
    head = OutputHead(source, "float64")
    drafts = [
        DSparkGuesser(files, head, source, "float64", "cpu", int8, int8),
        DSparkGuesser(replace(files, weights=rounded, matrix=matrix), head, source, "float64"),
        DSparkGuesser(files, head, source, "float64"),
    ]
    scores = []
    for draft in drafts:
        opened(draft)
        scores.append(draft.guess(1, PATHS, 40).scores)
    np.testing.assert_allclose(scores[0], scores[1], rtol=0, atol=1e-9)
    assert np.abs(scores[0] - scores[2]).max() > 1e-5


def test_a_head_that_cannot_be_quantised_so(base: Path, tmp_path: Path) -> None:
    write_dspark(tmp_path, Form())
    source = Checkpoint(base)
    with pytest.raises(ModelError, match=r"of the dspark head as int4: .* choose a group"):
        load_dspark(tmp_path, source, OutputHead(source), quantisation=Quantisation.parse("int4"))
    assert Form().block <= MOST_SLOTS
