"""A row's bits follow from its path alone: not from rows beside it, the cache, chunks or stages.

Every row of random trees, pruned early and late, must be to the bit what it is where its path is
run one row at a time, in every family, in each dtype that models are run in. For rows of several
requests and stems see tests/backends (test_joint_parts, test_shared_rows).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.cases import case
from support.checkpoints import FAMILY_SETTINGS, FOLDING, write_family
from support.live_trees import LiveTrees, Model, Play, plays
from support.one_by_one import OneByOne
from support.pipelines import CUTS, Grower, Pipeline, random_tokens
from support.tiers import examples, thorough, tiered

from edgespec.model import block as block_module
from edgespec.model.ends import OutputHead
from edgespec.model.row_math import SingleRows
from edgespec.model.sources import open_source

DTYPES = ("bfloat16", "float16", "float32")
NARROW = ("float32+int8", "bfloat16+int8", "float32+float16")
"""What is computed in, and what caches are held in."""
NAMES = list(FAMILY_SETTINGS)
STATES = [name for name in FOLDING if name != "nemotron_h-experts"]
"""Without one whose states are another's."""
QUICK = ["llama", "gemma2", "phi3", "gpt_oss", "granite", "lfm2"]


class ExactGrower(Grower):
    """Counts rows that differ in a bit from those of a OneByOne."""

    def __init__(self, pipeline: Pipeline, alone: OneByOne, seed: int, longest: int = 12) -> None:
        self.alone = alone
        super().__init__(pipeline, seed, chain=0.5, longest=longest)

    def compared(self, hidden: torch.Tensor, paths: list[list[int]]) -> float:
        return float(
            sum(
                not torch.equal(row, self.alone.row(path))
                for row, path in zip(hidden, paths, strict=True)
            )
        )


class Zoo:
    """Pipelines and their OneByOne, each made when first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._alone: dict[tuple[str, str], OneByOne] = {}
        self._pipelines: dict[tuple[str, str, int], Pipeline] = {}

    def folder(self, name: str) -> Path:
        folder = self._root / name
        return folder if folder.is_dir() else write_family(folder, name)

    def pair(self, name: str, dtype: str, stages: int = 2) -> tuple[Pipeline, OneByOne]:
        folder, one, many = self.folder(name), (name, dtype), (name, dtype, stages)
        if one not in self._alone:
            self._alone[one] = OneByOne(folder, dtype)
        if many not in self._pipelines:
            self._pipelines[many] = Pipeline(folder, CUTS[stages], dtype)
        return self._pipelines[many], self._alone[one]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    torch.set_num_threads(1)
    return Zoo(tmp_path_factory.mktemp("zoo"))


Models = Callable[[str, str], Model]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("models")
    return cache(lambda name, dtype: Model(root / name, name, dtype))


def differing(pair: tuple[Pipeline, OneByOne], seed: int, steps: list[int]) -> float:
    """How many rows differ of a prompt in chunks and of a tree: grown by so many rows a step, or
    pruned so many rows late."""
    pipeline, alone = pair
    pipeline.reset()
    sizes = np.random.default_rng(seed).integers(1, 20, 3).tolist()
    tokens, start, found = random_tokens(seed, sum(sizes)), 0, 0.0
    for size in sizes:
        rows = pipeline.prefill(tokens[start : start + size])
        ends = range(start + 1, start + size + 1)
        found += sum(
            not torch.equal(row, alone.row(tokens[:end]))
            for row, end in zip(rows, ends, strict=True)
        )
        start += size
    grower = ExactGrower(pipeline, alone, seed)
    return found + sum(grower.grow(n) if n > 0 else grower.prune(late=-n) for n in steps)


STEPS = [7, 1, -2, 5, 20, 0, 4, -3, 6]


@pytest.mark.parametrize("name", tiered(NAMES, QUICK))
@pytest.mark.parametrize("dtype", tiered(DTYPES, ["bfloat16"]))
def test_every_family(zoo: Zoo, name: str, dtype: str) -> None:
    assert differing(zoo.pair(name, dtype), 3, STEPS) == 0


@pytest.mark.parametrize("name", tiered(NAMES, ["gemma4_text", "gpt_oss", "lfm2", *STATES]))
@pytest.mark.parametrize("dtype", tiered(NARROW, ["float32+int8"]))
def test_every_family_with_narrow_caches(zoo: Zoo, name: str, dtype: str) -> None:
    pair = zoo.pair(name, dtype)
    assert differing(pair, 3, STEPS) == 0
    for stage in pair[0].stages:
        layer = stage.cache.layer(0)
        assert layer.dtype == getattr(torch, dtype.partition("+")[2]) or not layer.numel()


@given(
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(DTYPES),
    stages=st.sampled_from(sorted(CUTS)),
    steps=st.lists(st.integers(-4, 17), min_size=2, max_size=8),
)
@examples(10)
@pytest.mark.parametrize("name", ["llama", "gemma2", "lfm2", thorough("deepseek_v2")])
def test_random_trees(
    zoo: Zoo, name: str, seed: int, dtype: str, stages: int, steps: list[int]
) -> None:
    assert differing(zoo.pair(name, dtype, stages), seed, steps) == 0


@given(
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(DTYPES),
    steps=st.lists(st.integers(-4, 17), min_size=2, max_size=8),
)
@examples(5)
@pytest.mark.parametrize("name", tiered(FOLDING, STATES))
def test_random_trees_behind_folded_rows(
    zoo: Zoo, name: str, seed: int, dtype: str, steps: list[int]
) -> None:
    """At any place between two boundaries, rows before them given back."""
    grower = ExactGrower(*zoo.pair(name, dtype), seed, longest=180)
    assert sum(grower.grow(n) if n > 0 else grower.prune(late=-n) for n in steps) == 0


@given(play=plays())
@examples(8)
@pytest.mark.parametrize("dtype", tiered(DTYPES, ["float16"]))
@pytest.mark.parametrize("name", tiered([*FOLDING, "lfm2", "lfm2_moe"], ["qwen3_5_text"]))
def test_random_plays_of_several_requests(
    models: Models, name: str, dtype: str, play: Play
) -> None:
    """Joint segments, forks, stages that prune early, another turn: see also benchmarks/trees.py,
    which runs as many as one likes."""
    LiveTrees(models(name, dtype), play).run()


def test_a_play_sees_rows_of_another_dtype(models: Models, zoo: Zoo) -> None:
    model = models("lfm2", "bfloat16")
    model.alone = zoo.pair("lfm2", "float32")[1]
    play = Play(3, frozenset((2,)), (20,), (None,), 8, 5, (), 0)
    with pytest.raises(AssertionError, match="another row at position 0"):
        LiveTrees(model, play).run()


@pytest.mark.parametrize("name", tiered(NAMES, ["gemma2", "lfm2", *STATES]))
def test_every_family_without_a_compiler(
    zoo: Zoo, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_module, "row_math", lambda *_: SingleRows())
    folder = zoo.folder(name)
    for dtype in ("bfloat16", "bfloat16+int8"):
        pair = Pipeline(folder, CUTS[2], dtype), OneByOne(folder, dtype)
        with case(dtype):
            assert differing(pair, 4, STEPS[:6]) == 0


def test_another_dtype_or_path_is_seen(zoo: Zoo) -> None:
    """What would be compared equal if nothing were compared."""
    pipeline, alone = zoo.pair("llama", "bfloat16")
    tokens = random_tokens(5, 12)
    pipeline.reset()
    rows = pipeline.prefill(tokens)
    assert torch.equal(rows[-1], alone.row(tokens))
    assert not torch.equal(rows[-1], alone.row([*tokens[:-2], tokens[-2] ^ 1, tokens[-1]]))
    wide = zoo.pair("llama", "float32")[1].row(tokens)
    assert not torch.equal(rows[-1].float(), wide)


@pytest.mark.parametrize("dtype", tiered(DTYPES, ["bfloat16"]))
def test_logits_do_not_depend_on_rows_beside_them(zoo: Zoo, dtype: str) -> None:
    for name in ("llama", "gemma2", "granite"):
        head = OutputHead(open_source(zoo.folder(name)), dtype)
        rows = torch.randn(23, head.hidden_size, generator=torch.Generator().manual_seed(2))
        rows = rows.to(head.dtype)
        alone = torch.cat([head.logits(row[None]) for row in rows])
        for first, count in ((0, 23), (0, 2), (3, 5), (7, 16)):
            with case(name, first, count):
                whole = head.logits(rows[first : first + count])
                assert torch.equal(whole, alone[first : first + count])
