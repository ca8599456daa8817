"""The run that is prepared for a GPU goes through on a CPU, in Triton's interpreter, keeps what it
found when a part fails, and says so without a device."""

import gc
import importlib.util
import json
import os
import runpy
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import gpu_parts
from support.gpu_model import MEASURED, before
from support.gpu_parts import PARTS, TINY, Line, Place
from support.recorded_graphs import RecordedGraphs, torch_products

from edgespec.model.row_math import BATCHED, Norm, RowMath

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu.py"
CPU = torch.device("cpu")


@pytest.fixture
def script() -> dict[str, Any]:
    """Its names."""
    return runpy.run_path(str(SCRIPT))


def test_without_a_device_it_is_one_line(
    script: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script["main"](["--out", str(tmp_path / "out")]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "no CUDA device here, so nothing is measured\n")
    assert not (tmp_path / "out").exists()


def tiny(folder: Path, *parts: str) -> dict[str, Any]:
    """What a tiny run finds, in an interpreter of its own."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton has no build for this machine")
    command = [sys.executable, str(SCRIPT), "--tiny", "--out", str(folder), "--minutes", "60"]
    done = subprocess.run(
        [*command, "--parts", ",".join(parts)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    page = (folder / "gpu.md").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads((folder / "gpu.json").read_text(encoding="utf-8"))["parts"]
    for name in parts:
        assert found[name]["state"] == "done", found[name]
        assert found[name]["lines"]
        assert f"## {name} (done" in page
    return found


@pytest.mark.thorough
def test_all_that_needs_no_other_process_goes_through_on_a_cpu(tmp_path: Path) -> None:
    parts = ("right", "layers", "products", "attention", "states", "passes", "d0")
    found = tiny(tmp_path, *parts)
    checked = {line["what"] for line in found["right"]["lines"]}
    assert {
        "product, int4",
        "product, int4, long",
        "product, Q4_0",
        "product, plain",
        "norm",
        "gate",
    } <= checked
    rows = found["products"]["lines"]
    assert [row["way"] for row in rows] == [
        *("none", "int4", "Q4_0", "none, cuBLAS", "int4, tinygemm", "int4-g32, tinygemm"),
        "nf4, bitsandbytes",
    ]
    assert "layers of granitemoehybrid-mamba" in {line["what"] for line in found["layers"]["lines"]}
    states = [(line["what"], line.get("way")) for line in found["states"]["lines"]]
    ways = (None, "edgespec", "edgespec, by graph", "torch")
    assert states == [(n, w) for n in ("states, gated delta", "short convolution") for w in ways]


@pytest.mark.thorough
def test_what_asks_other_processes_goes_through_on_a_cpu(tmp_path: Path) -> None:
    found = tiny(tmp_path, "memory", "profile", "answers")
    assert [line["what"] for line in found["memory"]["lines"]] == [
        *("taken, MiB", "bytes of a file, as they are", "bytes of a file, by pinned pieces")
    ]
    assert [line["policy"] for line in found["answers"]["lines"]] == ["autoregressive", "adaptive"]
    assert [line["what"] for line in found["profile"]["lines"]] == ["edgespec profile", "its file"]


def test_answers_are_asked_as_bench_is_and_told_if_they_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, ...]] = []
    runs = [
        {"policy": name, "tokens_per_second": 2.0, "exact": name == "plain"}
        for name in ("plain", "other")
    ]

    def says(place: Place, *words: str) -> str:
        asked.append(words)
        if len(asked) == 3:
            raise TimeoutError
        return json.dumps({"runs": runs}) if len(asked) == 1 else "edgespec: error: no such model"

    monkeypatch.setattr(gpu_parts, "_edgespec", says)
    sizes = gpu_parts.Sizes(dtypes=TINY.dtypes, rings=((1, "ngram", 0.0),) * 4)
    first, second, third, last = gpu_parts.answers(Place(CPU, sizes, 1e9))
    assert "wrong" not in first
    assert second["wrong"] == "text differs"
    assert third["wrong"] == "edgespec: error: no such model"
    assert (last["skipped"], len(asked)) == ("its time was up", 3)
    page = (SCRIPT.parents[2] / "docs" / "commands.md").read_text(encoding="utf-8")
    usage = page.split("<!-- edgespec bench -->")[1].split("<!-- end -->")[0]
    assert all(word in usage for word in asked[0] if word.startswith("--"))


def test_what_a_part_found_is_kept_when_it_fails_or_takes_too_long(
    script: dict[str, Any], tmp_path: Path
) -> None:
    found = script["Findings"](tmp_path)

    def fails(place: Place) -> Iterator[Line]:
        yield {"what": "first", "wrong": "1 of 2 rows"}
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def long(place: Place) -> Iterator[Line]:
        yield {"what": "a"}
        yield {"what": "b"}
        yield {"what": "never"}

    place, times = Place(CPU, TINY, 1e9), iter(range(100))
    assert not script["run_part"](fails, place, found, "right", 9.0)
    assert script["run_part"](long, place, found, "long", 2.0, lambda: float(next(times)))
    again = script["Findings"](tmp_path)
    assert [line["what"] for line in again.parts["right"]["lines"]] == ["first"]
    assert [line["what"] for line in again.parts["long"]["lines"]] == [
        "a",
        "b",
    ]
    assert [one.partition(":")[0] for one in again.wrong] == ["right", "right"]
    assert "illegal memory access" in again.wrong[1]
    again.begin("lost")  # as a process leaves it that ends there
    assert "lost: it ended the process" in script["Findings"](tmp_path).wrong


def test_a_pass_by_graph_is_compared_with_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = RecordedGraphs()
    monkeypatch.setattr(gpu_parts.blocks, "row_math", lambda *_: BATCHED)  # torch's own
    sizes = gpu_parts.Sizes(**(vars(TINY) | {"forms": (), "layers": 2, "counts": (1, 2)}))
    with torch_products():
        lines = list(gpu_parts.passes_by_graph(Place(CPU, sizes, 1e9, lambda _: graphs)))
    assert [line["rows"] for line in lines] == [1, 2]
    assert all(float(str(line["difference"])) < 0.05 for line in lines), "both compute the same"
    assert graphs.captured
    failing = Place(CPU, sizes, 1e9, lambda _: RecordedGraphs(fail="no"))
    (line,) = gpu_parts.passes_by_graph(failing)
    assert line["skipped"] == "no"


def test_what_a_graph_reads_lives_as_long_as_it() -> None:
    # As on a GPU: a capture keeps none of the tensors (seen on an H200: illegal memory access).
    class Forgetful(RecordedGraphs):
        def capture(self, work: Callable[[], None]) -> Any:
            return SimpleNamespace(replay=lambda: None)

    rows = torch.ones(1, 4, dtype=torch.bfloat16)
    product = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    living = [weakref.ref(product), weakref.ref(rows)]
    run = gpu_parts._replayed(Place(CPU, TINY, 1e9, lambda _: Forgetful()), [product], rows)
    del product, rows
    gc.collect()
    assert all(one() is not None for one in living)
    run()


def test_a_row_that_depends_on_its_batch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> list[str]:
        place = Place(CPU, gpu_parts.Sizes(**(vars(TINY) | {"forms": ()})), 1e9)
        return [
            f"{line['what']}: {line['wrong']}" for line in gpu_parts.right(place) if "wrong" in line
        ]

    assert found() == []

    class Dependent(RowMath):
        def norm(self, rows: torch.Tensor, norm: Norm) -> torch.Tensor:
            return norm(rows) * (1 + 0.01 * (len(rows) < 9))

    monkeypatch.setattr(gpu_parts.blocks, "row_math", lambda *_: Dependent())
    assert "norm: 1 of 9 rows, 8 of 9 rows" in found()


def test_parts_are_known_and_have_shares_of_eight_minutes() -> None:
    assert sum(share for _, share in PARTS.values()) == 480


def test_the_model_of_a_product_is_near_what_a_device_took() -> None:
    for out, form, rows, took, *code in MEASURED:
        assert abs(before(out, form, *code) * 1e6 / took - 1) < 0.2, (out, form, rows)
