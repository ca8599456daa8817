"""Tables of commands."""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table


def show_table(table: Table, *lines: str) -> None:
    """Print a table at its full width, even on a narrow terminal or a pipe, and lines below it."""
    console = Console(markup=False, highlight=False, emoji=False)
    wide = console.options.update(width=1000)
    console.width = max(console.width, Measurement.get(console, wide, table).maximum)
    console.print(table)
    for line in lines:
        console.print(line, soft_wrap=True)
