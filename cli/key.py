"""edgespec key: make, list and take back API keys."""

from __future__ import annotations

import json

import typer

from edgespec.cli import options
from edgespec.cli.notes import Notes
from edgespec.cli.tables import show_table
from edgespec.cli.token import moment
from edgespec.daemon.api_keys import ApiKeys
from edgespec.daemon.cluster import ClusterFolder, folder_of

key = typer.Typer(help="API keys: who may ask over HTTP from other machines.", no_args_is_help=True)


@key.command()
def new(
    name: str = typer.Argument(..., help="Whose it is, or what for."),
    cluster: str = options.CLUSTER,
) -> None:
    """Make an API key and print it, alone, on standard output. It is kept nowhere."""
    text = _keys(cluster).new(name)
    Notes().say("clients send it as `Authorization: Bearer KEY`; it is not shown again")
    print(text)


@key.command(name="list")
def list_keys(cluster: str = options.CLUSTER, as_json: bool = options.JSON) -> None:
    """Show the keys that count: their names, and when they were made."""
    keys = _keys(cluster).all()
    if as_json:
        print(json.dumps({"keys": [{"name": one.name, "made": one.made} for one in keys]}))
        return
    if not keys:
        Notes().say("there is no API key; `edgespec key new NAME` makes one")
        return
    show_table(("name", "made"), ((one.name, moment(one.made)) for one in keys))


@key.command()
def revoke(
    name: str = typer.Argument(..., metavar="NAME|all", help="As `edgespec key list` has it."),
    cluster: str = options.CLUSTER,
) -> None:
    """Take a key back, or all of them; a running API refuses it at once."""
    _keys(cluster).revoke(name)
    Notes().say("no API key counts any more" if name == "all" else f"the key {name} counts no more")


def _keys(cluster: str) -> ApiKeys:
    return ApiKeys(ClusterFolder.open(folder_of(cluster)).path)
