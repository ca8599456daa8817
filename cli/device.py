"""edgespec device: list the devices and clients of the cluster, and remove one."""

from __future__ import annotations

import json

import typer
from msgspec import structs

from edgespec.cli import options
from edgespec.cli.notes import Notes
from edgespec.cli.tables import show_table
from edgespec.cli.token import moment, opened_store, with_cluster
from edgespec.daemon.cluster import folder_of

device = typer.Typer(help="Devices and clients that the cluster admits.", no_args_is_help=True)


@device.command(name="list")
def list_devices(cluster: str = options.CLUSTER, as_json: bool = options.JSON) -> None:
    """Show who is admitted; whether they are there now, `edgespec status` says."""
    entries = opened_store(folder_of(cluster)).devices()
    if as_json:
        listed = [{**structs.asdict(entry), "fingerprint": entry.fingerprint} for entry in entries]
        print(json.dumps({"devices": listed}, ensure_ascii=False))
        return
    if not entries:
        Notes().say("no device is admitted yet; `edgespec token new` makes a token for one")
        return
    show_table(
        ("name", "role", "fingerprint", "admitted"),
        ((entry.name, entry.role, entry.fingerprint, moment(entry.added)) for entry in entries),
    )


@device.command()
def remove(
    name: str = typer.Argument(
        ..., metavar="NAME|FINGERPRINT", help="As `edgespec device list` shows it."
    ),
    cluster: str = options.CLUSTER,
) -> None:
    """Admit a device or client no longer."""
    folder = folder_of(cluster)
    store = opened_store(folder)
    entry = store.remove(name)
    notes = Notes()
    notes.say(f"{entry.name} ({entry.fingerprint}) is admitted no longer")
    if store.tokens():
        notes.say(
            "tokens can still be used: whoever has one can come back, unless they are taken back: "
            + with_cluster("edgespec token revoke all", folder)
        )
