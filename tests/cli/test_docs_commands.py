"""Every command line in the documentation names a command and options that there are."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from edgespec.cli.main import application

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = sorted([REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")])
IN_A_BLOCK = re.compile(r"^ {4}((?:sudo )?(?:\S*/)?edgespec [a-z].*(?:\n {8,}\S.*)*)", re.MULTILINE)
IN_A_LINE = re.compile(r"`((?:sudo )?(?:\S*/)?edgespec [a-z][^`]*)`")
OPTION = re.compile(r"\[?(--[a-z0-9-]+)")
IN_WORDS = re.compile(r"\[[a-z][^]]*\]")  # [options of a request]
TOP = typer.main.get_command(application())


def lines_of(page: str) -> list[str]:
    """The command lines of a page, in blocks and in running text, without comments."""
    found = IN_A_BLOCK.findall(page.replace("\\\n", "\n")) + IN_A_LINE.findall(page)
    return [re.sub(r"\s#.*", "", line) for line in found]


def problems_of(line: str) -> Iterator[str]:
    """What there is not, of what a command line names."""
    words = IN_WORDS.sub("", line.partition("edgespec ")[2]).split()
    command = TOP
    while words and words[0] in getattr(command, "commands", ()):
        command = command.commands[words.pop(0)]
    if command is TOP:
        yield f"there is no command in: {line}"
    known = {"--help"}.union(*(option.opts + option.secondary_opts for option in command.params))
    for word in words:
        if word == "--":
            return  # what follows is another command's
        option = OPTION.match(word)
        if option and option[1] not in known:
            yield f"there is no {option[1]} in: {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_line_can_be_given(page: Path) -> None:
    lines = lines_of(page.read_text(encoding="utf-8"))
    assert [problem for line in lines for problem in problems_of(line)] == []


def test_command_lines_are_found() -> None:
    page = (
        "Say `edgespec join TOKEN` or:\n\n    sudo /opt/edgespec serve \\\n        --port 1 # a\n"
    )
    assert list(map(str.split, lines_of(page))) == [
        ["sudo", "/opt/edgespec", "serve", "--port", "1"],
        ["edgespec", "join", "TOKEN"],
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("edgespec jion TOKEN", "there is no command in: edgespec jion TOKEN"),
        ("edgespec token new --use 1", "there is no --use in: edgespec token new --use 1"),
        ("edgespec join [--metric HOST]", "there is no --metric in: edgespec join [--metric HOST]"),
    ],
)
def test_what_there_is_not_is_found(line: str, problem: str) -> None:
    assert list(problems_of(line)) == [problem]


def test_the_page_of_commands_is_generated() -> None:
    """A command, option, default or help text that changed is on the page after `make docs`."""
    tool = runpy.run_path(str(REPOSITORY / "tools" / "commands_page.py"))
    models = tool["MODELS_PAGE"].read_text(encoding="utf-8")
    assert "<!-- known models -->" in models
    assert models == tool["generated"](models)
    page = tool["PAGE"].read_text(encoding="utf-8")
    assert page == tool["generated"](page)
    parts = {found[1] for found in tool["PART"].finditer(page)}
    assert parts == {"commands", "options of a request", "shared options", *tool["COMMANDS"]}
