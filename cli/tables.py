"""Tables of commands."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

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
    """Print a table at its full width, even on a narrow terminal or a pipe, and lines below it.

    `left`: the columns that are not numbers, None for all. `spare`: those that a terminal which
    is too narrow does without, in this order.
    """
    cells = [list(row) for row in rows]
    console = Console(markup=False, highlight=False, emoji=False)
    for left_out in range(len(spare) + 1):
        kept = [title for title in titles if title not in spare[:left_out]]
        table = Table(box=rule, pad_edge=False)
        for title in kept:
            is_text = left is None or title in left
            table.add_column(Text(title), justify="left" if is_text else "right", no_wrap=True)
        for row in cells:
            table.add_row(*(Text(row[titles.index(title)]) for title in kept))
        width = Measurement.get(console, console.options.update(width=1000), table).maximum
        if not console.is_terminal or width <= console.width:
            break
    console.width = max(console.width, width)
    console.print(table)
    for line in lines:
        console.print(line, soft_wrap=True)
