"""edgespec status: how the ring and its devices are."""

from __future__ import annotations

import json
from collections.abc import Iterator

import typer

from edgespec.cli import options
from edgespec.cli.notes import Notes
from edgespec.cli.reach import reach
from edgespec.cli.tables import show_table
from edgespec.errors import EXIT_FAILED
from edgespec.planning.memory import GIB
from edgespec.runtime.client import Client
from edgespec.types.record import as_dict
from edgespec.wire.client_messages import NodeStatus, Status

UNKNOWN = "-"

NAMES = ("node", "device", "address", "layers", "state")
COLUMNS = (*NAMES, "GiB free", "°C", "busy", "link ms", "heard s", "losses")
SPARE = ("address", "heard s", "link ms", "losses", "busy", "layers", "GiB free", "°C", "device")
"""Columns that a narrow terminal does without, the first of them first."""


def status(
    coordinator: str | None = options.COORDINATOR,
    wait: float = options.WAIT,
    cluster: str = options.CLUSTER,
    as_json: bool = options.JSON,
) -> None:
    """Show the stages and spares of the ring: what they do, how warm, busy and slow they are.

    The exit code is 0 if the ring is up, and 1 if it is not or does not answer.
    """
    address, identity = reach(coordinator, cluster, wait, Notes())
    with Client(address, identity, wait) as client:
        state = client.status()
    if as_json:
        print(json.dumps(_as_json(state), ensure_ascii=False))
    else:
        print_status(state)
    if not state.ready:
        raise typer.Exit(EXIT_FAILED)


def print_status(state: Status) -> None:
    """Print all columns, or those that a narrow terminal has room for."""
    lines = (*remarks(state), *request_lines(state), *row_lines(state), ring_line(state))
    show_table(COLUMNS, map(cells, state.nodes), *lines, left=NAMES, spare=SPARE)


def cells(node: NodeStatus) -> Iterator[str]:
    """The cells of COLUMNS."""
    yield node_name(node)
    yield f"{node.name} (D0)" if node.with_coordinator else node.name or UNKNOWN
    yield node.address or UNKNOWN
    yield f"{node.first}-{node.end - 1}" if node.stage else UNKNOWN
    yield node.words if node.state == "loading" else node.state

    if node.free:
        yield f"{node.free / GIB:.1f} of {node.memory / GIB:.1f}"
    else:
        yield f"of {node.memory / GIB:.1f}" if node.memory else UNKNOWN
    limit = f" of {node.limit:.0f}" if node.limit else ""
    yield f"{node.temperature:.0f}{limit}" if node.temperature else UNKNOWN
    yield f"{node.busy:.0%}" if _has_said(node) else UNKNOWN
    yield f"{node.trip * 1e3:.1f}" if node.trip else UNKNOWN
    yield f"{node.heard:.1f}" if node.state != "missing" else UNKNOWN
    yield str(node.losses) if node.stage else UNKNOWN


def node_name(node: NodeStatus) -> str:
    """V1, V2, ... or spare."""
    return f"V{node.stage}" if node.stage else "spare"


def _has_said(node: NodeStatus) -> bool:
    """Whether the device has reported its health."""
    return bool(node.free or node.temperature)


def request_lines(state: Status) -> Iterator[str]:
    """Each request that runs, with its speed."""
    for one in state.live:
        yield (
            f"request {one.number} ({one.policy}): {one.tokens} token(s) behind a prompt of "
            f"{one.prompt_tokens}, {one.tokens_per_second:.1f} a second"
        )


def row_lines(state: Status) -> Iterator[str]:
    """What the stages' caches hold."""
    if state.rows_room:
        layers = max((node.end - node.first for node in state.nodes if node.stage), default=0)
        most = state.rows_room * state.row_bytes * layers / 2**20
        yield (
            f"cache rows of every stage: {state.rows_live} for running requests, "
            f"{state.rows_kept} kept of answered ones, room for {state.rows_room}"
            + (f" ({most:.0f} MiB at most)" if most else "")
        )


def remarks(state: Status) -> Iterator[str]:
    """How far spares are, warnings and losses."""
    for node in state.nodes:
        if not node.stage and node.words != node.state:
            yield f"{node_name(node)} ({node.name}): {node.words}"
    for node in state.nodes:
        if node.warning:
            yield f"{node_name(node)} ({node.name}): {node.warning}"
    for node in state.nodes:
        if node.losses:
            yield f"{node_name(node)} was lost {duration(node.lost_ago)} ago: it {node.last_loss}"


def ring_line(state: Status) -> str:
    """Whether the ring is up, which stages it lacks, and how many requests there are."""
    requests = f"{state.running} request(s) running, {state.waiting} waiting"
    if state.ready:
        return (
            f"the ring of {state.stages} stage(s) is up since {duration(state.up_for)} "
            f"(ring number {state.ring}); {requests}"
        )
    awaited = [
        f"{node_name(n)} is {n.state}" for n in state.nodes if n.stage and n.state != "ready"
    ]
    return f"the ring of {state.stages} stage(s) is not up: {', '.join(awaited)}; {requests}"


def duration(seconds: float) -> str:
    """A time in the largest unit of which it has at least two."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _as_json(state: Status) -> dict[str, object]:
    return {
        "ready": state.ready,
        "stages": state.stages,
        "ring": state.ring,
        "up_for_seconds": state.up_for,
        "requests_running": state.running,
        "requests_waiting": state.waiting,
        "requests": [as_dict(one) for one in state.live],
        "rows_live": state.rows_live,
        "rows_kept": state.rows_kept,
        "rows_room": state.rows_room or None,
        "row_bytes_of_a_layer": state.row_bytes or None,
        "nodes": [_node_as_json(node) for node in state.nodes],
    }


def _node_as_json(node: NodeStatus) -> dict[str, object]:
    """Unknown values are null."""
    has_said = _has_said(node)
    return {
        "stage": node.stage,
        "first_layer": node.first if node.stage else None,
        "end_layer": node.end if node.stage else None,
        "device": node.name or None,
        "with_coordinator": node.with_coordinator,
        "address": node.address or None,
        "state": node.state,
        "words": node.words,
        "heard_seconds_ago": node.heard if node.state != "missing" else None,
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
