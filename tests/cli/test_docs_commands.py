"""Every command line in the documentation is read as the real command line reads it.

Lines in blocks are parsed whole: names, options, values, how many arguments there are. Of synopses
and of what stands in running text the names of commands and options are compared. Some lines are
run as they stand. What takes root, boards, the hub or files of a reader's own cannot be: a page
with such a line carries MARK. The commands themselves are all run by other tests.
"""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from support.commands import run_here

from edgespec.cli.main import application
from edgespec.planning.catalogue import MODELS
from edgespec.plugins import OWN_POLICIES
from edgespec.policy.registry import POLICIES

REPOSITORY = Path(__file__).resolve().parents[2]
REFERENCE = sorted([REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")])
PAGES = REFERENCE + sorted((REPOSITORY / "docs").glob("*/*.md"))
IN_A_BLOCK = re.compile(
    r"^ {4}(?:\$ )?((?:sudo )?(?:\S*/)?edgespec [a-z].*(?:\n {8,}\S.*)*)", re.MULTILINE
)
IN_A_LINE = re.compile(r"`((?:sudo )?(?:\S*/)?edgespec [a-z][^`]*)`")
OPTION = re.compile(r"\[?(--[a-z0-9-]+)")
IN_WORDS = re.compile(r"\[[a-z][^]]*\]")  # [options of a request]
SYNOPSIS = re.compile(r"\[|…|\|(?! )")
PLACEHOLDER = re.compile(r"\b[A-Z][A-Z0-9_]*\b")
EXAMPLES = {"MODEL": "smollm2-135m", "BASE": "smollm2-135m", "N": "2"}
"""Of placeholders that a parser would not take as they are."""

MARK = "not run by a test as they stand"
OF_A_READER = re.compile(rf"sudo |/opt/|/var/|/srv/|edge-|\.jsonl?\b|{PLACEHOLDER.pattern}")
OF_THE_HUB = re.compile(
    rf"(?:--model|--draft|pull|shard) (?:\S+/|(?:{'|'.join(map(re.escape, MODELS))})\b)"
)
NO_DOWNLOAD = ("plan", "simulate")
RUN = (  # in this order, in one new cluster
    "init --stages 3",
    "key new laptop",
    "key list",
    "key revoke laptop",
    "token new",
    "models",
    "models qwen3-8b",
)
TOP: Any = typer.main.get_command(application())


def in_blocks(page: str) -> list[str]:
    """The command lines of a page's blocks, without comments."""
    found = IN_A_BLOCK.findall(page.replace("\\\n", "\n"))
    return [re.sub(r"\s#.*", "", line).strip() for line in found]


def in_text(page: str) -> list[str]:
    return IN_A_LINE.findall(page)


def command_of(line: str) -> tuple[Any, list[str]]:
    """The command that a line names, and what follows it, up to where the shell's part begins."""
    lexer = shlex.shlex(line.partition("edgespec ")[2], posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    words: list[str] = []
    for word in lexer:
        if set(word) <= set("();<>|&"):
            break
        words.append(word)
    command = TOP
    while words and words[0] in getattr(command, "commands", ()):
        command = command.commands[words.pop(0)]
    return command, words


def problems_of(line: str) -> Iterator[str]:
    """What there is not, of what a command line names."""
    command, words = command_of(IN_WORDS.sub("", line).replace("'", ""))
    if command is TOP:
        yield f"there is no command in: {line}"
    known = {"--help"}.union(*(option.opts + option.secondary_opts for option in command.params))
    for word in words:
        if word == "--":
            return  # what follows is another command's
        option = OPTION.match(word)
        if option and option[1] not in known:
            yield f"there is no {option[1]} in: {line}"


def parsed(line: str) -> None:
    """Read a whole line. Raises the error that its reader would see."""
    command, words = command_of(PLACEHOLDER.sub(lambda it: EXAMPLES.get(it[0], it[0]), line))
    for word in (word for word in words if word.endswith(".gguf") and "/" not in word):
        Path(word).touch()  # it is looked for
    command.make_context(command.name, words)


def needs_a_mark(line: str) -> bool:
    downloads = line.partition("edgespec ")[2].split()[0] not in NO_DOWNLOAD
    of_the_hub = downloads and OF_THE_HUB.search(line.replace("smollm2-135m", ""))
    return bool(of_the_hub or OF_A_READER.search(line))


@pytest.fixture
def beside_the_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In a folder of a reader's own, who saved the page's modules there."""
    shutil.copytree(REPOSITORY / "docs" / "examples", tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    OWN_POLICIES.clear()
    POLICIES.pop("chain", None)
    for module in ("chain", "bigram"):
        sys.modules.pop(module, None)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
@pytest.mark.usefixtures("beside_the_examples")
def test_every_command_line_can_be_given(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    lines = in_blocks(text)
    assert [problem for line in lines + in_text(text) for problem in problems_of(line)] == []
    for line in lines:
        if page.stem != "commands" and not SYNOPSIS.search(line):
            try:
                parsed(line)
            except Exception as error:
                raise AssertionError(f"{line}: {error}") from error


@pytest.mark.parametrize("page", REFERENCE, ids=lambda page: str(page.stem))
def test_a_page_says_which_lines_cannot_be_run_here(page: Path) -> None:
    """Nor does it say so without need."""
    text = " ".join(page.read_text(encoding="utf-8").split())
    lines = in_blocks(page.read_text(encoding="utf-8")) if page.stem != "commands" else []
    whole = [line for line in lines if needs_a_mark(line) and not SYNOPSIS.search(line)]
    assert (MARK in text) == bool(whole), whole


def test_every_command_is_run_by_a_test() -> None:
    tests = "".join(
        path.read_text(encoding="utf-8")
        for path in Path(__file__).parent.glob("test_*.py")
        if path.name != Path(__file__).name
    )
    assert [name for name in TOP.commands if f'"{name}"' not in tests] == []


def test_some_lines_are_run_as_they_stand(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EDGESPEC_CLUSTER", str(tmp_path / "cluster"))
    texts = [page.read_text(encoding="utf-8") for page in REFERENCE]
    written = {" ".join(line.split()) for text in texts for line in in_blocks(text)}
    told = "\n".join(written)
    for line in RUN:
        assert re.search(rf"^edgespec {line}\b", told, re.MULTILINE), f"no page has {line}"
        done = run_here(capfd, monkeypatch, *line.split())
        assert done.code == 0, done


def test_command_lines_are_found() -> None:
    page = (
        "Say `edgespec join TOKEN` or:\n\n    sudo /opt/edgespec serve \\\n        --port 1 # a\n"
    )
    assert list(map(str.split, in_blocks(page))) == [
        ["sudo", "/opt/edgespec", "serve", "--port", "1"]
    ]
    assert in_text(page) == ["edgespec join TOKEN"]


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


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("edgespec init --stages three", "valid integer"),
        ("edgespec key new", "name"),
        ("edgespec token list all", "extra argument"),
        ("edgespec pull no-such-model", "no model is called so"),
    ],
)
def test_a_line_that_would_be_refused_is_found(line: str, said: str) -> None:
    with pytest.raises(Exception, match=said):
        parsed(line)


def test_what_follows_for_the_shell_is_left_out() -> None:
    parsed("edgespec models --json | head")
    parsed("edgespec init --stages 3 && edgespec serve")
    parsed("git diff | edgespec prompt --system 'Write.' > answer.txt")


@pytest.mark.parametrize(
    ("line", "needs"),
    [
        ("edgespec serve --http none", False),
        ("edgespec demo --model smollm2-135m", False),
        ("edgespec plan --model llama-2-13b --devices 3*jetson-orin-nano-8gb", False),
        ("edgespec init --model llama-2-13b", True),
        ("edgespec shard meta-llama/Llama-2-13b-hf", True),
        ("edgespec join TOKEN", True),
        ("sudo edgespec service status", True),
    ],
)
def test_what_cannot_be_run_here_is_known(line: str, needs: bool) -> None:
    assert needs_a_mark(line) == needs


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
