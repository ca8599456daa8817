"""The screen of `edgespec top`: a table with bars that fits the terminal's width."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from edgespec.cli.status import (
    COLUMNS,
    UNKNOWN,
    cells,
    duration,
    remarks,
    request_lines,
    ring_line,
)
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
    lines += [Text(), widest_table(state, view.busy, console), Text()]
    lines += [Text(shown(line)) for line in request_lines(state)]
    lines += [Text(shown(line), style="yellow") for line in remarks(state)]
    return Group(*lines, _footer())


def _footer() -> Text:
    return Text("\nq or Ctrl-C leaves", style="dim")


# --- the table ----------------------------------------------------------------------------------

Cell = Callable[[NodeStatus, BusyHistory, bool], Text]
"""A cell of a node; the last argument: whether the terminal can show block characters."""


def widest_table(state: Status, busy: BusyHistory, console: Console) -> Table:
    """The table with the widest layout that fits."""
    unlimited = console.options.update(width=1000)
    for names in _LAYOUTS:
        table = _table(state, busy, console, names)
        if Measurement.get(console, unlimited, table).maximum <= console.width:
            break
    return table


def _table(state: Status, busy: BusyHistory, console: Console, names: str) -> Table:
    blocks = (console.encoding or "").lower().startswith("utf")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    columns = [_COLUMNS[name] for name in names.split()]
    for title, justify, _ in columns:
        table.add_column(title, justify=justify, no_wrap=True)
    for node in state.nodes:
        table.add_row(*(cell(node, busy, blocks) for *_, cell in columns))
    return table


def _status_cell(column: str) -> Cell:
    """A cell that `edgespec status` has too."""

    def cell(node: NodeStatus, busy: BusyHistory, blocks: bool) -> Text:
        return Text(shown(dict(zip(COLUMNS, cells(node), strict=True))[column]))

    return cell


def _state(node: NodeStatus, busy: BusyHistory, blocks: bool) -> Text:
    return Text(shown(node.state), style=_STATES.get(node.state, "yellow"))


def _words(node: NodeStatus, busy: BusyHistory, blocks: bool) -> Text:
    text = _state(node, busy, blocks)
    if node.state == "loading":
        text.plain = shown(node.words)
    return text


def _memory_bar(node: NodeStatus, busy: BusyHistory, blocks: bool) -> Text:
    if not node.memory or not node.free:
        return Text(UNKNOWN)
    used = 1 - node.free / node.memory
    return bar(used, "red" if used > 0.95 else "cyan", blocks)


def _temperature(node: NodeStatus, busy: BusyHistory, blocks: bool) -> Text:
    text = _status_cell("°C")(node, busy, blocks)
    if node.throttled or (node.limit and node.temperature >= node.limit):
        text.stylize("bold red")
    elif node.limit and node.temperature >= node.limit - WARM:
        text.stylize("yellow")
    return text


def _busy_bar(node: NodeStatus, busy: BusyHistory, blocks: bool) -> Text:
    share = _status_cell("busy")(node, busy, blocks)
    if share.plain == UNKNOWN:
        return share
    return Text.assemble(bar(node.busy, "green", blocks), f" {share.plain:>4}")


def _busy_history(node: NodeStatus, busy: BusyHistory, blocks: bool) -> Text:
    if _status_cell("busy")(node, busy, blocks).plain == UNKNOWN:
        return Text(UNKNOWN)
    levels = _LEVELS if blocks else "0123456789"
    last = len(levels) - 1
    shares = (min(max(share, 0.0), 1.0) for share in busy.of(node))
    return Text("".join(levels[round(share * last)] for share in shares), style="green")


def bar(share: float, style: str, blocks: bool) -> Text:
    full = round(min(max(share, 0.0), 1.0) * BAR)
    one, none = ("█", "░") if blocks else ("#", ".")
    return Text.assemble((one * full, style), (none * (BAR - full), "dim"))


_COLUMNS: dict[str, tuple[str, JustifyMethod, Cell]] = {
    "node": ("node", "left", _status_cell("node")),
    "device": ("device", "left", _status_cell("device")),
    "address": ("address", "left", _status_cell("address")),
    "layers": ("layers", "left", _status_cell("layers")),
    "words": ("state", "left", _words),
    "state": ("state", "left", _state),
    "bar": ("memory", "left", _memory_bar),
    "free": ("GiB free", "right", _status_cell("GiB free")),
    "celsius": ("°C", "right", _temperature),
    "work": ("busy", "left", _busy_bar),
    "history": (f"last {HISTORY} looks", "left", _busy_history),
    "busy": ("busy", "right", _status_cell("busy")),
    "trip": ("link ms", "right", _status_cell("link ms")),
    "heard": ("heard s", "right", _status_cell("heard s")),
    "losses": ("losses", "right", _status_cell("losses")),
}
_LAYOUTS = (
    "node device address layers words bar free celsius work history trip heard losses",
    "node device layers words bar free celsius work history trip losses",
    "node device layers words free celsius work history trip losses",
    "node device layers words free celsius work trip losses",
    "node device layers words free celsius busy losses",
    "node device layers state celsius work losses",
    "node device state celsius work",
    "node device state celsius busy",
    "node device state",
    "node state busy",
)
"""Columns, from the widest terminal to the narrowest."""
