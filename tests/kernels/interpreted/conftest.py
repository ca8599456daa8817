"""Checks here run in Triton's interpreter, with what it lacks."""

from __future__ import annotations

import pytest
from support.interpreted_gpu import complete


@pytest.fixture(autouse=True, scope="session")
def _complete_interpreter() -> None:
    complete()
