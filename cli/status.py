"""edgespec status: how the ring and its devices are."""

from __future__ import annotations

import json
from collections.abc import Iterator

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from edgespec.cli import options
from edgespec.cli.notes import Notes
from edgespec.cli.reach import reach
from edgespec.cli.tables import show_table
from edgespec.daemon.process import EXIT_FAILED
from edgespec.planning.memory import GIB
from edgespec.runtime.client import Client
from edgespec.wire.client_messages import NodeStatus, Status

UNKNOWN = "-"

_COLUMNS = ("node", "device", "address", "layers", "state")
_FIGURES = ("GiB free", "°C", "busy", "link ms", "heard s", "losses")


def status(
    coordinator: str | None = options.COORDINATOR,
    wait: float = options.WAIT,
    cluster: str = options.CLUSTER,
    as_json: bool = options.JSON,
) -> None:
    """Show the stages and spares of the ring: what they do, how warm, busy and slow they are.

    The exit code is 0 if the ring is up, and 1 if it is not or does not answer.
    """
    address, identity = reach(coordinator, cluster, wait, Notes().say)
    with Client(address, identity, wait) as client:
        told = client.status()
    if as_json:
        print(json.dumps(_as_json(told), ensure_ascii=False))
    else:
        print_status(told)
    if not told.ready:
        raise typer.Exit(EXIT_FAILED)


def print_status(told: Status) -> None:
    """The whole of it, however narrow the terminal."""
    table = _table(told)
    show_table(table, *remarks(told), ring_line(told))


def _table(told: Status) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in _COLUMNS:
        table.add_column(name)
    for name in _FIGURES:
        table.add_column(name, justify="right")
    for node in told.nodes:
        table.add_row(*map(Text, (*who(node), *figures(node))))
    return table


def who(node: NodeStatus) -> Iterator[str]:
    """Its texts in the columns of names."""
    yield node_name(node)
    yield node.name or UNKNOWN
    yield node.address or UNKNOWN
    yield f"{node.first}-{node.end - 1}" if node.stage else UNKNOWN
    yield node.words if node.state == "loading" else node.state


def node_name(node: NodeStatus) -> str:
    """V1, V2, ... or spare."""
    return f"V{node.stage}" if node.stage else "spare"


def figures(node: NodeStatus) -> Iterator[str]:
    """Its texts in the columns of figures."""
    is_here = node.state != "missing"
    has_said = node.free or node.temperature  # a device that has said how it is
    if node.free:
        yield f"{node.free / GIB:.1f} of {node.memory / GIB:.1f}"
    else:
        yield f"of {node.memory / GIB:.1f}" if node.memory else UNKNOWN
    limit = f" of {node.limit:.0f}" if node.limit else ""
    yield f"{node.temperature:.0f}{limit}" if node.temperature else UNKNOWN
    yield f"{node.busy:.0%}" if has_said else UNKNOWN
    yield f"{node.trip * 1e3:.1f}" if node.trip else UNKNOWN
    yield f"{node.heard:.1f}" if is_here else UNKNOWN
    yield str(node.losses) if node.stage else UNKNOWN


def remarks(told: Status) -> Iterator[str]:
    """What is wrong, and what was."""
    for node in told.nodes:
        if node.warning:
            yield f"{node_name(node)} ({node.name}): {node.warning}"
    for node in told.nodes:
        if node.losses:
            yield f"{node_name(node)} was lost {duration(node.lost_ago)} ago: it {node.last_loss}"


def ring_line(told: Status) -> str:
    """Whether the ring is up, or who is missing, and how many requests there are."""
    requests = f"{told.running} request(s) running, {told.waiting} waiting"
    if told.ready:
        return (
            f"the ring of {told.stages} stage(s) is up since {duration(told.up_for)} (ring number "
            f"{told.ring}); {requests}"
        )
    awaited = [f"{node_name(n)} is {n.state}" for n in told.nodes if n.stage and n.state != "ready"]
    return f"the ring of {told.stages} stage(s) is not up: {', '.join(awaited)}; {requests}"


def duration(seconds: float) -> str:
    """A time in the largest unit of which there are at least two."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _as_json(told: Status) -> dict[str, object]:
    return {
        "ready": told.ready,
        "stages": told.stages,
        "ring": told.ring,
        "up_for_seconds": told.up_for,
        "requests_running": told.running,
        "requests_waiting": told.waiting,
        "nodes": [_node_as_json(node) for node in told.nodes],
    }


def _node_as_json(node: NodeStatus) -> dict[str, object]:
    """Names with their units; what is not known is null."""
    is_here, has_said = node.state != "missing", bool(node.free or node.temperature)
    return {
        "stage": node.stage,
        "first_layer": node.first if node.stage else None,
        "end_layer": node.end if node.stage else None,
        "device": node.name or None,
        "address": node.address or None,
        "state": node.state,
        "words": node.words,
        "heard_seconds_ago": node.heard if is_here else None,
        "memory_bytes": node.memory or None,
        "free_bytes": node.free or None,
        "celsius": node.temperature or None,
        "celsius_limit": node.limit or None,
        "busy": node.busy if has_said else None,
        "throttled": node.throttled if has_said else None,
        "warning": node.warning or None,
        "link_milliseconds": node.trip * 1e3 or None,
        "losses": node.losses if node.stage else None,
        "last_loss": node.last_loss or None,
        "last_loss_seconds_ago": node.lost_ago if node.losses else None,
    }
