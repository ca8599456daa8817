"""The benchmark of a GPU: its tables are made here by a stand-in for CUDA graphs, and without a
device it says so."""

import gc
import runpy
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.recorded_graphs import RecordedGraphs, torch_products

from edgespec.daemon.layer_times import Shape, llama
from edgespec.model.row_math import Norm, RowMath

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu.py"


@pytest.fixture
def script() -> dict[str, Any]:
    """Its names."""
    return runpy.run_path(str(SCRIPT))


def test_without_a_device_it_is_one_line(
    script: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script["main"]([]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "no CUDA device here, so nothing is measured\n")


@pytest.mark.thorough
def test_a_table_has_a_line_for_each_number_of_rows(script: dict[str, Any]) -> None:
    config = llama("qwen2.5-0.5b").changed(
        hidden_size=64,
        intermediate_size=64,
        head_dim=32,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    graphs = RecordedGraphs()
    shape = Shape("small", config)
    script["measured"].__globals__["ROWS"] = (1, 64)
    with torch_products():
        lines = list(
            script["measured"](
                shape, "int4", 2, torch.device("cpu"), 1e9, 0.0, graphs=lambda device: graphs
            )
        )
    assert [line[0] for line in lines] == ["1", "64"]
    assert all(float(line[-1]) < 0.05 for line in lines), "both ways compute the same"
    assert graphs.captured
    head, rule, *rows = script["table"](lines)
    assert head.count("|") == rule.count("|") == rows[0].count("|") == 9

    failing = RecordedGraphs(fail="no")
    measured = script["measured"](
        shape, "none", 2, torch.device("cpu"), 1e9, 0.0, lambda _: failing
    )
    with pytest.raises(RuntimeError, match="its passes cannot be captured"):
        next(measured)


def test_tables_of_products_and_attention(script: dict[str, Any]) -> None:
    cpu, size = torch.device("cpu"), torch.Size((128, 128))
    head, _, *rows = list(script["product_table"](cpu, size, 1e9, 0.0, lambda _: None, (1, 16)))[2:]
    assert [row.split(" | ")[0] for row in rows] == [
        *("| none", "| int4", "| int4-g32", "| int8", "| nf4", "| none, cuBLAS"),
        *("| int4, tinygemm", "| int4-g32, tinygemm", "| nf4, bitsandbytes"),
    ]
    assert {row.count("|") for row in rows} == {head.count("|")}
    _, _, head, _, *rows = script["attention_table"](cpu, 0.0, lambda _: None, (5,), (1, 2))
    assert [row.split(" | ")[0] for row in rows] == ["| edgespec, 5", "| torch, 5"]


def test_what_a_graph_reads_lives_as_long_as_it(script: dict[str, Any]) -> None:
    # As on a GPU: a capture keeps none of the tensors (seen on an H200: illegal memory access).
    class Forgetful(RecordedGraphs):
        def capture(self, work: Callable[[], None]) -> Any:
            return SimpleNamespace(replay=lambda: None)

    rows = torch.ones(1, 4)
    product = torch.nn.Linear(4, 4)
    living = [weakref.ref(product), weakref.ref(rows)]
    run = script["_replayed"](torch.device("cpu"), Forgetful(), [product], rows)
    del product, rows
    gc.collect()
    assert all(one() is not None for one in living)
    run()


def test_a_row_that_depends_on_its_batch_is_found(script: dict[str, Any]) -> None:
    variances = script["variances"]

    def found() -> list[str]:
        return list(variances(torch.device("cpu"), torch.bfloat16, (64, 128), 20))

    assert found() == []

    class Dependent(RowMath):
        def norm(self, rows: torch.Tensor, norm: Norm) -> torch.Tensor:
            return norm(rows) * len(rows)

    variances.__globals__["row_math"] = lambda *_: Dependent()
    assert "a norm of 64 x 128, 1 of 20 rows" in found()
