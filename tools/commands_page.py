"""Write what pages take from the command line and the catalogue: run it, or `make docs`.

A part of docs/commands.md or docs/models.md between `<!-- NAME -->` and `<!-- end -->` is
generated: NAME is a command, or one of the lists `commands`, `options of a request`, `shared
options` and `known models`. The rest is written by hand.
"""

from __future__ import annotations

import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer.main

from edgespec.cli.main import application
from edgespec.cli.models import parameters_text
from edgespec.door.asking import RequestSettings
from edgespec.planning.catalogue import MODELS, FittingDraft

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "commands.md"
MODELS_PAGE = DOCS / "models.md"
PART = re.compile(r"<!-- ([a-z][a-z ]+) -->\n.*?<!-- end -->", re.DOTALL)
REQUEST = [field.name for field in fields(RequestSettings)]
SHARED_BY = 3
"""Commands that have an option from which on it is listed once, for all of them."""


def commands(command: Any, name: str = "edgespec") -> Iterator[tuple[str, Any]]:
    """The commands below one, by their whole names."""
    for word, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, f"{name} {word}")
    if not hasattr(command, "commands"):
        yield name, command


COMMANDS = dict(commands(typer.main.get_command(application())))


def is_option(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "option")


def identity(option: Any) -> tuple[str, str]:
    return option.name, option.help


def users() -> dict[tuple[str, str], list[str]]:
    """The commands that have an option with the same help."""
    found: dict[Any, list[str]] = defaultdict(list)
    for name, command in COMMANDS.items():
        for option in filter(is_option, command.params):
            found[identity(option)].append(name)
    return found


def value(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


def synopsis(name: str, command: Any) -> str:
    """The command line, with what may be left out in brackets."""
    required: list[str] = []
    optional: list[str] = []
    last: list[str] = []
    request = all(field in [p.name for p in command.params] for field in REQUEST)
    for one in command.params:
        if not is_option(one):
            word = value(one) if one.required or one.nargs == -1 else f"[{value(one)}]"
            (last if one.nargs == -1 else required).append(word)
        elif not (request and one.name in REQUEST):
            word = one.opts[0] if one.is_flag else f"{one.opts[0]} {value(one)}"
            word = "/".join((word, *one.secondary_opts)) + ("..." if one.multiple else "")
            (required if one.required else optional).append(word if one.required else f"[{word}]")
    if request:
        optional.append("[options of a request]")
    line = " ".join(word.replace(" ", "\0") for word in (*required, *optional, *last))
    indent = " " * (len(name) + 5)
    return textwrap.fill(
        line, 110, initial_indent=f"    {name} ", subsequent_indent=indent, break_on_hyphens=False,
        break_long_words=False,
    ).replace("\0", " ")  # fmt: skip


def default(option: Any) -> str:
    """What a table shows; nothing where the help tells it."""
    told = option.show_default is False or "Default:" in option.help
    value = option.default
    if told or value is None or value is False or value == "":
        return ""
    if value is True:
        return f"`{option.opts[0]}`"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f"`{' '.join(text.split())}`"


def row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def meaning(parameter: Any) -> str:
    variable = f" Or ${parameter.envvar} has it." if parameter.envvar else ""
    return f"{parameter.help}{variable}"


def own_options(command: Any) -> Iterator[str]:
    """A table of the arguments and of the options that few other commands have."""
    shared = users()
    rows = []
    for one in command.params:
        if not is_option(one):
            rows.append(row(f"`{value(one)}`", "", meaning(one)))
        elif len(shared[identity(one)]) < SHARED_BY and one.name != "help":
            rows.append(row(f"`{one.opts[0]}`", default(one), meaning(one)))
    if rows:
        yield from ("", row("option", "default", "meaning"), row("---", "---", "---"), *rows)


def shared_options(*, of_request: bool) -> Iterator[str]:
    """A table of the options that several commands have; one line for each of their defaults."""
    found: dict[Any, list[str]] = defaultdict(list)
    shared = users()
    for name, command in COMMANDS.items():
        for one in filter(is_option, command.params):
            many = len(shared[identity(one)]) >= SHARED_BY
            if many and of_request == (one.name in REQUEST):
                key = (f"`{one.opts[0]}`", default(one), meaning(one))
                found[key].append(name.removeprefix("edgespec "))
    yield from (row("option", "default", "meaning", "commands"), row(*["---"] * 4))
    order = list(dict.fromkeys(option for option, *_ in found))
    for cells in sorted(found, key=lambda cells: order.index(cells[0])):
        yield row(*cells, ", ".join(found[cells]))


def known_models() -> Iterator[str]:
    """A table of the catalogue."""
    yield row("name", "size", "from the hub", "licence", "`--draft`", "run by us", "pages")
    yield row(*["---"] * 7)
    for name, model in MODELS.items():
        pages = dict.fromkeys(draft.page for draft in model.drafts)
        yield row(
            f"`{name}`",
            parameters_text(model.parameters),
            "<br>".join(f"`{one}`" for one in (model.hub, model.gguf) if one),
            model.licence,
            "<br>".join(map(draft_text, model.drafts)),
            "yes" if model.tried else "",
            " ".join(f"[{number}]({page})" for number, page in enumerate(pages, 1)),
        )


def draft_text(draft: FittingDraft) -> str:
    return f"`{draft.source}`: `{draft.weights}`"


def part(name: str) -> Iterator[str]:
    """The lines of a generated part."""
    if name == "commands":
        width = max(map(len, COMMANDS))
        for command, at in COMMANDS.items():
            yield f"    {command:{width}}  # {at.help.partition('.')[0]}"
    elif name in ("options of a request", "shared options"):
        yield from shared_options(of_request=name == "options of a request")
    elif name == "known models":
        yield from known_models()
    else:
        yield synopsis(name, COMMANDS[name])
        yield from own_options(COMMANDS[name])


def generated(page: str) -> str:
    """The page with its generated parts as they should be. Raises KeyError for an unknown one."""

    def fill(found: re.Match[str]) -> str:
        return "\n".join((f"<!-- {found[1]} -->", *part(found[1]), "<!-- end -->"))

    return PART.sub(fill, page)


if __name__ == "__main__":
    for path in (PAGE, MODELS_PAGE):
        path.write_text(generated(path.read_text(encoding="utf-8")), encoding="utf-8")
