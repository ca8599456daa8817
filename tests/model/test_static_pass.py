"""Static passes: the same rows as passes of any shape, captured and replayed by a stand-in that
does a capture's operations again (support/recorded_graphs.py)."""

import gc
import logging
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpoints import FAMILY_SETTINGS, FOLDING, write_checkpoint, write_family
from support.pipelines import CUTS, TOLERANCE, Grower, Pipeline, difference, random_tokens
from support.recorded_graphs import RecordedGraphs, torch_products
from support.tiers import tiered

from edgespec.config import Quantisation
from edgespec.model.block import Block
from edgespec.model.joint import CachedPart
from edgespec.model.kv_cache import TwoRegionCache
from edgespec.model.sources import QuantisingSource, open_source
from edgespec.model.static_pass import MOST_SHAPES
from edgespec.model.tree_attention import tree_mask
from edgespec.types.static_shapes import ROW_BUCKETS, groups, room_for, row_bucket, slot_bucket

MIXTURES = ["qwen3_moe", "olmoe", "mixtral", "gpt_oss", "gemma4_text-experts", "lfm2_moe"]
MIXTURES += ["qwen2_moe", "glm4_moe", "ernie4_5_moe", "hunyuan_v1_moe"]
DENSE = [name for name in FAMILY_SETTINGS if name not in (*MIXTURES, *FOLDING)]
QUICK = ["llama", "gemma2", "phi3"]


@pytest.fixture(autouse=True)
def recordable() -> Iterator[None]:
    with torch_products():
        yield


@pytest.mark.parametrize("name", tiered(DENSE, QUICK))
def test_rows_are_those_of_the_plain_model(tmp_path: Path, name: str) -> None:
    graphs = RecordedGraphs()
    folder = write_family(tmp_path / "m", name)
    grower = Grower(Pipeline(folder, CUTS[2], graphs=graphs), seed=3)
    # Buckets filled and not, each often enough to be captured and replayed, in a growing cache.
    for count in (1, 3, 3, 4, 1, 7, 5, 1):
        assert grower.grow(count) < TOLERANCE
        assert grower.prune(late=count % 3) < TOLERANCE
    assert max(graph.replays for graph in graphs.captured) > 1
    assert graphs.captured[0].replays > 0, "the capture itself does nothing"


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_is_never_captured(tmp_path: Path, name: str) -> None:
    graphs = RecordedGraphs()
    grower = Grower(Pipeline(write_family(tmp_path / "m", name), [0, 4], graphs=graphs), seed=3)
    assert max(grower.grow(2) for _ in range(3)) < TOLERANCE
    assert not graphs.warmed


class Rows:
    """A block of ten layers with graphs, and the same one without; chains of rows on both."""

    def __init__(self, folder: Path, graphs: RecordedGraphs, dtype: str = "float64") -> None:
        source = open_source(write_checkpoint(folder, num_hidden_layers=10))
        self.graphs = graphs
        self.block = Block(source, 0, 10, dtype, graphs=lambda _: graphs)
        self.plain = Block(source, 0, 10, dtype)
        self.caches = self.open()

    def open(self, reserve: int = 600) -> tuple[TwoRegionCache, TwoRegionCache]:
        return self.block.new_cache(reserve), self.plain.new_cache(reserve)

    def same(self, count: int, caches: tuple[TwoRegionCache, TwoRegionCache] | None = None) -> None:
        """Run a chain of rows, which must be the same ones."""
        tokens = torch.tensor(random_tokens(count, count))
        out = [
            block.forward(
                tokens,
                torch.arange(cache.length, cache.length + count),
                cache,
                tree_mask(cache.length, np.tri(count, dtype=np.bool_)),
            )
            for block, cache in zip((self.block, self.plain), caches or self.caches, strict=True)
        ]
        assert out[0] is not None
        assert out[1] is not None
        assert difference(out[0], out[1]) < TOLERANCE

    @property
    def shapes(self) -> int:
        assert self.block.static is not None
        return len(self.block.static)


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    """Ten layers, so that there are three groups."""
    return Rows(tmp_path / "m", RecordedGraphs())


def test_a_shape_is_warmed_captured_and_then_replayed(rows: Rows) -> None:
    graphs = rows.graphs
    rows.same(5)
    assert (graphs.warmed, len(graphs.captured)) == (3, 0)
    rows.same(8)
    assert (graphs.warmed, [one.replays for one in graphs.captured]) == (3, [1, 1, 1])
    rows.same(6)
    assert (graphs.warmed, [one.replays for one in graphs.captured]) == (3, [2, 2, 2])
    rows.same(1)
    assert (graphs.warmed, rows.shapes) == (6, 2), "another bucket"


def test_more_rows_than_the_largest_bucket_are_not_captured(rows: Rows) -> None:
    rows.same(ROW_BUCKETS[-1] + 1)
    assert not rows.graphs.warmed
    rows.same(ROW_BUCKETS[-1])
    assert rows.graphs.warmed


def test_longer_contexts_take_another_shape(rows: Rows) -> None:
    rows.same(250)
    for _ in range(3):
        rows.same(2)
    assert rows.shapes == 1
    rows.same(2)  # 258 slots
    rows.same(2)
    assert rows.shapes == 2
    assert len(rows.graphs.captured) == 6


def test_a_cache_that_grows_drops_its_graphs(rows: Rows) -> None:
    caches = rows.open(reserve=4)
    rows.same(200, caches)
    rows.same(2, caches)
    rows.same(2, caches)
    capacity = caches[0].capacity
    assert capacity >= 256, "it does not move for every few rows"
    store = weakref.ref(caches[0].layer(0).untyped_storage())
    assert len(rows.graphs.captured) == 3
    while caches[0].capacity == capacity:
        rows.same(13, caches)
    rows.same(2, caches)
    assert rows.shapes == 2, "of the new memory"
    rows.graphs.captured.clear()
    assert store() is None, "the old memory is free"
    rows.same(2, caches)
    assert len(rows.graphs.captured) == 3
    rows.same(2, caches)


def test_graphs_go_with_their_cache(rows: Rows) -> None:
    caches = rows.open()
    for _ in range(3):
        rows.same(2, caches)
        rows.same(2)
    assert rows.shapes == 2
    gone = weakref.ref(caches[0])
    rows.graphs.captured.clear()
    gc.disable()
    try:
        del caches
        assert gone() is None, "no circle keeps the memory"
    finally:
        gc.enable()
    assert rows.shapes == 1
    rows.same(2)


def test_as_many_shapes_as_are_used_lately(rows: Rows) -> None:
    several = [rows.open(reserve=8) for _ in range(MOST_SHAPES)]
    rows.same(1)
    for caches in several:
        rows.same(1, caches)
    assert rows.shapes == MOST_SHAPES
    rows.same(1)
    assert not rows.graphs.captured, "the first one had gone, and begins again"
    rows.same(1)
    assert rows.graphs.captured


def test_a_pass_asks_between_groups_whether_to_go_on(rows: Rows) -> None:
    cache = rows.caches[0]
    for captured in (False, True):
        for allowed in range(3):
            length = cache.length
            answers = iter([False] * allowed + [True])
            mask = tree_mask(length, np.ones((1, 1), np.bool_))
            at = torch.tensor([length])
            out = rows.block.forward(at, at, cache, mask, answers.__next__)
            assert out is None
            assert list(answers) == []
            assert cache.length == length + 1
            cache.gather(length, np.zeros(0, np.int64))
        if not captured:
            rows.same(1)
    assert len(rows.graphs.captured) == 3
    rows.same(1)


def test_a_capture_that_fails_is_told_once_and_costs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = Rows(tmp_path / "m", RecordedGraphs(fail="operation not permitted"))
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            rows.same(3)
            rows.same(1)
    (record,) = caplog.records
    assert record.getMessage() == (
        "CUDA graphs are off for layers 0 to 9, which run slower so: a pass of 4 rows could not be "
        "captured (operation not permitted)"
    )
    assert rows.shapes == 0
    assert rows.graphs.warmed == 6, "both shapes once"


def test_rows_of_several_requests_and_tapped_layers_stay_as_they_are(rows: Rows) -> None:
    block, (cache, other) = rows.block, (rows.block.new_cache(8), rows.block.new_cache(8))
    mask = tree_mask(0, np.ones((1, 1), np.bool_))
    parts = [CachedPart(1, cache, mask), CachedPart(2, other, mask)]
    tokens = torch.tensor([4, 4])
    out = block.forward_joint(tokens, torch.tensor([0, 0]), parts)
    assert out is not None
    assert torch.equal(out[0], out[1])
    tapped: list[torch.Tensor] = []
    parts = [CachedPart(1, block.new_cache(8), mask)]
    last = block.forward_joint(
        tokens[:1], torch.tensor([0]), parts, aux_layers=range(10), enters=tapped.append
    )
    assert len(tapped) == 10
    assert last is not None
    assert torch.equal(tapped[0], block.embedded(tokens[:1]))
    assert not rows.graphs.warmed


@pytest.mark.parametrize("name", ["int8", "int4", "int4-g32", "nf4", "nf4-dq"])
def test_every_quantisation_can_be_captured(tmp_path: Path, name: str) -> None:
    if name.startswith("nf4"):
        pytest.importorskip("bitsandbytes")
    folder = write_checkpoint(tmp_path / "m", hidden_size=64, intermediate_size=128)
    source = QuantisingSource(open_source(folder), Quantisation.parse(name))
    graphs = RecordedGraphs()
    blocks = [
        Block(source, 1, 3, "bfloat16", graphs=lambda _: graphs),
        Block(source, 1, 3, "bfloat16"),
    ]
    caches = [block.new_cache(16) for block in blocks]
    for _ in range(3):
        hidden = torch.randn(2, 64).to(torch.bfloat16)
        length = caches[0].length
        positions = torch.arange(length, length + 2)
        mask = tree_mask(length, np.tri(2, dtype=np.bool_))
        out = [
            block.forward(hidden, positions, cache, mask)
            for block, cache in zip(blocks, caches, strict=True)
        ]
        assert out[0] is not None
        assert out[1] is not None
        assert difference(out[0].double(), out[1].double()) < 0.1 * float(out[1].abs().max())
    assert graphs.captured[0].replays == 2


def test_buckets() -> None:
    assert [row_bucket(rows) for rows in (1, 2, 3, 5, 9, 17, 33, 64)] == [
        1,
        2,
        4,
        8,
        16,
        32,
        64,
        64,
    ]
    assert row_bucket(65) is None
    slots = [slot_bucket(n) for n in (1, 256, 257, 1000, 1024, 1025, 2048, 2049, 5000)]
    assert slots == [256, 256, 512, 1024, 1024, 1280, 2048, 2560, 5120]
    for n in range(1, 20000, 7):
        assert n <= slot_bucket(n) <= max(n + 255, 1.25 * n + 1)
    assert [room_for(n) for n in (1, 256, 257)] == [256, 256, 512]
    assert groups(10) == [(0, 4), (4, 8), (8, 10)]
    assert groups(1) == [(0, 1)]
