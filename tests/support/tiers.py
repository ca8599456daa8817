"""Which cases of a matrix `make test` runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from hypothesis import settings


def tiered(every: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """The values of a parameter: those of `quick` in `make test`, the others marked thorough."""
    return [value if value in quick else thorough(value) for value in every]


def thorough(*values: Any) -> Any:
    """One case that only `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.thorough)


def examples(count: int, **more: Any) -> settings:
    """That many examples of a property; a quarter of them in `make test`."""
    return settings(max_examples=count * settings().max_examples // 100, **more)
