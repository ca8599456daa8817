"""What `edgespec --help` shows: every command in a group, and examples that can be entered."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys

import pytest
import typer.main
from support.commands import run_here

from edgespec.cli.main import EXAMPLES, EXAMPLES_OF, GROUPS, application


def test_every_command_is_in_one_group(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    grouped = [word for members in GROUPS.values() for word in members]
    commands = getattr(typer.main.get_command(application()), "commands", {})
    assert sorted(grouped) == sorted(commands)
    out = run_here(capfd, monkeypatch, "--help").out
    assert all(f" {group} " in out for group in GROUPS)
    assert all(re.search(rf"^│ {word} ", out, re.MULTILINE) for word in grouped)
    assert "Examples:" in out


def test_what_is_told_of_a_command_is_its_own_help() -> None:
    told = getattr(typer.main.get_command(application(are_told=True)), "commands", {})
    commands = getattr(typer.main.get_command(application()), "commands", {})
    assert told.keys() == commands.keys()
    for name, command in commands.items():
        assert told[name].help == inspect.cleandoc(command.help)


def test_help_imports_no_more_than_it_shows() -> None:
    """What all commands need together takes most of a second, and seconds on a small board."""
    code = (
        "import sys; sys.argv = ['edgespec', '--help']\n"
        "from edgespec.cli.main import main\n"
        "try: main()\n"
        "finally: print(sorted(sys.modules), file=sys.stderr)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    imported = re.findall(r"'([\w.]+)'", run.stderr)
    assert run.returncode == 0
    assert "rich.console" in imported
    assert not {"numpy", "zmq", "msgspec", "psutil", "asyncio"} & {*imported}
    ours = [name for name in imported if name.startswith("edgespec.")]
    assert len(ours) <= 8, ours


@pytest.mark.parametrize("command", EXAMPLES_OF)
def test_an_example_is_of_its_command(command: str) -> None:
    assert f"edgespec {command}" in EXAMPLES_OF[command]


def test_the_examples_are_of_commands_that_there_are() -> None:
    words = re.findall(r"edgespec (\w+)", " ".join([EXAMPLES, *EXAMPLES_OF.values()]))
    assert words
    assert set(words) <= {word for members in GROUPS.values() for word in members}
