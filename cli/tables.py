"""Tables of commands, with as many columns as a terminal has room for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text


def show_table(
    titles: Sequence[str],
    rows: Iterable[Iterable[str]],
    *lines: str,
    left: Collection[str] | None = None,
    rule: box.Box | None = box.SIMPLE_HEAD,
    spare: Sequence[str] = (),
) -> None:
    """Print a table, on a pipe with all its columns, and lines below it; see `fitting_table`."""
    console = Console(markup=False, highlight=False, emoji=False)
    spare = spare if console.is_terminal else ()
    cells = [list(map(Text, row)) for row in rows]
    table, width = fitting_table(titles, cells, console, left=left, spare=spare, box=rule)
    console.width = max(console.width, width)
    console.print(table)
    for line in lines:
        console.print(line, soft_wrap=True)


def fitting_table(
    titles: Sequence[str],
    rows: Sequence[Sequence[Text]],
    console: Console,
    *,
    left: Collection[str] | None = None,
    spare: Collection[str] = (),
    **style: Any,
) -> tuple[Table, int]:
    """A table, and its full width, which may be more than the console's.

    `left`: the columns that are not numbers, None for all. `spare`: those that a console which is
    too narrow does without, in this order. `style`: see rich's Table.
    """
    for left_out in range(len(spare) + 1):
        without = [*spare][:left_out]
        kept = [title for title in titles if title not in without]
        table = Table(pad_edge=False, **style)
        for title in kept:
            is_text = left is None or title in left
            table.add_column(Text(title), justify="left" if is_text else "right", no_wrap=True)
        for row in rows:
            table.add_row(*(row[titles.index(title)] for title in kept))
        width = Measurement.get(console, console.options.update(width=1000), table).maximum
        if width <= console.width:
            break
    return table, width
