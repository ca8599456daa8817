"""The `edgespec` command: its subcommands, and how errors leave it."""

from __future__ import annotations

import errno
import importlib
import inspect
import io
import os
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from edgespec import __version__
from edgespec.errors import (
    EXIT_CANCELLED,
    EXIT_FAILED,
    EXIT_NO_READER,
    EXIT_USAGE,
    AddressUnavailable,
    ConfigError,
    EdgespecError,
)
from edgespec.net.slowness import started
from edgespec.types.shown import shown

GROUPS = {
    "Try it": ("demo", "models", "pull"),
    "A cluster": ("init", "serve", "join", "leave"),
    "Ask": ("prompt", "chat", "api"),
    "Look": ("status", "top", "doctor"),
    "Plan and measure": ("plan", "profile", "simulate", "bench", "replay"),
    "Prepare models": ("shard", "train"),
    "Access, and starting at boot": ("token", "device", "key", "service"),
}
"""The commands as --help shows them; each is a function or a group of that name in the module of
that name."""
COMMANDS = tuple(word for words in GROUPS.values() for word in words)
OF_RINGS = ("demo", "init", "serve", "bench", "simulate", "replay")
"""Those that take all options of a ring."""
OTHERS_WORDS = {
    "run": "`edgespec init --model NAME`, `edgespec serve` and then `edgespec chat`",
    "start": "`edgespec serve`",
    "up": "`edgespec serve`",
    "list": "`edgespec models`",
    "ls": "`edgespec models`",
    "show": "`edgespec models`",
    "ps": "`edgespec status`",
    "stop": "Ctrl-C where `edgespec serve` runs, or `edgespec service uninstall`",
    "down": "Ctrl-C where `edgespec serve` runs, or `edgespec service uninstall`",
    "rm": "`hf cache rm model/HUB_ID`, as models lie in the hub's own cache",
}
"""Commands of Ollama and others, which many know, and what does the same here."""

EXAMPLES = """Examples:

edgespec demo   (a ring of processes on this machine answers a question)

edgespec init --model qwen3-8b --draft qwen3-0.6b --stages 2   (then `edgespec serve`)

edgespec join TOKEN   (on each other device; later `edgespec join`)

edgespec chat

Exit codes: 0 done, 1 failed, 2 wrong option, setting, model or prompt, 130 Ctrl-C."""
EXAMPLES_OF = {
    "init": "edgespec init --model qwen3-8b --draft qwen3-0.6b --stages 2",
    "serve": "edgespec serve --http 0.0.0.0:8000   (after `edgespec key new NAME`)",
    "join": "edgespec join edge-…   (the first time; then `edgespec join`)",
    "prompt": 'git diff | edgespec prompt --system "Write a commit message."',
    "chat": 'edgespec chat --system "Answer in one sentence."',
    "plan": "edgespec plan --model llama-2-13b --draft tinyllama-1.1b "
    '--devices "3*jetson-orin-nano-8gb"',
    "simulate": "edgespec simulate --stages 4 --limit 4",
}
"""What --help of a command shows below its options."""


class _Commands(TyperGroup):
    """Knows the words of others."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and (ours := OTHERS_WORDS.get(args[0])):
            raise ConfigError(f"there is no command {args[0]} here; use {ours}")
        return super().resolve_command(ctx, args)


@cache
def application(word: str = "", *, are_told: bool = False) -> typer.Typer:
    """The command line; of one of COMMANDS alone if `word` names it, or with what is told of all of
    them if they `are_told`: importing all takes most of a second on a desktop, and ten times as
    long on a small board."""
    app = typer.Typer(
        name="edgespec",
        cls=_Commands,
        help="Run one large language model across a handful of small boards.",
        epilog=EXAMPLES,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_version)
    for group, names in GROUPS.items():
        for name in names:
            if are_told:
                app.command(name, help=_told(name), rich_help_panel=group)(lambda: None)
            elif word in ("", name):
                _add(app, name, group)
    return app


def _told(name: str) -> str:
    """The help of a command, read from its file: the docstring of its function, or what is passed
    to the group."""
    text = Path(__file__).with_name(f"{name}.py").read_text("utf-8")
    function = rf'^def {name}\(.*?^\) -> None:\n    """(.*?)"""'
    found = re.search(rf'{function}|^{name} = typer\.Typer\(\s*help="(.*?)"', text, re.M | re.S)
    assert found is not None, f"{name} is a command"
    return inspect.cleandoc(found[1] or found[2])


def _add(app: typer.Typer, name: str, group: str) -> None:
    from edgespec.cli import options

    command = getattr(importlib.import_module(f"edgespec.cli.{name}"), name)
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name, rich_help_panel=group)
        return
    kind = options.RingCommand if name in OF_RINGS else None
    example = EXAMPLES_OF.get(name)
    below = f"Example: {example}" if example else None
    app.command(cls=kind, rich_help_panel=group, epilog=below)(command)


def _version(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if version:
        print(f"edgespec {__version__}")
        raise typer.Exit


def main() -> None:
    """Run a command. An EdgespecError becomes one line on standard error, not a traceback."""
    _fill_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # "?" for what the terminal cannot show
    try:
        word = next((word for word in sys.argv[1:2] if word in COMMANDS), "")
        command = application(word, are_told=not set(COMMANDS).intersection(sys.argv))
        started()
        try:
            command()
        finally:
            sys.stdout.flush()
    except EdgespecError as problem:
        print(f"edgespec: error: {shown(str(problem))}", file=sys.stderr)
        # systemd restarts a service unless it exits with EXIT_USAGE: after a power cut the network
        # may be up later than the board.
        wrong = isinstance(problem, ConfigError) and not isinstance(problem, AddressUnavailable)
        sys.exit(EXIT_USAGE if wrong else EXIT_FAILED)
    except OSError as problem:
        if problem.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what the exit flushes
        if problem.errno == errno.EPIPE:
            sys.exit(EXIT_NO_READER)
        print(f"edgespec: error: cannot write: {problem.strerror}", file=sys.stderr)
        sys.exit(EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(EXIT_CANCELLED)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # click makes it a failure
            sys.exit(EXIT_NO_READER)
        raise


def _fill_streams() -> None:
    """Let standard streams that were closed (`>&-`) be nowhere: no socket may get their numbers,
    and no part of the program has to ask for them."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


if __name__ == "__main__":
    main()
