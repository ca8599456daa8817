"""Both sides of the comparison over a network: ours, and a fake llama-server with fake workers."""

from __future__ import annotations

import importlib
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import pytest
from support.board_hosts import board_hosts
from support.fake_llama import SERVER, WORKER, fake
from support.namespaces import Cable

from edgespec.daemon.bundled_models import bundled

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TOY = bundled("base")


@pytest.fixture
def rivals(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("rivals")


@pytest.mark.parametrize(
    "ours",
    [
        pytest.param(True, id="edgespec", marks=pytest.mark.slow),
        pytest.param(False, id="fake peer", marks=pytest.mark.thorough),
    ],
)
def test_a_side_does_all_the_work(rivals: ModuleType, tmp_path: Path, ours: bool) -> None:
    words = ["--model", TOY, "--stages", "2", "--users", "2", "--prompts", "40", "--rounds", "1"]
    asked = rivals.parsed([*words, "--tokens", "8"])
    asked.peer, asked.rpc = fake(tmp_path, "llama-server", SERVER), fake(tmp_path, "rpc", WORKER)
    kind = rivals.Ours if ours else rivals.Theirs
    taken: dict[str, list[float | str]] = {}
    names = ("node-0", "node-1", "node-2")
    with ExitStack() as stack:
        there = board_hosts(tmp_path, *names, cable=Cable(1.0, 1000.0))
        hosts, _ = stack.enter_context(there)
        rival = kind(asked, hosts, stack)
        rivals.starts(rival, taken)
        rivals.speeds({kind.name: rival}, {kind.name: taken}, asked)
        assert len(rival.megabytes()) == 3
        rivals.loss(rival, taken)
        rivals.switch(rival, taken)
    assert taken["kill -9: the answer"] == ["goes on, with the same text"]
    assert all(len(values) == 1 for values in taken.values())
    numbers = [value for (value,) in taken.values() if not isinstance(value, str)]
    assert len(numbers) == len(taken) - 1
    assert min(numbers) >= 0.0
    if ours:
        assert taken["second start, MB sent"] < taken["first start, MB sent"]


def test_medians_ratios_and_what_is_not_known_are_told(rivals: ModuleType) -> None:
    ours = {"s": [3.0, 1.0, 2.0], "answer": ["goes on"], "pause": [2.0], "kB": [7.0]}
    theirs = {"s": [4.0], "answer": ["ends in an error"], "pause": ["for good"]}
    found = {"link": {"edgespec": ours, "llama.cpp + RPC": theirs}}
    assert rivals.table(found).splitlines()[2:] == [
        "| link | s | 2 | 4 | 0.50 |",
        "| link | answer | goes on | ends in an error |  |",
        "| link | pause | 2 | for good |  |",
        "| link | kB | 7 |  |  |",
    ]
    assert rivals.Answer(came=[1.0, 1.5, 4.0]).pause == 2.5


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--peer llama-server", "--peer and --rpc go together"),
        ("--peer llama-server --rpc rpc-server", "--second: name another GGUF file"),
        ("--peer /no/such --rpc /no --second x.gguf", "/no/such is no program here"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    rivals: ModuleType, capsys: pytest.CaptureFixture[str], options: str, says: str
) -> None:
    with pytest.raises(SystemExit):
        rivals.parsed(["--model", TOY, *options.split()])
    assert says in capsys.readouterr().err
