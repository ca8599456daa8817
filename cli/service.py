"""edgespec service: the coordinator or a stage as a service of systemd."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from edgespec.cli import options
from edgespec.cli.join import join
from edgespec.cli.notes import Notes
from edgespec.cli.reach import admitted, given_token
from edgespec.cli.serve import serve
from edgespec.daemon.cluster import ClusterFolder
from edgespec.daemon.own_stage import FOLDER, LOG_FILE
from edgespec.daemon.service import (
    ROLES,
    STATE_FOLDER,
    State,
    Systemd,
    executable,
    own_files,
    require_readable,
    unit_name,
    unit_text,
)
from edgespec.daemon.settings import chosen_draft
from edgespec.errors import EXIT_FAILED, ConfigError, EdgespecError
from edgespec.net.keys import Token

service = typer.Typer(
    help="Let systemd run the coordinator or a stage, from boot on.", no_args_is_help=True
)

Role = Annotated[str, typer.Argument(help="coordinator or stage.", metavar="coordinator|stage")]

_COMMANDS: dict[str, Callable[..., None]] = {"coordinator": serve, "stage": join}
_WRITTEN = ("cache", "trace", "record")  # options that name what a daemon writes
_READ = ("model", "draft")  # and what it reads


@service.command()
def install(
    role: Role,
    words: list[str] | None = typer.Argument(
        None,
        metavar="-- [TOKEN] OPTIONS...",
        help="Those of `edgespec serve`, or of `edgespec join`.",
    ),
    user: str = typer.Option(
        "", metavar="NAME", help="Run it as this user. Default: one that exists only while it runs."
    ),
    start: bool = typer.Option(True, help="Start it now, and at every boot."),
    force: bool = typer.Option(False, "--force", help="Replace a unit that differs."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the unit and do nothing."),
) -> None:
    """Write the unit with this installation's edgespec and the options behind `--`, and start it.

    The cluster is the one in /var/lib/edgespec: of a coordinator, made there with `edgespec init`;
    of a stage, joined there by the TOKEN, which is used at once and not kept. The user of its own
    has no home and reads what everybody may read; blocks are kept in /var/cache/edgespec.
    """
    words, systemd = words or [], Systemd()
    asked = _checked(role, words)
    text = unit_text(role, asked.words, user)
    if dry_run:
        print(text, end="")
        return
    notes = Notes()
    systemd.require_control()
    systemd.require_replaceable(role, text, force)
    _require_cluster(role, systemd.state_folder, asked, words)
    if not user:
        require_readable([*own_files(), *asked.reads, *_served(role, systemd.state_folder, asked)])
    if asked.token is not None:
        admitted(systemd.state_folder, asked.token, asked.coordinator, asked.wait, notes)
    changed = systemd.install(role, text, force)
    notes.say(f"{systemd.path(role)} {'is written' if changed else 'is as it should be'}")
    if not start:
        systemd.reload()
        return
    systemd.start(role)
    notes.say(f"{unit_name(role)} starts; see how it goes with: edgespec service status {role}")


@service.command()
def uninstall(role: Role) -> None:
    """Stop the service and remove its unit.

    Its blocks stay in /var/cache/edgespec, its keys in /var/lib/edgespec.
    """
    systemd = Systemd()
    systemd.require_control()
    systemd.uninstall(role)
    Notes().say(
        f"{systemd.path(role)} is removed; blocks stay in /var/cache/edgespec, keys in "
        f"{STATE_FOLDER}"
    )


@service.command()
def status(
    role: str = typer.Argument("", help="coordinator or stage. Default: both.", show_default=False),
    as_json: bool = options.JSON,
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
            _show(state, systemd.state_folder)
    if not wanted or any(state.active != "active" for state in wanted):
        raise typer.Exit(EXIT_FAILED)


@dataclass(frozen=True)
class _ServiceOptions:
    """The words after `--`."""

    words: list[str]  # for the unit, which all users can read: without the token
    reads: list[Path]  # models
    token: Token | None = None
    coordinator: str | None = None
    wait: float = 0.0
    names_model: bool = False


def _checked(role: str, words: list[str]) -> _ServiceOptions:
    """Check the options of a daemon before it is installed.

    Raises what the command itself would for unknown options, and ConfigError for paths that a
    service cannot use.
    """
    unit_name(role)  # raises for an unknown one
    inner = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    inner.command(cls=options.RingCommand, context_settings={"help_option_names": []})(
        _COMMANDS[role]
    )
    command = typer.main.get_command(inner)
    assert isinstance(command, TyperCommand)
    for parameter in command.params:
        parameter.envvar = None  # the service has another environment
    context = command.make_context(f"edgespec {_COMMANDS[role].__name__}", list(words))
    given: dict[str, Any] = context.params
    if given["cluster"]:
        raise ConfigError(
            f"a service cannot use {given['cluster']}; leave --cluster out: its keys are in "
            f"{STATE_FOLDER} (`edgespec init` and `edgespec token` take --cluster {STATE_FOLDER})"
        )
    for option in _WRITTEN:
        if given.get(option):
            raise ConfigError(
                f"a service cannot write to {given[option]}; leave --{option} out: it keeps its "
                "blocks in /var/cache/edgespec (docs/systemd.md says how to put that elsewhere)"
            )
    token = given.get("token", "")
    return _ServiceOptions(
        [word for word in words if not token or word != token],
        list(_models(given)),
        given_token(token),
        given.get("coordinator"),
        given.get("wait", 0.0),
        bool(given.get("model")),
    )


def _models(given: dict[str, Any]) -> Iterator[Path]:
    """The folders that the options name. Raises ConfigError for one that is not absolute."""
    for option in _READ:
        path = Path(given.get(option) or "")
        if path.is_absolute():
            yield path
        elif given.get(option) and path.exists():
            raise ConfigError(
                f"a service does not start in this folder; give --{option} {path.absolute()}"
            )


def _require_cluster(role: str, folder: Path, asked: _ServiceOptions, words: list[str]) -> None:
    """Raise ConfigError, with what to do, if the service would find no cluster."""
    edgespec = f"sudo {shlex.quote(str(executable()))}"
    if role == "stage":
        if asked.token is None and not ClusterFolder.is_at(folder):
            raise ConfigError(
                f"this device belongs to no cluster yet (by {folder}); give a token, which "
                "`edgespec token new` on the coordinator prints: "
                f"{_here(role, ['TOKEN', *words])}"
            )
        return
    if not ClusterFolder.is_at(folder):
        raise ConfigError(
            f"there is no cluster in {folder}, where the service has it; make one first: "
            f"{edgespec} init --cluster {folder} --model ... --stages N, or move one that was made "
            f"elsewhere: sudo mv FOLDER {folder}"
        )
    if not ClusterFolder.open(folder).is_coordinator:
        raise ConfigError(
            f"this machine is a device of a cluster, by {folder}, and not its coordinator; to make "
            f"a cluster of its own: {edgespec} leave --cluster {folder}, and then "
            f"{edgespec} init --cluster {folder} --model ... --stages N"
        )


def _served(role: str, folder: Path, asked: _ServiceOptions) -> Iterator[Path]:
    """The models that the cluster's settings name, unless the options name others."""
    if role == "coordinator" and not asked.names_model:
        cluster = ClusterFolder.open(folder)
        for settings in (cluster.settings, *cluster.added().values()):
            folders = chosen_draft(settings.draft, settings.model).folders if settings.draft else ()
            yield from (Path(name) for name in (settings.model, *folders) if os.path.isabs(name))


def _here(role: str, words: list[str]) -> str:
    """The command line that installs the service on the machine itself."""
    behind = ["--", *words] if words else []
    return f"sudo {shlex.join([str(executable()), 'service', 'install', role, *behind])}"


def _show(state: State, folder: Path) -> None:
    """`folder`: the cluster folder of the services."""
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
    if state.role == "coordinator" and (number := _own_stage(folder)):
        print(f"  stage {number} runs in it, too; its log is {folder / FOLDER / LOG_FILE}")
    for line in state.log:
        print(f"  | {line}")


def _own_stage(folder: Path) -> int:
    """The stage that the coordinator's service runs beside it; 0: none, or not ours to read."""
    try:
        return ClusterFolder.open(folder).settings.with_stage
    except EdgespecError:
        return 0
