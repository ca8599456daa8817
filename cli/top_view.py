"""The screen of `edgespec top`: the table of `edgespec status` with bars and colours."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from edgespec.cli.status import (
    COLUMNS,
    NAMES,
    SPARE,
    UNKNOWN,
    cells,
    duration,
    remarks,
    request_lines,
    ring_line,
)
from edgespec.cli.tables import fitting_table
from edgespec.types.shown import shown
from edgespec.wire.client_messages import NodeStatus, Status

HISTORY = 16
"""How many busy shares are shown."""

BAR = 8
"""Characters of a full bar."""

WARM = 10.0
"""A device is shown as warm from so many degrees below its limit."""

_LEVELS = "▁▂▃▄▅▆▇█"
_STATES = {"ready": "green", "missing": "bold red", "standing by": "dim"}


class BusyHistory:
    """The last busy shares of each node. One thread may write while another reads."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, str], tuple[float, ...]] = {}

    def add(self, state: Status) -> None:
        """Add one status; nodes that it lacks are forgotten."""
        self._seen = {
            (node.stage, node.name): (*self.of(node), node.busy)[-HISTORY:] for node in state.nodes
        }

    def of(self, node: NodeStatus) -> tuple[float, ...]:
        return self._seen.get((node.stage, node.name), ())


@dataclass(frozen=True)
class TopView:
    """What to show: the last status (None: none yet), and the error since then.

    `silent_for`: seconds without an answer.
    """

    address: str
    state: Status | None
    busy: BusyHistory
    problem: str = ""
    silent_for: float = 0.0
    clock: str = ""


def screen(view: TopView, console: Console) -> RenderableType:
    state = view.state
    model = f"{shown(state.model)}, " if state is not None and state.model else ""
    lines: list[RenderableType] = [
        Text.assemble(("edgespec top", "bold"), f"  {model}coordinator at {view.address}  ",
                      (view.clock, "dim"))
    ]  # fmt: skip
    if view.problem:
        silent = f" (for {duration(view.silent_for)})" if view.silent_for >= 1 else ""
        lines.append(
            Text(f"the coordinator cannot be reached{silent}; trying again: {view.problem}", "red")
        )
    if state is None:
        if not view.problem:
            lines.append(Text("waiting for the coordinator", style="dim"))
        return Group(*lines, _footer())
    if view.problem:
        lines.append(Text("what it said last:", style="dim"))
    else:
        lines.append(Text(shown(ring_line(state)), style="green" if state.ready else "bold red"))
    lines += [Text(), nodes_table(state, view.busy, console), Text()]
    lines += [Text(shown(line)) for line in request_lines(state)]
    lines += [Text(shown(line), style="yellow") for line in remarks(state)]
    return Group(*lines, _footer())


def _footer() -> Text:
    return Text("\nq or Ctrl-C leaves", style="dim")


# --- the table ----------------------------------------------------------------------------------

_LOOKS = f"last {HISTORY} looks"
_TITLES = (*COLUMNS[:5], "memory", *COLUMNS[5:8], _LOOKS, *COLUMNS[8:])
"""Those of `edgespec status`, and two more: bars of memory, and of how busy a device was."""
_SPARE = ("address", "heard s", "memory", "link ms", _LOOKS)
"""Columns that go first on a narrow terminal, before those that `edgespec status` leaves out."""


def nodes_table(state: Status, busy: BusyHistory, console: Console) -> Table:
    """A line for each node, with the columns that fit."""
    blocks = (console.encoding or "").lower().startswith("utf")
    rows = [_cells(node, busy.of(node), blocks) for node in state.nodes]
    table, _ = fitting_table(
        _TITLES,
        [[row[title] for title in _TITLES] for row in rows],
        console,
        left=(*NAMES, "memory", "busy", _LOOKS),
        spare=dict.fromkeys((*_SPARE, *SPARE)),
        box=None,
        padding=(0, 2, 0, 0),
        header_style="bold",
    )
    return table


def _cells(node: NodeStatus, busy: Iterable[float], blocks: bool) -> dict[str, Text]:
    """Those of a node by their titles; `blocks`: whether the terminal can show block characters."""
    text = dict(zip(COLUMNS, map(Text, map(shown, cells(node))), strict=True))
    text["state"].stylize(_STATES.get(node.state, "yellow"))
    text["memory"] = Text(UNKNOWN)
    if node.memory and node.free:
        used = 1 - node.free / node.memory
        text["memory"] = bar(used, "red" if used > 0.95 else "cyan", blocks)
    if node.throttled or (node.limit and node.temperature >= node.limit):
        text["°C"].stylize("bold red")
    elif node.limit and node.temperature >= node.limit - WARM:
        text["°C"].stylize("yellow")
    text[_LOOKS] = Text(share := text["busy"].plain)
    if share != UNKNOWN:
        text["busy"] = Text.assemble(bar(node.busy, "green", blocks), f" {share:>4}")
        levels = _LEVELS if blocks else "0123456789"
        heights = (round(min(max(one, 0.0), 1.0) * (len(levels) - 1)) for one in busy)
        text[_LOOKS] = Text("".join(levels[height] for height in heights), style="green")
    return text


def bar(share: float, style: str, blocks: bool) -> Text:
    full = round(min(max(share, 0.0), 1.0) * BAR)
    one, none = ("█", "░") if blocks else ("#", ".")
    return Text.assemble((one * full, style), (none * (BAR - full), "dim"))
