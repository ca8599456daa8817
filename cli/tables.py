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
) -> None:
    """Print a table at its full width, even on a narrow terminal or a pipe, and lines below it.

    `left`: the columns that are not numbers, None for all.
    """
    table = Table(box=rule, pad_edge=False)
    for title in titles:
        is_text = left is None or title in left
        table.add_column(Text(title), justify="left" if is_text else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(markup=False, highlight=False, emoji=False)
    wide = console.options.update(width=1000)
    console.width = max(console.width, Measurement.get(console, wide, table).maximum)
    console.print(table)
    for line in lines:
        console.print(line, soft_wrap=True)
