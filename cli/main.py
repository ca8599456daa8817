"""The `edgespec` command: its subcommands, and how errors leave it."""

from __future__ import annotations

import sys

import click
import typer
from edgespec.cli.demo import demo
from edgespec.cli.join import join
from edgespec.cli.prompt import CANCELLED, prompt
from edgespec.cli.serve import serve
from edgespec.daemon.process import EXIT_FAILED, EXIT_USAGE

from edgespec import __version__
from edgespec.errors import ConfigError, EdgespecError

app = typer.Typer(
    name="edgespec",
    help="Run one large language model across a handful of small boards.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (demo, serve, join, prompt):
    app.command()(command)


@app.callback(invoke_without_command=True)
def _version(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if version:
        print(f"edgespec {__version__}")
        raise typer.Exit


def main() -> None:
    """Run a command; every error on purpose is one line on standard error, never a traceback."""
    try:
        code = app(standalone_mode=False)
    except click.ClickException as problem:
        problem.show()
        code = problem.exit_code
    except (KeyboardInterrupt, click.Abort):
        code = CANCELLED
    except EdgespecError as problem:
        print(f"edgespec: error: {problem}", file=sys.stderr)
        code = EXIT_USAGE if isinstance(problem, ConfigError) else EXIT_FAILED
    except BrokenPipeError:
        # Whoever read our output has left (`| head`); nothing to tell, nobody to tell it to.
        sys.stderr.close()
        code = EXIT_FAILED
    sys.exit(code)


if __name__ == "__main__":
    main()
