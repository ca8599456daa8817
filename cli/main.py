"""The `edgespec` command: its subcommands, and how errors leave it."""

from __future__ import annotations

import io
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from edgespec import __version__
from edgespec.cli import options
from edgespec.cli.api import api
from edgespec.cli.bench import bench
from edgespec.cli.chat import chat
from edgespec.cli.demo import demo
from edgespec.cli.device import device
from edgespec.cli.doctor import doctor
from edgespec.cli.init import init
from edgespec.cli.join import join
from edgespec.cli.key import key
from edgespec.cli.leave import leave
from edgespec.cli.models import models
from edgespec.cli.plan import plan
from edgespec.cli.profile import profile
from edgespec.cli.prompt import prompt
from edgespec.cli.pull import pull
from edgespec.cli.serve import serve
from edgespec.cli.service import service
from edgespec.cli.shard import shard
from edgespec.cli.simulate import simulate
from edgespec.cli.status import status
from edgespec.cli.token import token
from edgespec.cli.top import top
from edgespec.cli.train import train
from edgespec.daemon.process import EXIT_CANCELLED, EXIT_FAILED, EXIT_USAGE
from edgespec.errors import AddressUnavailable, ConfigError, EdgespecError

OTHERS_WORDS = {
    "run": "`edgespec init --model NAME`, `edgespec serve` and then `edgespec chat`",
    "list": "`edgespec models`",
    "ps": "`edgespec status`",
    "stop": "Ctrl-C where `edgespec serve` runs, or `edgespec service uninstall`",
    "rm": "`hf cache rm model/HUB_ID`, as models lie in the hub's own cache",
}
"""Commands of Ollama, which many know, and what does the same here."""


class _Commands(TyperGroup):
    """Knows the words of others."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and (ours := OTHERS_WORDS.get(args[0])):
            raise ConfigError(f"there is no command {args[0]} here; use {ours}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="edgespec",
    cls=_Commands,
    help="Run one large language model across a handful of small boards.",
    epilog="Exit codes: 0 done, 1 failed, 2 wrong option, setting, model or prompt, 130 Ctrl-C.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (demo, models, pull, init, serve, join, leave, prompt, chat, status, top, api):
    kind = options.RingCommand if command in (demo, init, serve) else None
    app.command(cls=kind)(command)
app.add_typer(token, name="token")
app.add_typer(device, name="device")
app.add_typer(key, name="key")
app.add_typer(service, name="service")
app.add_typer(train, name="train")
for tool in (bench, simulate, shard, plan, profile, doctor):
    app.command(cls=options.RingCommand if tool in (bench, simulate) else None)(tool)


@app.callback(invoke_without_command=True)
def _version(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if version:
        print(f"edgespec {__version__}")
        raise typer.Exit


def main() -> None:
    """Run a command. An EdgespecError becomes one line on standard error, not a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # "?" for what the terminal cannot show
    try:
        app()
    except EdgespecError as problem:
        print(f"edgespec: error: {problem}", file=sys.stderr)
        # systemd restarts a service unless it exits with EXIT_USAGE: after a power cut the network
        # may be up later than the board.
        wrong = isinstance(problem, ConfigError) and not isinstance(problem, AddressUnavailable)
        sys.exit(EXIT_USAGE if wrong else EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(EXIT_CANCELLED)


if __name__ == "__main__":
    main()
