"""No test fails because the machine does other things: limits on real time are hang guards.

A wait ends with its event; the clock only ends a test that would hang. That takes 10 s or more of
a machine that is busy. What a wait for nothing to happen takes is as short as it likes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LEAST_S = 10.0
CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "time"}  # of the module time
LIMITED = {"communicate", "create_connection", "get", "run", "settimeout", "wait_for"}
"""Calls that fail when their time is over. (httpx has its limit from conftest.py.)"""
WAITS = {"join", "poll", "wait"}
"""Calls that return then, which fails a test that asserts what they return."""
SILENCES = {"silence", "answer_silence", "client_silence"}
"""Of Timing: after so long without a word a node of a ring is lost."""

ALLOWED = {
    "cli/test_losses.py": "slow: it measures how soon a coordinator's end is noticed",
    "net/test_transfer_kills.py": "it looks again and again until the test ends it",
    "ring/test_growing.py": "virtual time",
    "ring/test_member.py": "virtual time",
    "ring/test_replanning.py": "virtual time",
    "runtime/test_client.py": "a silence that is waited for",
    "support/attackers.py": "an attacker whose connection fails makes another one",
    "support/memberships.py": "virtual time",
    "support/memory_rings.py": "virtual time",
    "support/sniffer.py": "it looks again and again until the test ends it",
    "test_config.py": "it is refused",
}
"""Files with short limits, and why none of them fails a test on a busy machine."""


class Limits(ast.NodeVisitor):
    """The limits of a file that are too short, by their lines."""

    def __init__(self, tree: ast.Module) -> None:
        self.found: list[tuple[int, str]] = []
        self._known: dict[str, float] = {}  # numbers that have names
        self._clocked: dict[str, float | None] = {}  # names of times, and how far ahead they are
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                if (number := self._number(node.value)) is not None:
                    self._known[name] = number
                elif _asks_clock(node.value):
                    added = node.value.right if isinstance(node.value, ast.BinOp) else node.value
                    self._clocked[name] = self._number(added)
        self.visit(tree)

    def visit_Assert(self, node: ast.Assert) -> None:
        """What a test asserts of a time, and of a wait."""
        for part in _asserted(node.test):
            if isinstance(part, ast.Compare) and isinstance(part.ops[0], ast.Lt | ast.LtE):
                self._check_compared(part.left, part.comparators[0])
            elif isinstance(part, ast.Call) and _name(part) in WAITS and part.args:
                self._check(part, self._number(part.args[0]), f"assert …{_name(part)}")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Limits that are arguments."""
        name = _name(node)
        for keyword in node.keywords:
            if (name in LIMITED and keyword.arg == "timeout") or (
                name == "Timing" and keyword.arg in SILENCES
            ):
                self._check(node, self._number(keyword.value), f"{name}({keyword.arg}=…)")
        if name in LIMITED - {"run", "get"} and node.args:
            self._check(node, self._number(node.args[-1]), name)
        self.generic_visit(node)

    def _check_compared(self, time: ast.expr, limit: ast.expr) -> None:
        named = isinstance(time, ast.Name) and time.id in self._clocked
        if named or _asks_clock(time):
            ahead = self._clocked.get(limit.id) if isinstance(limit, ast.Name) else None
            self._check(time, ahead if ahead is not None else self._number(limit), "assert time <")

    def _check(self, node: ast.expr, seconds: float | None, what: str) -> None:
        if seconds is not None and 0.0 < seconds < LEAST_S:
            self.found.append((node.lineno, f"{what} {seconds:g}"))

    def _number(self, node: ast.expr) -> float | None:
        match node:
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                return float(value)
            case ast.Name(id=name):
                return self._known.get(name)
        return None


def _asserted(test: ast.expr) -> Iterator[ast.expr]:
    """Parts of a condition that have to be true."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        for part in test.values:
            yield from _asserted(part)
    else:
        yield test


def _asks_clock(node: ast.expr) -> bool:
    return any(
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in CLOCKS
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "time"
        for call in ast.walk(node)
    )


def _name(call: ast.Call) -> str:
    func = call.func
    return func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")


@pytest.fixture(scope="module")
def short() -> dict[str, list[tuple[int, str]]]:
    """The limits of each file that has some."""
    found = {}
    for path in HERE.rglob("*.py"):
        name = path.relative_to(HERE).as_posix()
        if not name.startswith("benchmarks/") and (lines := too_short(path.read_text("utf-8"))):
            found[name] = lines
    return found


def test_no_limit_on_real_time_is_below_ten_seconds(
    short: dict[str, list[tuple[int, str]]],
) -> None:
    assert {name: lines for name, lines in short.items() if name not in ALLOWED} == {}
    assert set(ALLOWED) <= set(short), "an exception that nothing needs"


@pytest.mark.parametrize(
    "line",
    [
        "assert time.monotonic() - started < 2.0",
        "took = time.perf_counter() - started; assert took <= SOON_S",
        "assert it and time.time() - started < 9",
        "limit = time.monotonic() + 5.0; assert time.monotonic() < limit",
        "assert begun.wait(0.5)",
        "assert pull.poll(SOON_S)",
        "out, _ = process.communicate(timeout=5)",
        "subprocess.run(command, timeout=SOON_S)",
        "answers.get(timeout=1.0)",
        "opened.settimeout(3)",
        "socket.create_connection((HOST, port), 5)",
        "await asyncio.wait_for(answer, 2.0)",
        "Timing(beat=0.1, silence=0.8)",
    ],
)
def test_a_short_limit_is_found(line: str) -> None:
    assert len(too_short(f"SOON_S = 5.0\n{line}")) == 1
    assert not too_short("SOON_S = 60.0\n" + re.sub(r"\b\d(\.\d)?\b", "60", line))


@pytest.mark.parametrize(
    "line",
    [
        "assert time.monotonic() - started > 0.5",
        "assert not pull.poll(200)",
        "assert not begun.wait(0.2)",
        "while not over.wait(0.05): pass",
        "for incoming in transport.poll(0.02): pass",
        "assert len(found) < 3",
    ],
)
def test_what_lasts_longer_on_a_busy_machine_is_no_limit(line: str) -> None:
    assert not too_short(line)


LIKELY = re.compile(
    r"time\.(monotonic|perf|time)|timeout|Timing\(|create_connection|wait_for"
    r"|assert .*\.(wait|poll|join)\("
)
"""What has none of these is not read more closely, which takes its time."""


def too_short(text: str) -> list[tuple[int, str]]:
    """Lines of a program with limits on real time below LEAST_S, and what they limit."""
    return sorted(Limits(ast.parse(text)).found) if LIKELY.search(text) else []
