"""A head over many tokens guesses a part of them: with the base's ids, as among all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpoints import write_checkpoint
from support.draft_sources import Few, dspark, eagle, mtp
from support.growers import SoloGrower

from edgespec.config import DRAFT_VOCABULARY, Quantisation
from edgespec.drafting.vocabulary import LAST, SAVE_TOKENS, AnswerTokens, guessed_tokens
from edgespec.model.ends import OutputHead
from edgespec.model.sources import open_source
from edgespec.sim.toy import VOCABULARY
from edgespec.verify.sampling import Sampling

CONTEXT = [5, 1, 30, 2, 5, 1, 7, 5]
PATHS = [(), (3,), (3, 4), (VOCABULARY - 9,)]
FEW = torch.tensor([*range(12), *range(VOCABULARY - 4, VOCABULARY)])


Maker = Callable[[Path, Path, Few], SoloGrower]


def eagle_as(form: str, scored: int = VOCABULARY) -> Maker:
    return lambda base, folder, few: eagle(form, scored, base, folder, few=few)


def dspark_as(form: str) -> Maker:
    return lambda base, folder, few: dspark(form, VOCABULARY, base, folder, few=few)


SOURCES: dict[str, Maker] = {
    "eagle that borrows the matrix": eagle_as("eagle-llama3"),
    "eagle with its own": eagle_as("eagle3-community"),
    "dspark with its own and a Markov head": dspark_as("deepspec"),
    "dspark that borrows it": dspark_as("specforge"),
    "mtp": lambda _, folder, few: mtp(folder, few=few),
}


def guessed(source: SoloGrower) -> list[dict[int, float]]:
    """What may follow each path, and its score."""
    source.open(1, Sampling())
    children = source.expand(1, CONTEXT, PATHS, VOCABULARY)
    told = zip(children.parents.tolist(), children.tokens.tolist(), children.scores, strict=True)
    found: list[dict[int, float]] = [{} for _ in PATHS]
    for parent, token, score in told:
        found[parent][token] = score
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    return write_checkpoint(folder, num_hidden_layers=5, vocab_size=VOCABULARY)


@pytest.mark.parametrize("name", SOURCES)
def test_guesses_among_a_part_are_those_among_all(name: str, base: Path, tmp_path: Path) -> None:
    every, some = (guessed(SOURCES[name](base, tmp_path, few)) for few in (None, FEW))
    assert any(some)
    for all_of_path, few in zip(every, some, strict=True):
        assert set(few) == (set(FEW.tolist()) if all_of_path else set())
        wanted = np.array([all_of_path[token] for token in few])
        wanted -= np.log(np.exp(wanted).sum())
        np.testing.assert_allclose(list(few.values()), wanted, rtol=0, atol=1e-5)


def test_a_file_that_says_its_tokens_keeps_them(base: Path, tmp_path: Path) -> None:
    """`d2t` of an EAGLE-3 head, which learnt these."""
    own = eagle_as("eagle3-official", VOCABULARY // 2)
    assert guessed(own(base, tmp_path, FEW)) == guessed(own(base, tmp_path, None))


def test_of_many_tokens_those_are_guessed_that_answers_have() -> None:
    """By rank as long as nothing is known; the last ones, which end a turn, always."""
    assert guessed_tokens(1 << 16) is None
    many = 248_320
    ranked = guessed_tokens(many)
    assert ranked is not None
    assert ranked.tolist() == [*range(DRAFT_VOCABULARY - LAST), *range(many - LAST, many)]
    counts = np.zeros(many, np.uint32)
    counts[[100_000, 200_000]] = 3, 1
    counted = guessed_tokens(many, counts)
    assert counted is not None
    first = DRAFT_VOCABULARY - LAST - 2
    assert counted.tolist() == [*range(first), 100_000, 200_000, *range(many - LAST, many)]


def test_tokens_of_answers_are_known_after_a_restart(tmp_path: Path) -> None:
    file, many = tmp_path / "answer-tokens", DRAFT_VOCABULARY + 7
    answers = AnswerTokens(file, many)
    answers.save()
    assert not file.exists(), "there were none"
    answers.add([5, 5, many - 1], idle=True)
    assert not file.exists(), "few are not worth a write"
    answers.add([9] * SAVE_TOKENS, idle=False)
    assert not file.exists(), "somebody waits"
    answers.add([9], idle=True)
    assert file.stat().st_mode & 0o777 == 0o600, "of what was answered nobody else reads anything"
    assert AnswerTokens(file, many).counts[[5, 9, many - 1]].tolist() == [2, SAVE_TOKENS + 1, 1]
    assert not AnswerTokens(file, many + 1).counts.any(), "of another base"
    file.write_bytes(file.read_bytes()[:-3])
    assert not AnswerTokens(file, many).counts.any(), "torn"


def test_counts_that_cannot_be_kept_end_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers = AnswerTokens(tmp_path / "no" / "folder", 9)
    answers.add([1], idle=True)
    answers.save()
    assert "cannot keep which tokens answers have" in caplog.text


@pytest.mark.parametrize("form", ["none", "int8", "file"])
def test_a_matrix_of_some_rows_is_held_as_the_whole_one(form: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, vocab_size=96)
    held = Quantisation(form) if form == "file" else Quantisation.parse(form)
    tokens = torch.tensor([3, 5, 80])
    few = OutputHead(open_source(tmp_path), "float64", tokens=tokens, few_as=held)
    rows = torch.randn((4, few.hidden_size), dtype=torch.float64)
    as_held = Quantisation.parse("none" if form == "none" else "int8")
    whole = OutputHead(open_source(tmp_path, as_held), "float64")
    assert (few.vocab_size, whole.vocab_size) == (3, 96)
    torch.testing.assert_close(few.logits(rows), whole.logits(rows)[:, tokens], rtol=0, atol=1e-12)
