"""Kernels for GPUs on a CPU, in processes of their own: an import decides how Triton runs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.tiers import tiered

REPOSITORY = Path(__file__).resolve().parents[2]
CHECKS = ("-o", "python_files=check_*.py", "-o", "python_functions=check_*")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton has no build for this machine"
)


def check(path: str, interpreted: bool) -> None:
    """Run the checks in a file or folder beside this one."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *CHECKS]
    done = subprocess.run(
        [*command, f"tests/kernels/{path}"],
        cwd=REPOSITORY,
        env=os.environ | {"TRITON_INTERPRET": str(int(interpreted))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


BLOCKS = "blocks.py::check_rows_do_not_know_their_batch"
QUICK = ("products.py", "attention.py", "rows.py", "layers.py", f"{BLOCKS}[llama]")


@pytest.mark.parametrize("checks", tiered([*QUICK, f"{BLOCKS}[gemma2]", f"{BLOCKS}[qwen3]"], QUICK))
def test_kernels_are_right_and_each_row_is_the_same_beside_any_others(checks: str) -> None:
    check(f"interpreted/check_{checks}", True)


@pytest.mark.thorough
def test_kernels_compile_for_an_orin_and_fit_into_it() -> None:
    check("compiled", False)
