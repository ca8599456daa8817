"""Several requests' drafts in the same passes: each gets the guesses that it gets alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from support.cases import case
from support.checkpoints import write_checkpoint
from support.draft_sources import Chained, dspark, eagle, easyspec, mtp
from support.growers import SoloGrower
from support.passes import rows_of

from edgespec.drafting.hybrid import HybridGuesser
from edgespec.drafting.independent import IndependentGuesser
from edgespec.drafting.ngram import NgramGuesser
from edgespec.drafting.steps import Steps, alone, at_once, call, together
from edgespec.errors import LocalProtocolError
from edgespec.model.loader import Checkpoint
from edgespec.sim.toy import VOCABULARY
from edgespec.tree.drafted import Children, DraftedTree
from edgespec.types.draft_pass import DraftPass, RankedRows
from edgespec.verify.sampling import BadLogits, Sampling

SAMPLINGS = (Sampling(), Sampling(0.8, seed=5), Sampling(1.0, top_p=0.9, seed=6), Sampling())
SOURCES = (
    *("independent", "ngram", "hybrid", "eagle", "eagle3", "dspark", "mtp", "ppd", "easyspec"),
)


BLOCKS = {"dspark": 8}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base of the heads."""
    folder = tmp_path_factory.mktemp("base")
    return write_checkpoint(folder, num_hidden_layers=5, vocab_size=VOCABULARY)


def independent(folder: Path) -> IndependentGuesser:
    return IndependentGuesser(Checkpoint(folder), "float64", vocab_size=VOCABULARY)


@pytest.fixture(params=SOURCES)
def make(
    request: pytest.FixtureRequest, folder: Path, base: Path, tmp_path: Path
) -> Callable[[], SoloGrower]:
    """Makes a source, each time an equal one."""
    makers: dict[str, Callable[[], SoloGrower]] = {
        "independent": lambda: SoloGrower(independent(folder)),
        "ngram": lambda: SoloGrower(NgramGuesser()),
        "hybrid": lambda: SoloGrower(HybridGuesser([NgramGuesser(), independent(folder)])),
        "eagle": lambda: eagle("eagle-llama3", VOCABULARY, base, tmp_path, "float64"),
        "eagle3": lambda: eagle("eagle3-official", VOCABULARY // 2, base, tmp_path, "float64"),
        "dspark": lambda: dspark("own", VOCABULARY // 2, base, tmp_path, "float64"),
        "mtp": lambda: mtp(tmp_path, "float64"),
        "ppd": lambda: Chained(base, "float64"),
        "easyspec": lambda: easyspec(base, "float64"),
    }
    return makers[request.param]


@dataclass
class Asker:
    """One request, which asks at random."""

    number: int
    context: list[int]
    grown: bool = False
    reads: bool = True
    paths: list[tuple[int, ...]] = field(default_factory=list)

    def expand(self, rng: random.Random) -> Callable[[SoloGrower], Steps[Children]]:
        """Guesses below known guesses, and below others."""
        context, width, self.reads = tuple(self.context), rng.randint(1, 6), True
        strange = [tuple(rng.choices(range(VOCABULARY), k=rng.randint(0, 3))) for _ in range(3)]
        paths = rng.sample([*self.paths, *strange, ()], rng.randint(1, 4))
        return lambda source: source.expanding(self.number, context, paths, width)

    def grow(self, rng: random.Random) -> Callable[[SoloGrower], Steps[DraftedTree]]:
        """A new tree, or more levels of the last one."""
        context, levels, width = tuple(self.context), rng.randint(0, 4), rng.randint(1, 4)
        self.reads = not self.grown or rng.random() < 0.6
        if not self.reads:
            return lambda source: source.deepening(self.number, levels, width)
        self.grown = True
        return lambda source: source.refreshing(self.number, context, levels, width)

    def commit(self, rng: random.Random) -> None:
        """More tokens are committed: often the guesses."""
        news = list(rng.choice(self.paths)) if self.paths and rng.random() < 0.7 else []
        self.context += news or rng.choices(range(VOCABULARY), k=rng.randint(0, 3))
        self.paths = []


def same(one: Children | DraftedTree, other: Children | DraftedTree) -> None:
    assert one.tokens.tolist() == other.tokens.tolist()
    assert one.parents.tolist() == other.parents.tolist()
    assert one.made_by.tolist() == other.made_by.tolist()
    np.testing.assert_allclose(one.scores, other.scores, rtol=0, atol=1e-9)


def rounds(seed: int) -> Iterator[tuple[list[Asker], random.Random]]:
    """Some requests, and in every round those that ask."""
    rng = random.Random(seed)
    askers = [
        Asker(number, rng.choices(range(VOCABULARY), k=rng.choice((1, 2, 9, 14))))
        for number in range(1, 5)
    ]
    for _ in range(5):
        yield rng.sample(askers, rng.randint(2, 4)), rng
        for asker in askers:
            asker.commit(rng)


def test_a_batch_gives_each_request_what_it_gets_alone(make: Callable[[], SoloGrower]) -> None:
    found = 0
    for seed in range(3):
        batched, single = make(), make()
        for source in (batched, single):
            for number, sampling in enumerate(SAMPLINGS, start=1):
                source.open(number, sampling)
        for live, rng in rounds(seed):
            kind = rng.choice((Asker.expand, Asker.grow))
            asked = [kind(asker, rng) for asker in live]
            got = together([ask(batched) for ask in asked])
            for asker in live:  # what passes are shared is read by all first, and learnt from
                if asker.reads and single.name != "ngram":
                    single.expand(asker.number, tuple(asker.context), [], 1)
            for asker, ask, one in zip(live, asked, got, strict=True):
                with case(seed, asker):
                    assert not isinstance(one, Exception)
                    same(one, alone(ask(single)))
                    found += len(one)
                if isinstance(one, Children):
                    asker.paths = [(token,) for token in one.tokens.tolist()]
    assert found > (10 if batched.name == "ngram" else 100)


def test_requests_share_passes_and_a_product(make: Callable[[], SoloGrower]) -> None:
    source = make()
    for number in (1, 2, 3):
        source.open(number, Sampling())
    contexts = {1: (5, 1, 30), 2: (7, 7, 5, 1, 2), 3: (9, 4)}
    together([source.refreshing(n, context, 3, 2) for n, context in contexts.items()])
    work = source.take_work()
    passes = [one for one in work if isinstance(one, DraftPass)]
    source.open(4, Sampling())
    source.refresh(4, (5, 1, 30), 3, 2)
    one_alone = [one for one in source.take_work() if isinstance(one, DraftPass)]
    assert len(passes) == len(one_alone)
    assert all(one.requests == (1, 2, 3) for one in passes)
    assert sum(one.rows for one in passes) >= 3 * len(passes)
    assert all(one.requests == (4,) for one in one_alone)
    ranked = [one for one in work if isinstance(one, RankedRows) and one.source != "ngram"]
    if source.name == "ppd" or not ranked:
        return  # what it ranks has come from one product before
    assert len(ranked) == 3 * 3
    for level in range(3):
        first, *others = ranked[3 * level : 3 * level + 3]
        rows = [len(one.positions) for one in (first, *others)]
        if source.name in BLOCKS:  # whole blocks meet the matrix, once
            assert first.product == (0 if level else 3 * BLOCKS[source.name])
        else:
            assert first.product == sum(rows)
        assert [one.product for one in others] == [0, 0]


def test_one_that_fails_fails_alone(make: Callable[[], SoloGrower]) -> None:
    source = make()
    for number in (1, 3):
        source.open(number, Sampling())
    context = (5, 1, 30)
    source.refresh(3, context, 0, 1)
    wanted = make()
    wanted.open(1, Sampling())
    good, unknown, shrunk = together(
        [
            source.expanding(1, context, [(), (4,)], 3),
            source.expanding(2, context, [()], 3),
            source.expanding(3, context[:1], [()], 3),
        ]
    )
    assert isinstance(good, Children)
    same(good, wanted.expand(1, context, [(), (4,)], 3))
    assert isinstance(unknown, LocalProtocolError)
    assert isinstance(shrunk, LocalProtocolError)
    assert "did not only grow" in str(shrunk)


def test_bad_logits_of_one_request_are_its_own(folder: Path) -> None:
    guesser = independent(folder)
    logits, source = guesser._head.logits, SoloGrower(guesser)

    def poisoned(hidden: torch.Tensor) -> torch.Tensor:
        found = logits(hidden).clone()
        found[(hidden == marked).all(1)] = float("nan")
        return found

    for number in (1, 2):
        source.open(number, Sampling())
    source.refresh(2, (7, 7, 5), 0, 1)
    marked = guesser._rows[2]._hidden
    guesser._head.logits = poisoned  # type: ignore[method-assign]
    good, bad = together(
        [source.expanding(1, (5, 1), [()], 3), source.expanding(2, (7, 7, 5), [()], 3)]
    )
    assert isinstance(good, Children)
    assert isinstance(bad, BadLogits)
    assert len(source.expand(1, (5, 1, 4), [()], 3)) == 3, "it goes on"


def test_a_long_text_is_read_in_parts_with_the_same_guesses(
    make: Callable[[], SoloGrower],
) -> None:
    source, whole = make(), make()
    context = tuple(random.Random(4).choices(range(VOCABULARY), k=40))
    for one in (source, whole):
        one.open(1, Sampling())
    for end in (15, 30):
        assert alone(source.reading_part(1, context, end)) is None
    parts = rows_of(source)
    got = source.refresh(1, context, 2, 3)
    same(got, whole.refresh(1, context, 2, 3))
    together_rows = sum(rows_of(whole))
    assert sum(parts) + sum(rows_of(source)) == together_rows
    if source.name in ("independent", "easyspec", "hybrid:ngram+independent"):
        assert parts == (15, 15)
    source.open(2, Sampling())
    alone(source.reading_part(2, (99_999,) * 70, 40))
    assert rows_of(source) == (), "what cannot be read whole is not begun"


def test_steps_wait_for_each_other_before_what_is_late() -> None:
    log: list[tuple[str, list[int]]] = []

    def early(given: Sequence[int]) -> list[int]:
        log.append(("early", list(given)))
        return [10 * one for one in given]

    def late(given: Sequence[int]) -> list[int]:
        log.append(("late", list(given)))
        return [one + 1 for one in given]

    def one(number: int, passes: int) -> Steps[list[int]]:
        found = []
        for _ in range(passes):
            found.append((yield from call(early, number)))
        found.append((yield from call(late, number, late=True)))
        return found

    @at_once
    def nothing() -> list[int]:
        return []

    assert together([one(1, 1), one(2, 3), nothing()]) == [[10, 2], [20, 20, 20, 3], []]
    assert log == [("early", [1, 2]), ("early", [2]), ("early", [2]), ("late", [1, 2])]


def test_a_joint_call_that_fails_is_tried_for_each_alone() -> None:
    def divide(given: Sequence[int]) -> list[int]:
        return [12 // one for one in given]

    def careful() -> Steps[str]:
        try:
            yield from call(divide, 0)
        except ZeroDivisionError:
            return f"no, but {(yield from call(divide, 3))}"
        raise AssertionError

    found = together([call(divide, 4), call(divide, 0), careful()])
    assert found[0] == 3
    assert isinstance(found[1], ZeroDivisionError)
    assert found[2] == "no, but 4"
    with pytest.raises(ZeroDivisionError):
        alone(call(divide, 0))
