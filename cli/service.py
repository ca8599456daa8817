"""edgespec service: the coordinator or a stage as a service of systemd."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from edgespec.cli import options
from edgespec.cli.join import join
from edgespec.cli.notes import Notes
from edgespec.cli.serve import serve
from edgespec.daemon.process import EXIT_FAILED
from edgespec.daemon.service import (
    ROLES,
    State,
    Systemd,
    own_files,
    require_readable,
    unit_name,
    unit_text,
)
from edgespec.errors import ConfigError

service = typer.Typer(
    help="Let systemd run the coordinator or a stage, from boot on.", no_args_is_help=True
)

Role = Annotated[str, typer.Argument(help="coordinator or stage.", metavar="coordinator|stage")]
Root = Annotated[
    str,
    typer.Option(
        metavar="DIR",
        help="Only write files, below this folder: the root of another system, such as an image.",
    ),
]

_COMMANDS: dict[str, Callable[..., None]] = {"coordinator": serve, "stage": join}
_WRITTEN = ("cache", "trace")  # options of what a daemon writes
_READ = ("model", "draft")  # and of what it reads


@service.command()
def install(
    role: Role,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- OPTIONS...", help="Those of `edgespec serve`, or of `edgespec join`."
        ),
    ] = None,
    user: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Run it as this user. Default: one that exists only while it runs.",
        ),
    ] = "",
    start: Annotated[bool, typer.Option(help="Start it now, and at every boot.")] = True,
    force: Annotated[bool, typer.Option("--force", help="Replace a unit that differs.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the unit and do nothing.")
    ] = False,
    root: Root = "",
) -> None:
    """Write the unit with this installation's edgespec and the options behind `--`, and start it.

    The user of its own has no home and reads what everybody may read; blocks are kept in
    /var/cache/edgespec.
    """
    systemd = _systemd(root)
    text = unit_text(role, words or (), user)
    models = _checked(role, words or [])
    if dry_run:
        print(text, end="")
        return
    if systemd.live:
        systemd.require_control()
    if not user and systemd.live:
        require_readable([*own_files(), *models])
    notes = Notes()
    changed = systemd.install(role, text, force)
    notes.say(f"{systemd.path(role)} {'is written' if changed else 'is as it should be'}")
    if not systemd.live:
        return
    if not start:
        systemd.reload()
        return
    systemd.start(role)
    notes.say(f"{unit_name(role)} starts; see how it goes with: edgespec service status {role}")


@service.command()
def uninstall(role: Role, root: Root = "") -> None:
    """Stop the service and remove its unit. Its blocks stay in /var/cache/edgespec."""
    systemd = _systemd(root)
    if systemd.live:
        systemd.require_control()
    systemd.uninstall(role)
    Notes().say(f"{systemd.path(role)} is removed; blocks stay in /var/cache/edgespec")


@service.command()
def status(
    role: Annotated[
        str, typer.Argument(help="coordinator or stage. Default: both.", show_default=False)
    ] = "",
    as_json: options.Json = False,
) -> None:
    """Show how the services are: state, since when, and the last lines of their logs.

    Exit code 0 if all that are asked for (without a name: that are installed) are up, else 1.
    """
    systemd = Systemd()
    states = [systemd.state(name) for name in ([role] if role else ROLES)]
    wanted = [state for state in states if role or state.installed]
    if as_json:
        print(json.dumps({"services": [asdict(state) for state in states]}))
    else:
        for state in states:
            _show(state)
    if not wanted or any(state.active != "active" for state in wanted):
        raise typer.Exit(EXIT_FAILED)


def _systemd(root: str) -> Systemd:
    return Systemd(Path(root), live=False) if root else Systemd()


def _checked(role: str, words: list[str]) -> list[Path]:
    """Look at the options of a daemon before it is left alone with them; returns what it reads.

    Raises what the command itself would for options that it does not know, and ConfigError for
    paths that mean something else, or cannot be used, in a service.
    """
    inner = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    inner.command(context_settings={"help_option_names": []})(_COMMANDS[role])
    command = typer.main.get_command(inner)
    name = f"edgespec {_COMMANDS[role].__name__}"
    given: dict[str, Any] = command.make_context(name, list(words)).params
    for option in _WRITTEN:
        if given.get(option):
            raise ConfigError(
                f"a service cannot write to {given[option]}; leave --{option} out: it keeps its "
                "blocks in /var/cache/edgespec (docs/systemd.md says how to put that elsewhere)"
            )
    found = []
    for option in _READ:
        path = Path(given.get(option) or "")
        if path.is_absolute():
            found.append(path)
        elif given.get(option) and path.exists():
            raise ConfigError(
                f"a service does not start in this folder; give --{option} {path.absolute()}"
            )
    return found


def _show(state: State) -> None:
    if not state.installed:
        print(f"{state.role}: not installed")
        return
    since = f" since {state.since}" if state.since else ""
    boot = "starts at boot" if state.starts_at_boot else "does not start at boot"
    print(f"{state.role}: {state.active} ({state.sub}){since}; {boot}")
    if state.process:
        print(f"  process {state.process}, {state.restarts} restart(s)")
    elif state.active == "failed":
        print(f"  ended with {state.result}, exit status {state.exit_status}")
    if state.status:
        print(f"  {state.status}")
    for line in state.log:
        print(f"  | {line}")
