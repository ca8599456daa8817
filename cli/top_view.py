"""The screen of `edgespec top`: a table with bars that fits the terminal's width."""

from __future__ import annotations

from collections.abc import Iterable
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
    for name in names.split():
        justify: JustifyMethod = "right" if name in _RIGHT else "left"
        table.add_column(_TITLES.get(name, name), justify=justify, no_wrap=True)
    for node in state.nodes:
        shown_cells = _cells(node, busy.of(node), blocks)
        table.add_row(*(shown_cells[name] for name in names.split()))
    return table


def _cells(node: NodeStatus, busy: Iterable[float], blocks: bool) -> dict[str, Text]:
    """Those of a node by their columns in _LAYOUTS; `blocks`: whether the terminal can show block
    characters."""
    text = dict(zip(COLUMNS, map(Text, map(shown, cells(node))), strict=True))
    state = Text(shown(node.state), style=_STATES.get(node.state, "yellow"))
    words = Text(text["state"].plain, style=state.style)
    memory = Text(UNKNOWN)
    if node.memory and node.free:
        used = 1 - node.free / node.memory
        memory = bar(used, "red" if used > 0.95 else "cyan", blocks)
    if node.throttled or (node.limit and node.temperature >= node.limit):
        text["°C"].stylize("bold red")
    elif node.limit and node.temperature >= node.limit - WARM:
        text["°C"].stylize("yellow")
    work = history = Text(share := text["busy"].plain)
    if share != UNKNOWN:
        work = Text.assemble(bar(node.busy, "green", blocks), f" {share:>4}")
        levels = _LEVELS if blocks else "0123456789"
        heights = (round(min(max(one, 0.0), 1.0) * (len(levels) - 1)) for one in busy)
        history = Text("".join(levels[height] for height in heights), style="green")
    own = {"words": words, "state": state, "bar": memory, "work": work, "history": history}
    return {_SHORT.get(title, title): cell for title, cell in text.items()} | own


def bar(share: float, style: str, blocks: bool) -> Text:
    full = round(min(max(share, 0.0), 1.0) * BAR)
    one, none = ("█", "░") if blocks else ("#", ".")
    return Text.assemble((one * full, style), (none * (BAR - full), "dim"))


_SHORT = {"GiB free": "free", "°C": "celsius", "link ms": "trip", "heard s": "heard"}
"""Columns of `edgespec status` by their names here."""
_TITLES = {
    **{name: title for title, name in _SHORT.items()},
    **{"words": "state", "bar": "memory", "work": "busy", "history": f"last {HISTORY} looks"},
}
_RIGHT = {"free", "celsius", "busy", "trip", "heard", "losses"}
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
