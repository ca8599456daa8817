"""Layer-parallel drafting: groups as the paper has them, and transformers' arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cases import case
from support.checkpoints import plain_hidden, reference, write_family

from edgespec.config import Quantisation
from edgespec.drafting.easyspec.guesser import (
    EasySpecGuesser,
    FuzzyRows,
    GroupedPasses,
)
from edgespec.drafting.easyspec.model import GroupedModel, layer_groups
from edgespec.drafting.independent import IndependentGuesser
from edgespec.drafting.steps import alone
from edgespec.errors import ModelError
from edgespec.model.ends import OutputHead
from edgespec.model.loader import Checkpoint
from edgespec.model.sources import QuantisingSource
from edgespec.types.features import NO_FEATURES
from edgespec.verify.sampling import Sampling

KINDS = ["llama", "llama-rope", "llama-biases", "qwen2", "qwen3"]
LAYERS = 7
CONTEXT = [5, 1, 30, 2, 5, 1, 7, 5]
PATHS = [(), (3,), (3, 4), (8,), (3, 9, 1), (8, 8)]


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("easy") / request.param
    return write_family(place, request.param, num_hidden_layers=LAYERS, initializer_range=0.1)


@pytest.mark.parametrize(
    ("layers", "size", "said"),
    [
        (32, 2, "0, 1-2, 3-4, 29-30, 31"),
        (32, 3, "0, 1-3, 4-6, 25-27, 28-30, 31"),
        (32, 4, "0, 1-3, 4-7, 8-11, 24-27, 28-30, 31"),
        (32, 5, "0, 1-3, 4-8, 9-13, 24-28, 29-30, 31"),
        (28, 4, "0, 1-3, 4-7, 8-11, 24-26, 27"),
        (8, 4, "0, 1-3, 4-6, 7"),
    ],
)
def test_groups_are_the_papers(layers: int, size: int, said: str) -> None:
    groups = layer_groups(layers, size)
    shown = [str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in groups]
    assert set(said.split(", ")) <= set(shown)
    assert shown[:2] == said.split(", ")[:2]
    assert shown[-2:] == said.split(", ")[-2:]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 9])
def test_groups_cover_every_layer_once(size: int) -> None:
    for layers in range(1, 40):
        groups = layer_groups(layers, size)
        with case(layers, groups):
            covered = [layer for first, end in groups for layer in range(first, end)]
            assert covered == list(range(layers))
            assert all(1 <= end - first <= size for first, end in groups)
            assert groups[0] == (0, 1)
            assert groups[-1] == (layers - 1, layers)


@torch.inference_mode()
def fuzzy_reference(
    model: Any, context: Sequence[int], path: Sequence[int], groups: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """The last hidden row of `path` behind `context`, by transformers' own modules, one sequence:
    the context precise, the path in groups (Alg. 2), each layer seeing keys made of its own input.
    """
    inner = model.model
    tokens = torch.tensor([[*context, *path]])
    count, before = tokens.shape[1], len(context)
    mask = torch.full((count, count), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    turns = inner.rotary_emb(inner.embed_tokens(tokens), torch.arange(count)[None])
    hidden = inner.embed_tokens(tokens)
    precise = [hidden]  # what enters each layer, and what leaves the last
    for layer in inner.layers:
        precise.append(layer(precise[-1], attention_mask=mask, position_embeddings=turns))
    for first, end in groups:
        given = hidden[:, before:]
        for at in range(first, end):
            layer = inner.layers[at]
            entering = torch.cat([precise[at][:, :before], given], 1)
            normed = layer.input_layernorm(entering)
            added, _ = layer.self_attn(normed, attention_mask=mask, position_embeddings=turns)
            later = hidden[:, before:] + added[:, before:]
            later = later + layer.mlp(layer.post_attention_layernorm(later))
            hidden = torch.cat([precise[at + 1][:, :before], later], 1)
    return inner.norm(hidden)[0, -1]


def test_fuzzy_rows_are_the_papers_arithmetic(folder: Path) -> None:
    grouped, plain = GroupedModel(Checkpoint(folder), 4, "float64"), reference(folder)
    rows = FuzzyRows(1, GroupedPasses(grouped, lambda *ran: None, bool))
    alone(rows.catch_up(CONTEXT))
    found = alone(rows.hidden_behind(PATHS))
    for row, path in zip(found, PATHS, strict=True):
        wanted = (
            fuzzy_reference(plain, CONTEXT, path, grouped.groups)
            if path
            else plain_hidden(plain, CONTEXT)[-1]
        )
        assert (row - wanted).abs().max() < 1e-12
    differing = [p for p in PATHS if p]
    exact = torch.stack([plain_hidden(plain, [*CONTEXT, *p])[-1] for p in differing])
    assert (found[1:] - exact).abs().max() > 1e-3, "fuzzy rows are not the precise ones"


def test_precise_passes_are_the_plain_models(folder: Path) -> None:
    grouped, plain = GroupedModel(Checkpoint(folder), 4, "float64"), reference(folder)
    rows = FuzzyRows(1, GroupedPasses(grouped, lambda *ran: None, bool))
    alone(rows.catch_up(CONTEXT[:3]))
    alone(rows.hidden_behind(PATHS))
    alone(rows.catch_up(CONTEXT[3:]))  # calibration: nothing fuzzy stays
    alone(rows.hidden_behind(PATHS))
    alone(rows.catch_up([3, 4]))
    wanted = plain_hidden(plain, [*CONTEXT, 3, 4])[-1]
    assert (alone(rows.hidden_behind([()]))[0] - wanted).abs().max() < 1e-12


def test_groups_of_one_are_the_plain_model(folder: Path) -> None:
    grouped, plain = GroupedModel(Checkpoint(folder), 1, "float64"), reference(folder)
    rows = FuzzyRows(1, GroupedPasses(grouped, lambda *ran: None, bool))
    alone(rows.catch_up(CONTEXT))
    for row, path in zip(alone(rows.hidden_behind(PATHS)), PATHS, strict=True):
        assert (row - plain_hidden(plain, [*CONTEXT, *path])[-1]).abs().max() < 1e-12


def test_rows_are_run_once_and_long_prompts_in_parts(folder: Path) -> None:
    grouped, plain = GroupedModel(Checkpoint(folder), 4, "float64"), reference(folder)
    work: list[int] = []
    rows = FuzzyRows(1, GroupedPasses(grouped, lambda rows, *_: work.append(rows), bool))
    long = np.random.default_rng(0).integers(0, 96, 300).tolist()
    alone(rows.catch_up(long))
    assert (alone(rows.hidden_behind([()]))[0] - plain_hidden(plain, long)[-1]).abs().max() < 1e-12
    alone(rows.hidden_behind([(1, 2), (1,)]))
    alone(rows.hidden_behind([(1, 2), (1, 3)]))
    assert work == [256, 44, 2, 1]


def test_the_first_level_is_that_of_the_plain_draft(folder: Path) -> None:
    source = Checkpoint(folder)
    head = OutputHead(source, "float64")
    easy = EasySpecGuesser(GroupedModel(source, 4, "float64"), head, 48, 90)
    plain = IndependentGuesser(source, "float64", vocab_size=90)
    for guesser in (easy, plain):
        guesser.open(1, Sampling(temperature=0.8, seed=5))
        assert guesser.read(1, CONTEXT, NO_FEATURES)
    found, wanted = easy.guess(1, [()], 6), plain.guess(1, [()], 6)
    assert found.tokens.tolist() == wanted.tokens.tolist()
    assert found.scores == pytest.approx(wanted.scores, abs=1e-9)
    assert not easy.read(1, [*CONTEXT, 99], NO_FEATURES)
    assert not easy.read(1, CONTEXT * 9, NO_FEATURES)


def test_other_models_are_refused(tmp_path: Path) -> None:
    for kind in ("phi3", "gemma2", "qwen2-windows"):
        place = write_family(tmp_path / kind, kind)
        with pytest.raises(ModelError, match="easyspec runs"):
            GroupedModel(Checkpoint(place), 4)
    packed = QuantisingSource(
        Checkpoint(write_family(tmp_path / "l", "llama")), Quantisation.parse("int8")
    )
    with pytest.raises(ModelError, match="as they are"):
        GroupedModel(packed, 4)
