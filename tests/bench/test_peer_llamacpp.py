"""Served answers beside a llama-server's: a fake one, which streams as llama-server does."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shlex
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support.fake_llama import SERVER, WORKER, fake

from edgespec.bench.workloads import Prompt
from edgespec.daemon.bundled_models import bundled
from edgespec.model.tokenizer import Tokenizer

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "peer_llamacpp.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module(SCRIPT.stem)


def test_a_peer_that_is_started_is_asked_as_a_ring_is(script: ModuleType, tmp_path: Path) -> None:
    server = fake(tmp_path, "llama-server", SERVER)
    rpc = fake(tmp_path, "rpc-server", WORKER)
    asked = argparse.Namespace(model="m.gguf", users=[1, 2], prompts=[128], tokens=5, rpc=rpc)
    with ExitStack() as stack:
        side = script.their_process(stack, "no AMX", server, 2, asked)
        runs = [process.cmdline() for process in side.processes()]
        prompts = [Prompt(str(number), "", (f"{number}. Once",)) for number in range(2)]
        found = script.play(side, prompts, 5)
        known = script.their_server("running", [side.url + "/"])
        assert script.play(known, prompts, 5)["cpu_ms_per_token"] is None
    assert side.name == "no AMX + 2 RPC"
    ports = [run[run.index("-p") + 1] for run in runs[:2]]
    assert all(run[-2:] == ["-t", "1"] for run in runs[:2])
    options = dict(zip(runs[2][3::2], runs[2][4::2], strict=True))
    assert options["--rpc"] == ",".join(f"127.0.0.1:{port}" for port in ports)
    assert (options["-np"], options["-c"], options["-ngl"]) == ("2", str(2 * 197), "99")
    assert found["tokens_per_second"] > 0
    assert found["ttft_seconds"] > 0
    assert found["cpu_ms_per_token"] >= 0


def test_medians_and_ratios_are_told_in_markdown(script: ModuleType) -> None:
    def rounds(*speeds: float, cpu: float | None) -> list[dict[str, float | None]]:
        names = list(script.FIGURES)
        return [
            dict(zip(names, (speed, 1 / speed, 2 / speed, cpu), strict=True)) for speed in speeds
        ]

    taken = {
        (128, 1, "ring"): rounds(10.0, 40.0, 20.0, cpu=18.0),
        (128, 1, "AMX"): rounds(80.0, 80.0, 10.0, cpu=9.0),
        (128, 1, "theirs"): rounds(10.0, cpu=None),
        (128, 2, "ring"): rounds(20.0, cpu=18.0),
    }
    found = script.compared(taken, ["ring"])
    assert [(one["users"], one["peer"]) for one in found["ratios"]] == [(1, "AMX"), (1, "theirs")]
    assert script.served_table(found).splitlines() == [
        "| prompt | users | system | tok/s | s to first token | s between tokens "
        "| CPU ms a token |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| 128 | 1 | ring | 20.0 | 0.050 | 0.1000 | 18.0 |",
        "| 128 | 1 | AMX | 80.0 | 0.013 | 0.0250 | 9.0 |",
        "| 128 | 1 | theirs | 10.0 | 0.100 | 0.2000 |  |",
        "| 128 | 2 | ring | 20.0 | 0.050 | 0.1000 | 18.0 |",
        "",
        "| prompt | users | system | peer | tok/s, ours / peer's | s to first token, ours / peer's "
        "| s between tokens, ours / peer's | CPU ms a token, ours / peer's |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| 128 | 1 | ring | AMX | 0.25 | 4.00 | 4.00 | 2.00 |",
        "| 128 | 1 | ring | theirs | 2.00 | 0.50 | 0.50 |  |",
    ]
    assert script.ratio(1.0, 0.0) is None


def test_prompts_have_about_their_length_and_none_begins_as_another(script: ModuleType) -> None:
    new, tokenizer = script.prompts_of(bundled("base")), Tokenizer(bundled("base"))
    prompts = [prompt.text for _ in range(2) for prompt in new(40, 8)]
    assert all(36 <= len(tokenizer.encode(text)) <= 44 for text in prompts)
    assert len({text.partition(" ")[0] for text in prompts}) == len(prompts)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--peer python --peer A=llama-server", "name one kind"),
        ("--peer llama-server --server http://127.0.0.1:1", "names of their own"),
        ("--server http://127.0.0.1:1 --peer A=/no/such/llama-server", "is no program here"),
        ("--rpc rpc-server", "is for a --peer that is a llama-server"),
        ("--peer A=", "has no command"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    script: ModuleType,
    options: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["peer", "--model", "m.gguf", *options.split()])
    with pytest.raises(SystemExit, match="2"):
        script.main()
    assert says in capsys.readouterr().err


def test_a_peer_that_is_not_there_is_told(script: ModuleType, tmp_path: Path) -> None:
    asked = SimpleNamespace(model="m.gguf", users=[1], prompts=[1], tokens=1, rpc=None)
    ends = fake(tmp_path, "llama-server", "import sys; sys.exit('no such file: ' + sys.argv[2])")
    with ExitStack() as stack, pytest.raises(SystemExit, match=r"(?s)AMX did .*file: m\.gguf"):
        script.their_process(stack, "AMX", ends, 0, asked)
    with pytest.raises(SystemExit, match=r"no llama-server .* at http://127.0.0.1:1"):
        script.their_server("A", ["http://127.0.0.1:1"])


@pytest.mark.thorough
def test_it_goes_through_beside_a_ring(tmp_path: Path) -> None:
    server = shlex.join(fake(tmp_path, "llama-server", SERVER))
    command = [sys.executable, str(SCRIPT), "--model", bundled("base"), "--rounds", "1", "--json"]
    command += ["--stages", "1", "--users", "1", "2", "--prompts", "12", "--tokens", "4"]
    done = subprocess.run(
        [*command, "--peer", f"AMX={server}", "--peer", f"no AMX={server} --no-repack"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[dict[str, Any]]] = json.loads(done.stdout)
    ring = "edgespec, 1 stage(s)"
    cases = [(one["users"], one["system"]) for one in found["figures"]]
    assert cases == [(users, name) for users in (1, 2) for name in (ring, "AMX", "no AMX")]
    own = [one for one in found["figures"] if one["system"] == ring]
    assert all(one["tokens_per_second"] > 0 and one["cpu_ms_per_token"] > 0 for one in own)
    pairs = [(one["users"], one["system"], one["peer"]) for one in found["ratios"]]
    assert pairs == [(users, ring, name) for users in (1, 2) for name in ("AMX", "no AMX")]
    assert all(one["ttft_seconds"] > 0 for one in found["ratios"])
