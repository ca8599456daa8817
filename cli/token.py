"""edgespec token: make, list and take back what lets devices and clients into the cluster."""

from __future__ import annotations

import json
import re
import shlex
import time
from pathlib import Path

import typer

from edgespec.cli import options
from edgespec.cli.notes import Notes
from edgespec.cli.tables import show_table
from edgespec.daemon.access_store import AccessStore
from edgespec.daemon.cluster import ClusterFolder, default_folder, folder_of
from edgespec.errors import ConfigError
from edgespec.net.keys import short
from edgespec.runtime.access_policy import CLIENT, STAGE

token = typer.Typer(
    help="Tokens: what lets devices and clients into the cluster.", no_args_is_help=True
)

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SPAN = re.compile(r"([0-9]{1,9})([smhd])")


@token.command()
def new(
    client: bool = typer.Option(
        False, "--client", help="For somebody who asks, not for a device that computes."
    ),
    uses: int = typer.Option(1, help="How many devices or clients it admits; 0: any number."),
    valid: str = typer.Option("1h", metavar="N[s|m|h|d]", help="For how long it admits them."),
    cluster: str = options.CLUSTER,
) -> None:
    """Make a token and print it, alone, on standard output."""
    folder = folder_of(cluster)
    store = opened_store(folder)
    seconds = seconds_of(valid)
    made = store.new_token(CLIENT if client else STAGE, uses, seconds)
    notes = Notes()
    many = "any number of" if not uses else str(uses)
    what = "client(s)" if client else "device(s)"
    notes.say(f"admits {many} {what} until {moment(time.time() + seconds)}; to be used with:")
    notes.say("edgespec prompt --token TOKEN ..." if client else "edgespec join TOKEN")
    revoke_it = f"edgespec token revoke {short(made.pair.public)}"
    notes.say(f"to take it back: {with_cluster(revoke_it, folder)}")
    print(made.text)


@token.command(name="list")
def list_tokens(cluster: str = options.CLUSTER, as_json: bool = options.JSON) -> None:
    """Show the tokens that can still be used. The tokens themselves are kept nowhere."""
    entries = opened_store(folder_of(cluster)).tokens()
    if as_json:
        names = ("id", "role", "expires", "uses_left", "made")
        listed = [{name: getattr(entry, name) for name in names} for entry in entries]
        print(json.dumps({"tokens": listed}))
        return
    if not entries:
        Notes().say("no token can be used; `edgespec token new` makes one")
        return
    rows = [
        (e.id, e.role, str(e.uses_left or "any number"), moment(e.expires), moment(e.made))
        for e in entries
    ]
    show_table(("id", "for", "uses left", "expires", "made"), rows)


@token.command()
def revoke(
    token_id: str = typer.Argument(
        ..., metavar="ID|all", help="As `edgespec token list` shows it."
    ),
    cluster: str = options.CLUSTER,
) -> None:
    """Take a token back, or all of them. Who was admitted by it stays admitted."""
    store = opened_store(folder_of(cluster))
    if token_id == "all":
        store.revoke_all()
        Notes().say("no token counts any more")
    else:
        store.revoke(token_id)
        Notes().say(f"the token {token_id} counts no more; who came in by it stays admitted")


def opened_store(folder: Path) -> AccessStore:
    """Raises AccessRefused or ConfigError without a cluster."""
    return AccessStore(ClusterFolder.open(folder))


def seconds_of(text: str) -> float:
    """Seconds of a text such as 30m. Raises ConfigError for other forms."""
    found = _SPAN.fullmatch(text.strip())
    if not found:
        raise ConfigError(f"{text!r} is no span of time; give a number with s, m, h or d: 30m, 2d")
    return int(found[1]) * _UNITS[found[2]]


def moment(seconds: float) -> str:
    """A local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def with_cluster(command: str, folder: Path) -> str:
    """A command line, with --cluster unless the folder is the default."""
    if folder == default_folder():
        return command
    return f"{command} --cluster {shlex.quote(str(folder))}"
