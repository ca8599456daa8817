"""A GGUF file of 7B shapes: two stages load it one after the other, in little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.big_gguf import LARGEST, LAYERS, write_big_gguf

from edgespec.model.gguf import reader
from edgespec.model.sources import open_source

LOADER = Path(__file__).parents[2] / "support" / "load_big.py"
MIB = 1 << 20
INTERPRETER = 600 * MIB

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    file = tmp_path_factory.mktemp("big") / "llama-2-7b-shapes.Q4_K_M.gguf"
    write_big_gguf(file)
    assert file.stat().st_size >= 3.5 * (1 << 30)
    yield file
    file.unlink()


def test_two_stages_load_their_halves(file: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)}
    for first, end in ((0, LAYERS // 2), (LAYERS // 2, LAYERS)):
        cache = tmp_path / f"blocks-{first}"
        done = subprocess.run(
            [sys.executable, LOADER, file, cache, "file", str(first), str(end)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=3000,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        took: dict[str, float] = json.loads(done.stdout)
        limit = took["block"] + LARGEST + INTERPRETER
        print(
            f"layers {first} to {end - 1}: {took['seconds']:.1f} s, peak "
            f"{took['peak'] / MIB:.0f} MiB of {limit / MIB:.0f}, block {took['block'] / MIB:.0f}"
        )
        assert took["peak"] <= limit
        for made in cache.glob("*/*"):
            made.unlink()


def test_it_is_opened_in_less_than_a_second(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    open_source(file)  # imports what reads it
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    reader._opened.cache_clear()
    began = time.process_time()
    open_source(file)
    assert time.process_time() - began < 1
