"""Every file, test and identifier that the documentation names exists.

Names are checked in code spans, in CamelCase and snake_case, on the pages that describe the code;
other pages name settings of other programs too. A name exists if the product has it as an
identifier or as a text.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
FOLDERS = ("cli", "daemon", "docs", "edgespec", "profiles", "systemd", "tests", "tools")
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md"]
PAGES += sorted((REPOSITORY / "docs").glob("*.md"))
OF_CODE = {"CONTRIBUTING", "architecture", "blocks", "drafts", "planning", "policies", "transfer"}
OF_OTHERS = {"True", "VmRSS", "Anonymous", "malloc_trim", "pfifo_fast", "_meta_registrations"}
"""Names in Python, Linux, glibc and torch."""
FILE = re.compile(rf"[\w./-]*\w\.py\b|(?<![\w./-])(?:{'|'.join(FOLDERS)})/[\w./-]*\w")
TEST = re.compile(r"\btest_\w+\b(?!\.py)")
SCRIPT = re.compile(r"\b(?:python|pytest)\b[^\n`]*?\b((?:tests|tools)/[\w/]+\.py)")
DEFINED = (ast.ClassDef, ast.FunctionDef)
EXPRESSION = re.compile(r"[\w.]+(?:\([\w, .=·]*\))?")
NAME = re.compile(r"\b(?:[A-Z][a-z0-9]+(?:[A-Z]\w*)?|_?[a-zA-Z0-9]+(?:_[a-zA-Z0-9]+)+)\b")


def missing(page: str, files: set[str], tests: set[str], names: set[str]) -> Iterator[str]:
    """What a page names and what does not exist; no `names`: only files and tests."""
    for file in FILE.findall(page):
        if not any(f"/{there}".endswith(f"/{file}") for there in files):
            yield file
    yield from (test for test in TEST.findall(page) if test not in tests)
    for span in (" ".join(found.split()) for found in re.findall("`([^`]+)`", page)):
        if names and span not in names and EXPRESSION.fullmatch(span):
            yield from (name for name in NAME.findall(span) if name not in names | tests)


@pytest.fixture(scope="module")
def known() -> tuple[set[str], set[str], set[str]]:
    """Files and folders; names of tests; identifiers and texts of the product."""
    paths = [path for folder in FOLDERS for path in (REPOSITORY / folder).rglob("*")]
    tests, names = set(), {*OF_OTHERS}
    for path in (path for path in paths if path.suffix == ".py"):
        source = path.read_text(encoding="utf-8")
        if path.is_relative_to(REPOSITORY / "tests"):
            tests |= {path.stem, *re.findall(r"def (test_\w+)", source)}
            continue
        names.add(path.stem)
        for node in ast.walk(ast.parse(source)):
            held = (getattr(node, field, None) for field in ("id", "attr", "arg", "name", "value"))
            names.update(value for value in held if isinstance(value, str))
    return {path.relative_to(REPOSITORY).as_posix() for path in paths} | {*FOLDERS}, tests, names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.stem))
def test_what_a_page_names_exists(page: Path, known: tuple[set[str], set[str], set[str]]) -> None:
    files, tests, names = known
    names = names if page.stem in OF_CODE else set()
    assert set(missing(page.read_text(encoding="utf-8"), files, tests, names)) == set()


def test_a_result_names_commands_that_exist() -> None:
    """A result is not rewritten; whoever moves what made it says so there."""
    for page in sorted((REPOSITORY / "docs" / "results").glob("*.md")):
        scripts = SCRIPT.findall(page.read_text(encoding="utf-8"))
        assert [path for path in scripts if not (REPOSITORY / path).exists()] == [], page.name


MECHANISM = re.compile(r"`([\w/]+\.py)` `([\w.]+)`")


def places(source: str) -> set[str]:
    """Classes, functions and methods of a file, as `Class.method`."""
    top = [node for node in ast.parse(source).body if isinstance(node, DEFINED)]
    below = [(one.name, two) for one in top for two in one.body if isinstance(two, DEFINED)]
    return {node.name for node in top} | {f"{name}.{node.name}" for name, node in below}


def test_every_mechanism_of_a_paper_is_where_the_page_says() -> None:
    """A file below edgespec/, and what in it is named behind it."""
    page = (REPOSITORY / "docs" / "results" / "papers.md").read_text(encoding="utf-8")
    found = MECHANISM.findall(page)
    assert len(found) >= 20
    for file, name in found:
        path = REPOSITORY / "edgespec" / file
        assert name in places(path.read_text(encoding="utf-8")), f"{file} has no {name}"


def test_a_name_that_is_gone_is_found() -> None:
    page = "`Retain(epoch)` `tree/gone.py` `pytest tests/test_x.py` `test_y` `a.old_name` `plain`"
    there = ({"edgespec/tree/there.py", "tests/test_x.py"}, {"test_x"}, {"Retain", "epoch"})
    assert set(missing(page, *there)) == {"old_name", "test_y", "tree/gone.py"}
    assert list(missing("`tree/there.py` `Retain`", *there)) == []
