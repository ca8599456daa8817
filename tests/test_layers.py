"""The rooms of edgespec may import only downwards: this reads every import and fails on a breach.

The picture, top to bottom; a room may import the rows below its own, never one beside or above it::

    cli
    door
    daemon
    serving   bench    training
    runtime   sim
    backends  drafting  net        (backends may import drafting; drafting no machine)
    model                          (not for net)
    kernels                        (not for net)
    files     plugins
    decoding  ring      blocks
    machines
    policy    verify
    tree      wire      planning   (wire may import tree)
    types
    config    schema
    errors

Imports are found in the syntax tree, so a lazy one inside a function, a relative one, one under
``TYPE_CHECKING`` and one through ``importlib.import_module("...")`` all count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

ROWS: tuple[frozenset[str], ...] = (
    frozenset({"errors"}),
    frozenset({"config", "schema"}),
    frozenset({"types"}),
    frozenset({"tree", "wire", "planning"}),
    frozenset({"policy", "verify"}),
    frozenset({"machines"}),
    frozenset({"decoding", "ring", "blocks"}),
    frozenset({"files", "plugins"}),
    frozenset({"kernels"}),
    frozenset({"model"}),
    frozenset({"backends", "drafting", "net"}),
    frozenset({"runtime", "sim"}),
    frozenset({"serving", "bench", "training"}),
    frozenset({"daemon"}),
    frozenset({"door"}),
    frozenset({"cli"}),
)
HEIGHT = {room: height for height, row in enumerate(ROWS) for room in row}
SIDEWAYS = {("backends", "drafting")}  # a backend drives the draft sources of its device
SIDEWAYS |= {("wire", "tree")}  # rows and retained sets travel as what they are
BLIND = {("net", "model"), ("net", "kernels")}  # moving bytes needs no torch
# Guessing knows no machine: what both speak of are values in lower rooms.
BLIND |= {("drafting", room) for room in ("machines", "decoding", "ring", "blocks")}
DATA = {"models", "profiles", "systemd"}  # demo pair, device profiles, units: files, no code
OUTSIDE = {"daemon", "cli"}  # folders beside edgespec/, which has links to them
ROOT_NAMES = {"__version__"}  # what edgespec/__init__.py itself offers

PURE = {room for room in HEIGHT if HEIGHT[room] <= HEIGHT["decoding"]}
HEAVY = {"torch", "transformers", "safetensors", "tokenizers", "bitsandbytes", "zmq", "psutil"}
HEAVY |= {"zeroconf", "huggingface_hub", "starlette", "uvicorn", "prometheus_client"}
CHANCE = {"time", "sched", "datetime", "random", "secrets", "uuid"}
SYSTEM = {"os", "socket", "select", "selectors", "ssl", "signal", "subprocess"}
CONCURRENCY = {"asyncio", "threading", "multiprocessing", "concurrent", "queue"}
IMPURE_IMPORTS = HEAVY | CHANCE | SYSTEM | CONCURRENCY
# A peer's bytes must never be able to run code, so nothing here can read a pickle.
NEVER_IMPORTED = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}


def room_of(module: str) -> str:
    """The room that a dotted module name lies in; the empty string for the package itself."""
    _, _, rest = module.partition(".")
    return rest.partition(".")[0]


def imported_names(
    tree: ast.AST, module: str, is_package: bool
) -> Iterator[tuple[int, str, str | None]]:
    """Every import as (line, absolute dotted module, name taken from it or None)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, None
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node.module or "", node.level, module, is_package)
            for alias in node.names:
                yield node.lineno, base, alias.name
        elif isinstance(node, ast.Call) and called_name(node) in {"import_module", "__import__"}:
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                name = first.value.lstrip(".")
                level = len(first.value) - len(name)
                yield node.lineno, absolute(name, level, module, is_package), None
            else:
                yield node.lineno, "<computed>", None


def called_name(call: ast.Call) -> str:
    """The last part of the name that a call goes through."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def absolute(name: str, level: int, module: str, is_package: bool) -> str:
    """What a (possibly relative) import inside ``module`` refers to."""
    if level == 0:
        return name
    parts = module.split(".")
    drop = level - 1 if is_package else level
    if drop >= len(parts):
        return "<beyond the package>"
    kept = parts[: len(parts) - drop]
    return ".".join([*kept, name] if name else kept)


def breaches(source: str, module: str, is_package: bool = False) -> list[str]:
    """Every rule that one module breaks, as ``module:line: what is wrong``."""
    tree = ast.parse(source)
    room = room_of(module)
    found: list[str] = []
    if ast.get_docstring(tree) is None:
        found.append(f"{module}:1: the first statement must be a docstring")
    if room and room not in HEIGHT:
        kind = "holds data, not code" if room in DATA else "is not declared in tests/test_layers.py"
        return [*found, f"{module}:1: the room '{room}' {kind}"]
    for line, target, name in imported_names(tree, module, is_package):
        problem = problem_with_import(room, target, name)
        if problem:
            found.append(f"{module}:{line}: {problem}")
    return found


def problem_with_import(room: str, target: str, name: str | None) -> str | None:
    """Why ``room`` (empty for the package itself) may not import ``target``, or None."""
    top = target.partition(".")[0]
    if target.startswith("<"):
        if target == "<computed>" and room not in PURE:
            return None
        return f"imports {target}: the reader must see what is imported"
    if top in OUTSIDE:
        return f"imports top-level '{top}': its installed name is edgespec.{top}"
    if top in NEVER_IMPORTED:
        return f"imports {top}: it can run code that a peer wrote"
    if top != "edgespec":
        if room in PURE and top in IMPURE_IMPORTS:
            return f"imports {top}: the rooms from decoding down are pure"
        return None
    goal = room_of(target)
    if not goal:
        if name is None:
            return "imports edgespec whole: name the room"
        if name in ROOT_NAMES:
            return None
        goal = name
    if not room:
        return f"imports {goal}: edgespec/__init__.py imports nothing, or every room would"
    if goal in DATA:
        return f"imports {goal}: it holds data, not code"
    if goal not in HEIGHT:
        return f"imports {goal}: no such room is declared in tests/test_layers.py"
    if goal == room or (room, goal) in SIDEWAYS:
        return None
    if (room, goal) in BLIND:
        return f"imports {goal}: {room} does without it"
    if HEIGHT[goal] >= HEIGHT[room]:
        where = "beside" if HEIGHT[goal] == HEIGHT[room] else "above"
        return f"imports {goal}, which lies {where} {room}: imports point down"
    return None


def modules_under(root: Path) -> Iterator[tuple[str, bool, Path]]:
    """Every module of the package as (dotted name, whether it is a package, file)."""
    for folder, prefix in (
        ("edgespec", ("edgespec",)),
        *((name, ("edgespec", name)) for name in sorted(OUTSIDE)),
    ):
        for path in sorted((root / folder).rglob("*.py")):
            parts = (*prefix, *path.relative_to(root / folder).with_suffix("").parts)
            is_package = parts[-1] == "__init__"
            yield ".".join(parts[:-1] if is_package else parts), is_package, path


def breaches_under(root: Path) -> list[str]:
    """Every breach in a checkout, rooms in the wrong place included."""
    found = [
        f"edgespec/{name}: lies beside edgespec/, which has no more than a link to it"
        for name in sorted(OUTSIDE)
        if (place := root / "edgespec" / name).is_dir() and not place.is_symlink()
    ]
    for module, is_package, path in modules_under(root):
        found += breaches(path.read_text(encoding="utf-8"), module, is_package)
    return found


def test_imports_point_down() -> None:
    assert [name for name, _, _ in modules_under(REPOSITORY)], "no module found: wrong folder?"
    assert breaches_under(REPOSITORY) == []


def test_no_two_classes_have_one_name() -> None:
    found: dict[str, list[str]] = {}
    for module, _, path in modules_under(REPOSITORY):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(module)
    assert {name: where for name, where in found.items() if len(where) > 1} == {}


def test_a_long_file_of_the_core_says_why() -> None:
    core = {"tree", "wire", "verify", "policy", "machines", "decoding", "ring", "blocks"}
    for module, _, path in modules_under(REPOSITORY):
        text = path.read_text(encoding="utf-8")
        if room_of(module) in core and text.count("\n") > 400:
            reason = ast.get_docstring(ast.parse(text)) or ""
            assert "400 lines" in reason, f"{module} is long: cut it, or say why in its docstring"


@pytest.mark.parametrize("folder", ["tests", "tools"])
def test_every_other_file_starts_with_a_docstring(folder: str) -> None:
    bare = [
        str(path.relative_to(REPOSITORY))
        for path in sorted((REPOSITORY / folder).rglob("*.py"))
        if ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) is None
    ]
    assert bare == []


# The checker itself: each snippet breaks one rule, and its message must say which.


@pytest.mark.parametrize(
    ("module", "line", "message"),
    [
        ("edgespec.tree.grow", "import edgespec.decoding.stage", "above tree"),
        ("edgespec.tree.grow", "from edgespec.machines import stage", "above tree"),
        ("edgespec.tree.grow", "from edgespec import machines", "above tree"),
        ("edgespec.tree.grow", "from ..machines import stage", "above tree"),
        ("edgespec.tree.grow", "from .. import machines", "above tree"),
        ("edgespec.tree.grow", "from edgespec.wire import codec", "beside tree"),
        ("edgespec.policy.flowspec", "from edgespec.verify import walk", "beside policy"),
        ("edgespec.decoding.stage", "from edgespec.model import block", "above decoding"),
        ("edgespec.drafting.eagle", "from edgespec.backends import torch", "beside drafting"),
        ("edgespec.net.inproc", "from edgespec.drafting import base", "beside net"),
        ("edgespec.net.blocks", "from edgespec.model import loader", "does without it"),
        ("edgespec.drafting.eagle", "from edgespec.machines import events", "does without it"),
        ("edgespec.ring.member", "from edgespec.decoding import stage", "beside ring"),
        ("edgespec.model.block", "from edgespec.backends import base", "above model"),
        ("edgespec.sim.world", "from edgespec.runtime import loop", "beside sim"),
        ("edgespec.serving.api", "from edgespec.daemon import main", "above serving"),
        ("edgespec.daemon.main", "from edgespec.cli import main", "above daemon"),
        ("edgespec.daemon.main", "from ..cli import main", "above daemon"),
        ("edgespec.errors", "from edgespec.config import Config", "above errors"),
        ("edgespec.errors", "from .config import Config", "above errors"),
        ("edgespec.cli.main", "import daemon.main", "edgespec.daemon"),
        ("edgespec.cli.main", "from cli import demo", "edgespec.cli"),
        ("edgespec.cli.main", "from edgespec.gossip import x", "no such room"),
        ("edgespec.cli.main", "from edgespec import models", "data, not code"),
        ("edgespec.daemon.profiles", "import edgespec.profiles", "data, not code"),
        ("edgespec.daemon.service", "import edgespec.systemd", "data, not code"),
        ("edgespec.cli.main", "from edgespec import *", "no such room"),
        ("edgespec.cli.main", "import edgespec", "name the room"),
        ("edgespec.cli.main", "from ... import other", "beyond the package"),
        ("edgespec.gossip.tell", "import json", "'gossip' is not declared"),
        ("edgespec.models.load", "import json", "'models' holds data"),
        ("edgespec.net.zmq", "import pickle", "can run code"),
        ("edgespec.tree.grow", "import torch", "pure"),
        ("edgespec.tree.grow", "import torch.nn.functional as functional", "pure"),
        ("edgespec.tree.grow", "from torch import nn", "pure"),
        ("edgespec.config", "import os.path", "pure"),
        ("edgespec.decoding.stage", "from time import monotonic", "pure"),
        ("edgespec.decoding.stage", "def f():\n    import time", "pure"),
        ("edgespec.decoding.stage", "if TYPE_CHECKING:\n    import zmq", "pure"),
        ("edgespec.decoding.stage", "try:\n    import asyncio\nexcept E:\n    pass", "pure"),
        ("edgespec.decoding.stage", "importlib.import_module('threading')", "pure"),
        ("edgespec.decoding.stage", "import_module('..runtime.loop')", "above decoding"),
        ("edgespec.decoding.stage", "__import__(name)", "must see"),
    ],
)
def test_a_breach_is_found(module: str, line: str, message: str) -> None:
    found = breaches(f'"""Purpose."""\n{line}\n', module)
    assert len(found) == 1, found
    assert message in found[0]
    assert found[0].startswith(f"{module}:")


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("edgespec.tree.grow", "import numpy as np"),
        ("edgespec.tree.grow", "from edgespec.errors import EdgespecError"),
        ("edgespec.tree.grow", "from . import merge"),
        ("edgespec.config", "from edgespec.errors import ConfigError"),
        ("edgespec.policy.flowspec", "from edgespec.planning import cost"),
        ("edgespec.model.block", "import torch\nfrom edgespec.tree import visibility"),
        ("edgespec.backends.torch", "import torch\nfrom edgespec.drafting import base"),
        ("edgespec.backends.torch", "from edgespec.model import block"),
        ("edgespec.drafting.eagle", "from edgespec.model import cache"),
        ("edgespec.runtime.loop", "import time, threading, zmq"),
        ("edgespec.cli.main", "from edgespec.daemon import main\nfrom edgespec import __version__"),
        ("edgespec.cli.main", "importlib.import_module(f'edgespec.cli.{name}')"),
    ],
)
def test_an_honest_import_passes(module: str, line: str) -> None:
    assert breaches(f'"""Purpose."""\n{line}\n', module) == []


def test_a_relative_import_in_a_package_file_counts_from_the_package() -> None:
    source = '"""Purpose."""\nfrom . import stage\nfrom ..runtime import loop\n'
    found = breaches(source, "edgespec.decoding", is_package=True)
    assert len(found) == 1
    assert "imports runtime" in found[0]


@pytest.mark.parametrize("source", ["", "x = 1\n", "import json\n", '# Only a comment.\nf"{x}"\n'])
def test_a_missing_docstring_is_found(source: str) -> None:
    assert breaches(source, "edgespec.tree.grow") == [
        "edgespec.tree.grow:1: the first statement must be a docstring"
    ]


def test_the_package_itself_imports_no_room() -> None:
    found = breaches('"""Purpose."""\nfrom edgespec.tree import grow\n', "edgespec", True)
    assert len(found) == 1
    assert "imports nothing" in found[0]


def test_a_whole_checkout_is_read(tmp_path: Path) -> None:
    files = {
        "edgespec/__init__.py": '"""Fine."""\n',
        "edgespec/tree/deep/inner.py": '"""Bad."""\nimport random\n',
        "edgespec/gossip.py": '"""Undeclared."""\n',
        "edgespec/cli/__init__.py": '"""In the wrong place."""\n',
        "daemon/main.py": '"""Bad."""\nfrom edgespec.cli import demo\n',
        "cli/main.py": '"""Fine."""\nfrom edgespec.daemon import main\n',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = breaches_under(tmp_path)
    assert [entry.partition(":")[0] for entry in found] == [
        "edgespec/cli",
        "edgespec.gossip",
        "edgespec.tree.deep.inner",
        "edgespec.daemon.main",
    ]
