"""How the room is built: each attribute has one writer, no files import each other in a circle, and
one step of decoding runs through few files."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from types import FrameType

import pytest
from support.rings import FakeRing, submit

import edgespec.decoding
from edgespec.decoding.events import Drafted, HeadDone, SegmentArrived
from edgespec.machines.effects import Effect
from edgespec.machines.events import Event

ROOM = Path(edgespec.decoding.__file__).parent
FILES = sorted(ROOM.glob("*.py"))

MUTATORS = {"append", "appendleft", "extend", "extendleft", "insert", "sort", "reverse"}
MUTATORS |= {"add", "update", "setdefault", "remove", "discard", "clear"}
MUTATORS |= {"pop", "popitem", "popleft"}


# --- one writer -----------------------------------------------------------------------------------


def written(node: ast.AST) -> list[ast.expr]:
    """What a statement or a call writes: its targets, or the value whose content it changes."""
    match node:
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            return targets
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target) | ast.For(target=target):
            return [target]
        case ast.comprehension(target=target) | ast.withitem(optional_vars=ast.expr() as target):
            return [target]
        case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in MUTATORS:
            return [value]
    return []


def attributes(target: ast.expr) -> Iterator[ast.Attribute]:
    """The attributes among the parts of a target."""
    match target:
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            for part in parts:
                yield from attributes(part)
        case ast.Subscript(value=value) | ast.Starred(value=value):
            yield from attributes(value)
        case ast.Attribute():
            yield target


def foreign_writes(source: str) -> list[str]:
    """Every write to an attribute of another object than `self`, as `line: attribute`."""
    return [
        f"{node.lineno}: {ast.unparse(attribute)}"  # type: ignore[attr-defined]
        for node in ast.walk(ast.parse(source))
        for target in written(node)
        for attribute in attributes(target)
        if not (isinstance(attribute.value, ast.Name) and attribute.value.id in ("self", "cls"))
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_only_its_own_methods_write_an_object_s_attributes(path: Path) -> None:
    assert foreign_writes(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "request.turn = 3",
        "self.outbox.in_flight += 1",
        "self.at, request.turn = 1, 2",
        "for request.turn in turns: pass",
        "del request.leaving[0]",
        "request.known[3] = 4",
        "request.leaving.popleft()",
        "self.request.known[3].add(5)",
    ],
)
def test_a_foreign_write_is_found(source: str) -> None:
    assert foreign_writes(source)


@pytest.mark.parametrize(
    "source",
    ["self.turn = 3", "self.known[3].add(5)", "turns.append(request.turn)", "request.send(self.x)"],
)
def test_an_own_write_passes(source: str) -> None:
    assert not foreign_writes(source)


# --- no circle ------------------------------------------------------------------------------------


def test_no_two_files_import_each_other_by_whatever_way() -> None:
    """Imports for types alone count too."""
    package = edgespec.decoding.__name__
    needs: dict[str, set[str]] = {}
    for path in FILES:
        found = needs.setdefault(path.stem, set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                base, _, name = node.module.rpartition(".")
                found |= {name} if base == package else set()
                found |= {one.name for one in node.names} if node.module == package else set()
    assert needs["coordinator"]
    TopologicalSorter(needs).prepare()  # raises CycleError


# --- one step -------------------------------------------------------------------------------------


def files_of_a_step(policy: str) -> set[str]:
    """The files of edgespec in which any code runs while the coordinator takes up a segment, what
    its head said, or guesses: 60 events in the middle of an answer, on a ring of 3 toy stages."""
    fake, root = FakeRing(3), str(ROOM.parent)
    handle, count = fake.coordinator.handle, 0
    found: set[str] = set()

    def profile(frame: FrameType, what: str, _: object) -> None:
        if what == "call" and frame.f_code.co_filename.startswith(root):
            found.add(frame.f_code.co_filename.removeprefix(root))

    def watched(event: Event, now: float) -> list[Effect]:
        nonlocal count
        count += isinstance(event, SegmentArrived | HeadDone | Drafted)
        is_step = isinstance(event, SegmentArrived | HeadDone | Drafted) and 10 < count <= 70
        sys.setprofile(profile if is_step else None)
        try:
            return handle(event, now)
        finally:
            sys.setprofile(None)

    fake.coordinator.handle = watched  # type: ignore[method-assign]
    fake.ring.ask(submit(max_new_tokens=60, policy=policy))
    assert count > 70
    return found


@pytest.mark.parametrize(("policy", "most"), [("autoregressive", 20), ("adaptive", 24)])
def test_a_step_runs_through_few_files(policy: str, most: int) -> None:
    found = files_of_a_step(policy)
    assert any("scheduler" in name for name in found)
    assert len(found) <= most, sorted(found)
