"""What `edgespec --help` shows: every command in a group, and examples that can be entered."""

from __future__ import annotations

import re

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


@pytest.mark.parametrize("command", EXAMPLES_OF)
def test_an_example_is_of_its_command(command: str) -> None:
    assert f"edgespec {command}" in EXAMPLES_OF[command]


def test_the_examples_are_of_commands_that_there_are() -> None:
    words = re.findall(r"edgespec (\w+)", " ".join([EXAMPLES, *EXAMPLES_OF.values()]))
    assert words
    assert set(words) <= {word for members in GROUPS.values() for word in members}
