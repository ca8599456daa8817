"""Tests try what the product shows: how often they reach for what is private has a bound."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
MOST = 198
"""Of a test that needs more: give the product a reading, or write a helper in tests/support/."""

PUBLIC = {"_replace", "_make", "_asdict", "_fields"}  # of named tuples, so that no field clashes


def private_uses(source: str) -> list[str]:
    """Private attributes of others that are read, called or set, as `value._name`."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in PUBLIC
        and ast.unparse(node.value) not in ("self", "cls", "super()")
    ]


def test_tests_reach_for_few_private_attributes() -> None:
    found = {path: private_uses(path.read_text()) for path in HERE.rglob("*.py")}
    worst = sorted(found, key=lambda path: -len(found[path]))[:5]
    named = "\n".join(f"{path.relative_to(HERE)}: {', '.join(found[path])}" for path in worst)
    assert sum(map(len, found.values())) <= MOST, f"the files with most:\n{named}"


@pytest.mark.parametrize(
    ("line", "uses"),
    [
        ("ring.machine._state._limit = 1", ["ring.machine._state._limit", "ring.machine._state"]),
        ("doctor._swap(root)", ["doctor._swap"]),
        ("self.ring._nodes[0]", ["self.ring._nodes"]),
        ("self._nodes[0], cls._made, super()._come()", []),
        ("row._replace(a=1), row.__class__", []),
    ],
)
def test_what_counts_as_one(line: str, uses: list[str]) -> None:
    assert private_uses(line) == uses
