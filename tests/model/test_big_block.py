"""Promise 5 at the size that it is for: a block of Llama 2 7B's shapes, loaded in little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.big_checkpoint import LARGEST, write_big_checkpoint

SUPPORT = Path(__file__).parent.parent / "support"
MIB = 1 << 20
INTERPRETER = 600 * MIB
LAYERS = 8
"""3.0 GiB of layers in 16 bit, 3.5 with embedding and head."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("big") / "llama-2-7b-shapes"
    write_big_checkpoint(folder, LAYERS)
    assert sum(file.stat().st_size for file in folder.iterdir()) > 3 << 30
    yield folder
    for file in folder.iterdir():
        file.unlink()


def load(model: Path, cache: Path, quant: str) -> dict[str, float]:
    """Load all layers and the embedding in a process of its own; what it took."""
    done = subprocess.run(
        [sys.executable, SUPPORT / "load_big.py", model, cache, quant, "0", str(LAYERS)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    took: dict[str, float] = json.loads(done.stdout)
    print(
        f"{quant}: {took['seconds']:.1f} s, peak {took['peak'] / MIB:.0f} MiB, block "
        f"{took['block'] / MIB:.0f} MiB, at the start {took['start'] / MIB:.0f} MiB"
    )
    return took


@pytest.mark.parametrize("quant", ["nf4", "int4"])
def test_loading_takes_the_block_one_tensor_and_the_interpreter(
    model: Path, tmp_path: Path, quant: str
) -> None:
    first = load(model, tmp_path, quant)
    limit = first["block"] + LARGEST + INTERPRETER
    print(f"limit: {limit / MIB:.0f} MiB")
    assert first["peak"] <= limit
    again = load(model, tmp_path, quant)
    assert again["peak"] <= limit
    print(f"a restart is {first['seconds'] / again['seconds']:.1f} times faster")
    assert first["seconds"] >= 5 * again["seconds"]
