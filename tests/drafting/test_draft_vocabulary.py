"""A draft over many tokens guesses a part of them: with the base's ids, as among all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpoints import write_checkpoint
from support.draft_sources import dspark, eagle, mtp
from support.growers import SoloGrower

from edgespec.config import Quantisation
from edgespec.drafting import weight_file
from edgespec.drafting.independent import IndependentGuesser
from edgespec.model.ends import OutputHead
from edgespec.model.loader import Checkpoint
from edgespec.model.sources import open_source
from edgespec.sim.toy import VOCABULARY
from edgespec.verify.sampling import Sampling

CONTEXT = [5, 1, 30, 2, 5, 1, 7, 5]
PATHS = [(), (3,), (3, 4), (VOCABULARY - 9,)]
FEW = [*range(12), *range(VOCABULARY - 4, VOCABULARY)]


def independent(base: Path, _: Path) -> SoloGrower:
    return SoloGrower(IndependentGuesser(Checkpoint(base), vocab_size=VOCABULARY))


SOURCES: dict[str, Callable[[Path, Path], SoloGrower]] = {
    "independent": independent,
    "eagle that borrows the matrix": lambda b, f: eagle("eagle-llama3", VOCABULARY, b, f),
    "eagle with its own": lambda b, f: eagle("eagle3-community", VOCABULARY, b, f),
    "dspark with its own and a Markov head": lambda b, f: dspark("deepspec", VOCABULARY, b, f),
    "dspark that borrows it": lambda b, f: dspark("specforge", VOCABULARY, b, f),
    "mtp": lambda _, f: mtp(f),
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


def test_of_many_tokens_the_first_and_the_last_are_guessed() -> None:
    assert weight_file.guessed_tokens(1 << 16) is None
    every = weight_file.guessed_tokens(248_320)
    assert every is not None
    assert (len(every), len(every.unique()), int(every[-1])) == (1 << 16, 1 << 16, 248_319)


@pytest.mark.parametrize("name", SOURCES)
def test_guesses_among_a_part_are_those_among_all(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write_checkpoint(tmp_path / "base", num_hidden_layers=5, vocab_size=VOCABULARY)
    every = guessed(SOURCES[name](base, tmp_path / "head"))
    monkeypatch.setattr(weight_file, "DRAFT_VOCABULARY", len(FEW))
    monkeypatch.setattr(weight_file, "LAST", 4)
    some = guessed(SOURCES[name](base, tmp_path / "head"))
    assert any(some)
    for all_of_path, few in zip(every, some, strict=True):
        assert set(few) == (set(FEW) if all_of_path else set())
        wanted = np.array([all_of_path[token] for token in few])
        wanted -= np.log(np.exp(wanted).sum())
        np.testing.assert_allclose(list(few.values()), wanted, rtol=0, atol=1e-5)


def test_a_file_that_says_its_tokens_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write_checkpoint(tmp_path / "base", num_hidden_layers=5, vocab_size=VOCABULARY)
    half = VOCABULARY // 2
    before = guessed(eagle("eagle3-official", half, base, tmp_path / "head"))
    monkeypatch.setattr(weight_file, "DRAFT_VOCABULARY", len(FEW))
    monkeypatch.setattr(weight_file, "LAST", 4)
    assert guessed(eagle("eagle3-official", half, base, tmp_path / "head")) == before


@pytest.mark.parametrize("form", ["none", "int8", "file"])
def test_a_matrix_of_some_rows_is_held_as_the_whole_one(form: str, tmp_path: Path) -> None:
    plain = Checkpoint(write_checkpoint(tmp_path, vocab_size=96))
    held = Quantisation.parse("int8" if form == "int8" else "none")
    source = open_source(tmp_path, held)
    tokens = torch.tensor([3, 5, 80])
    as_file = Quantisation("file") if form == "file" else None
    few = OutputHead(source, "float64", tokens=tokens, few_as=as_file)
    rows = torch.randn((4, few.hidden_size), dtype=torch.float64)
    as_held = open_source(tmp_path, Quantisation("int8")) if form == "file" else source
    whole = OutputHead(as_held, "float64")
    assert (few.vocab_size, OutputHead(plain, "float64").vocab_size) == (3, 96)
    torch.testing.assert_close(few.logits(rows), whole.logits(rows)[:, tokens], rtol=0, atol=1e-12)
