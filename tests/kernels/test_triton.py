"""Kernels for GPUs on a CPU, in processes of their own: an import decides how Triton runs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
CHECKS = ("-o", "python_files=check_*.py", "-o", "python_functions=check_*")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton has no build for this machine"
)


def check(path: str, tier: str, interpreted: bool) -> None:
    """Run the checks in a folder beside this one, those of a tier."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", tier, *CHECKS]
    done = subprocess.run(
        [*command, f"tests/kernels/{path}"],
        cwd=REPOSITORY,
        env=os.environ | {"TRITON_INTERPRET": str(int(interpreted))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_kernels_are_right_and_each_row_is_the_same_beside_any_others() -> None:
    check("interpreted", "not thorough", True)


@pytest.mark.thorough
def test_so_are_the_kernels_of_every_form_and_those_of_whole_blocks() -> None:
    check("interpreted", "thorough", True)


@pytest.mark.thorough
def test_kernels_compile_for_an_orin_and_fit_into_it() -> None:
    check("compiled", "", False)
