"""Notes for the person at the terminal: progress, figures; on standard error, never in the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table
from rich.text import Text

EVERY_S = 1.0
"""Seconds between two lines of progress where there is no terminal to rewrite one."""


class Notes:
    """Standard error. What others wrote (names of devices, reasons) is shown as it is."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, markup=False, highlight=False, emoji=False)

    def say(self, text: str) -> None:
        """One remark."""
        self._console.print(text, style="dim", soft_wrap=True)

    def table(self, rows: list[tuple[str, str]]) -> None:
        """Names and values, one a line."""
        table = Table.grid(padding=(0, 2))
        for name, value in rows:
            table.add_row(Text(name, style="dim"), Text(value))
        self._console.print(table)

    @contextmanager
    def waiting(self, text: str) -> Iterator[Callable[[str], None]]:
        """Show that something takes its time; gives a function that says how far it is.

        The function with an empty text ends it early.
        """
        if not self._console.is_terminal:
            yield self._line_by_line()
            return
        with self._console.status(Text(text)) as status:
            yield lambda news: status.update(Text(news)) if news else status.stop()

    def _line_by_line(self) -> Callable[[str], None]:
        last, at = "", float("-inf")

        def update(text: str) -> None:
            nonlocal last, at
            now = time.monotonic()
            if text and text != last and now - at >= EVERY_S:
                last, at = text, now
                self.say(text)

        return update
