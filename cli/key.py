"""edgespec key: make, list and take back API keys."""

from __future__ import annotations

import json

import typer
from rich.text import Text

from edgespec.cli import options
from edgespec.cli.notes import Notes
from edgespec.cli.tables import show_table
from edgespec.cli.token import moment
from edgespec.config import Address
from edgespec.daemon.api_keys import ONCE_S, ApiKeys
from edgespec.daemon.api_process import HTTP_PORT
from edgespec.daemon.cluster import ClusterFolder, folder_of
from edgespec.daemon.extras import require
from edgespec.errors import ConfigError
from edgespec.net.discovery_interfaces import EVERY_ADDRESS, reached_at

EVERYWHERE = Address(EVERY_ADDRESS, HTTP_PORT)
MOST_URL = 256
"""Characters of a page's address: with more the picture fits no terminal."""

key = typer.Typer(help="API keys: who may ask over HTTP from other machines.", no_args_is_help=True)


@key.command()
def new(
    name: str = typer.Argument(..., help="Whose it is, or what for."),
    qr: bool = typer.Option(
        False,
        "--qr",
        help="For a phone: print the address of the page with a key for one use, and show it as a "
        "QR code. The page exchanges that key for one that the phone keeps.",
    ),
    url: str = typer.Option(
        "",
        help="With --qr: where a phone finds the page. Default: this machine's address on its "
        f"network, port {HTTP_PORT}.",
        show_default=False,
    ),
    cluster: str = options.CLUSTER,
) -> None:
    """Make an API key and print it, alone, on standard output. It is kept nowhere."""
    notes, base = Notes(), _page(url)
    if not qr:
        notes.say("clients send it as `Authorization: Bearer KEY`; it is not shown again")
        print(_keys(cluster).new(name))
        return
    if reached_at(EVERYWHERE)[0] in base:
        notes.say("the page has to listen there: `edgespec serve --http 0.0.0.0:8000`")
    require("coordinator", "a QR code")
    link = f"{base}/#key={_keys(cluster).new(name, once=True)}"
    for line in qr_lines(link):
        notes.say(Text(line, style="black on bright_white"))
    notes.say(f"scan it within {ONCE_S / 60:.0f} minutes; it serves one device, once")
    print(link)


@key.command(name="list")
def list_keys(cluster: str = options.CLUSTER, as_json: bool = options.JSON) -> None:
    """Show the keys that count: their names, and when they were made."""
    keys = [one for one in _keys(cluster).all() if not one.is_stale]
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


def qr_lines(text: str) -> list[str]:
    """A text as a QR code in half blocks, two squares above each other in one, with its border."""
    from segno import make_qr  # of the extra

    rows = [*map(list, make_qr(text, error="l").matrix_iter(border=4))]
    rows.append([0] * len(rows[0]))  # their number is odd, and they are shown in pairs
    pairs = zip(rows[::2], rows[1::2], strict=True)
    return ["".join(" ▀▄█"[a + 2 * b] for a, b in zip(*pair, strict=True)) for pair in pairs]


def _page(url: str) -> str:
    """Where a phone finds the page."""
    base = url.rstrip("/") or f"http://{reached_at(EVERYWHERE)[0]}"
    if not base.startswith(("http://", "https://")) or len(base) > MOST_URL:
        raise ConfigError(f"--url {url:.80} is no address of a page; give http://HOST:PORT")
    return base


def _keys(cluster: str) -> ApiKeys:
    return ApiKeys(ClusterFolder.open(folder_of(cluster)).path)
